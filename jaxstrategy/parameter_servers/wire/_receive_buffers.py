"""Memory for arrays that are received, used again: `ReceiveBuffers`.

Fresh memory costs a page fault for each 4 KB: arrays of 10 MB came at a fifth of the
speed (measured over Unix sockets).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._aligned_memory import aligned_empty

SMALLEST = 1 << 16
"""Bytes below which memory of malloc is as fast."""


class _Loan(weakref.ref):
    """Memory that somebody uses: as long as the array of it, or a view, lives."""

    __slots__ = ("memory",)
    memory: np.ndarray


@final
class ReceiveBuffers:
    """Memory for arrays, which comes back by itself.

    It is safe by construction: memory is lent as an array to which all views of it
    refer, and a weak reference to that array gives the memory back. So no array that
    anybody can still reach is written again. Threads may share one.

    Args:
      most: bytes that are kept while nobody uses them.
    """

    def __init__(self, most: int = 1 << 29) -> None:
        self._most = most
        self._idle_bytes = 0
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._returned: deque[np.ndarray] = deque()
        # By identity: a weak reference compares and hashes as what it refers to.
        self._loans: dict[int, _Loan] = {}

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses now."""
        return self._idle_bytes

    def take(self, size: int) -> np.ndarray:
        """A vector of so many bytes, whatever they are."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        room = _rounded(size)
        memory = self._found(room)
        if memory is None:
            memory = aligned_empty((room,), np.uint8)
        # NumPy collapses chains of views down to the array whose base is no array.
        array = np.frombuffer(memory.data, np.uint8, size)
        loan = _Loan(array, self._give_back)
        loan.memory = memory
        self._loans[id(loan)] = loan
        return array

    def _found(self, room: int) -> np.ndarray | None:
        with self._lock:
            self._sort_returned()
            if memories := self._idle.get(room):
                self._idle_bytes -= room
                self._idle.move_to_end(room)
                return memories.pop()
        return None

    def _give_back(self, loan: _Loan) -> None:
        self._loans.pop(id(loan), None)
        self._returned.append(loan.memory)
        # The collector may call this within any line of this class: it must not wait.
        if self._lock.acquire(blocking=False):
            try:
                self._sort_returned()
            finally:
                self._lock.release()

    def _sort_returned(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._idle.setdefault(memory.nbytes, []).append(memory)
            self._idle_bytes += memory.nbytes
        while self._idle_bytes > self._most:
            self._forget_one()

    def _forget_one(self) -> None:
        """Free some memory of the size that was not wanted for the longest time."""
        room = next(iter(self._idle))
        if memories := self._idle[room]:
            self._idle_bytes -= memories.pop().nbytes
        else:
            del self._idle[room]


SHARED = ReceiveBuffers()
"""That of all streams of this process."""


def _rounded(size: int) -> int:
    """The next of eight sizes up to the next power of two."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step
