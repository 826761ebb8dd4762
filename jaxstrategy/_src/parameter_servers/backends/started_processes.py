"""Workers and parameter servers that this process starts, on any machine."""

from __future__ import annotations

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
    CalledTask,
    TaskBackend,
    TaskGroup,
)

Job: TypeAlias = Literal["worker", "ps"]
NAMES: Mapping[Job, str] = {"worker": "worker", "ps": "parameter server"}
ALL_ENDED = "All processes were ended."
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


class StartedTasks(TaskGroup):
    """Starts the processes, and ends them at the latest with this one.

    A worker's process that ends is followed by the next one at once.
    """

    is_closed = False

    def begin(
        self, workers: int, servers: int, told: Mapping[str, Any] | None = None
    ) -> None:
        """Start so many, and call them; `told` is what workers would say."""
        self._locks = [threading.Lock() for _ in range(workers)]
        self._unused = set(range(workers))  # those whose process was never given out
        try:
            with ThreadPoolExecutor(workers + servers) as pool:
                serving = [pool.submit(self.started, "ps", k) for k in range(servers)]
                working = [
                    pool.submit(self.started, "worker", k, self._ended_of(k))
                    for k in range(workers)
                ]
            errors = [e for each in (*working, *serving) if (e := each.exception())]
            if errors and all(isinstance(each, ClusterError) for each in errors):
                raise ClusterError(" ".join(map(str, errors)))
            self.workers = [each.result() for each in working]
            self.servers = [each.result() for each in serving]
            self.connect(self.workers, told)
        except BaseException:
            self.close()
            raise

    def renewed(self, worker: int) -> CalledTask:
        with self._locks[worker]:
            old = self.workers[worker]
            is_fresh = worker in self._unused and old.end is None
            if not is_fresh:
                old.kill()  # it may have what the next one needs
                try:
                    self._start_again(worker)
                except ClusterError as error:
                    raise WorkerLost(f"Worker {worker} is lost. {error}") from error
            self._unused.discard(worker)
            task = self.workers[worker]
        if not is_fresh:
            old.close()
        return task

    def restart_server(self, number: int) -> None:
        """A new process of a parameter server, which has nothing."""
        self.servers[number].kill()
        self.servers[number].close()
        self.replace(number, self.started("ps", number))

    def started(
        self, job: Job, number: int, ended: Ended = lambda task: None
    ) -> StartedTask:
        """A process, unless all were ended."""
        if self.is_closed or not threading.main_thread().is_alive():
            raise ClusterError(ALL_ENDED)
        return self._started(job, number, ended)

    def _started(self, job: Job, number: int, ended: Ended) -> StartedTask:
        raise NotImplementedError

    def close(self) -> None:
        """End all; may be called twice."""
        if not self.is_closed:
            self.is_closed = True
            self.hang_up()
            self._close()

    def _close(self) -> None:
        raise NotImplementedError

    def _start_again(self, worker: int) -> None:
        ended = self._ended_of(worker)
        self.workers[worker] = self.started("worker", worker, ended)

    def _ended_of(self, worker: int) -> Ended:
        def ended(task: StartedTask) -> None:
            with self._locks[worker]:
                is_used = worker not in self._unused
                if is_used and task is self.workers[worker]:
                    # Who asks for one tries again, and hears of it.
                    with contextlib.suppress(ClusterError):
                        self._start_again(worker)
                        self._unused.add(worker)

        return ended


class StartedProcesses(TaskBackend):
    """A backend that starts its processes."""

    _tasks: StartedTasks

    def _begin(
        self,
        tasks: StartedTasks,
        workers: int,
        servers: int,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        self._close = weakref.finalize(self, tasks.close)
        tasks.begin(workers, servers, told)
        self._use(tasks, workers)

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        self._tasks.workers[worker].kill()
