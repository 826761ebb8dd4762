"""The children of this process that belong together: `Children`."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import final

from jaxstrategy.launch._child_process import Guard
from jaxstrategy.parameter_servers.backends._child_process import ChildProcess

_POLITE_SECONDS = 2.0
_TERMINATE_SECONDS = 1.0


@final
class Children:
    """Processes that are started and ended together, at the latest with this one."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._lock = threading.Lock()
        self._living: list[ChildProcess] = []
        self._pid = os.getpid()
        self._is_closed = False
        _all.add(self)

    def start(self, make: Callable[[Guard], ChildProcess]) -> ChildProcess | None:
        """A new child; None once all were ended, or the main thread has."""
        with self._lock:
            if self._is_closed or not threading.main_thread().is_alive():
                return None
            self._living = [each for each in self._living if each.end is None]
            try:
                child = make(self._guard)
            except RuntimeError:
                # Since Python 3.12 an ending interpreter starts no thread; the guard
                # ends what the child has begun.
                if threading.main_thread().is_alive():
                    raise
                return None
            self._living.append(child)
        return child

    def close(self) -> None:
        """End all: asked to first, then made to. May be called twice."""
        if os.getpid() != self._pid:
            return  # a fork of the parent has no children
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for child in self._living:
            # One that is starting has nothing to end, and would not listen.
            child.ask_to_end() if child.is_ready(0) else child.kill()
        left = _still_there(self._living, _POLITE_SECONDS)
        for child in left:
            child.send(signal.SIGTERM)
        for child in _still_there(left, _TERMINATE_SECONDS):
            child.kill()
        for child in self._living:
            child.close()
        self._guard.close()

    def abandon(self) -> None:
        """Give up what a fork of this process has of them."""
        for child in self._living:
            child.abandon()
        self._guard.abandon()


def _still_there(
    children: Iterable[ChildProcess], seconds: float
) -> list[ChildProcess]:
    end = time.monotonic() + seconds
    return [c for c in children if not c.wait(max(0.0, end - time.monotonic()))]


_all: weakref.WeakSet[Children] = weakref.WeakSet()


def _abandon_all() -> None:
    for children in _all:
        children.abandon()


# Children would wait for the forks of their parent too, which have copies of sockets.
os.register_at_fork(after_in_child=_abandon_all)
