"""Runs functions on the workers of a backend: `Scheduler`, a thread for each worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, final

import numpy as np

from jaxstrategy._src.coordinator.queue import (
    STOPPED,
    Closure,
    ClosureQueue,
    FunctionNumbers,
    WorkerSession,
)
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
    ParameterServerLost,
    WorkerLost,
)
from jaxstrategy._src.parameter_servers.worker import (
    AbstractWorkerBackend,
    WorkerResource,
)
from jaxstrategy._src.scheduled.arguments import function_name
from jaxstrategy._src.scheduled.functions import Prepared
from jaxstrategy._src.scheduled.values import RemoteValue
from jaxstrategy._src.text import warn

_incarnations: weakref.WeakKeyDictionary[AbstractWorkerBackend, list[int]] = (
    weakref.WeakKeyDictionary()
)
_AWAY = (WorkerActivity.LOST, WorkerActivity.GIVEN_UP)
_POLL_SECONDS = 0.5
# So many workers a function may end before it is taken for the reason.
_MOST_DEATHS = 3


@final
class Scheduler:
    """A queue, a thread for each worker, and what follows when one of them fails."""

    def __init__(
        self,
        backend: AbstractWorkerBackend,
        max_restarts: int,
        recovery: ServerRecovery | None,
    ) -> None:
        self.backend = backend
        self.max_restarts = max_restarts
        self.queue = ClosureQueue()
        # The number each worker pushes with; servers refuse earlier ones.
        self.incarnations = _incarnations.setdefault(backend, [0] * backend.num_workers)
        self._fencing = threading.Lock()
        self.executions, self.fetches = Stopwatch(), Stopwatch()
        self._numbers = FunctionNumbers()
        self._recovery = recovery
        self._patience = 10.0
        self._kept: weakref.WeakSet[WorkerResource] = weakref.WeakSet()
        self._left = set(range(backend.num_workers))
        self._threads = [WorkerThread(index, self) for index in self._left]
        for thread in self._threads:
            thread.thread.start()
        if recovery is not None:
            recovery.start(self)

    # What the user's threads call.

    def raise_error(self) -> None:
        """Raise what is to be raised, once nothing runs any more."""
        self._tell()
        if self.queue.has_failed or self.queue.is_stopped:
            self.queue.done()

    def schedule(
        self, fn: Any, prepared: Prepared, until_end: bool = False
    ) -> RemoteValue:
        """Queue a function; waits only while there are too many."""
        if self._recovery is not None:
            self._recovery.check(prepared.program.homes)
        for resource in prepared.resources:
            self.keep(resource)
        value = RemoteValue(
            function_name(fn), self.fetches.add, self.queue.check_waiting
        )
        closure = Closure(fn, prepared, value, self._numbers, until_end)
        try:
            self.queue.put(closure)
        except BaseException:
            closure.leave()
            raise
        return value

    def copies(self, variable: WorkerResource) -> list[np.ndarray]:
        """What each worker's own variable holds, in their order; waits for them."""
        if self.queue.is_stopped:
            raise RuntimeError(STOPPED)
        values = [thread.read(variable) for thread in self._threads]
        return [value.result() for value in values]

    def keep(self, resource: WorkerResource) -> None:
        """Let the workers forget a resource when nobody refers to it any more."""
        if resource not in self._kept:
            self._kept.add(resource)
            for thread in self._threads:
                resource.when_gone(thread.gone.append)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        last_seen, is_told = time.monotonic(), False
        while True:
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            is_done = self.queue.wait(max(0.0, min(left, _POLL_SECONDS)))
            self._tell()
            if is_done:
                return
            states = self.states
            if end is not None and time.monotonic() >= end:
                running = sum(state.function is not None for state in states)
                where = "".join(f"\n  {state}" for state in states)
                raise TimeoutError(
                    f"Functions have not ended after {timeout:g} seconds: {running} "
                    f"run, {self.queue.queued} are queued.{where}"
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

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """A pause, for the variables of a checkpoint; also once this is stopped."""
        with contextlib.ExitStack() as pause:
            if not self.queue.is_stopped:
                pause.enter_context(self.queue.paused())
                if self._recovery is not None:
                    pause.enter_context(self._recovery.noted(step))
            yield

    def done(self) -> bool:
        """Whether all has ended."""
        self._tell()
        return self.queue.done()

    @property
    def states(self) -> WorkerStates:
        """What the workers are doing."""
        return WorkerStates(thread.state() for thread in self._threads)

    @property
    def is_in_thread(self) -> bool:
        """Whether the caller is the thread of a worker."""
        current = threading.current_thread()
        return any(each.thread is current for each in self._threads)

    def stop(self, seconds: float = 0.0) -> None:
        """End all workers and threads; waits for them no longer than this."""
        self.queue.stop()
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

    @property
    def finished(self) -> int:
        """How many functions have finished."""
        return sum(thread.functions for thread in self._threads)

    def renew(self) -> None:
        """Start all workers again."""
        for thread in self._threads:
            thread.renew()

    # What the workers' threads call.

    def failed(self, closure: Closure, error: BaseException) -> None:
        """A closure has raised this on a worker."""
        if isinstance(error, ParameterServerLost):
            if self._is_mended():
                self.queue.put_back(closure)
                return
            self.queue.cancel(error, for_ever=True)
        if not self.queue.has_failed:
            self.queue.cancel(error)
            # What others run now is cancelled, so that it must not change variables.
            for other, running in self.queue.running:
                if other is not closure:
                    self._fence(running)
        self.queue.mark_failed(closure, error)

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
            self.queue.put_back(closure)
            return False
        error = RuntimeError(
            f"{closure.described()} was run {closure.deaths} times, and each time "
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
        self.queue.cancel(error, for_ever=lasting)

    def _is_mended(self) -> bool:
        """Whether servers that are lost are started again."""
        return self._recovery is not None and self._recovery.report()

    def fence(self, worker: int) -> None:
        """What a worker pushes with its present number does not count any more."""
        with self._fencing:
            self.incarnations[worker] += 1
            for server in self.backend.servers:
                server.fence(worker, self.incarnations[worker])

    def _fence(self, worker: int) -> None:
        try:
            self.fence(worker)
        except ParameterServerLost as error:
            # If that is mended, all workers get new numbers.
            if not self._is_mended():
                self.queue.cancel(error, for_ever=True)


THREAD_NAME = "jaxstrategy worker"
# A worker without work is asked so often whether it is there.
_IDLE_SECONDS = 0.5


@final
class WorkerThread:
    """Starts one worker, whenever it is lost, and lets it run one closure at a time."""

    def __init__(self, index: int, scheduler: Scheduler) -> None:
        self.thread = threading.Thread(
            target=self._run, name=f"{THREAD_NAME} {index}", daemon=True
        )
        self.functions = 0  # that it has finished
        self.gone: deque[int] = deque()  # resources that nobody uses any more
        self._index = index
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._delay = _start_delay(index)
        self._deaths = RestartPolicy(scheduler.max_restarts)
        self._life: WorkerSession | None = None
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
        self._queue.wake()
        if self._refusal is not None:
            self._end(self._refusal)
        return future

    def stop(self) -> None:
        """End the worker, whatever it is doing, and with it the thread, a bit later."""
        self._is_stopped.set()
        life = self._life
        if life is not None:
            life.kill()

    def renew(self) -> None:
        """End the worker without blame; it is started again."""
        life = self._life
        if life is not None:
            self._is_excused = True
            life.kill()

    def _run(self) -> None:
        try:
            self._live()
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            self._give_up(error)
            raise

    def _live(self) -> None:
        pause = self._delay
        while not self._is_stopped.wait(pause):
            if self._start_worker():
                while self._serve():
                    pass
            self._life = None
            if self._activity is WorkerActivity.GIVEN_UP:
                return
            pause = self._deaths.pause
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
        self._life = WorkerSession(worker)
        if self._is_stopped.is_set():  # it was just too late for `stop`
            worker.kill()
            return False
        self._starts += 1
        self._activity = WorkerActivity.IDLE
        return True

    def _serve(self) -> bool:
        """Run one closure, if there is one soon; whether the worker is there after."""
        life = self._life
        assert life is not None, "it was started"
        closure = self._queue.get(self._index, _IDLE_SECONDS, self._reads)
        if closure is None and self._is_stopped.is_set():
            return False
        try:
            if closure is not None:
                self._run_closure(life, closure)
            elif self._reads:
                self._read(life)
            else:
                life.look_after(self.gone)
        except WorkerLost as lost:
            self._lost(closure, lost)
            return False
        finally:
            self._running = None
        return True

    def _run_closure(self, life: WorkerSession, closure: Closure) -> None:
        incarnation = self._scheduler.incarnations[self._index]
        # In this order: another function may fail at any moment, and then what counts
        # with this number is refused.
        if self._queue.has_failed:
            self._queue.put_back(closure)
            return
        self._running = closure.name, time.monotonic()
        began = time.perf_counter()
        try:
            if self.gone:
                life.look_after(self.gone)
            results = closure.run(life, self._index, incarnation)
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
            self._queue.mark_finished(closure, results)
        self._deaths.forget()

    def _read(self, life: WorkerSession) -> None:
        variable, future = self._reads[0]
        try:
            future.set_result(life.own(variable))
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
