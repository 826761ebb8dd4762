"""The batches of several steps, divided into runs of one size: `BatchRun`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax

from jaxstrategy.executors._array_tree import ArrayTree, are_alike, told


class BatchRun:
    """Batches of one size, one after the other.

    Attributes:
      form: the first of them.
      columns: for each array of a batch, that of each batch.
    """

    def __init__(self, batches: Sequence[ArrayTree]) -> None:
        self.form = batches[0]
        rows = zip(*(batch.arrays for batch in batches), strict=True)
        self.columns = [list(column) for column in rows]
        self._number = len(batches)

    def __len__(self) -> int:
        return self._number


def runs(name: str, given: object) -> list[BatchRun]:
    """The batches of one call: one loop each for those of one size.

    Where there is one replica, the last batch of a dataset may be smaller.

    Raises:
      TypeError: they are in no tuple.
      ValueError: there are none, or they are of several kinds.
    """
    if not isinstance(given, (tuple, list)):
        raise TypeError(
            f"`{name}` makes several steps and takes a tuple of batches in the "
            f"last place, as `jaxstrategy.grouped(dataset, 10)` makes them. It was "
            f"given {told(given)}; write `(batch,)` for one step."
        )
    if not given:
        raise ValueError(
            f"`{name}` was given no batches, and each step needs one. Leave out "
            "the call."
        )
    batches = list(map(ArrayTree, given))
    for number, batch in enumerate(batches):
        _check_kind(name, number, batch, batches[0])
    by_size = itertools.groupby(batches, lambda batch: [a.shape for a in batch.arrays])
    return [BatchRun(list(run)) for _, run in by_size]


def _check_kind(name: str, number: int, batch: ArrayTree, form: ArrayTree) -> None:
    advice = "Steps of one loop need batches of one kind; call it for each kind."
    if batch.structure != form.structure:
        raise ValueError(
            f"`{name}`: `batches[{number}]` has another structure than "
            f"`batches[0]`: {batch.structure} instead of {form.structure}. "
            f"{advice}"
        )
    for path, leaf, first in zip(batch.paths, batch.leaves, form.leaves, strict=True):
        if not are_alike(leaf, first, but_rows=True):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"`{name}`: `batches[{number}]{where}` is {told(leaf)}, and "
                f"`batches[0]{where}` is {told(first)}. {advice}"
            )
