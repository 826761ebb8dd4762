"""The thread that gives functions to one worker: `WorkerThread`."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import final

from jaxstrategy._errors import WorkerLost
from jaxstrategy.coordinator._closure_queue import ClosureQueue
from jaxstrategy.coordinator._deaths import Deaths
from jaxstrategy.coordinator._durations import Stopwatch
from jaxstrategy.coordinator._failures import Failures
from jaxstrategy.coordinator._scheduled_closure import WorkerClosure
from jaxstrategy.coordinator._worker_life import WorkerLife
from jaxstrategy.coordinator._worker_states import WorkerActivity, WorkerRecord
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend

THREAD_NAME = "jaxstrategy worker"
# A worker without work is asked so often whether it is there.
_IDLE_SECONDS = 0.5


@final
class WorkerThread:
    """Starts one worker, whenever it is lost, and lets it run one closure at a time.

    Args:
      index: of the worker.
      backend: starts it.
      queue: has the closures; those with the worker's index as their tag are its own.
      failures: knows what to do with closures that have ended.
      executions: is told how long each closure took.
      deaths: says whether the worker is started again.
      delay: so many seconds before it begins.

    Attributes:
      record: what it is doing.
    """

    def __init__(
        self,
        index: int,
        backend: AbstractWorkerBackend,
        queue: ClosureQueue[WorkerClosure],
        failures: Failures,
        executions: Stopwatch,
        deaths: Deaths,
        delay: float = 0.0,
    ) -> None:
        self.record = WorkerRecord()
        self._index = index
        self._backend = backend
        self._queue = queue
        self._failures = failures
        self._executions = executions
        self._deaths = deaths
        self._delay = delay
        self._life: WorkerLife | None = None
        self._gone: deque[int] = deque()
        self._is_excused = False
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_NAME} {index}", daemon=True
        )

    def start(self) -> None:
        """Start the worker; does not wait for it."""
        self._thread.start()

    def stop(self) -> None:
        """End the worker, whatever it is doing, and with it the thread, a bit later.

        The queue must have been stopped.
        """
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

    def join(self, timeout: float) -> None:
        """Wait until it has ended, but no longer than so many seconds."""
        if self._thread is not threading.current_thread() and self._thread.ident:
            self._thread.join(timeout)

    def forget(self, resource: int) -> None:
        """Nobody uses a resource any more; may be called at any moment."""
        self._gone.append(resource)

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        try:
            self._live()
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            self._give_up(error)
            raise

    def _live(self) -> None:
        pause = self._delay
        while not self._is_stopped.wait(pause):
            if self._start():
                while self._serve():
                    pass
            self._life = None
            if self.record.activity is WorkerActivity.GIVEN_UP:
                return
            pause = self._deaths.pause
        self.record.activity = WorkerActivity.CLOSED

    def _start(self) -> bool:
        """Whether the worker is there."""
        incarnation = self._failures.incarnations[self._index]
        try:
            worker = self._backend.start(self._index, incarnation)
        except WorkerLost as lost:
            self._lost(None, lost)
            return False
        except BaseException as error:  # another try would not help
            error.add_note(f"Worker {self._index} could not be started.")
            self._give_up(error)
            return False
        self._life = WorkerLife(worker)
        if self._is_stopped.is_set():  # it was just too late for `stop`
            worker.kill()
            return False
        self.record.starts += 1
        self.record.activity = WorkerActivity.IDLE
        return True

    def _serve(self) -> bool:
        """Run one closure, if there is one soon; whether the worker is there after."""
        life = self._life
        assert life is not None, "it was started"
        closure = self._queue.get(self._index, _IDLE_SECONDS)
        if closure is None and self._is_stopped.is_set():
            return False
        try:
            if closure is None:
                life.look_after(self._gone)
            else:
                self._run_closure(life, closure)
        except WorkerLost as lost:
            self._lost(closure, lost)
            return False
        finally:
            self.record.running = None
        return True

    def _run_closure(self, life: WorkerLife, closure: WorkerClosure) -> None:
        incarnation = self._failures.incarnations[self._index]
        # In this order: another function may fail at any moment, and then what counts
        # with this number is refused.
        if self._queue.has_failed and not closure.is_of_one_worker:
            self._queue.put_back(closure)
            return
        self.record.running = closure.name, time.monotonic()
        began = time.perf_counter()
        try:
            if self._gone:
                life.look_after(self._gone)
            results = closure.run(life, self._index, incarnation)
        except WorkerLost:
            raise
        except BaseException as error:
            self.record.error = f"{type(error).__name__}: {error}"
            self._failures.failed(self._index, closure, error)
        else:
            if not closure.is_of_one_worker:
                self._executions.add(time.perf_counter() - began)
                self.record.functions += 1
            # Nobody is told before: who knows of the results may look at these.
            self.record.running = None
            self._failures.succeeded(closure, results)
        self._deaths.forget()

    def _lost(self, closure: WorkerClosure | None, lost: WorkerLost) -> None:
        """Give back what it was running, and decide whether it is started again."""
        self.record.activity, self.record.error = WorkerActivity.LOST, str(lost)
        is_excused, self._is_excused = self._is_excused, False
        if not (self._is_stopped.is_set() or is_excused):
            self._deaths.add()
        if self._failures.lost(self._index, closure, lost, is_excused):
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
        self.record.activity = WorkerActivity.GIVEN_UP
        self.record.error = str(error)
        self._failures.gave_up(self._index, error)
