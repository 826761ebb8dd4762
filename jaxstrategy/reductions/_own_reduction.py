"""Reductions of a replica that is by itself: `OwnReduction`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn, final

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._errors import ContextError
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compressed import Owed
from jaxstrategy.reductions._reduce_operations import OPERATIONS, checked
from jaxstrategy.reductions._sparse import check_sum
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.values._slices import IndexedSlices, is_slices
from jaxstrategy.values._types import Leaf


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
class OwnReduction:
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

    def alone(self) -> OwnReduction:
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
        owed: Sequence[Owed | None],
        options: CommunicationOptions,
    ) -> NoReturn:
        """Not defined.

        Raises:
          ContextError: always.
        """
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
        """Not defined.

        Raises:
          ContextError: always.
        """
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
