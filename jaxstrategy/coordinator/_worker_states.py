"""What the workers of a coordinator are doing: `WorkerState`, `WorkerStates`."""

from __future__ import annotations

import dataclasses
import enum
import time
from typing import final

from jaxstrategy.text import _html_report
from jaxstrategy.text._units import with_seconds

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
        return _html_report.rows_of("Workers", HEADER, rows)


@final
class WorkerRecord:
    """What is known of a worker; its own thread writes, anyone reads.

    Attributes:
      activity: what it does besides functions.
      starts: how often it was started.
      functions: how many it has finished.
      running: what it runs, and since when; None if nothing.
      error: the last one.
    """

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
