"""A jaxpr whose types name no mesh: `without_meshes`.

The type of an array that a step captures names the mesh on which it lies, and so do
those of all that is computed from it. Where the step is evaluated, inside a
`shard_map`, the same mesh is another type (JAX 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef
from jax.sharding import AbstractMesh, NamedSharding, Sharding, use_abstract_mesh

from jaxstrategy.replicas._mesh import as_seen_on
from jaxstrategy.tracing.jaxprs._visit import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    with_jaxprs,
)

# They only say on which mesh an array is to be.
_OF_MESHES = ("mesh_cast", "reshard")
_NO_MESH = AbstractMesh((), ())


def without_meshes(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr`, and all that its equations hold, with types of no mesh.

    What users have said of meshes stays: it names devices, which types do not; and so
    do constraints along inner axes, which are for the replicas' part of the step.
    """
    is_meant = any(map(_names_mesh, jaxpr.invars)) or any(
        any(map(_names_mesh, eqn.outvars)) or not eqn.ctx.cur_abstract_mesh.empty
        for eqn in all_eqns(jaxpr)
    )
    return _Renaming().of_jaxpr(jaxpr) if is_meant else jaxpr


def _names_mesh(var: Var) -> bool:
    return _without_mesh(var.aval) is not var.aval


@final
class _Renaming:
    """Variables that take the places of those whose types name a mesh."""

    def __init__(self) -> None:
        self._names: dict[Atom, Atom] = {}
        self._contexts: dict[object, object] = {}
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            new: dict[str, Any] = {
                "constvars": self._of_vars(jaxpr.constvars),
                "invars": self._of_vars(jaxpr.invars),
                "eqns": [new for eqn in jaxpr.eqns for new in self._of_equation(eqn)],
                "outvars": [self._read(atom) for atom in jaxpr.outvars],
                "debug_info": jaxpr.debug_info,
            }
            if hasattr(jaxpr, "consts"):  # JAX 0.12; they would be dropped
                new["consts"] = jaxpr.consts
            self._done[id(jaxpr)] = jaxpr, jaxpr.replace(**new)
        return self._done[id(jaxpr)][1]

    def _of_equation(self, eqn: Any) -> list[Equation]:
        invars = [self._read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _OF_MESHES:
            self._names.update(zip(eqn.outvars, invars, strict=True))
            return []
        outvars = self._of_vars(eqn.outvars)
        params = eqn.params
        if eqn.primitive.name == "sharding_constraint":
            params = {**params, "sharding": _seen_by_one_replica(params)}
        else:
            params = {key: self._of_parameter(each) for key, each in params.items()}
        ctx = self._of_context(eqn.ctx)
        return [eqn.replace(invars=invars, outvars=outvars, params=params, ctx=ctx)]

    def _of_context(self, ctx: Any) -> Any:
        if ctx.cur_abstract_mesh.empty:
            return ctx
        if ctx not in self._contexts:
            self._contexts[ctx] = _context_without_mesh(ctx)
        return self._contexts[ctx]

    def _of_parameter(self, value: Any) -> Any:
        if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
            return None
        return with_jaxprs(value, self.of_jaxpr)

    def _of_vars(self, variables: Sequence[Var]) -> list[Atom]:
        return [self._new(var) for var in variables]

    def _new(self, var: Var) -> Atom:
        aval = _without_mesh(var.aval)
        if aval is var.aval or isinstance(var, DropVar):
            return var
        return self._names.setdefault(var, core.Var(aval))

    def _read(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            aval = _without_mesh(atom.aval)
            if aval is atom.aval:
                return atom
            # The value names the mesh that was set when it was made.
            return core.Literal(np.asarray(atom.val), aval)
        return self._names.get(atom, atom)


def _seen_by_one_replica(params: dict[str, Any]) -> Sharding:
    """The sharding of a constraint, on the mesh as one replica sees it.

    JAX takes one on the mesh of devices for that where a user gives it, but not in the
    equation (JAX 0.10 and 0.12).
    """
    sharding = params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return sharding
    return as_seen_on(sharding, params["context_mesh"])


def _context_without_mesh(ctx: Any) -> Any:
    """The context of an equation, what else it says, without the mesh that was set."""
    with ctx.manager, use_abstract_mesh(_NO_MESH):
        (eqn,) = jax.make_jaxpr(lax.neg)(jax.ShapeDtypeStruct((), "float32")).eqns
    return eqn.ctx


def _without_mesh(aval: ArrayType) -> ArrayType:
    """The same type without its mesh; the same object if it has none."""
    # Effects hold the variables of references, which have to stay as they are.
    if isinstance(aval, AbstractRef):
        return aval
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval
    weak_type = getattr(aval, "weak_type", False)
    bare = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
    return jax.typeof(bare)
