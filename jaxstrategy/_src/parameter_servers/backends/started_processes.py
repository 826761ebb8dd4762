"""Workers and parameter servers that this process starts, on any machine."""

from __future__ import annotations

import abc
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, final

from jaxstrategy._src.errors import ClusterError, WorkerLost
from jaxstrategy._src.launch.child_process import (
    OutputThread,
    StartedProcess,
    described,
)
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    CalledBackend,
    CalledTask,
    CalledTasks,
)
from jaxstrategy._src.processes.secret import Secret

Job: TypeAlias = Literal["worker", "ps"]
NAMES: Mapping[Job, str] = {"worker": "worker", "ps": "parameter server"}
_DRAIN_SECONDS = 1.0


@final
class StartedTask(CalledTask):
    """A process that was started to listen at an address.

    Args:
      name: what it is, for people.
      address: where it listens.
      start: starts it, given what to call with its return code.
      ended: what else to call once it has ended.
      release: gives its place to the next one; may be called twice.
      hidden: how lines begin that it writes and nobody need see.
      news_seconds: how long it takes until one hears of its end.

    Attributes:
      process: it.
    """

    def __init__(
        self,
        name: str,
        address: str,
        start: Callable[[Callable[[int], None]], StartedProcess],
        ended: Callable[[StartedTask], None],
        release: Callable[[], None] = lambda: None,
        hidden: str = "\0",
        news_seconds: float = 1.0,
    ) -> None:
        super().__init__(name, address)
        self._ended, self._release = ended, release
        self._news_seconds = news_seconds
        self._hidden = hidden.encode()
        self._code: int | None = None
        self._building = threading.Lock()
        with self._building:  # some end at once
            self.process = start(self._end)
            read = functools.partial(self.process.read, 0)
            self._output = OutputThread(name, read, self._show)

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""
        return None if self._code is None else f"it ended with {described(self._code)}"

    def last_output(self) -> str:
        """The last lines that it wrote, and how it has ended if it has."""
        # Its connections break before it is known that it is over.
        if self.over.wait(self._news_seconds):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        lines += [f"({self.end})"] if self.end else []
        return "\n".join(lines)

    def kill(self) -> None:
        """End it now, and what it has started."""
        self.process.kill()

    def close(self) -> None:
        """Wait for its end, and for what it has written."""
        self.process.close()
        self._output.finish(_DRAIN_SECONDS)
        self._release()

    def _end(self, code: int) -> None:
        with self._building:
            self._code = code
        self.over.set()
        self.close()
        self._ended(self)

    def _show(self, line: bytes) -> None:
        if line.startswith(self._hidden):
            return
        stream = sys.stderr
        # Notebooks have streams of their own, and some programs have none.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.write(f"[{self.name}] {line.decode(errors='replace')}\n")
            stream.flush()


Ended: TypeAlias = Callable[[StartedTask], None]


@final
class WorkerPlace:
    """A worker's process, and the next one as soon as that has ended."""

    def __init__(self, start: Callable[[Ended], StartedTask | None]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._is_used = False
        with self._lock:  # it may end before it is known here
            self.current = start(self._ended)

    def fresh(self) -> StartedTask | None:
        """A process that was never given out; the one before it is ended."""
        with self._lock:
            old = self.current
            if self._is_used or old is None or old.end is not None:
                if old is not None:
                    old.kill()  # it may have what the next one needs
                self.current = self._start(self._ended)
            self._is_used = True
            task = self.current
        if old is not None and old is not task:
            old.close()
        return task

    def _ended(self, task: StartedTask) -> None:
        with self._lock:
            if task is self.current and self._is_used:
                self.current, self._is_used = self._start(self._ended), False


class StartedTasks(abc.ABC):
    """Starts the processes, and ends them at the latest with this one."""

    def __init__(self) -> None:
        self.places: list[WorkerPlace] = []
        self.servers: list[StartedTask] = []
        self.calls: CalledTasks | None = None
        self.is_closed = False
        self.failures: dict[tuple[Job, int], str] = {}

    def start_all(self, workers: int, servers: int) -> None:
        """Start so many processes."""

        def place(number: int) -> WorkerPlace:
            return WorkerPlace(functools.partial(self.started, "worker", number))

        with ThreadPoolExecutor(workers + servers) as pool:
            serving = pool.map(functools.partial(self.started, "ps"), range(servers))
            self.places = list(pool.map(place, range(workers)))
            self.servers = [task for task in serving if task is not None]
        if self.failures:
            raise ClusterError(" ".join(self.failures.values()))

    def renewed(self, worker: int) -> StartedTask:
        """A new process of a worker; the one before is ended, if it has not."""
        task = self.places[worker].fresh()
        if task is None:
            why = self.failures.get(("worker", worker), "All processes were ended.")
            raise WorkerLost(f"Worker {worker} is lost. {why}")
        return task

    def started(
        self, job: Job, number: int, ended: Ended = lambda task: None
    ) -> StartedTask | None:
        """A process; None once all were ended, or if it failed, which is kept."""
        if self.is_closed or not threading.main_thread().is_alive():
            return None
        return self._started(job, number, ended)

    @abc.abstractmethod
    def _started(self, job: Job, number: int, ended: Ended) -> StartedTask | None:
        """A process, whatever there is."""

    def close(self) -> None:
        """End all; may be called twice."""
        if not self.is_closed:
            self.is_closed = True
            if self.calls is not None:
                self.calls.hang_up()
            self._close()

    @abc.abstractmethod
    def _close(self) -> None:
        """End all."""


class StartedProcesses(CalledBackend):
    """A backend that starts its processes."""

    def _begin(
        self,
        tasks: StartedTasks,
        workers: int,
        servers: int,
        secret: Secret | None,
        start_seconds: float,
        patience: float,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Start so many; `told` is what is known of a worker's devices before."""
        self._close = weakref.finalize(self, tasks.close)
        self._tasks = tasks
        try:
            tasks.start_all(workers, servers)
            current = (place.current for place in tasks.places)
            tasks.calls = CalledTasks(
                [task for task in current if task is not None],
                tasks.servers,
                tasks.renewed,
                secret,
                start_seconds,
                patience,
                told,
            )
        except BaseException:
            self._close()
            raise
        self._use(tasks.calls, workers)

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        task = self._tasks.places[worker].current
        if task is not None:
            task.kill()

    def close(self) -> None:
        """End all processes that were started; may be called twice."""
        self._close()
