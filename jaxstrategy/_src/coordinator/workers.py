"""A thread for each worker, and what follows when functions or workers end."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import final

from jaxstrategy._src.coordinator.queue import Closure, ClosureQueue, WorkerSession
from jaxstrategy._src.coordinator.recovery import Incarnations, Recovery, RestartPolicy
from jaxstrategy._src.errors import ParameterServerLost, WorkerLost
from jaxstrategy._src.parameter_servers.protocol import AbstractWorkerBackend
from jaxstrategy._src.text import html
from jaxstrategy._src.text.shown import (
    with_seconds,
)

HEADER = ("worker", "state", "starts", "functions", "running", "last error")


class WorkerActivity(enum.Enum):
    """What a worker is doing.

    >>> import jaxstrategy as js
    >>> js.coordinator.WorkerActivity.IDLE.value
    'idle'
    """

    STARTING = "starting"
    """It is started for the first time."""
    IDLE = "idle"
    """It waits for a function."""
    RUNNING = "running"
    """It runs a function."""
    LOST = "lost"
    """It has ended, and is started again."""
    GIVEN_UP = "given up"
    """It was lost too often, and is not started any more."""
    CLOSED = "closed"
    """The coordinator is closed."""


@final
@dataclasses.dataclass(frozen=True)
class WorkerState:
    """What a worker is doing now.

    Attributes:
      index: of the worker.
      activity: whether it is there, and has something to do.
      incarnation: what it pushes counts only with this number, which grows when it is
        lost, and when it runs a function that was cancelled.
      starts: how often it was started.
      functions: how many it has finished.
      function: what it is running; None if nothing.
      seconds: for how long.
      error: the last one: why it was lost, or what a function raised there; "" of none.

    >>> import jaxstrategy as js
    >>> state = js.coordinator.WorkerState(index=0, function="step", seconds=2.0)
    >>> print(state)
    worker 0: starting, `step` for 2 s
    """

    index: int
    activity: WorkerActivity = WorkerActivity.STARTING
    incarnation: int = 0
    starts: int = 0
    functions: int = 0
    function: str | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def running(self) -> str:
        """The function that it is running, and for how long."""
        if self.function is None:
            return ""
        return f"{self.function} for {with_seconds(self.seconds)}"

    def row(self) -> list[str]:
        """Its row in a table with this `HEADER`."""
        numbers = (str(self.starts), str(self.functions))
        name = str(self.index)
        return [name, self.activity.value, *numbers, self.running, self._first_line()]

    def __str__(self) -> str:
        text = f"worker {self.index}: {self.activity.value}"
        if self.function is not None:
            text += f", `{self.function}` for {with_seconds(self.seconds)}"
        return f"{text}; last error: {self._first_line()}" if self.error else text

    def _first_line(self) -> str:
        return self.error.partition("\n")[0]


@final
class WorkerStates(tuple[WorkerState, ...]):
    """The states of all workers, in their order; in a notebook a table.

    >>> import jaxstrategy as js
    >>> print(js.coordinator.WorkerStates([js.coordinator.WorkerState(index=0)]))
    worker 0: starting
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        rows = [state.row() for state in self]
        return html.rows_of("Workers", HEADER, rows)


@final
class WorkerRecord:
    """What is known of a worker; its own thread writes, anyone reads."""

    def __init__(self) -> None:
        self.activity = WorkerActivity.STARTING
        self.starts = self.functions = 0
        self.running: tuple[str, float] | None = None
        self.error = ""

    def state(self, index: int, incarnation: int) -> WorkerState:
        """What it is doing now."""
        running = self.running
        function, began = running or (None, 0.0)
        return WorkerState(
            index=index,
            activity=self.activity if running is None else WorkerActivity.RUNNING,
            incarnation=incarnation,
            starts=self.starts,
            functions=self.functions,
            function=function,
            seconds=0.0 if running is None else time.monotonic() - began,
            error=self.error,
        )


@final
@dataclasses.dataclass(frozen=True)
class Durations:
    """Times in seconds.

    Attributes:
      count: how many there were.
      min: the shortest; 0.0 of none.
      max: the longest; 0.0 of none.
      sum: of all.

    >>> import jaxstrategy as js
    >>> js.coordinator.Durations(2, 0.5, 1.5, 2.0).mean
    1.0
    """

    count: int = 0
    min: float = 0.0
    max: float = 0.0
    sum: float = 0.0

    @property
    def mean(self) -> float:
        """The mean; 0.0 of none."""
        return self.sum / self.count if self.count else 0.0

    def __str__(self) -> str:
        if not self.count:
            return "0"
        return (
            f"{self.count} of {with_seconds(self.mean)} "
            f"({with_seconds(self.min)} to {with_seconds(self.max)})"
        )


@final
class Stopwatch:
    """Adds up durations, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._sum = 0, 0.0
        self._min, self._max = math.inf, 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        with self._lock:
            self._count += 1
            self._sum += seconds
            self._min = min(self._min, seconds)
            self._max = max(self._max, seconds)

    @property
    def durations(self) -> Durations:
        """Those up to now."""
        with self._lock:
            shortest = self._min if self._count else 0.0
            return Durations(self._count, shortest, self._max, self._sum)


@final
@dataclasses.dataclass(frozen=True)
class CoordinatorMetrics:
    """Counts and times of a coordinator, under TensorFlow's names.

    Attributes:
      function_tracing: how long functions were traced.
      closure_execution: how long scheduled functions took, from when a worker had them
        until it had sent their results.
      remote_value_fetch: how long it took until results were there, of those that were
        asked for; each counts once.
      queued_closures: how many functions wait for a worker.
      inflight_closures: how many run.

    >>> import jaxstrategy as js
    >>> times = js.coordinator.Durations
    >>> print(js.coordinator.CoordinatorMetrics(times(), times(2, 0.5, 1.5, 2.0)))
    function_tracing: 0
    closure_execution: 2 of 1 s (500 ms to 1.5 s)
    remote_value_fetch: 0
    queued_closures: 0
    inflight_closures: 0
    """

    function_tracing: Durations = Durations()
    closure_execution: Durations = Durations()
    remote_value_fetch: Durations = Durations()
    queued_closures: int = 0
    inflight_closures: int = 0

    def __str__(self) -> str:
        fields = (each.name for each in dataclasses.fields(self))
        return "\n".join(f"{name}: {getattr(self, name)}" for name in fields)


# A second coordinator of the same servers goes on from the numbers of the first.


# So many workers a function may end before it is taken for the reason.
_MOST_DEATHS = 3


@final
class Failures:
    """Tells the queue how closures have ended. Any number of threads call it."""

    def __init__(
        self,
        queue: ClosureQueue,
        incarnations: Incarnations,
        num_workers: int,
    ) -> None:
        self.incarnations = incarnations
        self._queue = queue
        self._left = set(range(num_workers))
        self.recovery: Recovery | None = None

    def succeeded(self, closure: Closure, results: object) -> None:
        """It has run."""
        if closure.is_of_one_worker:
            closure.succeed(results)
        else:
            self._queue.mark_finished(closure, results)

    def failed(self, worker: int, closure: Closure, error: BaseException) -> None:
        """It has raised this on a worker."""
        if isinstance(error, ParameterServerLost) and self._is_mended():
            self._queue.put_back(closure, _tag(closure, worker))
            return
        if isinstance(error, ParameterServerLost):
            self._queue.cancel(error, for_ever=True)
        if closure.is_of_one_worker:
            closure.fail(error)
            return
        if not self._queue.has_failed:
            self._queue.cancel(error)
            self._refuse_pushes(closure)
        self._queue.mark_failed(closure, error)

    def lost(
        self,
        worker: int,
        closure: Closure | None,
        lost: WorkerLost,
        is_excused: bool = False,
    ) -> bool:
        """A worker was lost, with what it was running; whether that is to blame."""
        # Before it is run again: what the lost worker has sent may arrive at any time.
        self._fence(worker)
        if closure is None:
            return False
        closure.deaths += not is_excused
        is_to_blame = closure.deaths >= _MOST_DEATHS
        if is_to_blame:
            error = RuntimeError(
                f"{closure.described()} was run {closure.deaths} times, and each time "
                "its worker was lost; it is not run again. Does it need more memory "
                f"than a worker has? The last time: {lost}"
            )
            error.__cause__ = lost
            self.failed(worker, closure, error)
        else:
            self._queue.put_back(closure, _tag(closure, worker))
        return is_to_blame

    def gave_up(self, worker: int, error: BaseException) -> None:
        """A worker is not started again; without any, nothing runs any more."""
        self._left.discard(worker)
        lasting = not self._left or isinstance(error, ParameterServerLost)
        self._queue.cancel(error, for_ever=lasting)
        self._queue.refuse(worker, error)

    def _refuse_pushes(self, failed: Closure) -> None:
        """What others run now is cancelled, so that it must not change variables."""
        for closure, worker in self._queue.running:
            if closure is not failed:
                self._fence(worker)

    def _is_mended(self) -> bool:
        """Whether servers that are lost are started again."""
        return self.recovery is not None and self.recovery.report()

    def _fence(self, worker: Hashable) -> None:
        try:
            assert isinstance(worker, int), "who runs closures asks by its index"
            self.incarnations.fence(worker)
        except ParameterServerLost as error:
            if self._is_mended():
                return  # it gives all workers new numbers
            self._queue.cancel(error, for_ever=True)


def _tag(closure: Closure, worker: int) -> int | None:
    return worker if closure.is_of_one_worker else None


THREAD_NAME = "jaxstrategy worker"
# A worker without work is asked so often whether it is there.
_IDLE_SECONDS = 0.5


@final
class WorkerThread:
    """Starts one worker, whenever it is lost, and lets it run one closure at a time."""

    def __init__(
        self,
        index: int,
        backend: AbstractWorkerBackend,
        queue: ClosureQueue,
        failures: Failures,
        executions: Stopwatch,
        deaths: RestartPolicy,
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
        self._life: WorkerSession | None = None
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
        self._life = WorkerSession(worker)
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

    def _run_closure(self, life: WorkerSession, closure: Closure) -> None:
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

    def _lost(self, closure: Closure | None, lost: WorkerLost) -> None:
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
