"""Passes whose place is, in part, the number of batches that were read."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxstrategy.inputs.sources._source import Pass, State
from jaxstrategy.text._units import with_noun
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values import _per_replica
from jaxstrategy.values._types import PyTree


@final
class CountedPass(Pass):
    """Batches of an iterator; a later pass gets to the same place by reading again.

    Args:
      begin: makes the iterator.
      name: of the source, in messages.
      length: how many batches there are, if that is known.
      in_memory: all batches, if they are in a list.
    """

    def __init__(
        self,
        begin: Callable[[], Iterator[PyTree]],
        name: str,
        length: int | None = None,
        in_memory: Sequence[PyTree] = (),
    ) -> None:
        self._begin = begin
        self._in_memory = in_memory
        self._name = name
        self._length = length
        self._iterator: Iterator[PyTree] | None = None  # begun when first needed
        self._batches = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = self._begin()
        batch = next(self._iterator)
        self._batches += 1
        return batch

    def rows_ahead(self, most: int) -> list[int]:
        found: list[int] = []
        for batch in self._in_memory[self._batches : self._batches + most]:
            leaves = jax.tree.leaves(batch, is_leaf=_per_replica.is_per_replica)
            if not all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
                break
            rows = {leaf.shape[0] for leaf in leaves if leaf.ndim}
            if len(rows) != 1:
                break
            found += rows
        return found

    def get_state(self) -> State:
        return {"batches": self._batches, **of_length(self._length)}

    def set_state(self, state: State) -> PyTree | None:
        wanted = counted(state, "batches", self._name)
        # Of a state beyond the end, `too_few` says more.
        if self._length is None or wanted <= self._length:
            check_length(state, self._length, self._name)
        self.close()
        self._batches, batch = 0, None
        while self._batches < wanted:
            try:
                batch = next(self)
            except StopIteration:
                raise too_few(self._name, self._batches, wanted) from None
        return batch

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        close(iterator)


# A state is asked for so seldom; to resume reads up to so many batches, less one, anew.
_EVERY = 16


class SnapshotPass(Pass):
    """A pass over a source that has a state of its own, which takes long to ask for.

    Its place is such a state, of every sixteenth batch, and how many were read since.
    """

    name: str
    _snapshot: dict[str, State] | None = None
    _since = 0

    @abc.abstractmethod
    def _read(self) -> PyTree:
        """The next batch of the source."""

    @abc.abstractmethod
    def _check_place(self) -> None:
        """Raise if the source's state is not that of this pass, or there is none."""

    @abc.abstractmethod
    def _take(self) -> dict[str, State]:
        """The source's own state, copied."""

    @abc.abstractmethod
    def _load(self, state: State) -> None:
        """Go on from a state that `_take` gave."""

    def __next__(self) -> PyTree:
        batch = self._read()
        self._since += 1
        return batch

    def get_state(self) -> State:
        self._check_place()
        if self._snapshot is None or self._since >= _EVERY:
            self._snapshot, self._since = self._take(), 0
        return {**self._snapshot, **({"since": self._since} if self._since else {})}

    def set_state(self, state: State) -> None:
        since = 0
        if isinstance(state, dict) and "since" in state:
            since = counted(state, "since", self.name)
            state = {key: value for key, value in state.items() if key != "since"}
        self._load(state)
        for _ in range(since):
            try:
                self._read()
            except StopIteration:
                raise ValueError(
                    f"{self.name} has fewer batches than when the state was saved. "
                    f"{SAME_DATA}"
                ) from None
        self._snapshot, self._since = state, since


def close(iterator: Any) -> None:
    """Close what can be closed: a generator, an iterator with workers."""
    closing = getattr(iterator, "close", None)
    if callable(closing):
        closing()


def counted(state: State, key: str, name: str) -> int:
    """The number of batches or epochs that `state` holds under `key`.

    Raises:
      ValueError: it holds none.
    """
    count = whole(state.get(key)) if isinstance(state, dict) else None
    if count is None or count < 0:
        raise foreign(name, state, f"a number under {key!r}")
    return count


def of_length(length: int | None) -> dict[str, int]:
    """The part of a state that says how many batches there are, if that is known."""
    return {} if length is None else {"length": length}


def check_length(state: State, length: int | None, name: str) -> None:
    """Raise if the data had another length when `state` was saved, if both are known.

    Raises:
      ValueError: it had.
    """
    then = state.get("length")
    if then is not None and length is not None and then != length:
        raise ValueError(
            f"The state was saved with {then} batches in {name}, which has {length} "
            f"now, so that other examples would follow. {SAME_DATA}"
        )


SAME_DATA = (
    "Resume with the dataset, the batch size and the options that the state was saved "
    "with, or begin anew."
)


def foreign(name: str, state: State, wanted: str) -> ValueError:
    """The error for a state that another kind of source gave."""
    return ValueError(
        f"{state!r:.200} is not the state of a pass over {name}, which has {wanted}. "
        "Give the state that `get_state` of an iterator over the same dataset returned."
    )


def too_few(name: str, count: int, wanted: int) -> ValueError:
    """The error for a state beyond the end."""
    return ValueError(
        f"The state was saved after batch {wanted}, but {name} has "
        f"{with_noun(count, 'batch')}. {SAME_DATA}"
    )
