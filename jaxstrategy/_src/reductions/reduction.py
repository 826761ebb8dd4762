"""The reductions that code can ask for: compiled, local, and of replicas in threads.

Collectives of replicas that run eagerly are functions of one replica's arrays and a
reduction: with that of the strategy they do what a compiled step does, with
`SameShapes` they say what comes out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.reductions import compression, operations
from jaxstrategy._src.reductions.compression import Residual
from jaxstrategy._src.reductions.cross_device_ops import AnyPlan
from jaxstrategy._src.reductions.operations import OPERATIONS, Groups, checked
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.slices import IndexedSlices, is_slices

Residuals: TypeAlias = Sequence[Residual | None]
"""What each array owes from earlier compressed reductions; None: it is exact."""


@final
@dataclasses.dataclass(frozen=True)
class HowReduced:
    """How arrays are reduced: with `options` that differ from the plan's."""

    op: ReduceOp
    options: CommunicationOptions | None = None
    groups: Groups | None = None  # of replicas, each with its own result


@final
class Reduction:
    """The one way in which replicas combine what each of them has, inside a step."""

    def __init__(self, replicas: Replicas, plan: AnyPlan) -> None:
        self._replicas = replicas
        self._plan = plan

    def reduce_leaves(self, how: HowReduced, leaves: Sequence[Leaf]) -> list[Leaf]:
        """This replica's arrays reduced over all replicas, or over its group."""
        plan = self._plan.with_options(how.options, self._replicas).within(how.groups)
        dense = [leaf for leaf in leaves if not is_slices(leaf)]
        sparse = [self._sparse(how, x) for x in leaves if is_slices(x)]
        reduced, joined = iter(self._dense(plan, how.op, dense)), iter(sparse)
        return [next(joined if is_slices(leaf) else reduced) for leaf in leaves]

    def alone(self) -> Reduction:
        """The same, but that arrays are not joined unless somebody chose how."""
        return Reduction(self._replicas, self._plan.alone())

    def _dense(self, plan: AnyPlan, op: ReduceOp, leaves: Sequence[Leaf]) -> list[Leaf]:
        axes = self._replicas.axes
        alone = [self._goes_alone(leaf) for leaf in leaves]
        packed = [x for x, is_alone in zip(leaves, alone, strict=True) if not is_alone]
        together = iter(plan.reduce(op, packed, axes))
        return [
            plan.reduce(op, [leaf], axes)[0] if is_alone else next(together)
            for leaf, is_alone in zip(leaves, alone, strict=True)
        ]

    def _goes_alone(self, leaf: Leaf) -> bool:
        """Whether an array is not to be joined with others."""
        # Of joined ones no replica could take its part, and each device has all.
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return False
        replicas = self._replicas
        return replicas.is_divisible(leaf) or replicas.may_lie_inside(leaf.shape)

    def reduce_compressed(
        self, how: HowReduced, leaves: Sequence[Leaf], owed: Residuals
    ) -> tuple[list[Leaf], list[Residual | None]]:
        """This replica's arrays reduced over all replicas, some of them compressed."""
        op, plan = how.op, self._plan.with_options(how.options, self._replicas)
        axes = self._replicas.axes
        dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
        exact = functools.partial(self._dense, plan, op)
        in_eight_bits = functools.partial(plan.in_eight_bits, op, axes=axes)
        reduced = compression.reduce_with_memory(
            op,
            [leaves[i] for i in dense],
            [owed[i] for i in dense],
            compression.compression_of(how.options),
            compression.Sums(exact, in_eight_bits),
            is_alone=self._replicas.count == 1,
        )
        results, debts = list(leaves), list(owed)  # what is sparse owes what it owed
        for i, leaf in enumerate(leaves):
            if is_slices(leaf):
                results[i] = self._sparse(how, leaf)
        for i, result, debt in zip(dense, *reduced, strict=True):
            results[i], debts[i] = result, debt
        return results, debts

    def _sparse(self, how: HowReduced, leaf: IndexedSlices) -> IndexedSlices:
        if how.groups is not None:
            raise ValueError(
                "`groups` was given for IndexedSlices, whose rows go to all replicas. "
                "Reduce `slices.to_dense()` instead."
            )
        return operations.reduce_slices(how.op, leaf, self._replicas)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """Every replica's array, joined along `axis` in replica order."""
        return operations.all_gather(leaf, axis, self._replicas)

    def first(self, leaf: Leaf) -> jax.Array:
        """The array of the first replica on all of them, in its own shape."""
        return self.gathered(mesh.array_of(leaf)[None], 0)[0]


class LocalReduction:
    """Reductions as if all of `count` replicas had what this one has."""

    # So a step of gradients takes its way by its own rows alone.

    def __init__(self, count: int) -> None:
        self._count = count
        self._results: list[tuple[jax.Array, jax.Array, HowReduced]] = []
        self._state: object = None

    def alone(self) -> LocalReduction:
        """As that of `Reduction`: a replica by itself joins no arrays."""
        return self

    def reduce_leaves(self, how: HowReduced, leaves: Sequence[Leaf]) -> list[Leaf]:
        op, groups = how.op, how.groups
        count = self._count if groups is None else len(groups[0])
        row, results = OPERATIONS[op], []
        for leaf in leaves:
            if is_slices(leaf):
                operations.check_sum(op)
                rows = row.of_equal(row.prepared(checked(op, leaf.values)), count)
                results.append(IndexedSlices(rows, leaf.indices, leaf.dense_shape))
                continue
            own = row.prepared(checked(op, leaf))
            # An array of its own, by which it is known when the step returns it.
            result = jnp.copy(row.of_equal(own, count))
            results.append(result)
            # A jitted function inside the step returns other arrays than it has made,
            # which must not outlive its trace.
            if get_opaque_trace_state() == self._state:
                self._results.append((result, own, how))
        return results

    def reduce_compressed(
        self, how: HowReduced, leaves: Sequence[Leaf], owed: Residuals
    ) -> tuple[list[Leaf], list[Residual | None]]:
        raise ContextError(
            "A compressed reduction was called in local steps, in which each replica "
            "is by itself and sends nothing. Leave the `compression` out there."
        )

    def begin(self) -> None:
        """Know the results of the step that begins here by what it returns."""
        self._state = get_opaque_trace_state()

    def before(self, array: jax.Array) -> tuple[jax.Array, HowReduced | None]:
        """What was reduced to `array` and how; of one that is no result it and None."""
        known = ((own, how) for result, own, how in self._results if result is array)
        return next(known, (array, None))

    def forget(self) -> None:
        """Forget all results: those of a step are values of its trace."""
        self._results.clear()
        self._state = None

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        raise ContextError(
            "`all_gather` was called in local steps, where each replica is by itself: "
            "what the others have is not there. Return the array from the step; it "
            "comes back as a `PerReplica`, for `strategy.gather`."
        )

    def first(self, leaf: Leaf) -> Leaf:
        return leaf


class SameShapes(LocalReduction):
    """Reductions for shapes and types alone; values do not count."""

    def reduce_leaves(self, how: HowReduced, leaves: Sequence[Leaf]) -> list[Leaf]:
        found = super().reduce_leaves(how, leaves)
        return [
            IndexedSlices(
                self.gathered(leaf.values, 0),
                self.gathered(leaf.indices, 0),
                leaf.dense_shape,
            )
            if is_slices(leaf)
            else leaf
            for leaf in found
        ]

    def reduce_compressed(
        self, how: HowReduced, leaves: Sequence[Leaf], owed: Residuals
    ) -> tuple[list[Leaf], list[Residual | None]]:
        return self.reduce_leaves(how, leaves), list(owed)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        checked = operations.all_gather(leaf, axis, Replicas.alone())
        return jnp.concatenate([checked] * self._count, axis)

    def first(self, leaf: Leaf) -> jax.Array:
        return mesh.array_of(leaf)


Reducing: TypeAlias = Reduction | SameShapes


@final
@dataclasses.dataclass(frozen=True)
class EagerCollective:
    """A collective without its operands: a name for messages, a function, its settings.

    Equal ones are the same collective, whichever replica calls it.
    """

    name: str
    function: Callable[..., PyTree] = dataclasses.field(repr=False)
    settings: tuple[Any, ...] = ()

    def results(self, reduction: Reducing, arrays: Sequence[Leaf]) -> PyTree:
        """What one replica gets for its arrays."""
        return self.function(reduction, arrays, *self.settings)

    def __call__(self, reduction: Reducing, arrays: Sequence[Leaf]) -> list[jax.Array]:
        """The same, as a list of arrays."""
        return list(map(jnp.asarray, jax.tree.leaves(self.results(reduction, arrays))))


def _called(
    reduction: Reducing,
    arrays: Sequence[Leaf],
    method: str,
    structure: TreeStructure,
    static: tuple[tuple[str, object], ...],
) -> PyTree:
    """What a method of a reduction gives for these operands, and what is static."""
    return getattr(reduction, method)(**structure.unflatten(arrays), **dict(static))


def derivative(of: EagerCollective, differs: tuple[bool, ...]) -> EagerCollective:
    """That of a collective along tangents, which stand after the arrays that differ."""
    return EagerCollective(f"the derivative of {of.name}", _tangents, (of, differs))


def _tangents(
    reduction: Reducing,
    arrays: Sequence[Leaf],
    of: EagerCollective,
    differs: tuple[bool, ...],
) -> list[jax.Array]:
    primals, given = list(arrays[: len(differs)]), iter(arrays[len(differs) :])
    tangents = []
    for primal, is_given in zip(primals, differs, strict=True):
        if is_given:
            tangents.append(next(given))
        elif jnp.issubdtype(primal.dtype, jnp.inexact):
            tangents.append(jnp.zeros_like(primal))
        else:
            tangents.append(np.zeros(np.shape(primal), jax.dtypes.float0))
    _, found = jax.jvp(lambda *arrays: of(reduction, arrays), primals, tangents)
    return [each for each in found if each.dtype != jax.dtypes.float0]


def transposed(
    of: EagerCollective, linear: tuple[jax.ShapeDtypeStruct | None, ...]
) -> EagerCollective:
    """The transpose of a collective in the arrays of these types; None: it is known."""
    name = f"the gradient of {of.name.removeprefix('the derivative of ')}"
    return EagerCollective(name, _cotangents, (of, linear))


def _cotangents(
    reduction: Reducing,
    arrays: Sequence[Leaf],
    of: EagerCollective,
    linear: tuple[jax.ShapeDtypeStruct | None, ...],
) -> PyTree:
    types = [like for like in linear if like is not None]
    fixed = len(linear) - len(types)
    known, cotangents = arrays[:fixed], list(arrays[fixed:])

    def function(*given: jax.Array) -> list[jax.Array]:
        others, these = iter(known), iter(given)
        return of(
            reduction, [next(others if like is None else these) for like in linear]
        )

    return jax.linear_transpose(function, *types)(cotangents)


def mapped(of: EagerCollective, dimensions: tuple[int | None, ...]) -> EagerCollective:
    """A collective under `jax.vmap`, of these dimensions of its arrays."""
    return EagerCollective(of.name, _mapped, (of, dimensions))


def _mapped(
    reduction: Reducing,
    arrays: Sequence[Leaf],
    of: EagerCollective,
    dimensions: tuple[int | None, ...],
) -> PyTree:
    return jax.vmap(lambda *each: of(reduction, each), in_axes=dimensions)(*arrays)


RunCollective = Callable[[EagerCollective, Sequence[jax.Array]], PyTree]
"""Runs a collective with the arrays of this replica, when all replicas call it."""


@final
class EagerReduction:
    """Reductions of eager replicas: each runs collectives with its arrays."""

    def __init__(self, run_collective: RunCollective) -> None:
        self._run_collective = run_collective

    def alone(self) -> EagerReduction:
        """As that of `Reduction`: replicas that run eagerly join no arrays."""
        return self

    def reduce_leaves(self, how: HowReduced, leaves: Sequence[Leaf]) -> list[Leaf]:
        over = "" if how.groups is None else f", groups={how.groups}"
        name = f"all_reduce({how.op.name.lower()!r}{over})"
        return self._run(name, "reduce_leaves", {"leaves": list(leaves)}, how=how)

    def reduce_compressed(
        self, how: HowReduced, leaves: Sequence[Leaf], owed: Residuals
    ) -> tuple[list[Leaf], list[Residual | None]]:
        name = f"all_reduce_compressed({how.op.name.lower()!r})"
        operands = {"leaves": list(leaves), "owed": list(owed)}
        return self._run(name, "reduce_compressed", operands, how=how)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        name = f"all_gather(axis={axis})"
        return self._run(name, "gathered", {"leaf": leaf}, axis=axis)

    def first(self, leaf: Leaf) -> jax.Array:
        name = "an assignment with aggregation 'only_first_replica'"
        return self._run(name, "first", {"leaf": leaf})

    def _run(
        self, name: str, method: str, operands: dict[str, PyTree], **static: object
    ) -> PyTree:
        arrays, structure = jax.tree.flatten(operands)
        settings = method, structure, tuple(static.items())
        collective = EagerCollective(name, _called, settings)
        # Raises for strings and most other objects.
        return self._run_collective(collective, list(map(mesh.array_of, arrays)))
