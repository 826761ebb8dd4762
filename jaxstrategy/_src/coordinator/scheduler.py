"""Runs functions on the workers of a backend: `Scheduler`."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeAlias, final

import numpy as np

from jaxstrategy._src.coordinator.queue import (
    MOST_QUEUED,
    ClosureQueue,
    FunctionNumbers,
    ScheduledClosure,
    WorkerSession,
    WorkerTask,
    function_name,
)
from jaxstrategy._src.coordinator.recovery import (
    Incarnations,
    Recovery,
    RestartPolicy,
    ServerRestarts,
)
from jaxstrategy._src.coordinator.values import RemoteValue
from jaxstrategy._src.coordinator.workers import (
    HEADER,
    Failures,
    Stopwatch,
    WorkerActivity,
    WorkerStates,
    WorkerThread,
)
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.parameter_servers.protocol import AbstractWorkerBackend
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.scheduled.functions import Prepared
from jaxstrategy._src.text.user_code import warn
from jaxstrategy._src.values.arrays import PyTree

_DELAY = "TF_COORDINATOR_SCHEDULE_START_DELAY"
_AWAY = (WorkerActivity.LOST, WorkerActivity.GIVEN_UP)
_POLL_SECONDS = 0.5


@final
class Scheduler:
    """A queue, and a thread for each worker."""

    def __init__(
        self,
        backend: AbstractWorkerBackend,
        max_restarts: int = 3,
        limit: int = MOST_QUEUED,
        patience: float = 10.0,
    ) -> None:
        self.executions, self.fetches = Stopwatch(), Stopwatch()
        self._queue: ClosureQueue = ClosureQueue(limit)
        self._numbers = FunctionNumbers()
        self._incarnations = Incarnations(backend)
        self.max_restarts = max_restarts
        self._patience = patience
        self._kept: weakref.WeakSet[WorkerResource] = weakref.WeakSet()
        self._recovery: Recovery | None = None
        self._failures = failures = Failures(
            self._queue, self._incarnations, backend.num_workers
        )
        self._threads = [
            WorkerThread(
                index,
                backend,
                self._queue,
                failures,
                self.executions,
                RestartPolicy(max_restarts),
                _start_delay(index),
            )
            for index in range(backend.num_workers)
        ]

    def start(self) -> None:
        """Start the workers; does not wait for them."""
        for thread in self._threads:
            thread.start()

    def recover(self, restarts: ServerRestarts) -> None:
        """Have lost servers started again from now on."""
        self._recovery = self._failures.recovery = Recovery(
            restarts, self._queue, self._incarnations, self._finished, self._renew
        )
        self._recovery.start()

    def raise_error(self) -> None:
        """Raise what is to be raised, once nothing runs any more."""
        self._tell()
        if self._queue.has_failed or self._queue.is_stopped:
            self._queue.done()

    def schedule(
        self, fn: Any, prepared: Prepared, until_end: bool = False
    ) -> RemoteValue:
        """Queue a function; waits only while there are too many."""
        if self._recovery is not None:
            self._recovery.check(number for number, _ in prepared.program.homes)
        for resource in prepared.resources:
            self.keep(resource)
        value = RemoteValue(
            function_name(fn), self.fetches.add, self._queue.check_waiting
        )
        closure = ScheduledClosure(fn, prepared, value, self._numbers, until_end)
        try:
            self._queue.put(closure)
        except BaseException:
            closure.leave()
            raise
        return value

    def on_worker(
        self, index: int, name: str, task: Callable[[WorkerSession], PyTree]
    ) -> RemoteValue:
        """Let one worker do something before its next function."""
        value = RemoteValue(name)
        self._queue.put(WorkerTask(name, task, value), tag=index)
        return value

    def copies(self, variable: WorkerResource) -> list[np.ndarray]:
        """What each worker's own variable holds, in their order; waits for them."""
        values = [
            self.on_worker(index, "read_all", lambda life: life.own(variable))
            for index in range(len(self._threads))
        ]
        return [value.fetch() for value in values]

    def keep(self, resource: WorkerResource) -> None:
        """Let the workers forget a resource when nobody refers to it any more."""
        if resource not in self._kept:
            self._kept.add(resource)
            for thread in self._threads:
                resource.when_gone(thread.forget)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all has ended."""
        end = None if timeout is None else time.monotonic() + timeout
        last_seen, is_told = time.monotonic(), False
        while True:
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            if self._queue.wait(max(0.0, min(left, _POLL_SECONDS))):
                self._tell()
                return
            self._tell()
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(self._unfinished(timeout or 0.0))
            if not all(state.activity in _AWAY for state in self.states):
                last_seen, is_told = time.monotonic(), False
            elif time.monotonic() - last_seen > self._patience and not is_told:
                is_told = True
                self._tell_that_all_are_lost()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """For a `with` block: no function runs, nor begins."""
        return self._queue.paused()

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """Likewise, for the variables of a checkpoint; also once this is stopped."""
        if not self.is_stopped:
            with self.paused(), self._noted(step):
                yield
        else:
            yield

    def done(self) -> bool:
        """Whether all has ended."""
        self._tell()
        return self._queue.done()

    @property
    def states(self) -> WorkerStates:
        """What the workers are doing."""
        return WorkerStates(
            thread.record.state(index, self._incarnations[index])
            for index, thread in enumerate(self._threads)
        )

    @property
    def queued(self) -> int:
        """How many functions wait for a worker."""
        return self._queue.queued

    @property
    def running(self) -> int:
        """How many functions run."""
        return len(self._queue.running)

    @property
    def is_stopped(self) -> bool:
        """Whether no function runs any more."""
        return self._queue.is_stopped

    @property
    def is_in_thread(self) -> bool:
        """Whether the caller is the thread of a worker."""
        return any(thread.is_current for thread in self._threads)

    def stop(self, seconds: float = 0.0) -> None:
        """End all workers and threads; waits for them no longer than this."""
        self._queue.stop()
        if self._recovery is not None:
            self._recovery.stop()
        for thread in self._threads:
            thread.stop()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _noted(self, step: int) -> contextlib.AbstractContextManager[None]:
        recovery = self._recovery
        return contextlib.nullcontext() if recovery is None else recovery.noted(step)

    def _tell(self) -> None:
        if self._recovery is not None:
            self._recovery.tell()

    def _finished(self) -> int:
        return sum(thread.record.functions for thread in self._threads)

    def _renew(self) -> None:
        for thread in self._threads:
            thread.renew()

    def _unfinished(self, timeout: float) -> str:
        states = self.states
        running = sum(state.function is not None for state in states)
        where = "".join(f"\n  {state}" for state in states)
        return (
            f"Functions have not ended after {timeout:g} seconds: {running} run, "
            f"{self.queued} are queued.{where}"
        )

    def _tell_that_all_are_lost(self) -> None:
        warn(
            f"All {len(self._threads)} workers are lost, so that no function runs. "
            "They are started again, or waited for; `join` goes on when one is back. "
            f"{self.states}",
            RuntimeWarning,
        )


def _start_delay(index: int) -> float:
    """By how many seconds a worker starts later than the first, as in TensorFlow."""
    delay = index * float(os.environ.get(_DELAY) or 0)
    most = float(os.environ.get(f"{_DELAY}_MAX") or 0)
    return min(delay, most) if most else delay


def end_later(scheduler: Scheduler) -> None:
    """End the threads of a coordinator that is gone."""
    atexit.unregister(scheduler.stop)
    started(threading.Thread(target=scheduler.stop, daemon=True))


Console: TypeAlias = Any
"""A `rich.console.Console`; rich may be missing."""


_PER_SECOND = 4


@final
class LiveTable:
    """The states of the workers, drawn while a `with` block runs.

    Drawn by rich, in a terminal or a notebook; elsewhere, and without rich, nothing is
    drawn. Made by `ClusterCoordinator.progress`.
    """

    def __init__(
        self, scheduler: Scheduler, description: str = "", console: Console = None
    ) -> None:
        self._scheduler = scheduler
        self._description = description
        self._console = console
        self._live: Any = None
        self._began = (0.0, 0)

    def __enter__(self) -> LiveTable:
        """Begin to draw."""
        self._began = time.monotonic(), self._finished()
        with contextlib.suppress(ImportError):
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the table as it is."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def __str__(self) -> str:
        """How much is done, and how fast."""
        began, before = self._began
        done = self._finished() - before
        seconds = time.monotonic() - began
        rate = f", {done / seconds:,.3g} functions/s" if began and seconds else ""
        counts = f"{self._scheduler.queued} queued, {self._scheduler.running} running"
        text = f"{done} finished, {counts}{rate}"
        return f"{self._description}: {text}" if self._description else text

    def _finished(self) -> int:
        return sum(state.functions for state in self._scheduler.states)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.errors import LiveError
        from rich.live import Live

        console = self._console
        if console is None:
            console = Console(stderr=True, file=sys.stderr)
        if not (console.is_terminal or console.is_jupyter):
            return
        live = Live(
            get_renderable=self._table, console=console, refresh_per_second=_PER_SECOND
        )
        with contextlib.suppress(LiveError):  # an older rich cannot draw two
            live.start(refresh=True)
            self._live = live

    def _table(self) -> Any:
        from rich.table import Table

        table = Table(*HEADER, title=str(self), title_justify="left")
        for state in self._scheduler.states:
            table.add_row(*state.row())
        return table
