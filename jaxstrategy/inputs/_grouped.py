"""Batches in groups, for several steps per call: `grouped`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import final

from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import PyTree, Value


@final
class Grouped(Iterable[tuple[PyTree, ...]]):
    """Tuples of batches. Made by `grouped`; a pass for each `iter`."""

    def __init__(self, dataset: Iterable[PyTree], k: int) -> None:
        self._dataset = dataset
        self._k = k

    def __iter__(self) -> Iterator[tuple[PyTree, ...]]:
        batches = iter(self._dataset)
        while True:
            group: list[PyTree] = []
            try:
                # Not `islice`, which would lose the batches before an error.
                while len(group) < self._k:
                    group.append(next(batches))
            except StopIteration:
                if group:
                    yield tuple(group)
                return
            except Exception:
                if group:
                    yield tuple(group)
                raise
            yield tuple(group)

    def __len__(self) -> int:
        """The number of tuples of a pass.

        Raises:
          TypeError: the dataset does not know its length.
        """
        return -(-self.number_of_batches() // self._k)

    def number_of_batches(self) -> int:
        """The number of batches in all tuples of a pass together.

        Raises:
          TypeError: the dataset does not know its length.
        """
        if not isinstance(self._dataset, Sized):
            raise TypeError(
                f"How many batches a {type(self._dataset).__name__} has is not known. "
                "Count the groups, or give a dataset that has a length."
            )
        return len(self._dataset)


def grouped(dataset: Iterable[PyTree], k: int) -> Grouped:
    """The batches of `dataset` in tuples of `k`; the last one may have fewer.

    For steps that are made several at a time, see `Strategy.several`. Nothing is read
    beyond the tuple that is asked for, so that the state of a `DistributedIterator` is
    the one after the last batch given. When the dataset raises, the batches before are
    given first.

    Args:
      dataset: batches; when it can be iterated over again, then so can the result.
      k: how many batches a tuple has.

    Returns:
      An iterable of tuples; `len` of it works where that of `dataset` does.

    Raises:
      ValueError: `k` is less than 1.
      TypeError: `k` is not a whole number; `dataset` cannot be iterated over.

    >>> list(grouped(range(5), 2))
    [(0, 1), (2, 3), (4,)]
    """
    if not isinstance(dataset, Iterable):
        raise TypeError(
            f"`dataset` was {dataset!r}, which cannot be iterated over; batches were "
            "wanted."
        )
    return Grouped(dataset, _checked(k))


def _checked(k: Value) -> int:
    number = whole(k)
    if number is None:
        raise TypeError(
            f"`k` was {k!r}; the number of batches in a tuple was wanted, a whole "
            "number."
        )
    if number < 1:
        raise ValueError(f"`k` was {number}; a tuple has at least one batch.")
    return number
