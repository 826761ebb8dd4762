"""`ClusterTasks`: workers and parameter servers that somebody else has started."""

from __future__ import annotations

import itertools
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from jaxstrategy._errors import ClusterError, WorkerLost
from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers.backends._checked_cluster import checked_cluster
from jaxstrategy.parameter_servers.backends._cluster_session import (
    COORDINATOR,
    Hello,
    joined,
)
from jaxstrategy.parameter_servers.backends._reconnecting_server import (
    ReconnectingServer,
)
from jaxstrategy.parameter_servers.backends._served_task import checked_secret
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote_worker import RemoteWorker
from jaxstrategy.parameter_servers.wire._stream import Stream

_PAUSE = 0.2  # between two tries to reach a task
_SAID_SECONDS = 15.0  # without one, after which a line says so

_lives = itertools.count()


@final
class ClusterTasks(AbstractWorkerBackend):
    """The tasks of a cluster, of which this process is the coordinator.

    Each runs `jaxstrategy.Server(...).join()`, or `python -m
    jaxstrategy.parameter_servers` with its TF_CONFIG, and waits at its address. All
    have the job's secret in JAXSTRATEGY_CLUSTER_SECRET. Another coordinator that comes
    takes them over from this one.

    Args:
      resolver: tells the addresses.
      start_seconds: how long to wait for the parameter servers and the first worker.
      patience: seconds without a sign of life after which a task that was asked
        something is lost.

    Raises:
      ValueError: the cluster cannot train in this way.
      ClusterError: the job has no secret; or those at the addresses are others, or do
        not come in time.
    """

    def __init__(
        self,
        resolver: ClusterResolver,
        *,
        start_seconds: float = 300.0,
        patience: float = _peer.PATIENCE,
    ) -> None:
        spec = resolver.cluster_spec()
        self._workers, servers = checked_cluster(spec, resolver.task_type)
        self._secret = checked_secret(servers[0])
        self._coordinator = COORDINATOR
        self._strategy = secrets.token_hex(8)
        self._addresses = tuple(servers)
        self._patience = patience
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._lives: dict[int, RemoteWorker] = {}
        end = time.monotonic() + start_seconds
        self._servers: list[ReconnectingServer] = []
        try:
            self._connect_servers(end)
            self._told = self._first_worker(end)
        except BaseException:
            self.close()
            raise

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return len(self._workers)

    @property
    def replicas_per_worker(self) -> int:
        """How many devices each worker has."""
        return self._told["devices"]

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platform of the workers' devices."""
        return (self._told["platform"],)

    @property
    def servers(self) -> Sequence[AbstractServer]:
        """The parameter servers."""
        return self._servers

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new life of a worker, as soon as its process is there.

        It waits for that process as long as it takes, and says so.

        Raises:
          WorkerLost: it works for a later coordinator; or `close` was called.
        """
        address = self._workers[worker]
        name = f"Worker {worker} at {address}"
        name_of_life = f"{incarnation}.{next(_lives)}"
        hello = self._hello("begin", name_of_life, worker, self._addresses)
        try:
            stream, _ = self._when_there(name, address, hello, None)
        except ConnectionError as error:
            raise WorkerLost(f"{name} is lost: {error}.") from error
        life = RemoteWorker(self._peer(name, address, hello, stream))
        self._begin(worker, life)
        return life

    def close(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        if self._closed.is_set():
            return
        self._closed.set()
        for worker in tuple(self._lives):
            self._begin(worker, None)
        for server in self._servers:
            server.close()
        with ThreadPoolExecutor(len(self._addresses)) as pool:
            list(pool.map(self._end, self._addresses))

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
        count = len(self._addresses)
        with ThreadPoolExecutor(count) as pool:
            made = [pool.submit(self._server, number, end) for number in range(count)]
        # All that were made are kept, also if another one fails, to be closed.
        self._servers = [each.result() for each in made if each.exception() is None]
        for each in made:
            each.result()

    def _server(self, number: int, end: float) -> ReconnectingServer:
        address = self._addresses[number]
        name = f"Parameter server {number} at {address}"
        try:
            stream, _ = self._when_there(name, address, self._hello("begin"), end)
        except ConnectionError as error:
            raise ClusterError(f"{name} cannot be reached: {error}.") from error
        stream.close()
        joining = self._hello("join")

        def dial() -> Stream:
            return joined(address, self._secret, joining)[0]

        return ReconnectingServer(name, dial, self._patience)

    def _peer(self, name: str, address: str, hello: Hello, first: Stream) -> Peer:
        made = [first]

        def dial() -> Stream:
            try:
                return made.pop()
            except IndexError:
                return joined(address, self._secret, hello.with_wish("join"))[0]

        peer = Peer(name, dial, WorkerLost, self._patience)
        peer.ask(WireFrame(Kind.PING))  # so that the first stream is its to close
        return peer

    def _first_worker(self, end: float) -> dict[str, Any]:
        """What the first worker that is there says of its devices."""
        found: list[dict[str, Any]] = []
        there = threading.Event()

        def ask(worker: int) -> None:
            address = self._workers[worker]
            try:
                stream, answer = self._when_there(
                    f"Worker {worker} at {address}",
                    address,
                    self._hello("devices"),
                    end,
                    there,
                )
            except ConnectionError:
                return
            stream.close()
            found.append(dict(answer))
            there.set()

        with ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(ask, range(len(self._workers))))
        if not found:
            raise ClusterError(
                f"None of the workers at {', '.join(self._workers)} can be reached. "
                "Each runs `python -m jaxstrategy.parameter_servers`, or "
                "`jaxstrategy.Server(...).join()`."
            )
        return found[0]

    def _when_there(
        self,
        name: str,
        address: str,
        hello: Hello,
        end: float | None,
        given_up: threading.Event | None = None,
    ) -> tuple[Stream, Any]:
        """A connection to a task, once it is there.

        Raises:
          ConnectionError: it is not there in time; or it refuses.
        """
        since, is_said = time.monotonic(), False
        while True:
            try:
                return joined(address, self._secret, hello)
            except ConnectionAbortedError:
                raise
            except ConnectionError:
                now = time.monotonic()
                if end is not None and now >= end:
                    raise
            if not is_said and now - since > _SAID_SECONDS:
                is_said = True
                _say(f"{name} does not answer, and is waited for")
            if (given_up or self._closed).wait(_PAUSE) or self._closed.is_set():
                raise ConnectionError("nobody waits for it any more")


def _say(text: str) -> None:
    if sys.stderr is not None:
        print(f"jaxstrategy: {text}.", file=sys.stderr, flush=True)
