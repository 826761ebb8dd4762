"""Runs functions on the workers of a backend: `Scheduler`, a thread for each worker."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any, final

import numpy as np

from jaxstrategy._src.coordinator.recovery import RestartPolicy, ServerRecovery
from jaxstrategy._src.coordinator.workers import (
    Stopwatch,
    WorkerActivity,
    WorkerState,
    WorkerStates,
)
from jaxstrategy._src.errors import (
    CancelledError,
    ClosureAbortedError,
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
from jaxstrategy._src.parameter_servers.worker import (
    AbstractWorkerBackend,
    WorkerEngine,
    WorkerResource,
)
from jaxstrategy._src.scheduled.arguments import function_name
from jaxstrategy._src.scheduled.functions import Prepared
from jaxstrategy._src.scheduled.values import RemoteValue, sums_of
from jaxstrategy._src.text import Line, warn
from jaxstrategy._src.values.arrays import PyTree

STOPPED = "The coordinator is closed: it runs no functions any more. Make another one."
# TensorFlow's; a queue without a limit could fill the memory.
MOST_QUEUED = 256 * 1024
_POLL_SECONDS = 0.5
# So many workers a function may end before it is taken for the reason.
_MOST_DEATHS = 3
_AWAY = (WorkerActivity.LOST, WorkerActivity.GIVEN_UP)
_incarnations: weakref.WeakKeyDictionary[AbstractWorkerBackend, list[int]] = (
    weakref.WeakKeyDictionary()
)
# Of all coordinators of this process: a server takes a number it knows for a repeat.
_numbers = itertools.count()


@final
class Closure:
    """A scheduled function with its arguments: queued, running, or ended."""

    def __init__(
        self, fn: Any, prepared: Prepared, value: RemoteValue, until_end: bool
    ) -> None:
        self.name, self.prepared, self.value = function_name(fn), prepared, value
        self.until_end = until_end  # called for each element of its iterator
        self.number = -1  # what it pushes twice with it counts once
        self.call: CallNumber | None = None  # of its last run
        self.deaths = 0  # workers that were lost while they ran it
        self._fn = fn

    def __str__(self) -> str:
        """Its name and the line of the user's code that it is from."""
        code = getattr(inspect.unwrap(self._fn), "__code__", None)
        if code is None:
            return f"`{self.name}`"
        return f"`{self.name}` ({Line(code.co_filename, code.co_firstlineno)})"


@final
class Scheduler:
    """All closures under one lock, and what follows when one or a worker fails.

    A closure is open from `schedule` on until it ends. It is queued, or a worker runs
    it; it is queued again when the worker is lost.
    """

    def __init__(
        self,
        backend: AbstractWorkerBackend,
        max_restarts: int,
        recovery: ServerRecovery | None,
    ) -> None:
        self.backend, self.max_restarts = backend, max_restarts
        # The number each worker pushes with; servers refuse earlier ones.
        self.incarnations = _incarnations.setdefault(backend, [0] * backend.num_workers)
        self.executions, self.fetches = Stopwatch(), Stopwatch()
        self.is_stopped = False
        self._limit, self._patience = MOST_QUEUED, 10.0
        lock = self._lock = threading.Lock()
        self._work = threading.Condition(lock)  # to be had, or never again
        self._changed = threading.Condition(lock)  # what user's threads wait for
        # By their numbers. The first one is found at once, which it is not in a dict
        # that is often cut.
        self._open: OrderedDict[int, Closure] = OrderedDict()
        self._queued: deque[Closure] = deque()
        self._running: dict[Closure, int] = {}  # the workers
        self._error: BaseException | None = None  # to be raised once
        self._last_error: BaseException | None = None  # to be raised each time
        self._pauses: Counter[int] = Counter()  # by threads
        self._is_held = False  # servers are being started again
        self._fencing = threading.Lock()
        self._recovery = recovery
        self._kept: weakref.WeakSet[WorkerResource] = weakref.WeakSet()
        self._left = set(range(backend.num_workers))
        self._threads = [WorkerThread(index, self) for index in self._left]
        for thread in self._threads:
            thread.thread.start()
        if recovery is not None:
            recovery.start(self)

    @property
    def queued(self) -> int:
        """How many closures wait for a worker."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """How many closures run."""
        return len(self._running)

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be raised."""
        return self._error is not None or self._last_error is not None

    @property
    def finished(self) -> int:
        """How many functions have finished."""
        return sum(thread.functions for thread in self._threads)

    @property
    def states(self) -> WorkerStates:
        """What the workers are doing."""
        return WorkerStates(thread.state() for thread in self._threads)

    @property
    def is_in_thread(self) -> bool:
        """Whether the caller is the thread of a worker."""
        current = threading.current_thread()
        return any(each.thread is current for each in self._threads)

    # What the user's threads call.

    def raise_error(self) -> None:
        """Raise what is to be raised, once nothing runs any more."""
        self._tell()
        if self.has_failed or self.is_stopped:
            self.done()

    def schedule(
        self, fn: Any, prepared: Prepared, until_end: bool = False
    ) -> RemoteValue:
        """Queue a function; waits only while there are too many."""
        if self._recovery is not None:
            self._recovery.check(prepared.program.homes)
        for resource in prepared.resources:
            self._keep(resource)
        name = function_name(fn)
        value = RemoteValue(name, self.fetches.add, self._refuse_in_pause)
        closure = Closure(fn, prepared, value, until_end)
        with self._lock:
            self._raise_error()
            if len(self._queued) >= self._limit:
                self._refuse_in_pause()
                self._wait_for(
                    lambda: len(self._queued) < self._limit or self.has_failed
                )
                self._raise_error()
            self._begin(closure)
            self._queued.append(closure)
            self._work.notify()
        return value

    def copies(self, variable: WorkerResource) -> list[np.ndarray]:
        """What each worker's own variable holds, in their order; waits for them."""
        if self.is_stopped:
            raise RuntimeError(STOPPED)
        values = [thread.read(variable) for thread in self._threads]
        return [value.result() for value in values]

    def join(self, timeout: float | None = None) -> None:
        """Wait until all has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        last_seen, is_told = time.monotonic(), False
        while True:
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            is_done = self._wait(time.monotonic() + min(left, _POLL_SECONDS))
            self._tell()
            if is_done:
                return
            states = self.states
            if end is not None and time.monotonic() >= end:
                running = sum(state.function is not None for state in states)
                where = "".join(f"\n  {state}" for state in states)
                raise TimeoutError(
                    f"Functions have not ended after {timeout:g} seconds: {running} "
                    f"run, {self.queued} are queued.{where}"
                )
            if not all(state.activity in _AWAY for state in states):
                last_seen, is_told = time.monotonic(), False
            elif time.monotonic() - last_seen > self._patience and not is_told:
                is_told = True
                warn(
                    f"All {len(states)} workers are lost, so that no function runs. "
                    "They are started again, or waited for; `join` goes on when one is "
                    f"back. {states}",
                    RuntimeWarning,
                )

    def done(self) -> bool:
        """Whether all has ended."""
        self._tell()
        with self._lock:
            self._raise_error()
            return self._is_done()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a `with` block: nothing runs, and nothing is given out."""
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._pauses:
                self._wait_for(lambda: not self._is_held)
            self._refuse_if_stopped()
            self._pauses[thread] += 1
        try:
            with self._lock:
                self._wait_for(lambda: not self._running)
            yield
        finally:
            with self._lock:
                self._pauses[thread] -= 1
                self._pauses += Counter()  # forgets who has none
                self._wake()

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """A pause, for the variables of a checkpoint; also once this is stopped."""
        with contextlib.ExitStack() as pause:
            if not self.is_stopped:
                pause.enter_context(self.paused())
                if self._recovery is not None:
                    pause.enter_context(self._recovery.noted(step))
            yield

    def stop(self, seconds: float = 0.0) -> None:
        """End all workers and threads; waits for them no longer than this."""
        with self._lock:
            self.is_stopped = True
            self._cancel_queued()
        if self._recovery is not None:
            self._recovery.stop()
        for thread in self._threads:
            thread.stop()
        end = time.monotonic() + seconds
        for thread in (each.thread for each in self._threads):
            if thread is not threading.current_thread() and thread.ident:
                thread.join(max(0.0, end - time.monotonic()))

    def _tell(self) -> None:
        if self._recovery is not None:
            self._recovery.tell()

    def _keep(self, resource: WorkerResource) -> None:
        """Let the workers forget a resource when nobody refers to it any more."""
        if resource not in self._kept:
            self._kept.add(resource)
            for thread in self._threads:
                resource.when_gone(thread.gone.append)

    # What the recovery of servers calls.

    def hold(self) -> None:
        """Give out nothing until `held` has ended; does not wait."""
        with self._lock:
            self._is_held = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For a `with` block: nothing runs or is given out, and nobody has a pause."""
        self.hold()
        try:
            with self._lock:
                self._changed.wait_for(
                    lambda: self.is_stopped or not (self._running or self._pauses)
                )
            yield
        finally:
            with self._lock:
                self._is_held = False
                self._wake()

    def renew(self) -> None:
        """Start all workers again."""
        for thread in self._threads:
            thread.renew()

    def renumber(self) -> None:
        """What queued closures have pushed before was undone."""
        with self._lock:
            for closure in self._queued:
                if closure.call is not None:
                    del self._open[closure.number]
                    self._begin(closure)

    def fence(self, worker: int) -> None:
        """What a worker pushes with its present number does not count any more."""
        with self._fencing:
            self.incarnations[worker] += 1
            for server in self.backend.servers:
                server.fence(worker, self.incarnations[worker])

    def cancel(self, error: BaseException, for_ever: bool = False) -> None:
        """Keep an error, as if a closure had raised it."""
        with self._lock:
            self._cancel(error, for_ever)

    # What the workers' threads call.

    def get(self, worker: int, other: Collection[object] = ()) -> Closure | None:
        """The next closure; None if there is none soon, and once this is stopped.

        And None at once while the worker has something other to do.
        """

        def may_run() -> bool:
            return bool(self._queued) and not (self._pauses or self._is_held)

        with self._lock:
            self._work.wait_for(
                lambda: self.is_stopped or other or may_run(), _IDLE_SECONDS
            )
            if self.is_stopped or other or not may_run():
                return None
            if len(self._queued) >= self._limit:
                self._changed.notify_all()
            closure = self._queued.popleft()
            self._running[closure] = worker
            finished, incarnation = next(iter(self._open)), self.incarnations[worker]
            # If another closure fails from now on, this number is refused.
            closure.call = CallNumber(closure.number, finished, worker, incarnation)
            return closure

    def wake_workers(self) -> None:
        """Let all workers look what they have to do."""
        with self._lock:
            self._work.notify_all()

    def succeeded(self, closure: Closure, build: Callable[[], PyTree]) -> None:
        """It has run; if another one has failed meanwhile, it counts as cancelled."""
        with self._lock:
            self._end(closure, None if self.has_failed else build)

    def failed(self, closure: Closure, error: BaseException) -> None:
        """A closure has raised this on a worker; the first error of all is kept."""
        if isinstance(error, ParameterServerLost):
            if self._is_mended():
                self._put_back(closure)
                return
            self.cancel(error, for_ever=True)
        with self._lock:
            # What others run now is cancelled, so that it must not change variables.
            others = [] if self.has_failed else list(self._running.items())
            self._cancel(error)
        for other, worker in others:
            if other is not closure:
                self._fence(worker)
        with self._lock:
            closure.value.set_error(error)
            self._end(closure)

    def lost(
        self, worker: int, closure: Closure | None, lost: WorkerLost, is_excused: bool
    ) -> bool:
        """A worker was lost, with what it was running; whether that is to blame."""
        # Before it is run again: what the lost worker has sent may arrive at any time.
        self._fence(worker)
        if closure is None:
            return False
        closure.deaths += not is_excused
        if closure.deaths < _MOST_DEATHS:
            self._put_back(closure)
            return False
        error = RuntimeError(
            f"{closure} was run {closure.deaths} times, and each time "
            "its worker was lost; it is not run again. Does it need more memory "
            f"than a worker has? The last time: {lost}"
        )
        error.__cause__ = lost
        self.failed(closure, error)
        return True

    def gave_up(self, worker: int, error: BaseException) -> None:
        """A worker is not started again; without any, nothing runs any more."""
        self._left.discard(worker)
        lasting = not self._left or isinstance(error, ParameterServerLost)
        self.cancel(error, for_ever=lasting)

    def _is_mended(self) -> bool:
        """Whether servers that are lost are started again."""
        return self._recovery is not None and self._recovery.report()

    def _fence(self, worker: int) -> None:
        try:
            self.fence(worker)
        except ParameterServerLost as error:
            # If that is mended, all workers get new numbers.
            if not self._is_mended():
                self.cancel(error, for_ever=True)

    def _put_back(self, closure: Closure) -> None:
        """Queue a closure again, behind the others; whatever the limit is."""
        with self._lock:
            if self.has_failed or self.is_stopped:
                self._end(closure)
                return
            self._queued.append(closure)
            self._work.notify()
            self._leave_worker(closure)

    # With the lock.

    def _is_done(self) -> bool:
        return not (self._queued or self._running or self._is_held)

    def _begin(self, closure: Closure) -> None:
        closure.number = next(_numbers)
        self._open[closure.number] = closure

    def _end(self, closure: Closure, build: Callable[[], PyTree] | None = None) -> None:
        """It pushes nothing any more; without results or an error it is cancelled."""
        if build is not None:
            closure.value.set_results(build)
        else:
            closure.value.set_error(self._cancelled())
        del self._open[closure.number]
        self._leave_worker(closure)

    def _leave_worker(self, closure: Closure) -> None:
        del self._running[closure]
        is_awaited = not self._queued or self.has_failed
        if not self._running and (is_awaited or self._pauses or self._is_held):
            self._changed.notify_all()

    def _wait_for(self, claim: Callable[[], bool], end: float | None = None) -> bool:
        left = None if end is None else max(0.0, end - time.monotonic())
        self._changed.wait_for(lambda: self.is_stopped or claim(), left)
        self._refuse_if_stopped()
        return claim()

    def _wait(self, end: float) -> bool:
        """Wait until all is done; False if that takes longer."""
        with self._lock:
            if self._queued:
                self._refuse_in_pause()
            is_done = self._wait_for(
                lambda: not self._running if self.has_failed else self._is_done(), end
            )
            if is_done:
                self._raise_error()
            return is_done

    def _raise_error(self) -> None:
        """Raise what is to be raised, once nothing runs any more."""
        self._wait_for(lambda: not (self.has_failed and self._running))
        error, self._error = self._error or self._last_error, None
        if error is not None:
            raise error

    def _refuse_if_stopped(self) -> None:
        if self.is_stopped:
            raise RuntimeError(STOPPED)

    def _refuse_in_pause(self) -> None:
        if threading.get_ident() in self._pauses:
            raise RuntimeError(
                "In a block of `coordinator.paused()` something waits for functions, "
                "which begin after the block only. Wait before it, or behind it."
            )

    def _cancel(self, error: BaseException, for_ever: bool = False) -> None:
        if for_ever:
            self._last_error = self._last_error or error
        elif not self.has_failed:
            self._error = error
        self._cancel_queued()

    def _cancel_queued(self) -> None:
        error = self._cancelled()
        while self._queued:
            closure = self._queued.popleft()
            closure.value.set_error(error)
            del self._open[closure.number]
        self._wake()

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
        self._work.notify_all()
        self._changed.notify_all()


THREAD_NAME = "jaxstrategy worker"
# A worker without work is asked so often whether it is there.
_IDLE_SECONDS = 0.5


@final
class WorkerThread:
    """Starts one worker, whenever it is lost, and lets it run one closure at a time."""

    _worker: WorkerEngine  # its present life
    # What that knows: its programs, resources and those that could not be made.
    _programs: RecentlyUsed[bool]
    _built: set[int]
    _failed: dict[int, Exception]

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self.thread = threading.Thread(
            target=self._run, name=f"{THREAD_NAME} {index}", daemon=True
        )
        self.functions = 0  # that it has finished
        self.gone: deque[int] = deque()  # resources that nobody uses any more
        self._index = index
        self._scheduler = scheduler
        self._delay = _start_delay(index)
        self._deaths = RestartPolicy(scheduler.max_restarts)
        self._kill: Callable[[], None] | None = None  # ends the worker; None: it ended
        self._is_excused = False
        self._is_stopped = threading.Event()
        self._reads: deque[tuple[WorkerResource, Future[np.ndarray]]] = deque()
        self._refusal: BaseException | None = None
        self._activity = WorkerActivity.STARTING
        self._starts = 0
        self._running: tuple[str, float] | None = None
        self._error = ""

    def state(self) -> WorkerState:
        """What the worker is doing now."""
        running = self._running
        function, began = running or (None, 0.0)
        return WorkerState(
            index=self._index,
            activity=self._activity if running is None else WorkerActivity.RUNNING,
            incarnation=self._scheduler.incarnations[self._index],
            starts=self._starts,
            functions=self.functions,
            function=function,
            seconds=0.0 if running is None else time.monotonic() - began,
            error=self._error,
        )

    def read(self, variable: WorkerResource) -> Future[np.ndarray]:
        """What the worker's own variable will hold before its next function."""
        future: Future[np.ndarray] = Future()
        self._reads.append((variable, future))
        self._scheduler.wake_workers()
        if self._refusal is not None:
            self._end(self._refusal)
        return future

    def stop(self) -> None:
        """End the worker, whatever it is doing, and with it the thread, a bit later."""
        self._is_stopped.set()
        if (kill := self._kill) is not None:
            kill()

    def renew(self) -> None:
        """End the worker without blame; it is started again."""
        if (kill := self._kill) is not None:
            self._is_excused = True
            kill()

    def _run(self) -> None:
        pause = self._delay
        try:
            while not self._is_stopped.wait(pause):
                if self._start_worker():
                    while self._serve():
                        pass
                    del self._worker
                self._kill = None
                if self._activity is WorkerActivity.GIVEN_UP:
                    return
                pause = self._deaths.pause
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            self._give_up(error)
            raise
        self._activity = WorkerActivity.CLOSED
        self._end(CancelledError(STOPPED))

    def _start_worker(self) -> bool:
        """Whether the worker is there."""
        incarnation = self._scheduler.incarnations[self._index]
        try:
            worker = self._scheduler.backend.start(self._index, incarnation)
        except WorkerLost as lost:
            self._lost(None, lost)
            return False
        except BaseException as error:  # another try would not help
            error.add_note(f"Worker {self._index} could not be started.")
            self._give_up(error)
            return False
        self._kill = worker.kill
        if self._is_stopped.is_set():  # it was just too late for `stop`
            worker.kill()
            return False
        self._worker = worker
        self._programs, self._built, self._failed = RecentlyUsed(), set(), {}
        self._starts += 1
        self._activity = WorkerActivity.IDLE
        return True

    def _serve(self) -> bool:
        """Run one closure, if there is one soon; whether the worker is there after."""
        closure = self._scheduler.get(self._index, self._reads)
        if closure is None and self._is_stopped.is_set():
            return False
        try:
            if closure is not None:
                self._run_closure(closure)
            elif self._reads:
                self._read()
            else:
                # A worker that has nothing to do is asked, too: so its loss is noticed.
                self._release()
        except WorkerLost as lost:
            self._lost(closure, lost)
            return False
        finally:
            self._running = None
        return True

    def _run_closure(self, closure: Closure) -> None:
        self._running = closure.name, time.monotonic()
        began = time.perf_counter()
        try:
            if self.gone:
                self._release()
            build = self._results(closure)
        except WorkerLost:
            raise
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            self._scheduler.failed(closure, error)
        else:
            # Nobody is told before: who knows of the results may look at these.
            self._scheduler.executions.add(time.perf_counter() - began)
            self.functions += 1
            self._running = None
            self._scheduler.succeeded(closure, build)
        self._deaths.forget()

    def _results(self, closure: Closure) -> Callable[[], PyTree]:
        """Builds what a function returns, or the sums of it until its iterator ends."""
        if not closure.until_end:
            arrays = self._called(closure)
            return functools.partial(closure.prepared.rebuild, arrays)

        def results() -> Iterator[PyTree]:
            with contextlib.suppress(OutOfRangeError):
                while True:
                    program = closure.prepared.program
                    if program.pushes or program.own:
                        raise ValueError(
                            f"`{program.name}` is evaluated on each batch of a "
                            "dataset, and changes variables: what a shard is read for "
                            "again would count again. Return what is to be added up "
                            "instead."
                        )
                    arrays = self._called(closure)
                    # Not the arrays: a number of rows may be part of the program.
                    yield closure.prepared.rebuild(arrays)

        sums = sums_of(results())
        return lambda: sums

    def _called(self, closure: Closure) -> list[np.ndarray]:
        """The results of the program, or of another one for elements of other types."""
        while True:
            try:
                return self._call(closure.prepared, closure.call)
            except ElementChanged as changed:
                # The worker keeps the element, so here it has to run.
                again = changed
            closure.prepared = closure.prepared.traced_again(again)

    def _call(self, prepared: Prepared, number: CallNumber | None) -> list[np.ndarray]:
        for resource in prepared.resources:
            self._build(resource)
        program = prepared.program
        if not self._programs.get(program.key):
            self._worker.define(program)
            self._programs.put(program.key, True)
        arguments = prepared.arguments_of(self._index)
        call = Call(number, program.key, arguments, prepared.iterators)
        return prepared.taken(self._index, self._worker.call(call))

    def _build(self, resource: WorkerResource) -> None:
        """Make a resource, and what it uses, unless it is there."""
        if resource.number in self._built:
            return
        for each in resource.uses:
            self._build(each)
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

    def _release(self) -> None:
        """Let the worker forget resources that are gone; an error if it is lost."""
        numbers = [self.gone.popleft() for _ in range(len(self.gone))]
        self._worker.release([n for n in numbers if n in self._built])
        self._built.difference_update(numbers)
        for number in numbers:
            self._failed.pop(number, None)

    def _read(self) -> None:
        variable, future = self._reads[0]
        try:
            self._build(variable)
            future.set_result(self._worker.own(variable.number))
        except WorkerLost:
            raise  # it is read again, of the next one
        except BaseException as error:
            future.set_exception(error)
        self._reads.popleft()

    def _lost(self, closure: Closure | None, lost: WorkerLost) -> None:
        """Give back what it was running, and decide whether it is started again."""
        self._activity, self._error = WorkerActivity.LOST, str(lost)
        is_excused, self._is_excused = self._is_excused, False
        if not (self._is_stopped.is_set() or is_excused):
            self._deaths.add()
        if self._scheduler.lost(self._index, closure, lost, is_excused):
            self._deaths.forget()  # it is not the worker that is ill
        if self._deaths.are_too_many:
            error = RuntimeError(
                f"Worker {self._index} was lost {self._deaths}; it is not started "
                "again. Find out why in what it wrote, then close the coordinator and "
                f"make another one. The last time: {lost}"
            )
            error.__cause__ = lost
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        self._activity = WorkerActivity.GIVEN_UP
        self._error = str(error)
        self._scheduler.gave_up(self._index, error)
        self._end(ClosureAbortedError(error))

    def _end(self, error: BaseException) -> None:
        """Let what waits for the worker have an error, now and later."""
        self._refusal = error
        with contextlib.suppress(IndexError):
            while True:
                self._reads.popleft()[1].set_exception(error)


_DELAY = "TF_COORDINATOR_SCHEDULE_START_DELAY"


def _start_delay(index: int) -> float:
    """By how many seconds a worker starts later than the first, as in TensorFlow."""
    delay = index * float(os.environ.get(_DELAY) or 0)
    most = float(os.environ.get(f"{_DELAY}_MAX") or 0)
    return min(delay, most) if most else delay
