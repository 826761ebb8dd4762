"""The processes of one worker, one after the other: `WorkerPlace`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, final


class PlacedProcess(Protocol):
    """A process that can be replaced by another one."""

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""

    def kill(self) -> None:
        """End it now."""

    def close(self) -> None:
        """Wait for its end."""


ProcessT = TypeVar("ProcessT", bound=PlacedProcess)
Ended = Callable[[Any], None]


@final
class WorkerPlace(Generic[ProcessT]):
    """A worker's process, and the next one as soon as that has ended."""

    def __init__(self, start: Callable[[Ended], ProcessT | None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._is_used = False
        with self._lock:  # it may end before it is known here
            self._child = start(self._ended)

    @property
    def current(self) -> ProcessT | None:
        """The process that there is now."""
        return self._child

    def fresh(self) -> ProcessT | None:
        """A process that was never given out; the one before it is ended."""
        with self._lock:
            old = self._child
            if self._is_used or old is None or old.end is not None:
                if old is not None:
                    old.kill()  # it may have what the next one needs
                self._child = self._start(self._ended)
            self._is_used = True
            child = self._child
        if old is not None and old is not child:
            old.close()
        return child

    def renew(self) -> None:
        """End the process, and start one that knows the servers that there are now."""
        with self._lock:
            old = self._child
            if old is not None:
                old.kill()
            self._child, self._is_used = self._start(self._ended), False
        if old is not None:
            old.close()

    def kill(self) -> None:
        """End the process that there is now."""
        child = self._child
        if child is not None:
            child.kill()

    def _ended(self, child: ProcessT) -> None:
        with self._lock:
            if child is self._child and self._is_used:
                self._child, self._is_used = self._start(self._ended), False
