"""The reductions that code can ask for: compiled, local, and of replicas in threads.

Collectives of replicas that run eagerly are functions of one replica's arrays and a
reduction: with that of the strategy they do what a compiled step does, with
`SameShapes` they say what comes out.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.reductions.compression import (
    Residual,
    Sums,
    compression_of,
    reduce_with_memory,
)
from jaxstrategy._src.reductions.operations import (
    OPERATIONS,
    Groups,
    all_gather,
    check_sum,
    checked,
    reduce_slices,
)
from jaxstrategy._src.reductions.plan import AbstractPlan
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.slices import IndexedSlices, is_slices


@final
class Reduction:
    """The one way in which replicas combine what each of them has, inside a step.

    Args:
      replicas: whose values they are.
      plan: what is done with them.
    """

    def __init__(self, replicas: Replicas, plan: AbstractPlan) -> None:
        self._replicas = replicas
        self._plan = plan

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """This replica's arrays reduced over all replicas, or over its group."""
        plan = self._plan.with_options(options, self._replicas).within(groups)
        dense = [leaf for leaf in leaves if not is_slices(leaf)]
        sparse = [self._sparse(op, x, groups) for x in leaves if is_slices(x)]
        reduced, joined = iter(self._dense(plan, op, dense)), iter(sparse)
        return [next(joined if is_slices(leaf) else reduced) for leaf in leaves]

    def alone(self) -> Reduction:
        """The same, but that arrays are not joined unless somebody chose how."""
        return Reduction(self._replicas, self._plan.alone())

    def _dense(
        self, plan: AbstractPlan, op: ReduceOp, leaves: Sequence[Leaf]
    ) -> list[Leaf]:
        axes = self._replicas.collective_axes
        alone = [self._goes_alone(leaf) for leaf in leaves]
        packed = [x for x, is_alone in zip(leaves, alone, strict=True) if not is_alone]
        together = iter(plan.reduce(op, packed, axes))
        return [
            plan.reduce(op, [leaf], axes)[0] if is_alone else next(together)
            for leaf, is_alone in zip(leaves, alone, strict=True)
        ]

    def _goes_alone(self, leaf: Leaf) -> bool:
        """Whether an array is not to be joined with others.

        Of those that are, no replica could take its part, and each device of a replica
        would have all.
        """
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return False
        replicas = self._replicas
        return replicas.is_divisible(leaf) or replicas.may_lie_inside(leaf.shape)

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Residual | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Residual | None]]:
        """This replica's arrays reduced over all replicas, some of them compressed."""
        plan = self._plan.with_options(options, self._replicas)
        axes = self._replicas.collective_axes
        dense = [i for i, leaf in enumerate(leaves) if not is_slices(leaf)]
        reduced, settled = reduce_with_memory(
            op,
            [leaves[i] for i in dense],
            [owed[i] for i in dense],
            compression_of(options),
            Sums(
                functools.partial(self._dense, plan, op),
                functools.partial(plan.in_eight_bits, op, axes=axes),
            ),
            is_alone=self._replicas.count == 1,
        )
        # What is sparse owes what it owed.
        results = {
            i: self._sparse(op, x, None) for i, x in enumerate(leaves) if is_slices(x)
        }
        results.update(zip(dense, reduced, strict=True))
        debts = {**dict(enumerate(owed)), **dict(zip(dense, settled, strict=True))}
        places = range(len(leaves))
        return [results[i] for i in places], [debts[i] for i in places]

    def _sparse(
        self, op: ReduceOp, leaf: IndexedSlices, groups: Groups | None
    ) -> IndexedSlices:
        if groups is not None:
            raise ValueError(
                "`groups` was given for IndexedSlices, whose rows go to all replicas. "
                "Reduce `slices.to_dense()` instead."
            )
        return reduce_slices(op, leaf, self._replicas)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """Every replica's array, joined along `axis` in replica order.

        Shapes: local `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`.

        Raises:
          ValueError: a scalar, or `axis` is out of range.
          TypeError: `axis` is not a whole number.
        """
        return all_gather(leaf, axis, self._replicas)

    def first(self, leaf: Leaf) -> jax.Array:
        """The array of the first replica on all of them, in its own shape."""
        return self.gathered(mesh.array_of(leaf)[None], 0)[0]


@final
@dataclasses.dataclass(frozen=True)
class HowReduced:
    """How an array was to be reduced over the replicas.

    Attributes:
      op: what is done with their versions.
      options: how, instead of as planned.
      groups: over which replicas; None for all of them.
    """

    op: ReduceOp
    options: CommunicationOptions | None = None
    groups: Groups | None = None


@final
class LocalReduction:
    """Reductions without the other replicas: each has what this one has.

    The sum is then `count` times its array, and the mean, the smallest and the largest
    are that array; so a step of gradients takes its way by its own rows alone.

    Args:
      count: how many replicas there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._results: list[tuple[jax.Array, jax.Array, HowReduced]] = []
        self._state: object = None

    def alone(self) -> LocalReduction:
        """As that of `Reduction`: a replica by itself joins no arrays."""
        return self

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """As that of `Reduction`, if all replicas had these arrays."""
        count = self._count if groups is None else len(groups[0])
        results = []
        for leaf in leaves:
            if is_slices(leaf):
                results.append(_sparse(op, leaf, count))
                continue
            row = OPERATIONS[op]
            own = row.prepared(checked(op, leaf))
            # An array of its own, by which it is known when the step returns it.
            result = jnp.copy(row.of_equal(own, count))
            results.append(result)
            # A jitted function inside the step returns other arrays than it has made,
            # which must not outlive its trace.
            if get_opaque_trace_state() == self._state:
                how = HowReduced(op, options, groups)
                self._results.append((result, own, how))
        return results

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Residual | None],
        options: CommunicationOptions,
    ) -> NoReturn:
        """Not defined."""
        raise ContextError(
            "A compressed reduction was called in local steps, in which each replica "
            "is by itself and sends nothing. Leave the `compression` out there."
        )

    def begin(self) -> None:
        """Know the results of the step that begins here by what it returns."""
        self._state = get_opaque_trace_state()

    def before(self, array: jax.Array) -> tuple[jax.Array, HowReduced | None]:
        """What was reduced to `array`, of its shape, and how.

        Of an array that is no result of a reduction it, and None.
        """
        for result, own, how in self._results:
            if result is array:
                return own, how
        return array, None

    def forget(self) -> None:
        """Forget all results: those of a step are values of its trace."""
        self._results.clear()
        self._state = None

    def gathered(self, leaf: Leaf, axis: int) -> NoReturn:
        """Not defined."""
        raise ContextError(
            "`all_gather` was called in local steps, where each replica is by itself: "
            "what the others have is not there. Return the array from the step; it "
            "comes back as a `PerReplica`, for `strategy.gather`."
        )

    def first(self, leaf: Leaf) -> Leaf:
        """The array, as it is."""
        return leaf


def _sparse(op: ReduceOp, slices: IndexedSlices, count: int) -> IndexedSlices:
    check_sum(op)
    row = OPERATIONS[op]
    rows = row.of_equal(row.prepared(checked(op, slices.values)), count)
    return IndexedSlices(rows, slices.indices, slices.dense_shape)


class EagerCollective(abc.ABC):
    """A collective of all replicas, without its operands."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What the user called, for messages."""

    @abc.abstractmethod
    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """What one replica gets for its arrays."""

    def __call__(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> list[jax.Array]:
        """The arrays that one replica gets for its own."""
        return list(map(jnp.asarray, jax.tree.leaves(self.results(reduction, arrays))))


@final
@dataclasses.dataclass(frozen=True)
class Reduced(EagerCollective):
    """`all_reduce`.

    Attributes:
      op: what is done.
      options: how, instead of as the strategy does.
      groups: over which replicas; None for all.
      structure: of the leaves, some of which may be `IndexedSlices`.
    """

    op: ReduceOp
    options: CommunicationOptions | None
    groups: Groups | None
    structure: TreeStructure

    @property
    def name(self) -> str:
        """What the user called."""
        over = "" if self.groups is None else f", groups={self.groups}"
        return f"all_reduce({self.op.name.lower()!r}{over})"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """A list of leaves like those that were given."""
        leaves = self.structure.unflatten(arrays)
        return reduction.reduce_leaves(self.op, leaves, self.options, self.groups)


@final
@dataclasses.dataclass(frozen=True)
class ReducedCompressed(EagerCollective):
    """`all_reduce_compressed`.

    Attributes:
      op: what is done.
      options: with a compression.
      structure: of the leaves, and of what is owed of each.
    """

    op: ReduceOp
    options: CommunicationOptions
    structure: TreeStructure

    @property
    def name(self) -> str:
        """What the user called."""
        return f"all_reduce_compressed({self.op.name.lower()!r})"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """The leaves, and what is owed of each now."""
        leaves, pairs = self.structure.unflatten(arrays)
        owed = [None if pair is None else Residual(*pair) for pair in pairs]
        reduced, debts = reduction.reduce_compressed(
            self.op, leaves, owed, self.options
        )
        return reduced, [None if d is None else (d.error, d.basis) for d in debts]


@final
@dataclasses.dataclass(frozen=True)
class Gathered(EagerCollective):
    """`all_gather` along a dimension."""

    axis: int

    @property
    def name(self) -> str:
        """What the user called."""
        return f"all_gather(axis={self.axis})"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """One longer array."""
        return [reduction.gathered(array, self.axis) for array in arrays]


@final
@dataclasses.dataclass(frozen=True)
class OfFirst(EagerCollective):
    """The array of the first replica, as `only_first_replica` takes it."""

    @property
    def name(self) -> str:
        """What the user called."""
        return "an assignment with aggregation 'only_first_replica'"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """One array for each."""
        return [reduction.first(array) for array in arrays]


@final
@dataclasses.dataclass(frozen=True)
class Derivative(EagerCollective):
    """The derivative of a collective along tangents.

    Attributes:
      of: the collective.
      differs: which of its arrays have a tangent. These stand after the arrays.
    """

    of: EagerCollective
    differs: tuple[bool, ...]

    @property
    def name(self) -> str:
        """What the user called."""
        return f"the derivative of {self.of.name}"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """The tangents of the results that have one."""
        primals = list(arrays[: len(self.differs)])
        given = iter(arrays[len(self.differs) :])
        tangents = [
            next(given) if differs else _zero_tangent(primal)
            for primal, differs in zip(primals, self.differs, strict=True)
        ]

        def function(*arrays: jax.Array) -> list[jax.Array]:
            return self.of(reduction, arrays)

        _, found = jax.jvp(function, tuple(primals), tuple(tangents))
        return [each for each in found if each.dtype != jax.dtypes.float0]


@final
@dataclasses.dataclass(frozen=True)
class Transposed(EagerCollective):
    """The transpose of a collective that is linear in some of its arrays.

    Attributes:
      of: the collective.
      linear: the types of the arrays in which it is linear; None for the others, which
        are given before the cotangents.
    """

    of: EagerCollective
    linear: tuple[jax.ShapeDtypeStruct | None, ...]

    @property
    def name(self) -> str:
        """What the user called."""
        return f"the gradient of {self.of.name.removeprefix('the derivative of ')}"

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """The cotangents of what it is linear in."""
        fixed = len([each for each in self.linear if each is None])
        known, cotangents = arrays[:fixed], list(arrays[fixed:])

        def function(*linear: jax.Array) -> list[jax.Array]:
            others, these = iter(known), iter(linear)
            return self.of(
                reduction,
                [next(others if like is None else these) for like in self.linear],
            )

        types = [like for like in self.linear if like is not None]
        return jax.linear_transpose(function, *types)(cotangents)


@final
@dataclasses.dataclass(frozen=True)
class Mapped(EagerCollective):
    """A collective under `jax.vmap`.

    Attributes:
      of: the collective.
      dimensions: of each array the one that is mapped; None if it has none.
    """

    of: EagerCollective
    dimensions: tuple[int | None, ...]

    @property
    def name(self) -> str:
        """What the user called."""
        return self.of.name

    def results(
        self, reduction: Reduction | SameShapes, arrays: Sequence[Leaf]
    ) -> PyTree:
        """The results, mapped along their first dimension."""

        def function(*arrays: jax.Array) -> list[jax.Array]:
            return self.of(reduction, arrays)

        return jax.vmap(function, in_axes=self.dimensions)(*arrays)


def _zero_tangent(primal: jax.Array) -> Any:
    dtype = primal.dtype
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(np.shape(primal), jax.dtypes.float0)


@final
class SameShapes:
    """Reductions that say of what shape and type the results are, and nothing else.

    Args:
      replicas: whose collectives they are.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._count = replicas.count
        self._own = LocalReduction(replicas.count)

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """As that of `Reduction`."""
        found = self._own.reduce_leaves(op, leaves, options, groups)
        self._own.forget()
        return [self._joined(leaf) if is_slices(leaf) else leaf for leaf in found]

    def _joined(self, rows: IndexedSlices) -> IndexedSlices:
        return IndexedSlices(
            self.gathered(rows.values, 0),
            self.gathered(rows.indices, 0),
            rows.dense_shape,
        )

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Residual | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Residual | None]]:
        """As that of `Reduction`."""
        return self.reduce_leaves(op, leaves), list(owed)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """As that of `Reduction`."""
        checked = all_gather(leaf, axis, Replicas.alone())
        return jnp.concatenate([checked] * self._count, axis)

    def first(self, leaf: Leaf) -> jax.Array:
        """As that of `Reduction`."""
        return mesh.array_of(leaf)


Meet = Callable[[EagerCollective, Sequence[jax.Array]], PyTree]
"""A collective with the arrays of this replica: what comes of them."""


@final
class EagerReduction:
    """Reductions for which the replicas meet; in each the arrays are its own.

    Args:
      meet: takes part in a collective.
    """

    def __init__(self, meet: Meet) -> None:
        self._meet = meet

    def alone(self) -> EagerReduction:
        """As that of `Reduction`: replicas that run eagerly join no arrays."""
        return self

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        options: CommunicationOptions | None = None,
        groups: Groups | None = None,
    ) -> list[Leaf]:
        """As that of `Reduction`."""
        arrays, structure = jax.tree.flatten(list(leaves))
        return self._met(Reduced(op, options, groups, structure), arrays)

    def reduce_compressed(
        self,
        op: ReduceOp,
        leaves: Sequence[Leaf],
        owed: Sequence[Residual | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Residual | None]]:
        """As that of `Reduction`."""
        pairs = [None if each is None else (each.error, each.basis) for each in owed]
        arrays, structure = jax.tree.flatten((list(leaves), pairs))
        collective = ReducedCompressed(op, options, structure)
        reduced, debts = self._met(collective, arrays)
        return reduced, [None if pair is None else Residual(*pair) for pair in debts]

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """As that of `Reduction`.

        Shapes: `[n, ...]` -> `[num_replicas * n, ...]` for `axis=0`.
        """
        return self._met(Gathered(axis), [leaf])[0]

    def first(self, leaf: Leaf) -> jax.Array:
        """As that of `Reduction`: the first replica's, of the same shape."""
        return self._met(OfFirst(), [leaf])[0]

    def _met(self, collective: EagerCollective, arrays: Sequence[Leaf]) -> PyTree:
        # Most leaves of strings and other objects come to an end here.
        return self._meet(collective, [mesh.array_of(array) for array in arrays])
