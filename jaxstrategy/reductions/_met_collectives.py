"""Collectives of replicas that run eagerly: `MetCollective`, and its derivatives.

Each is a function of one replica's arrays and a reduction. With that of the strategy it
is what a compiled step does; with `SameShapes` it says what comes out.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compressed import Owed
from jaxstrategy.reductions._gather import all_gather
from jaxstrategy.reductions._own_reduction import OwnReduction
from jaxstrategy.reductions._reduction import Reduction
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas import _overflow
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._slices import IndexedSlices, is_slices
from jaxstrategy.values._types import Leaf, PyTree, TreeStructure


class MetCollective(abc.ABC):
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
class Reduced(MetCollective):
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
class ReducedCompressed(MetCollective):
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
        owed = [None if pair is None else Owed(*pair) for pair in pairs]
        reduced, debts = reduction.reduce_compressed(
            self.op, leaves, owed, self.options
        )
        return reduced, [None if d is None else (d.error, d.basis) for d in debts]


@final
@dataclasses.dataclass(frozen=True)
class Gathered(MetCollective):
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
class OfFirst(MetCollective):
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
class Derivative(MetCollective):
    """The derivative of a collective along tangents.

    Attributes:
      of: the collective.
      differs: which of its arrays have a tangent. These stand after the arrays.
    """

    of: MetCollective
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
class Transposed(MetCollective):
    """The transpose of a collective that is linear in some of its arrays.

    Attributes:
      of: the collective.
      linear: the types of the arrays in which it is linear; None for the others, which
        are given before the cotangents.
    """

    of: MetCollective
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
class Mapped(MetCollective):
    """A collective under `jax.vmap`.

    Attributes:
      of: the collective.
      dimensions: of each array the one that is mapped; None if it has none.
    """

    of: MetCollective
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
        self._own = OwnReduction(replicas.count)

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
        owed: Sequence[Owed | None],
        options: CommunicationOptions,
    ) -> tuple[list[Leaf], list[Owed | None]]:
        """As that of `Reduction`."""
        return self.reduce_leaves(op, leaves), list(owed)

    def gathered(self, leaf: Leaf, axis: int) -> jax.Array:
        """As that of `Reduction`."""
        checked = all_gather(leaf, axis, Replicas.alone())
        return jnp.concatenate([checked] * self._count, axis)

    def first(self, leaf: Leaf) -> jax.Array:
        """As that of `Reduction`."""
        return _overflow.array_of(leaf)
