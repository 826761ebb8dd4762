"""Values of one replica, whole or sharded, while its equations are evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import Literal
from jax.ref import AbstractRef

from jaxstrategy._src.reductions import rows as _rows
from jaxstrategy._src.reductions.rows import ShardFunction
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec, of_versions
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs.rewrite import rewritten_function
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    closed,
    plain,
)
from jaxstrategy._src.tracing.numbered_prints import on_each_device
from jaxstrategy._src.values.arrays import Function, Leaf


@final
class PartCollectives:
    """Collectives for arrays of which every replica has a part."""

    def __init__(self, replicas: Replicas, inner: Mapping[Var, InnerSpec]) -> None:
        self.axes = replicas.part_axes
        self._replicas = replicas
        self._inner = inner

    def all_gather(
        self, part: jax.Array, dimension: int, var: Var, in_loop: bool = False
    ) -> jax.Array:
        def gather(part: jax.Array) -> jax.Array:
            return lax.all_gather(part, self.axes, axis=dimension, tiled=True)

        return self._on_devices(gather, var, in_loop)(part)

    def reduce_scatter(
        self, array: jax.Array, dimension: int, var: Var, in_loop: bool = False
    ) -> jax.Array:
        def scatter(array: jax.Array) -> jax.Array:
            array = self.sum_on_device(array)
            return lax.psum_scatter(
                array, self.axes, scatter_dimension=dimension, tiled=True
            )

        return self._on_devices(scatter, var, in_loop)(array)

    def all_reduce(self, array: jax.Array) -> jax.Array:
        return lax.psum(array, self._replicas.axes)

    def sum_on_device(self, array: jax.Array) -> jax.Array:
        """The sum of the arrays of those replicas that share a device."""
        shared = self._replicas.sharing_axes
        return lax.psum(array, shared) if shared else array

    def _on_devices(self, function: Function, var: Var, in_loop: bool) -> Function:
        """`function` on each device's part of a replica's array.

        Otherwise XLA would first gather the array on each device (JAX 0.10 and 0.12).
        """
        inner = self._inner.get(var, WHOLE)
        inner = of_versions(inner) if in_loop else inner
        return (
            on_each_device(function, inner, self._replicas) if any(inner) else function
        )


@final
class ReplicaValues:
    """The values of one replica: whole ones, and its parts of sharded ones."""

    def __init__(
        self,
        whole: dict[Var, Leaf],
        parts: dict[Var, Leaf],
        dimensions: Mapping[Var, int],
        collectives: PartCollectives,
    ) -> None:
        self._whole = whole
        self.parts = parts
        self._dimensions = dimensions
        self.collectives = collectives

    def whole(self, atom: Atom) -> Leaf:
        """The whole value; a sharded one is gathered, once."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            dimension = self._dimensions[atom]
            part = self.parts[atom]
            self._whole[atom] = self.collectives.all_gather(part, dimension, atom)
        return self._whole[atom]

    def keep(self, variables: Sequence[Var], values: Sequence[Leaf]) -> None:
        """Stores whole values."""
        self._whole.update(zip(variables, values, strict=True))


Evaluation: TypeAlias = Callable[[ReplicaValues], None]
"""Computes values from others."""


# Primitives around the call of a shard function, and the parameter with the call.
WRAPPERS = {"custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}
_SHAPES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim"))


def shard_function(eqn: Equation) -> ShardFunction | None:
    """The function that an equation calls, if it can be computed from shards."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    operands = [atom.aval for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    return _rows.called_by(eqn.params["name"], operands, results)


def wraps_shard_function(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is one call of a shard function, perhaps with reshapes.

    Our rule for its derivatives holds for shards, too. A user's rule is around ours, so
    that this is False, and its call is not inlined.
    """
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _SHAPES]
    if len(eqns) != 1:
        return False
    if eqns[0].primitive.name != "custom_vmap_call":
        return shard_function(eqns[0]) is not None
    inside = plain(eqns[0].params[WRAPPERS["custom_vmap_call"]])
    return len(inside.eqns) == 1 and shard_function(inside.eqns[0]) is not None


def adds_few_rows(eqn: Equation, parts: int) -> bool:
    """Whether an equation adds so few rows to a table that `part_of_sum` is cheaper.

    Such as the gradient of a lookup, which JAX adds to zeros. Few: all replicas
    together send less than the table.
    """
    if eqn.primitive.name != "scatter-add":
        return False
    table, indices, rows = (atom.aval for atom in eqn.invars)
    numbers, batch = eqn.params["dimension_numbers"], len(indices.shape) - 1
    is_of_rows = (
        tuple(numbers.update_window_dims) == tuple(range(batch, len(rows.shape)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and rows.shape[batch:] == table.shape[1:]
    )
    is_known = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    is_known &= indices.dtype in ("int32", "int64")
    is_few = math.prod(indices.shape) * parts <= table.shape[0]
    return is_of_rows and is_known and is_few


def sharded_call(
    eqn: Equation, parts: Mapping[Var, int], varies: Callable[[Atom], bool]
) -> ShardFunction | None:
    """The shard function of an equation whose operands are sharded as it needs."""
    function = shard_function(eqn)
    if function is None:
        return None
    # Shards of a varying array would be shards of different arrays.
    if function.are_rest_equal and any(map(varies, eqn.invars)):
        return None
    operands = [eqn.invars[place] for place in function.divided]
    is_divided = [not isinstance(a, Literal) and parts.get(a) == 0 for a in operands]
    return function if all(is_divided) else None


def evaluate_sharded_call(eqn: Equation, function: ShardFunction) -> Evaluation:
    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if place in function.divided else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        results = jax.tree.leaves(
            function.of_parts(*operands, axes=values.collectives.axes)
        )
        for place, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
            if place in function.returns_divided:
                values.parts[var] = value
            else:
                values.keep([var], [value])

    return evaluate


REMAT = ("remat2", "remat", "checkpoint")


# The forward pass has gathered them; they are gathered again rather than kept.
def rematerialized_parts(eqn: Equation, parts: Mapping[Var, int]) -> dict[int, int]:
    """The sharded operands of a rematerialization, with dimensions; else empty."""
    params = eqn.params
    is_remat = eqn.primitive.name in REMAT and params.get("differentiated")
    if not is_remat or not params.get("prevent_cse"):
        return {}
    if any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars):
        return {}
    return {
        place: parts[atom]
        for place, atom in enumerate(eqn.invars)
        if not isinstance(atom, Literal) and atom in parts
    }


def evaluate_remat(eqn: Equation, sharded: Mapping[int, int]) -> Evaluation:
    """Evaluates a rematerialization, with gathers of its own."""
    function = core.jaxpr_as_fun(closed(eqn.params["jaxpr"]))

    def evaluate(values: ReplicaValues) -> None:
        operands = [
            values.parts[atom] if i in sharded else values.whole(atom)
            for i, atom in enumerate(eqn.invars)
        ]
        # As JAX does for `checkpoint`: keeps XLA from merging it with the first time.
        operands = lax.optimization_barrier(operands)
        whole = [
            values.collectives.all_gather(x, sharded[i], eqn.invars[i])
            if i in sharded
            else x
            for i, x in enumerate(operands)
        ]
        values.keep(eqn.outvars, function(*whole))

    return evaluate


# Beside automatic axes JAX lowers `axis_index` to a `shard_map`, on the mesh where the
# equation was traced (JAX 0.10 and 0.12). A step with sharded state is traced without a
# mesh: its loops, branches and calls would raise "The context mesh cannot be empty".
def retrace_axis_indices(fn: Function) -> Function:
    """`fn` with each `axis_index` traced again, on the current mesh."""

    def rule(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "axis_index":
            return None
        return lambda: [eqn.primitive.bind(**eqn.params)]

    return rewritten_function(fn, rule)
