"""The batches that datasets have given, and how long loops waited for them.

Processes compare the numbers of batches, and a profile counts the rows of nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import final

import jax

from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica

_known: dict[int, tuple[weakref.ref[Leaf], str | None]] = {}


def note(batch: PyTree, name: str | None) -> None:
    """Let the arrays of `batch` be known as such as long as they live."""
    for leaf in jax.tree.leaves(batch, is_leaf=_is_per_replica):
        # Not the mask of a `PerReplica`, which may be one of several batches.
        array = leaf._value if isinstance(leaf, PerReplica) else leaf
        key = id(array)
        forget = functools.partial(_known.pop, key)  # with a reference as the default
        _known[key] = weakref.ref(array, forget), name


def of(array: Leaf) -> str | None:
    """The name of the batch of an array, None if it is of none or that has no name."""
    found = _found(array)
    return None if found is None else found[1]


def is_of_dataset(leaf: Leaf) -> bool:
    """Whether a dataset, or `batches`, has given this array or `PerReplica`."""
    return _found(leaf._value if isinstance(leaf, PerReplica) else leaf) is not None


def _found(array: Leaf) -> tuple[weakref.ref[Leaf], str | None] | None:
    found = _known.get(id(array))
    return found if found is not None and found[0]() is array else None


def _is_per_replica(node: object) -> bool:
    return isinstance(node, PerReplica)


@final
class BatchWaits:
    """The seconds for which this thread has waited for batches of iterators."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.clock = clock
        self.thread = threading.get_ident()
        self.depth = 0  # a wait within another is part of it
        _all.add(self)


_all: weakref.WeakSet[BatchWaits] = weakref.WeakSet()


@contextlib.contextmanager
def waiting(waits: Iterable[BatchWaits] = _all) -> Iterator[None]:
    """A `with` block in which a batch is waited for, for all that count it."""
    here = threading.get_ident()
    counting = [each for each in list(waits) if each.thread == here]
    begun = [(each, each.clock()) for each in counting if not each.depth]
    for each in counting:
        each.depth += 1
    try:
        yield
    finally:
        for each in counting:
            each.depth -= 1
        for each, start in begun:
            each.seconds += each.clock() - start
