"""Results of the parts of a data set, added up: `WideSums`, `shard_sums`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import Leaf, PyTree, TreeStructure


@final
class WideSums:
    """Sums of pytrees of numbers, all of one structure.

    Floating-point numbers are added as float64, and rounded once at the end.
    """

    def __init__(self) -> None:
        self._structure: TreeStructure | None = None
        self._dtypes: list[np.dtype] = []
        self._totals: list[np.ndarray] = []

    def add(self, tree: PyTree) -> None:
        """Add one.

        Raises:
          TypeError: something in it is no number.
        """
        leaves, structure = jax.tree.flatten(tree)
        if self._structure is None:
            self._structure = structure
            self._dtypes = [_number_type(leaf) for leaf in leaves]
            self._totals = [
                np.zeros(np.shape(leaf), _wide(dtype))
                for leaf, dtype in zip(leaves, self._dtypes, strict=True)
            ]
        for total, leaf in zip(self._totals, leaves, strict=True):
            _number_type(leaf)
            total += np.asarray(leaf).astype(total.dtype)

    def sums(self) -> PyTree:
        """The sums, of the dtypes that were added first; None of nothing."""
        if self._structure is None:
            return None
        pairs = zip(self._totals, self._dtypes, strict=True)
        sums = [total.astype(dtype)[()] for total, dtype in pairs]
        return jax.tree.unflatten(self._structure, sums)


def shard_sums(results: Sequence[PyTree], may_be_none: bool = False) -> PyTree:
    """The sums of what the same function returned for each shard.

    Args:
      results: for each shard.
      may_be_none: whether None stands for a shard that was empty.

    Raises:
      TypeError: something that it returned is no number.
      ValueError: all shards were empty.
    """
    if may_be_none:
        results = [result for result in results if result is not None]
    if not results:
        raise ValueError(
            "All shards of the dataset were empty on the workers, although there was "
            "an element on the coordinator. Do they find the same files?"
        )
    totals = WideSums()
    for result in results:
        totals.add(result)
    return totals.sums()


def _number_type(leaf: Leaf) -> np.dtype:
    """The dtype of a number; what JAX makes of one of Python's.

    Raises:
      TypeError: it is none.
    """
    is_number = isinstance(leaf, np.ndarray | np.generic | int | float)
    if not is_number or np.result_type(leaf) == np.bool_:
        raise TypeError(
            f"A function that was evaluated returned {shown(leaf)}; sums of numbers "
            "were wanted, such as of losses and of examples."
        )
    return np.dtype(jnp.result_type(leaf))


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype
