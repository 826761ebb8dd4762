"""Traces what one replica computes: `one_replica`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    Sharding,
    use_abstract_mesh,
)

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.reductions.packing import AbstractPacking, in_packs
from jaxstrategy._src.replicas.inner_axes import has_inner_axes
from jaxstrategy._src.replicas.mesh import as_seen_on
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    inner_jaxprs,
    jaxpr_of,
    rewritten,
    with_jaxprs,
)
from jaxstrategy._src.tracing.numbered_prints import on_own_devices
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.tracing.translation import UnknownAxis
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.variables.variable import Variable

# When a value is computed: the number of the equation; for one that calls a function,
# followed by the number in it. Inputs, `()`, come first.
_Position: TypeAlias = tuple[int, ...]

# Their results are ready at once, as the number of calls is not known.
_AT_ONCE = frozenset(("scan", "while", "cond"))


def pack_reductions(
    jaxpr: Jaxpr, packing: AbstractPacking, axis_sizes: Sequence[tuple[str, int]]
) -> Jaxpr:
    """Sums arrays of consecutive `psum`s in packs, in the order they are computed."""
    positions: dict[Var, _Position] = {}
    _find_positions(jaxpr, positions, set())

    def packed(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "psum" or len(eqn.invars) < 2:
            return None
        computed = [_position(atom, positions) for atom in eqn.invars]
        order = sorted(range(len(computed)), key=computed.__getitem__)

        def sum_of(array: jax.Array) -> jax.Array:
            return eqn.primitive.bind(array, **eqn.params)

        def sums(*arrays: jax.Array) -> list[jax.Array]:
            ready = [arrays[index] for index in order]
            done = in_packs(sum_of, ready, packing, tells_places=True)
            by_index = dict(zip(order, done, strict=True))
            return [by_index[index] for index in range(len(arrays))]

        return sums

    return rewritten(jaxpr, packed, axis_sizes, grouped=_join_sums)


def _join_sums(eqns: Sequence[Any]) -> list[Equation]:
    """Joins consecutive sums over the same replicas into one equation."""
    joined: list[Any] = []
    for eqn in eqns:
        last = joined[-1] if joined else None
        if last is not None and _can_be_joined(last, eqn):
            joined[-1] = last.replace(
                invars=[*last.invars, *eqn.invars],
                outvars=[*last.outvars, *eqn.outvars],
            )
        else:
            joined.append(eqn)
    return joined


def _can_be_joined(eqn: Equation, following: Equation) -> bool:
    is_sum = eqn.primitive.name == following.primitive.name == "psum"
    is_independent = following.invars[:1] and following.invars[0] not in eqn.outvars
    return is_sum and eqn.params == following.params and bool(is_independent)


def _find_positions(
    jaxpr: Jaxpr, positions: dict[Var, _Position], seen: set[int]
) -> None:
    """Adds the position of each variable of `jaxpr` and of inner jaxprs."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for number, eqn in enumerate(jaxpr.eqns):
        inner = list(inner_jaxprs(eqn.params))
        for each in inner:
            _find_positions(each, positions, seen)
        for index, var in enumerate(eqn.outvars):
            if isinstance(var, DropVar):
                continue
            if (source := _reshaped_operand(eqn)) is not None and not inner:
                positions[var] = _position(source, positions)
                continue
            positions[var] = (number,)
            if len(inner) == 1 and eqn.primitive.name not in _AT_ONCE:
                results = inner[0].outvars
                if len(results) == len(eqn.outvars):
                    positions[var] += _position(results[index], positions)


def _reshaped_operand(eqn: Equation) -> Atom | None:
    """The operand from which the only result is made element by element, if any."""
    if len(eqn.outvars) != 1 or eqn.effects:  # such as of a write to a reference
        return None
    size = _size(eqn.outvars[0])
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    whole = [atom for atom in operands if _size(atom) == size]
    others = [atom for atom in operands if _size(atom) not in (1, size)]
    return whole[0] if size > 1 and len(whole) == 1 and not others else None


def _size(atom: Atom) -> int:
    return getattr(atom.aval, "size", 0)


def _position(atom: Atom, positions: dict[Var, _Position]) -> _Position:
    return () if isinstance(atom, Literal) else positions.get(atom, ())


# They change nothing but the mesh of a type.
_MESH_PRIMITIVES = ("mesh_cast", "reshard")
_NO_MESH = AbstractMesh((), ())


def without_meshes(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr`, and inner jaxprs, without meshes in the types of variables."""
    has_mesh = any(map(_names_mesh, jaxpr.invars)) or any(
        any(map(_names_mesh, eqn.outvars)) or not eqn.ctx.cur_abstract_mesh.empty
        for eqn in all_eqns(jaxpr)
    )
    return _MeshRemoval().of_jaxpr(jaxpr) if has_mesh else jaxpr


def _names_mesh(var: Var) -> bool:
    return _without_mesh(var.aval) is not var.aval


@final
class _MeshRemoval:
    """Replaces variables whose types name a mesh."""

    def __init__(self) -> None:
        self._names: dict[Atom, Atom] = {}
        self._contexts: dict[object, object] = {}
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            new: dict[str, Any] = {
                "constvars": list(map(self._new, jaxpr.constvars)),
                "invars": list(map(self._new, jaxpr.invars)),
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
        if eqn.primitive.name in _MESH_PRIMITIVES:
            self._names.update(zip(eqn.outvars, invars, strict=True))
            return []
        outvars = list(map(self._new, eqn.outvars))
        params = eqn.params
        if eqn.primitive.name == "sharding_constraint":
            params = {**params, "sharding": _seen_by_one_replica(params)}
        else:
            params = {
                key: None
                if isinstance(value, NamedSharding)
                and isinstance(value.mesh, AbstractMesh)
                else with_jaxprs(value, self.of_jaxpr)
                for key, value in params.items()
            }
        ctx = self._of_context(eqn.ctx)
        return [eqn.replace(invars=invars, outvars=outvars, params=params, ctx=ctx)]

    def _of_context(self, ctx: Any) -> Any:
        if ctx.cur_abstract_mesh.empty:
            return ctx
        if ctx not in self._contexts:
            self._contexts[ctx] = _context_without_mesh(ctx)
        return self._contexts[ctx]

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
            # The value has the mesh that was set when it was made.
            return core.Literal(np.asarray(atom.val), aval)
        return self._names.get(atom, atom)


def _seen_by_one_replica(params: dict[str, Any]) -> Sharding:
    """The sharding of a constraint, on the mesh as one replica sees it."""
    sharding = params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return sharding
    return as_seen_on(sharding, params["context_mesh"])


def _context_without_mesh(ctx: Any) -> Any:
    """The context of an equation, without the mesh that was set."""
    with ctx.manager, use_abstract_mesh(_NO_MESH):
        (eqn,) = jax.make_jaxpr(lax.neg)(jax.ShapeDtypeStruct((), "float32")).eqns
    return eqn.ctx


def _without_mesh(aval: ArrayType) -> ArrayType:
    """The same type without its mesh; the same object if it has none."""
    # Effects refer to the variables of references, so these must stay.
    if isinstance(aval, AbstractRef):
        return aval
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval
    weak_type = getattr(aval, "weak_type", False)
    bare = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
    return jax.typeof(bare)


@dataclasses.dataclass(frozen=True)
class StepInput:
    """An input of a replica's jaxpr: an argument, a variable or else a constant."""

    layout: ReplicaLayout = REPLICATED
    argument: int | None = None
    variable: Variable | None = None
    constant: Leaf = None


class OneReplica(NamedTuple):
    """What one replica computes."""

    closed: ClosedJaxpr  # the whole call
    jaxpr: Jaxpr
    inputs: list[StepInput]
    has_mesh: bool


def one_replica(
    replica: Function,
    leaves: Sequence[Leaf],
    inputs: Sequence[StepInput],
    replicas: Replicas,
) -> OneReplica:
    """Traces `replica`, a function of the arguments `leaves` and of variables."""
    variables = [each.variable for each in inputs if each.variable is not None]
    sharded = any(not variable.division.is_whole for variable in variables)
    is_sharded = shards_state(replicas) or (sharded and replicas.parts > 1)
    if replicas.per_device == 1 and not is_sharded:
        try:
            return _trace_in_shard_map(replica, leaves, inputs, replicas)
        except UnknownAxis:
            if has_inner_axes(replicas):
                raise
    traced = _trace_with_axis_names(replica, leaves, inputs, replicas)
    primitives = {eqn.primitive.name for eqn in all_eqns(traced.jaxpr)}
    # Over the devices of a replica: needs a mesh.
    if replicas.inner_axes and "shard_map" in primitives:
        return _trace_in_shard_map(replica, leaves, inputs, replicas)
    return traced


def _trace_in_shard_map(
    replica: Function,
    leaves: Sequence[Leaf],
    inputs: Sequence[StepInput],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map`, and takes only its body."""
    # `REPLICATED` for all outputs is no claim, as the `shard_map` is not kept.
    layouts = [each.layout for each in inputs]
    mapped = on_own_devices(replica, replicas, layouts, REPLICATED)

    def all_replicas(*arrays: jax.Array) -> PyTree:
        own, values = arrays[: len(leaves)], arrays[len(leaves) :]
        return mapped(*own, *map(jax.new_ref, values))

    types = [
        jax.ShapeDtypeStruct(v.cell.shape, v.dtype, sharding=v.sharding)
        for each in inputs
        if (v := each.variable) is not None
    ]
    try:
        closed = jax.make_jaxpr(all_replicas)(*leaves, *types)
    except AttributeError as error:
        # shard_map has no rule for references that a function captures.
        if "'AbstractRef' object" in str(error):
            raise CapturedReference from error
        raise
    *references, eqn = closed.jaxpr.eqns
    arguments = closed.jaxpr.invars[: len(leaves)]
    refs = [each.outvars[0] for each in references]
    known: dict[Atom, StepInput] = dict(zip([*arguments, *refs], inputs, strict=True))
    for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        known[var] = StepInput(constant=value)
    found = [
        StepInput(constant=atom.val) if isinstance(atom, Literal) else known[atom]
        for atom in eqn.invars
    ]
    return OneReplica(closed, eqn.params["jaxpr"], found, has_mesh=True)


def _trace_with_axis_names(
    replica: Function,
    leaves: Sequence[Leaf],
    inputs: Sequence[StepInput],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica without a `shard_map`, where its axes are only names."""
    is_own = [replicas.differ(each.layout) for each in inputs]
    row = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=1)

    def first_replica(*arrays: jax.Array) -> PyTree:
        # The first row stands for any replica's: whatever the dtype, or a tracer.
        parts = [row(x) if own else x for x, own in zip(arrays, is_own, strict=True)]
        own, values = parts[: len(leaves)], parts[len(leaves) :]
        return replica(*own, *map(jax.new_ref, values))

    variables = [each.variable for each in inputs if each.variable is not None]
    values = [jax.ShapeDtypeStruct(v.cell.shape, v.dtype) for v in variables]
    make_jaxpr = jax.make_jaxpr(first_replica, axis_env=replicas.axis_sizes)
    # Without the mesh of arrays, which would be in the types of what is traced.
    types = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        for leaf in jax.eval_shape(list, leaves)
    ]
    with replicas.as_one_replica():
        closed = make_jaxpr(*types, *values)
    if any(isinstance(jax.typeof(value), AbstractRef) for value in closed.consts):
        raise CapturedReference
    whole, rows = closed.jaxpr, sum(is_own)
    start = rows + len(variables)
    results = iter(eqn.outvars[0] for eqn in whole.eqns[:rows])
    arrays = [
        next(results) if own else var
        for var, own in zip(whole.invars, is_own, strict=True)
    ]
    references = [eqn.outvars[0] for eqn in whole.eqns[rows:start]]
    invars = [*arrays[: len(leaves)], *references, *whole.constvars]
    jaxpr = without_meshes(jaxpr_of(invars, whole.eqns[start:], whole.outvars))
    constants = [StepInput(constant=value) for value in closed.consts]
    return OneReplica(closed, jaxpr, [*inputs, *constants], has_mesh=False)


class CapturedReference(Exception):
    """A step captures a `jax.Ref` that is no variable."""


def shards_state(replicas: Replicas) -> bool:
    """Whether all state of these replicas may be sharded over them."""
    return replicas.state_sharding is not None and replicas.parts > 1


def check_conditions(jaxpr: ClosedJaxpr) -> None:
    """Raise if a `while_loop` changes a variable that its condition reads."""
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name != "while":
            continue
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        read = [var for var in eqn.invars[:n] if isinstance(var.aval, AbstractRef)]
        body = all_eqns(eqn.params["body_jaxpr"].jaxpr)
        if any(var in eqn.invars[n : n + m] for var in read) and any(
            inner.primitive.name in ("swap", "addupdate") for inner in body
        ):
            raise ValueError(
                "The condition of a `while_loop` reads a variable that its body uses, "
                "and would not see it change.\n"
                f"  the `while_loop`: {Site((eqn,)).line or 'unknown'}\n"
                "Let the loop carry the value, and assign it to the variable as well."
            )


def check_not_in_shard_map(name: str) -> None:
    """Raise inside `jax.pmap` or `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in mesh.axis_types:
        raise ContextError(
            f"`{name}` was to be run on all replicas inside a function that `jax.pmap` "
            "or `jax.shard_map` runs on each of several devices already. A strategy "
            "does that itself: call `strategy.run` instead of it, on the whole batch. "
            "Inside `jax.jit`, `jax.vmap` and `jax.lax.scan` it may be called."
        )
