"""Values of one replica, whole ones and parts, while its equations are evaluated."""

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
    """The gathers and scatters of arrays of which every replica has a part."""

    def __init__(self, replicas: Replicas, inner: Mapping[Var, InnerSpec]) -> None:
        self.axes = replicas.part_axes
        self._replicas = replicas
        self._inner = inner

    def gathered(
        self, part: jax.Array, dimension: int, var: Var, in_turn: bool = False
    ) -> jax.Array:
        """All of an array of which every replica has a part."""

        def all_parts(part: jax.Array) -> jax.Array:
            return lax.all_gather(part, self.axes, axis=dimension, tiled=True)

        return self._on_devices(all_parts, var, in_turn)(part)

    def scattered(
        self, array: jax.Array, dimension: int, var: Var, in_turn: bool = False
    ) -> jax.Array:
        """This replica's part of the sum of all replicas' arrays."""

        def own_part(array: jax.Array) -> jax.Array:
            return lax.psum_scatter(
                self.of_one_device(array),
                self.axes,
                scatter_dimension=dimension,
                tiled=True,
            )

        return self._on_devices(own_part, var, in_turn)(array)

    def total(self, array: jax.Array) -> jax.Array:
        """The sum of all replicas' arrays."""
        return lax.psum(array, self._replicas.collective_axes)

    def of_one_device(self, array: jax.Array) -> jax.Array:
        """The sum of the arrays of those replicas that share a device."""
        shared = self._replicas.sharing_axes
        return lax.psum(array, shared) if shared else array

    def _on_devices(self, function: Function, var: Var, in_turn: bool) -> Function:
        """`function` on each device's part of what the replica has.

        XLA would make what it gathers or scatters over the replicas whole on each
        device before (JAX 0.10 and 0.12).
        """
        inner = self._inner.get(var, WHOLE)
        inner = of_versions(inner) if in_turn else inner
        return (
            on_each_device(function, inner, self._replicas) if any(inner) else function
        )


@final
class ReplicaValues:
    """What one replica has: whole values, and its parts of others."""

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
        """All of a value; of one that is divided it is gathered, once."""
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self._whole:
            dimension = self._dimensions[atom]
            self._whole[atom] = self.collectives.gathered(
                self.parts[atom], dimension, atom
            )
        return self._whole[atom]

    def keep(self, variables: Sequence[Var], values: Sequence[Leaf]) -> None:
        """Takes note of whole values."""
        self._whole.update(zip(variables, values, strict=True))


Evaluation: TypeAlias = Callable[[ReplicaValues], None]
"""Reads values, and keeps others."""


# What stands around a call of such a function, and where it keeps the call.
AROUND_FUNCTIONS = {"custom_jvp_call": "call_jaxpr", "custom_vmap_call": "call"}
_SHAPES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim"))


def shard_function(eqn: Equation) -> ShardFunction | None:
    """The function that an equation calls if it can be computed from parts."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    operands = [atom.aval for atom in eqn.invars]
    results = [var.aval for var in eqn.outvars]
    return _rows.called_by(eqn.params["name"], operands, results)


def is_around_function(jaxpr: Jaxpr) -> bool:
    """Whether nothing is computed but one call of such a function.

    `jax.vmap` may have put changes of shapes around it. A rule for derivatives that is
    given for such a call is that of the call from parts, too. One that a user gives is
    around another rule, ours, and stays.
    """
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive.name not in _SHAPES]
    if len(eqns) != 1:
        return False
    if eqns[0].primitive.name != "custom_vmap_call":
        return shard_function(eqns[0]) is not None
    inside = plain(eqns[0].params[AROUND_FUNCTIONS["custom_vmap_call"]])
    return len(inside.eqns) == 1 and shard_function(inside.eqns[0]) is not None


def adds_few_rows(eqn: Equation, parts: int) -> bool:
    """Whether an equation adds rows to a table, of which `part_of_sum` is computed.

    It is what JAX makes of the gradient of rows that were taken, if it adds them to
    zeros. Few are those of which all replicas together send less than the table.
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


def call_of_parts(
    eqn: Equation, parts: Mapping[Var, int], varies: Callable[[Atom], bool]
) -> ShardFunction | None:
    """The function, if what it takes parts of lies divided along dimension 0."""
    function = shard_function(eqn)
    if function is None:
        return None
    # Parts of what differs between replicas would be parts of several arrays.
    if function.are_rest_equal and any(map(varies, eqn.invars)):
        return None
    operands = [eqn.invars[place] for place in function.divided]
    is_divided = [not isinstance(a, Literal) and parts.get(a) == 0 for a in operands]
    return function if all(is_divided) else None


def evaluation_of_parts(eqn: Equation, function: ShardFunction) -> Evaluation:
    """The evaluation of such a call."""

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


_NAMES = ("remat2", "remat", "checkpoint")


# The forward pass has gathered them; they are gathered again rather than kept until
# then.
def parts_computed_again(eqn: Equation, parts: Mapping[Var, int]) -> dict[int, int]:
    """The operands of `jax.checkpoint` that are gathered for it, with dimensions.

    None of an equation that is something else, or that is no second computation.
    """
    params = eqn.params
    is_again = eqn.primitive.name in _NAMES and params.get("differentiated")
    if not is_again or not params.get("prevent_cse"):
        return {}
    if any(isinstance(atom.aval, AbstractRef) for atom in eqn.invars):
        return {}
    return {
        place: parts[atom]
        for place, atom in enumerate(eqn.invars)
        if not isinstance(atom, Literal) and atom in parts
    }


def computed_again(eqn: Equation, divided: Mapping[int, int]) -> Evaluation:
    """The second computation of something, with gathers of its own."""
    function = core.jaxpr_as_fun(closed(eqn.params["jaxpr"]))

    def evaluate(values: ReplicaValues) -> None:
        given = [
            values.parts[atom] if place in divided else values.whole(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        # As JAX does for `checkpoint`: or XLA would join this with the first time.
        given = lax.optimization_barrier(given)
        whole = [
            values.collectives.gathered(x, divided[place], eqn.invars[place])
            if place in divided
            else x
            for place, x in enumerate(given)
        ]
        values.keep(eqn.outvars, function(*whole))

    return evaluate


# JAX makes of `axis_index` beside automatic axes a `shard_map` when it lowers a
# program, on the mesh where the equation was traced (JAX 0.10 and 0.12). A step with
# divided state is traced without one: its loops, branches and calls would end in "The
# context mesh cannot be empty".
def numbered_here(fn: Function) -> Function:
    """`fn` of one replica, with its numbers traced where this is called."""
    return rewritten_function(fn, _traced_here)


def _traced_here(eqn: Equation) -> Function | None:
    """The function that takes the place of an `axis_index`; None: another equation."""
    if eqn.primitive.name != "axis_index":
        return None

    def computed() -> list[jax.Array]:
        return [eqn.primitive.bind(**eqn.params)]

    return computed
