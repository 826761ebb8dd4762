"""Workers and parameter servers at addresses that are called: `CalledTasks`."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from jaxstrategy._errors import ClusterError, WorkerLost
from jaxstrategy.parameter_servers.backends._cluster_session import (
    COORDINATOR,
    Hello,
    joined,
)
from jaxstrategy.parameter_servers.backends._reconnecting_server import (
    ReconnectingServer,
)
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote import RemoteWorker
from jaxstrategy.parameter_servers.wire._stream import Kind, Stream, WireFrame
from jaxstrategy.processes._secret import Secret

_PAUSE = 0.2  # between two tries to reach a task
_SAID_SECONDS = 15.0  # without one, after which a line says so

_lives = itertools.count()


@final
@dataclasses.dataclass(frozen=True, eq=False)
class CalledTask:
    """A process that listens, or will.

    Attributes:
      name: what it is, for people.
      address: where.
      over: set when it is known to have ended.
      kill: ends it; None where only who has started it can.
      last_output: what it wrote last, for errors.
    """

    name: str
    address: str
    over: threading.Event = dataclasses.field(default_factory=threading.Event)
    kill: Callable[[], None] | None = None
    last_output: Callable[[], str | None] | None = None


@final
class CalledTasks:
    """Workers and parameter servers at addresses, for one strategy of this process."""

    def __init__(
        self,
        workers: Sequence[CalledTask],
        servers: Sequence[CalledTask],
        renewed: Callable[[int], CalledTask],
        secret: Secret,
        start_seconds: float,
        patience: float = _peer.PATIENCE,
    ) -> None:
        self._tasks = servers
        self._renewed = renewed
        self._addresses = tuple(task.address for task in servers)
        self._secret = secret
        self._coordinator = COORDINATOR
        self._strategy = secrets.token_hex(8)
        self._patience = patience
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._lives: dict[int, RemoteWorker] = {}
        end = time.monotonic() + start_seconds
        self.servers: list[ReconnectingServer] = []
        try:
            self._connect_servers(end)
            self.told = self._first_worker(workers, end)
        except BaseException:
            self.close()
            raise

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new life of a worker, as soon as its process is there."""
        task = self._renewed(worker)
        name_of_life = f"{incarnation}.{next(_lives)}"
        hello = self._hello("begin", name_of_life, worker, self._addresses)
        try:
            stream, _ = self._when_there(task, hello, None)
        except ConnectionError as error:
            raise WorkerLost(_why(task, "is lost", error)) from error
        life = RemoteWorker(self._peer(task, hello, stream), task.kill)
        self._begin(worker, life)
        return life

    def close(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        if self._closed.is_set():
            return
        self.hang_up()
        with ThreadPoolExecutor(len(self._addresses)) as pool:
            list(pool.map(self._end, self._addresses))

    def hang_up(self) -> None:
        """Close all connections, to tasks that will be ended."""
        self._closed.set()
        for worker in tuple(self._lives):
            self._begin(worker, None)
        for server in self.servers:
            server.close()

    def _end(self, address: str) -> None:
        """Let a server drop what it holds."""
        try:
            joined(address, self._secret, self._hello("end"))[0].close()
        except (ConnectionError, ClusterError):
            return  # it holds nothing any more

    def _begin(self, worker: int, life: RemoteWorker | None) -> None:
        """Let go of the life before, which its task then forgets."""
        with self._lock:
            old = self._lives.pop(worker, None)
            if life is not None and not self._closed.is_set():
                self._lives[worker] = life
        for each in (old, life if self._closed.is_set() else None):
            if each is not None:
                each.close()

    def _hello(
        self, wants: Any, life: str = "", index: int = 0, servers: tuple[str, ...] = ()
    ) -> Hello:
        return Hello(wants, self._coordinator, self._strategy, life, index, servers)

    def _connect_servers(self, end: float) -> None:
        with ThreadPoolExecutor(len(self._tasks)) as pool:
            made = [pool.submit(self._server, task, end) for task in self._tasks]
        # All that were made are kept, also if another one fails, to be closed.
        self.servers = [each.result() for each in made if each.exception() is None]
        for each in made:
            each.result()

    def _server(self, task: CalledTask, end: float) -> ReconnectingServer:
        try:
            stream, _ = self._when_there(task, self._hello("begin"), end)
        except ConnectionError as error:
            raise ClusterError(_why(task, "cannot be reached", error)) from error
        stream.close()
        joining = self._hello("join")

        def dial() -> Stream:
            return joined(task.address, self._secret, joining)[0]

        name = f"{task.name} at {task.address}"
        return ReconnectingServer(
            name, dial, self._patience, last_output=task.last_output
        )

    def _peer(self, task: CalledTask, hello: Hello, first: Stream) -> Peer:
        made = [first]

        def dial() -> Stream:
            try:
                return made.pop()
            except IndexError:
                return joined(task.address, self._secret, hello.with_wish("join"))[0]

        name = f"{task.name} at {task.address}"
        peer = Peer(name, dial, WorkerLost, self._patience, task.last_output)
        peer.ask(WireFrame(Kind.PING))  # so that the first stream is its to close
        return peer

    def _first_worker(
        self, workers: Sequence[CalledTask], end: float
    ) -> dict[str, Any]:
        """What the first worker that is there says of its devices."""
        found: list[dict[str, Any]] = []
        failures: list[str] = []
        there = threading.Event()

        def ask(task: CalledTask) -> None:
            try:
                stream, answer = self._when_there(
                    task, self._hello("devices"), end, there
                )
            except ConnectionError as error:
                failures.append(_why(task, "cannot be reached", error))
                return
            stream.close()
            found.append(dict(answer))
            there.set()

        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(ask, workers))
        if not found:
            addresses = ", ".join(task.address for task in workers)
            raise ClusterError(
                f"None of the workers at {addresses} can be reached. Each runs `python "
                "-m jaxstrategy.parameter_servers`, or `jaxstrategy.Server(...)."
                f"join()`. {failures[0]}"
            )
        return found[0]

    def _when_there(
        self,
        task: CalledTask,
        hello: Hello,
        end: float | None,
        given_up: threading.Event | None = None,
    ) -> tuple[Stream, Any]:
        """A connection to a task, once it is there."""
        since, is_said = time.monotonic(), False
        while True:
            try:
                return joined(task.address, self._secret, hello)
            except ConnectionAbortedError:
                raise
            except ConnectionError:
                now = time.monotonic()
                if end is not None and now >= end:
                    raise
            if not is_said and now - since > _SAID_SECONDS:
                is_said = True
                _say(
                    f"{task.name} at {task.address} does not answer, and is waited for"
                )
            if task.over.is_set():
                raise ConnectionError("it has ended")
            if (given_up or self._closed).wait(_PAUSE) or self._closed.is_set():
                raise ConnectionError("nobody waits for it any more")


def _why(task: CalledTask, what: str, error: Exception) -> str:
    said = task.last_output() if task.last_output is not None else None
    more = f"\nThe last that it wrote:\n{said}" if said else ""
    return f"{task.name} at {task.address} {what}: {error}.{more}"


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"jaxstrategy: {text}.", file=sys.stderr, flush=True)
