"""How long loops wait for batches: `BatchWaits`."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import final


@final
class BatchWaits:
    """The seconds for which this thread has waited for batches of iterators.

    Args:
      clock: returns seconds.

    Attributes:
      seconds: of all waits since it was made.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._thread = threading.get_ident()
        self._depth = 0
        _all.add(self)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A `with` block in which a batch is waited for; within another it is one."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._depth += 1
        start = self._clock()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += self._clock() - start


_all: weakref.WeakSet[BatchWaits] = weakref.WeakSet()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A `with` block in which a batch is waited for, for all that count it."""
    with contextlib.ExitStack() as stack:
        for each in list(_all):
            stack.enter_context(each.waiting())
        yield
