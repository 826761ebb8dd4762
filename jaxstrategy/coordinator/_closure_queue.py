"""The functions that wait for a worker, and those that run: `ClosureQueue`.

It knows neither workers nor programs, so that it is tested alone.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar, final

from jaxstrategy._errors import CancelledError, ClosureAbortedError

# TensorFlow's; a closure of a queue without a limit could fill the memory.
MOST_QUEUED = 256 * 1024


class AbstractClosure(abc.ABC):
    """A scheduled function with its arguments, which ends in one of three ways.

    The queue calls these while it holds its lock: they must not wait.
    """

    @abc.abstractmethod
    def succeed(self, results: object) -> None:
        """It has run, with these results."""

    @abc.abstractmethod
    def fail(self, error: BaseException) -> None:
        """It has raised this, or can have no results because of this."""


_Closure = TypeVar("_Closure", bound=AbstractClosure)


@final
class ClosureQueue(Generic[_Closure]):
    """Closures in the order in which they came, for any number of threads.

    The first error of a closure cancels what is queued and what runs. `put`, `wait` and
    `done` then block until nothing runs any more; one of them raises the error, and
    with that it is gone. A closure with a tag is only for who asks for that tag; it is
    not waited for, and its errors are its own.

    Args:
      limit: how many closures without a tag are queued at most; `put` waits for room.
    """

    def __init__(self, limit: int = MOST_QUEUED) -> None:
        self._limit = limit
        self._queued: collections.deque[_Closure] = collections.deque()
        self._tagged: dict[Hashable, collections.deque[_Closure]] = {}
        self._refused: dict[Hashable, BaseException] = {}
        self._running: dict[int, tuple[_Closure, Hashable | None]] = {}
        self._error: BaseException | None = None
        self._last_error: BaseException | None = None
        self._is_stopped = False
        self._pauses: collections.Counter[int] = collections.Counter()  # by threads
        self._is_held = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # to be had, or never again
        self._room = threading.Condition(lock)  # in the queue, or an error
        self._ended = threading.Condition(lock)  # all that runs, or all there is
        self._lock = lock

    @property
    def queued(self) -> int:
        """How many closures without a tag wait for a worker."""
        return len(self._queued)

    @property
    def running(self) -> tuple[tuple[_Closure, Hashable | None], ...]:
        """Closures that were got and have not ended, with the tag of who got them."""
        with self._lock:
            return tuple(self._running.values())

    @property
    def is_stopped(self) -> bool:
        """Whether nobody gets anything any more."""
        return self._is_stopped

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be raised."""
        return self._error is not None or self._last_error is not None

    # What the user's threads call.

    def put(self, closure: _Closure, tag: Hashable | None = None) -> None:
        """Queue a closure; with a tag for nobody else.

        Raises:
          BaseException: an error of an earlier closure; this one is not queued.
        """
        with self._lock:
            if tag is not None:
                self._refuse_if_stopped()
                self._put_tagged(closure, tag)
                return
            self._raise_error()
            if len(self._queued) >= self._limit:
                self._refuse_in_pause()
            while len(self._queued) >= self._limit and not self.has_failed:
                self._room.wait()
                self._refuse_if_stopped()
            self._raise_error()
            self._queued.append(closure)
            self._work.notify()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is done; False if that took longer than `timeout` seconds.

        Raises:
          BaseException: the first error of a closure.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._queued:
                self._refuse_in_pause()
            while self._wait_for(lambda: self.has_failed or self._is_done(), end):
                if not self.has_failed:
                    return True
                if not self._raise_error(end):
                    return False
            return False

    def done(self) -> bool:
        """Whether nothing is queued and nothing runs.

        Raises:
          BaseException: the first error of a closure.
        """
        with self._lock:
            self._raise_error()
            return self._is_done()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a `with` block: nothing runs, and nothing without a tag is given out."""
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._pauses:
                self._ended.wait_for(lambda: self._is_stopped or not self._is_held)
            self._refuse_if_stopped()
            self._pauses[thread] += 1
        try:
            with self._lock:
                self._ended.wait_for(lambda: self._is_stopped or not self._running)
                self._refuse_if_stopped()
            yield
        finally:
            with self._lock:
                self._pauses[thread] -= 1
                self._pauses += collections.Counter()  # forgets who has none
                self._work.notify_all()
                self._ended.notify_all()

    def hold(self) -> None:
        """Give out nothing without a tag, until `resume`; does not wait."""
        with self._lock:
            self._is_held = True

    def wait_alone(self) -> None:
        """Wait until nothing runs and nobody else has a pause; after `hold`."""
        with self._lock:
            self._ended.wait_for(
                lambda: self._is_stopped or not (self._running or self._pauses)
            )

    def resume(self) -> None:
        """Go on after `hold`."""
        with self._lock:
            self._is_held = False
            self._wake()

    def each_queued(self, tell: Callable[[_Closure], object]) -> None:
        """Call a function with each closure that waits without a tag."""
        with self._lock:
            for closure in self._queued:
                tell(closure)

    def check_waiting(self) -> None:
        """Raise where waiting for a closure would last for ever.

        Raises:
          RuntimeError: the caller has paused the queue.
        """
        with self._lock:
            self._refuse_in_pause()

    # What the workers' threads call.

    def get(
        self, tag: Hashable | None = None, timeout: float | None = None
    ) -> _Closure | None:
        """The next closure; None after `timeout` seconds, and once this is stopped.

        Args:
          tag: those with this tag come first.
          timeout: in seconds; None: wait for ever.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._is_stopped:
                if tag is not None and self._tagged.get(tag):
                    return self._tagged[tag].popleft()
                if self._queued and not (self._pauses or self._is_held):
                    return self._start(self._queued.popleft(), tag)
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._work.wait(left)
            return None

    def put_back(self, closure: _Closure, tag: Hashable | None = None) -> None:
        """Queue a closure again, behind the others; whatever the limit is."""
        with self._lock:
            if tag is not None:
                self._put_tagged(closure, tag)
                return
            if self.has_failed or self._is_stopped:
                closure.fail(self._cancelled())
            else:
                self._queued.append(closure)
                self._work.notify()
            self._end(closure)

    def mark_finished(self, closure: _Closure, results: object = None) -> None:
        """It has run; if another one has failed meanwhile, it counts as cancelled."""
        with self._lock:
            if self.has_failed:
                closure.fail(self._cancelled())
            else:
                closure.succeed(results)
            self._end(closure)

    def mark_failed(self, closure: _Closure, error: BaseException) -> None:
        """It has raised; the first error of all is kept."""
        with self._lock:
            closure.fail(error)
            self._cancel(error)
            self._end(closure)

    def cancel(self, error: BaseException, for_ever: bool = False) -> None:
        """Keep an error, as if a closure had raised it.

        Args:
          error: the first one counts.
          for_ever: `put`, `wait` and `done` raise it each time.
        """
        with self._lock:
            if for_ever and self._last_error is None:
                self._last_error = error
            self._cancel(error, for_ever)

    def refuse(self, tag: Hashable, error: BaseException) -> None:
        """There is nobody any more who asks for a tag: its closures have this error."""
        with self._lock:
            self._refused[tag] = error
            for closure in self._tagged.pop(tag, ()):
                closure.fail(ClosureAbortedError(error))

    def stop(self) -> None:
        """Cancel what is queued; nobody gets anything any more."""
        with self._lock:
            self._is_stopped = True
            self._drop_queued()
            self._drop_tagged(CancelledError(_STOPPED))
            self._wake()

    def _put_tagged(self, closure: _Closure, tag: Hashable) -> None:
        error = self._last_error or self._refused.get(tag)
        if self._is_stopped:
            closure.fail(CancelledError(_STOPPED))
            return
        if error is not None:
            closure.fail(ClosureAbortedError(error))
            return
        self._tagged.setdefault(tag, collections.deque()).append(closure)
        self._work.notify_all()

    def _start(self, closure: _Closure, tag: Hashable | None) -> _Closure:
        self._running[id(closure)] = closure, tag
        self._room.notify()
        return closure

    def _end(self, closure: _Closure) -> None:
        del self._running[id(closure)]
        is_awaited = not self._queued or self.has_failed
        if not self._running and (is_awaited or self._pauses or self._is_held):
            self._ended.notify_all()

    def _is_done(self) -> bool:
        return not (self._queued or self._running or self._is_held)

    def _wait_for(self, claim: Callable[[], bool], end: float | None) -> bool:
        left = None if end is None else max(0.0, end - time.monotonic())
        self._ended.wait_for(lambda: self._is_stopped or claim(), left)
        self._refuse_if_stopped()
        return claim()

    def _raise_error(self, end: float | None = None) -> bool:
        """Raise what is to be raised once nothing runs; False if that comes too late.

        Of several threads that wait here one raises; to the others nothing happened.
        """
        self._refuse_if_stopped()
        while self.has_failed and self._running:
            if not self._wait_for(lambda: not self._running, end):
                return False
        error, self._error = self._error or self._last_error, None
        if error is not None:
            raise error
        return True

    def _refuse_if_stopped(self) -> None:
        if self._is_stopped:
            raise RuntimeError(_STOPPED)

    def _refuse_in_pause(self) -> None:
        if threading.get_ident() in self._pauses:
            raise RuntimeError(
                "In a block of `coordinator.paused()` something waits for functions, "
                "which begin after the block only. Wait before it, or behind it."
            )

    def _cancel(self, error: BaseException, for_ever: bool = False) -> None:
        if not for_ever and not self.has_failed:
            self._error = error
        self._drop_queued()
        if for_ever:
            self._drop_tagged(ClosureAbortedError(error))
        self._wake()

    def _drop_queued(self) -> None:
        error = self._cancelled()
        while self._queued:
            self._queued.popleft().fail(error)

    def _drop_tagged(self, error: BaseException) -> None:
        for closures in self._tagged.values():
            while closures:
                closures.popleft().fail(error)

    def _cancelled(self) -> CancelledError:
        cause = self._error or self._last_error
        if cause is None:
            return CancelledError(_STOPPED)
        error = CancelledError(
            "The function was cancelled, because another one had failed: "
            f"{type(cause).__name__}: {cause}. Schedule it again."
        )
        error.__cause__ = cause
        return error

    def _wake(self) -> None:
        for condition in (self._work, self._room, self._ended):
            condition.notify_all()


_STOPPED = "The coordinator is closed: it runs no functions any more. Make another one."
