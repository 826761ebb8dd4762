"""What workers are doing, counts and times of a coordinator, and a table of them."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import threading
import time
from typing import Any, TypeAlias, final

from jaxstrategy._src import text
from jaxstrategy._src.text import with_seconds

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
        return text.rows_of("Workers", HEADER, rows)


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
        self.durations = Durations()

    def add(self, seconds: float) -> None:
        """One more."""
        with self._lock:
            known = self.durations
            self.durations = Durations(
                known.count + 1,
                min(known.min, seconds) if known.count else seconds,
                max(known.max, seconds),
                known.sum + seconds,
            )


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


Console: TypeAlias = Any
"""A `rich.console.Console`; rich may be missing."""


@final
class LiveTable:
    """The states of the workers, drawn while a `with` block runs.

    Drawn by rich, in a terminal or a notebook; elsewhere, and without rich, nothing is
    drawn. Made by `ClusterCoordinator.progress`.
    """

    def __init__(
        self, scheduler: Any, description: str = "", console: Console = None
    ) -> None:
        self._scheduler, self._description = scheduler, description
        self._console = console
        self._live: Any = None
        self._began, self._before = 0.0, 0

    def __enter__(self) -> LiveTable:
        """Begin to draw."""
        self._began, self._before = time.monotonic(), self._scheduler.finished
        with contextlib.suppress(ImportError):
            self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the table as it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __str__(self) -> str:
        """How much is done, and how fast."""
        calls = self._scheduler
        done, seconds = calls.finished - self._before, time.monotonic() - self._began
        rate = f", {done / seconds:,.3g} functions/s" if self._began and seconds else ""
        text = f"{done} finished, {calls.queued} queued, {calls.running} running{rate}"
        return f"{self._description}: {text}" if self._description else text

    def _draw(self) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.live import Live

        console = self._console or Console(stderr=True, file=sys.stderr)
        if not (console.is_terminal or console.is_jupyter):
            return
        live = Live(get_renderable=self._table, console=console, refresh_per_second=4)
        with contextlib.suppress(LiveError):  # an older rich cannot draw two
            live.start(refresh=True)
            self._live = live

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(*HEADER, title=str(self), title_justify="left")
        for state in self._scheduler.states:
            table.add_row(*state.row())
        return table
