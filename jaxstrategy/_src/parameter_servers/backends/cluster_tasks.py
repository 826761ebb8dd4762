"""`ClusterTasks`: workers and servers that somebody else has started."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, Self, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec, host_and_port
from jaxstrategy._src.errors import (
    ClusterError,
    WorkerLost,
)
from jaxstrategy._src.parameter_servers import peer as _peer
from jaxstrategy._src.parameter_servers.peer import (
    Peer,
    ReconnectingPeer,
    RemoteServer,
    RemoteWorker,
)
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractWorkerBackend,
)
from jaxstrategy._src.parameter_servers.stream import FrameError, Stream, dialled
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret

_JOBS = ("chief", "worker", "evaluator", "ps")
_ONE_TASK = ("chief", "evaluator")


class ClusterAddresses(NamedTuple):
    """The addresses of a cluster's workers and parameter servers, in their order."""

    workers: Sequence[str]
    servers: Sequence[str]


def is_for_servers(spec: ClusterSpec) -> bool:
    """Whether a cluster has parameter servers at all.

    >>> is_for_servers(ClusterSpec({"worker": ["a:1", "b:1"]}))
    False
    """
    return "ps" in spec.jobs and spec.num_tasks("ps") > 0


def checked_cluster(
    spec: ClusterSpec, task_type: str | None = None
) -> ClusterAddresses:
    """The tasks that a coordinator calls.

    >>> checked_cluster(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]}))
    ClusterAddresses(workers=['a:1', 'b:1'], servers=['c:1'])
    """
    if not spec:
        raise ValueError(
            "Cluster spec must be non-empty: TF_CONFIG or the resolver names no task. "
            "Without a cluster, `ParameterServerStrategy(workers=2, "
            "parameter_servers=1)` starts processes on this host."
        )
    _check_jobs(spec, task_type)
    for job in ("ps", "worker"):
        if not _count(spec, job):
            raise ValueError(
                f"There must be at least one {job}. The cluster is {spec}, which needs "
                "to have `ps` jobs and `worker` jobs."
            )
    return ClusterAddresses(_addresses(spec, "worker"), _addresses(spec, "ps"))


def _check_jobs(spec: ClusterSpec, task_type: str | None) -> None:
    allowed = ", ".join(_JOBS)
    if set(spec.jobs) - set(_JOBS):
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {allowed}, "
            f"and the cluster spec is {spec}."
        )
    if task_type is not None and task_type not in _JOBS:
        raise ValueError(
            f"Unrecognized task_type: {task_type!r}, valid task types are {allowed}."
        )
    if task_type not in (None, "evaluator", "chief", *spec.jobs):
        raise ValueError(
            f"`task_type` {task_type!r} not found in the cluster spec {spec}."
        )
    for job in _ONE_TASK:
        if _count(spec, job) > 1:
            raise ValueError(
                f"There must be at most one {job!r} job, and the cluster has "
                f"{_count(spec, job)}: {spec}."
            )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _addresses(spec: ClusterSpec, job: str) -> list[str]:
    tasks = spec.job_tasks(job)
    addresses = [address for address in tasks if address is not None]
    if len(addresses) < len(tasks):
        raise ValueError(
            f"The cluster names the tasks {spec.task_indices(job)} of {job!r}; the "
            "coordinator calls all of them, so that it needs all addresses."
        )
    for address in addresses:
        host_and_port(address)
    return addresses


COORDINATOR = secrets.token_hex(16)
"""The name of this process as a coordinator; another one has another name."""

_Wish = Literal["begin", "join", "end", "devices"]
_SECONDS = 10.0  # for an answer to it


@final
@dataclasses.dataclass(frozen=True)
class Hello:
    """Who calls a worker or parameter server, and for what.

    Attributes:
      wants: "begin" something with this name; "join" it, as another connection; "end"
        it; or only to know which "devices" there are.
      coordinator: the name of its process.
      strategy: the name of one strategy of it.
      life: of a worker, the name of one life; empty for a server.
      index: of the worker.
      servers: the addresses of all parameter servers, for a worker.
    """

    wants: _Wish
    coordinator: str
    strategy: str
    life: str = ""
    index: int = 0
    servers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The name of what is begun or joined, within one coordinator."""
        return self.strategy, self.life

    def with_wish(self, wants: Literal["join", "end"]) -> Self:
        """The same with another wish."""
        return dataclasses.replace(self, wants=wants)


def joined(
    address: str, secret: Secret, hello: Hello
) -> tuple[Stream, Mapping[str, Any]]:
    """A stream to a task of a cluster, and what it says of itself."""
    try:
        stream = dialled(address, secret)
    except ConnectionError as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            raise ConnectionRefusedError(f"nobody listens at {address}") from error
        raise
    try:
        stream.limit_silence(_SECONDS)
        stream.send(hello)
        answer = stream.receive()
        stream.limit_silence(None)
        why = _peer.raised_by(answer, address)
    except (EOFError, OSError, FrameError) as error:
        stream.close()
        raise ConnectionError(f"{address} does not answer ({error})") from error
    if why is not None:
        stream.close()
        raise ConnectionAbortedError(str(why))
    return stream, answer[1]


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
        self.servers: list[RemoteServer] = []
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

    def _server(self, task: CalledTask, end: float) -> RemoteServer:
        try:
            stream, _ = self._when_there(task, self._hello("begin"), end)
        except ConnectionError as error:
            raise ClusterError(_why(task, "cannot be reached", error)) from error
        stream.close()
        joining = self._hello("join")

        def dial() -> Stream:
            return joined(task.address, self._secret, joining)[0]

        name = f"{task.name} at {task.address}"
        return RemoteServer(
            ReconnectingPeer(name, dial, self._patience, task.last_output)
        )

    def _peer(self, task: CalledTask, hello: Hello, first: Stream) -> Peer:
        def dial() -> Stream:
            return joined(task.address, self._secret, hello.with_wish("join"))[0]

        name = f"{task.name} at {task.address}"
        return Peer(name, dial, WorkerLost, self._patience, task.last_output, first)

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


@final
class ClusterTasks(AbstractWorkerBackend):
    """The tasks of a cluster, of which this process is the coordinator."""

    def __init__(
        self,
        resolver: ClusterResolver,
        *,
        start_seconds: float = 300.0,
        patience: float = _peer.PATIENCE,
    ) -> None:
        spec = resolver.cluster_spec()
        addresses = checked_cluster(spec, resolver.task_type)
        workers, servers = (
            [CalledTask(f"{name} {number}", each) for number, each in enumerate(given)]
            for name, given in zip(
                ("Worker", "Parameter server"), addresses, strict=True
            )
        )
        self._calls = CalledTasks(
            workers,
            servers,
            workers.__getitem__,
            checked_secret(servers[0].address),
            start_seconds,
            patience,
        )
        self.num_workers, self.servers = len(workers), self._calls.servers
        self.replicas_per_worker = self._calls.told["devices"]
        self.platforms = (self._calls.told["platform"],)

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new life of a worker, as soon as its process is there."""
        return self._calls.start(worker, incarnation)

    def close(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        self._calls.close()


def checked_secret(address: str) -> Secret:
    """The secret of the job."""
    secret = Secret.of_environment()
    if not secret and not _secret.is_network_trusted():
        raise ClusterError(
            f"A coordinator and its workers run what they send each other, and who can "
            f"reach {address} could send something too: the job needs a secret. Set "
            f"{_secret.VARIABLE} to the same random word for all its processes, in "
            "their environment and never on a command line "
            f"({_secret.HOW_TO_MAKE_ONE} makes one; `python -m jaxstrategy.launch "
            "--workers 2 --parameter-servers 1 train.py` does so by itself)."
        )
    return secret
