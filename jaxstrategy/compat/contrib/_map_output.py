"""The results of a function of many elements, until they are reduced: `MapOutput`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import final

import jax

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._reduce_operations import OPERATIONS
from jaxstrategy.values._types import PyTree


@final
class MapOutput:
    """What `DistributionStrategy.map` returns, for `reduce` and `unwrap`.

    Args:
      results: a pytree for each element, of one structure.
      num_towers: the number of towers to which the elements go in turn.
    """

    def __init__(self, results: Sequence[PyTree], num_towers: int) -> None:
        self._results = results
        self._num_towers = num_towers

    def reduced(self, op: ReduceOp) -> PyTree:
        """The sum or the mean over all elements.

        Raises:
          ValueError: there are none.
        """
        if not self._results:
            raise ValueError(
                "`map` was given no elements, so there is nothing to reduce."
            )
        sums = jax.tree.map(
            lambda *leaves: functools.reduce(operator.add, leaves), *self._results
        )
        if not OPERATIONS[op].divides:
            return sums
        return jax.tree.map(lambda leaf: leaf / len(self._results), sums)

    def of_towers(self) -> list[list[PyTree]]:
        """For each tower the results of its elements, in their order."""
        n = self._num_towers
        return [list(self._results[i::n]) for i in range(n)]

    def __repr__(self) -> str:
        return f"MapOutput({len(self._results)} elements on {self._num_towers} towers)"
