"""The queue of a coordinator, and what waits in it."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, final

import numpy as np

from jaxstrategy._src.errors import (
    CancelledError,
    ClosureInputError,
    OutOfRangeError,
    ParameterServerLost,
    WorkerLost,
)
from jaxstrategy._src.parameter_servers.protocol import (
    Call,
    CallNumber,
    ElementChanged,
    RecentlyUsed,
)
from jaxstrategy._src.parameter_servers.worker import WorkerEngine, WorkerResource
from jaxstrategy._src.scheduled.arguments import function_name
from jaxstrategy._src.scheduled.functions import Prepared
from jaxstrategy._src.scheduled.values import RemoteValue, sums_of
from jaxstrategy._src.text import Line
from jaxstrategy._src.values.arrays import PyTree

# TensorFlow's; a closure of a queue without a limit could fill the memory.
MOST_QUEUED = 256 * 1024


@final
class ClosureQueue:
    """Closures in the order in which they came, for any number of threads."""

    def __init__(self, limit: int = MOST_QUEUED) -> None:
        self._limit = limit
        self._queued: collections.deque[Closure] = collections.deque()
        self._running: dict[int, tuple[Closure, int]] = {}
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
        """How many closures wait for a worker."""
        return len(self._queued)

    @property
    def running(self) -> tuple[tuple[Closure, int], ...]:
        """Closures that were got and have not ended, with the worker of each."""
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

    def put(self, closure: Closure) -> None:
        """Queue a closure."""
        with self._lock:
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
        """Wait until all is done; False if that took longer than `timeout` seconds."""
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
        """Whether nothing is queued and nothing runs."""
        with self._lock:
            self._raise_error()
            return self._is_done()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a `with` block: nothing runs, and nothing is given out."""
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
        """Give out nothing until `resume`; does not wait."""
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

    def each_queued(self, tell: Callable[[Closure], object]) -> None:
        """Call a function with each closure that waits."""
        with self._lock:
            for closure in self._queued:
                tell(closure)

    def check_waiting(self) -> None:
        """Raise where waiting for a closure would last for ever."""
        with self._lock:
            self._refuse_in_pause()

    # What the workers' threads call.

    def get(
        self, worker: int, timeout: float, other: Collection[object] = ()
    ) -> Closure | None:
        """The next closure; None after `timeout` seconds, and once this is stopped.

        And None at once while the worker has something other to do.
        """
        end = time.monotonic() + timeout
        with self._lock:
            while not (self._is_stopped or other):
                if self._queued and not (self._pauses or self._is_held):
                    closure = self._queued.popleft()
                    self._running[id(closure)] = closure, worker
                    self._room.notify()
                    return closure
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._work.wait(left)
            return None

    def wake(self) -> None:
        """Let all workers look what they have to do."""
        with self._lock:
            self._work.notify_all()

    def put_back(self, closure: Closure) -> None:
        """Queue a closure again, behind the others; whatever the limit is."""
        with self._lock:
            if self.has_failed or self._is_stopped:
                closure.fail(self._cancelled())
            else:
                self._queued.append(closure)
                self._work.notify()
            self._end(closure)

    def mark_finished(self, closure: Closure, results: object = None) -> None:
        """It has run; if another one has failed meanwhile, it counts as cancelled."""
        with self._lock:
            if self.has_failed:
                closure.fail(self._cancelled())
            else:
                closure.succeed(results)
            self._end(closure)

    def mark_failed(self, closure: Closure, error: BaseException) -> None:
        """It has raised; the first error of all is kept."""
        with self._lock:
            closure.fail(error)
            self._cancel(error)
            self._end(closure)

    def cancel(self, error: BaseException, for_ever: bool = False) -> None:
        """Keep an error, as if a closure had raised it."""
        with self._lock:
            if for_ever and self._last_error is None:
                self._last_error = error
            self._cancel(error, for_ever)

    def stop(self) -> None:
        """Cancel what is queued; nobody gets anything any more."""
        with self._lock:
            self._is_stopped = True
            self._drop_queued()
            self._wake()

    def _end(self, closure: Closure) -> None:
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
        """Raise an error once nothing runs any more; False if that is too late."""
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
            raise RuntimeError(STOPPED)

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
        self._wake()

    def _drop_queued(self) -> None:
        error = self._cancelled()
        while self._queued:
            self._queued.popleft().fail(error)

    def _cancelled(self) -> CancelledError:
        cause = self._error or self._last_error
        if cause is None:
            return CancelledError(STOPPED)
        error = CancelledError(
            "The function was cancelled, because another one had failed: "
            f"{type(cause).__name__}: {cause}. Schedule it again."
        )
        error.__cause__ = cause
        return error

    def _wake(self) -> None:
        for condition in (self._work, self._room, self._ended):
            condition.notify_all()


STOPPED = "The coordinator is closed: it runs no functions any more. Make another one."


# Of all coordinators of this process: a server takes a number it knows for a repeat.
_numbers = itertools.count()


@final
class FunctionNumbers:
    """Numbers for the functions of one coordinator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The first one is found at once, which it is not in a dict that is often cut.
        self._open: OrderedDict[int, None] = OrderedDict()
        self._next = 0

    def begin(self) -> int:
        """The number of a new function."""
        with self._lock:
            number = next(_numbers)
            self._open[number] = None
            self._next = number + 1
        return number

    def end(self, number: int) -> None:
        """It pushes nothing any more."""
        with self._lock:
            self._open.pop(number, None)

    @property
    def finished(self) -> int:
        """All functions before this number have ended."""
        with self._lock:
            return next(iter(self._open), self._next)


@final
class WorkerSession:
    """Gives a worker what it needs before each function; `kill` is thread-safe."""

    def __init__(self, worker: WorkerEngine) -> None:
        self._worker = worker
        self._programs: RecentlyUsed[bool] = RecentlyUsed()
        self._built: set[int] = set()
        self._failed: dict[int, Exception] = {}

    def call(self, prepared: Prepared, number: CallNumber) -> list[np.ndarray]:
        """The program's results."""
        for resource in prepared.resources:
            self.build(resource)
        program = prepared.program
        if not self._programs.get(program.key):
            self._worker.define(program)
            self._programs.put(program.key, True)
        arguments = prepared.arguments_of(number.worker)
        call = Call(number, program.key, arguments, prepared.iterators)
        return prepared.taken(number.worker, self._worker.call(call))

    def own(self, variable: WorkerResource) -> np.ndarray:
        """What a variable of the worker's own holds."""
        self.build(variable)
        return self._worker.own(variable.number)

    def build(self, resource: WorkerResource) -> None:
        """Make a resource, and what it uses, if it is not there."""
        if resource.number not in self._built:
            for each in resource.in_order():
                if each.number not in self._built:
                    self._build(each)

    def look_after(self, gone: deque[int]) -> None:
        """Forget these resources; an error if the worker is lost."""
        numbers = [gone.popleft() for _ in range(len(gone))]
        # A worker that has nothing to do is asked, too: it notices that it is lost.
        self._worker.release([n for n in numbers if n in self._built])
        self._built.difference_update(numbers)
        for number in numbers:
            self._failed.pop(number, None)

    def kill(self) -> None:
        """End the worker now; callable from any thread."""
        self._worker.kill()

    def _build(self, resource: WorkerResource) -> None:
        number = resource.number
        if number not in self._failed:
            try:
                uses = [each.number for each in resource.uses]
                self._worker.build(number, resource.builder, uses)
                self._built.add(number)
                return
            except (WorkerLost, ParameterServerLost):
                raise
            except Exception as error:
                self._failed[number] = error
        error = self._failed[number]
        raise ClosureInputError(error) from error


@final
class Closure:
    """A scheduled function with its arguments.

    The queue calls `succeed` and `fail` while it holds its lock: they must not wait.
    """

    def __init__(
        self,
        fn: Any,
        prepared: Prepared,
        value: RemoteValue,
        numbers: FunctionNumbers,
        until_end: bool = False,
    ) -> None:
        self.name, self.value = function_name(fn), value
        self.deaths = 0  # workers that were lost while they ran it
        self._number = numbers.begin()
        self._has_run = False
        self._fn = fn
        self._prepared = prepared
        self._numbers = numbers
        self._until_end = until_end

    def described(self) -> str:
        """Its name and the line of the user's code that it is from."""
        code = getattr(inspect.unwrap(self._fn), "__code__", None)
        if code is None:
            return f"`{self.name}`"
        return f"`{self.name}` ({Line(code.co_filename, code.co_firstlineno)})"

    def run(self, life: WorkerSession, worker: int, incarnation: int) -> Any:
        """Its arrays; or the sums of what it returns until its iterator ends."""
        self._has_run = True
        number = CallNumber(self._number, self._numbers.finished, worker, incarnation)
        if not self._until_end:
            return self._called(life, number)

        def results() -> Iterator[PyTree]:
            with contextlib.suppress(OutOfRangeError):
                while True:
                    program = self._prepared.program
                    if program.pushes or program.own:
                        raise ValueError(
                            f"`{program.name}` is evaluated on each batch of a "
                            "dataset, and changes variables: what a shard is read for "
                            "again would count again. Return what is to be added up "
                            "instead."
                        )
                    arrays = self._called(life, number)
                    # Not the arrays: a number of rows may be part of the program.
                    yield self._prepared.rebuild(arrays)

        return sums_of(results())

    def _called(self, life: WorkerSession, number: CallNumber) -> list[np.ndarray]:
        while True:
            try:
                return life.call(self._prepared, number)
            except ElementChanged as changed:
                # The worker keeps the element, so here it has to run.
                again = changed
            self._prepared = self._prepared.traced_again(again)

    def renumber(self) -> None:
        """What it has pushed before was undone."""
        if self._has_run:
            self.leave()
            self._number = self._numbers.begin()

    def leave(self) -> None:
        """It pushes nothing any more."""
        self._numbers.end(self._number)

    def succeed(self, results: Any) -> None:
        """It has returned these arrays; or they are its sums already."""
        build = functools.partial(self._prepared.rebuild, results)
        self.value.set_results((lambda: results) if self._until_end else build)
        self.leave()

    def fail(self, error: BaseException) -> None:
        """It has raised this, or can have no results because of this."""
        self.value.set_error(error)
        self.leave()
