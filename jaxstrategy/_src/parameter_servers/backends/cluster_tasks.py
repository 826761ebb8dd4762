"""Backends of processes at addresses, and `ClusterTasks`, that somebody else starts."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec, host_and_port
from jaxstrategy._src.errors import ClusterError, WorkerLost
from jaxstrategy._src.parameter_servers import peer as _peer
from jaxstrategy._src.parameter_servers.peer import (
    COORDINATOR,
    Hello,
    Peer,
    RemoteServer,
    RemoteWorker,
    joined,
    remote_server,
)
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    AbstractWorker,
    AbstractWorkerBackend,
)
from jaxstrategy._src.parameter_servers.stream import Stream
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret

_JOBS = ("chief", "worker", "evaluator", "ps")


class ClusterAddresses(NamedTuple):
    """The addresses of a cluster's workers and parameter servers, in their order."""

    workers: Sequence[str]
    servers: Sequence[str]


def is_for_servers(spec: ClusterSpec) -> bool:
    """Whether a cluster has parameter servers at all.

    >>> is_for_servers(ClusterSpec({"worker": ["a:1", "b:1"]}))
    False
    """
    return _count(spec, "ps") > 0


def checked_cluster(
    spec: ClusterSpec, task_type: str | None = None
) -> ClusterAddresses:
    """The tasks that a coordinator calls.

    >>> checked_cluster(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]}))
    ClusterAddresses(workers=['a:1', 'b:1'], servers=['c:1'])
    """
    allowed = ", ".join(_JOBS)
    if not spec:
        raise ValueError(
            "Cluster spec must be non-empty: TF_CONFIG or the resolver names no task. "
            "Without a cluster, `ParameterServerStrategy(workers=2, "
            "parameter_servers=1)` starts processes on this host."
        )
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
    for job in ("chief", "evaluator"):
        if _count(spec, job) > 1:
            raise ValueError(
                f"There must be at most one {job!r} job, and the cluster has "
                f"{_count(spec, job)}: {spec}."
            )
    for job in ("ps", "worker"):
        if not _count(spec, job):
            raise ValueError(
                f"There must be at least one {job}. The cluster is {spec}, which needs "
                "to have `ps` jobs and `worker` jobs."
            )
    return ClusterAddresses(_addresses(spec, "worker"), _addresses(spec, "ps"))


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


_PAUSE, _SHORT_PAUSE = 0.2, 0.02  # between two tries to reach a task; on this host
_SAID_SECONDS = 15.0  # without one, after which a line says so

_lives = itertools.count()


class CalledTask:
    """A process that listens, or will.

    Attributes:
      name: what it is, for people.
      address: where.
      over: set when it is known to have ended.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.over = threading.Event()

    @property
    def shown(self) -> str:
        """What it is and where, as a sentence begins; a path says nobody anything."""
        name, is_path = self.name.capitalize(), self.address.startswith("/")
        return name if is_path else f"{name} at {self.address}"

    def kill(self) -> None:
        """End it, if this process has started it."""

    def close(self) -> None:
        """Wait for its end, if this process has started it."""

    def last_output(self) -> str:
        """What it wrote last, if that is known."""
        return ""

    def why(self, what: str, error: Exception) -> str:
        """Why something is so, for people."""
        said = self.last_output()
        more = f"\nThe last that it wrote:\n{said}" if said else ""
        return f"{self.shown} {what}: {error}.{more}"


def reached(
    task: CalledTask,
    secret: Secret | None,
    hello: Hello,
    end: float | None = None,
    *given_up: threading.Event,
) -> tuple[Stream, Mapping[str, Any]]:
    """A connection to a task, once it is there; and what it says of itself."""
    since, is_said = time.monotonic(), False
    pause = _SHORT_PAUSE if secret is None else _PAUSE
    while True:
        try:
            return joined(task.address, secret, hello)
        except ConnectionAbortedError:
            raise
        except ConnectionError:
            now = time.monotonic()
            if end is not None and now >= end:
                raise
        if not is_said and now - since > _SAID_SECONDS:
            is_said = True
            if sys.stderr is not None:
                text = f"jaxstrategy: {task.shown} does not answer, and is waited for."
                print(text, file=sys.stderr, flush=True)
        if task.over.is_set():
            raise ConnectionError("it has ended")
        time.sleep(pause)
        if any(each.is_set() for each in given_up):
            raise ConnectionError("nobody waits for it any more")


class TaskGroup:
    """Workers and parameter servers at addresses, for one strategy of this process.

    Args:
      secret: of the job; None if all are of this host, at paths.
      start_seconds: the time in which all must be there.
      patience: seconds without a sign of life after which one is lost.

    Attributes:
      servers: the processes of the parameter servers.
      called: those servers.
      told: what the first worker that is there says of its devices.
    """

    def __init__(
        self, secret: Secret | None, start_seconds: float, patience: float
    ) -> None:
        self.servers: list[CalledTask] = []
        self.called: list[RemoteServer] = []
        self.told: Mapping[str, Any] = {}
        self._secret = secret
        self._start_seconds = start_seconds
        self._patience = patience
        self._strategy = secrets.token_hex(8)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._lives: dict[int, RemoteWorker] = {}

    def connect(
        self, workers: Sequence[CalledTask], told: Mapping[str, Any] | None = None
    ) -> None:
        """Call all servers, and a worker unless it is known what it would say."""
        end = time.monotonic() + self._start_seconds
        with ThreadPoolExecutor(len(self.servers)) as pool:
            made = [pool.submit(self._server, task, end) for task in self.servers]
        # All that were made are kept, also if another one fails, to be closed.
        self.called += [each.result() for each in made if not each.exception()]
        for each in made:
            each.result()
        self.told = told or self._first_worker(workers, end)

    def renewed(self, worker: int) -> CalledTask:
        """The process of a worker that is to begin a new life."""
        raise NotImplementedError

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new life of a worker, as soon as its process is there."""
        task = self.renewed(worker)
        addresses = tuple(each.address for each in self.servers)
        life = f"{incarnation}.{next(_lives)}"
        hello = Hello("begin", COORDINATOR, self._strategy, life, worker, addresses)
        # A process of this host ends if it does not start; others somebody else starts.
        is_here = self._secret is None
        end = time.monotonic() + self._start_seconds if is_here else None
        try:
            stream, _ = reached(task, self._secret, hello, end, self._closed)
        except ConnectionError as error:
            task.kill()
            raise WorkerLost(task.why("is lost", error)) from error
        joining = hello._replace(wants="join")

        def dial(seconds: float) -> Stream:
            return joined(task.address, self._secret, joining, seconds)[0]

        of_output = task.last_output
        peer = Peer(task.shown, dial, WorkerLost, self._patience, of_output, stream)
        begun = RemoteWorker(peer, task.kill)
        self._begin(worker, begun)
        return begun

    def replace(self, server: int, task: CalledTask) -> None:
        """Go on with a process in the place of a lost server, which has nothing."""
        self.servers[server] = task
        end = time.monotonic() + self._start_seconds
        self.called[server].peer = self._server(task, end).peer

    def close(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        if self._closed.is_set():
            return
        self.hang_up()
        hello = Hello("end", COORDINATOR, self._strategy)

        def end(task: CalledTask) -> None:
            # One that cannot be reached holds nothing any more.
            with contextlib.suppress(ConnectionError, ClusterError):
                joined(task.address, self._secret, hello)[0].close()

        with ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(end, self.servers))

    def hang_up(self) -> None:
        """Close all connections."""
        self._closed.set()
        for worker in tuple(self._lives):
            self._begin(worker, None)
        for server in self.called:
            server.close()

    def _begin(self, worker: int, life: RemoteWorker | None) -> None:
        """Let go of the life before, which its task then forgets."""
        with self._lock:
            old = self._lives.pop(worker, None)
            if life is not None and not self._closed.is_set():
                self._lives[worker] = life
        for each in (old, life if self._closed.is_set() else None):
            if each is not None:
                each.close()

    def _server(self, task: CalledTask, end: float) -> RemoteServer:
        hello = Hello("begin", COORDINATOR, self._strategy)
        try:
            reached(task, self._secret, hello, end, self._closed)[0].close()
        except ConnectionError as error:
            raise ClusterError(task.why("cannot be reached", error)) from error
        where, output = task.address, task.last_output
        patience = self._patience
        return remote_server(task.shown, where, self._secret, hello, patience, output)

    def _first_worker(
        self, workers: Sequence[CalledTask], end: float
    ) -> Mapping[str, Any]:
        found: list[Mapping[str, Any]] = []
        failures: list[str] = []
        there = threading.Event()
        hello = Hello("devices", COORDINATOR, self._strategy)

        def ask(task: CalledTask) -> None:
            try:
                stream, answer = reached(
                    task, self._secret, hello, end, self._closed, there
                )
            except ConnectionError as error:
                failures.append(task.why("cannot be reached", error))
                return
            stream.close()
            found.append(answer)
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


class TaskBackend(AbstractWorkerBackend):
    """A backend of processes at addresses."""

    _close: Callable[[], object]

    def _use(self, tasks: TaskGroup, workers: int) -> None:
        self._tasks = tasks
        self.num_workers = workers
        self.servers = cast("Sequence[AbstractServer]", tasks.called)
        self.replicas_per_worker = tasks.told["devices"]
        self.platforms = (tasks.told["platform"],)

    def start(self, worker: int, incarnation: int) -> AbstractWorker:
        """A new life of a worker, as soon as its process is there.

        Raises:
          WorkerLost: it did not start; the message has the last lines that it wrote.
        """
        return cast("AbstractWorker", self._tasks.start(worker, incarnation))

    def close(self) -> None:
        """End all that was started, or let go of it; may be called twice."""
        self._close()


@final
class _ClusterGroup(TaskGroup):
    def __init__(
        self, addresses: ClusterAddresses, start_seconds: float, patience: float
    ) -> None:
        super().__init__(checked_secret(addresses.servers[0]), start_seconds, patience)
        self._workers, self.servers = (
            [CalledTask(f"{name} {number}", each) for number, each in enumerate(given)]
            for name, given in zip(
                ("worker", "parameter server"), addresses, strict=True
            )
        )
        try:
            self.connect(self._workers)
        except BaseException:
            self.close()
            raise

    def renewed(self, worker: int) -> CalledTask:
        return self._workers[worker]


@final
class ClusterTasks(TaskBackend):
    """The tasks of a cluster whose coordinator is this process.

    Closed, it lets go of them, and they wait for another coordinator.
    """

    def __init__(
        self,
        resolver: ClusterResolver,
        *,
        start_seconds: float = 300.0,
        patience: float = _peer.PATIENCE,
    ) -> None:
        addresses = checked_cluster(resolver.cluster_spec(), resolver.task_type)
        tasks = _ClusterGroup(addresses, start_seconds, patience)
        self._close = tasks.close
        self._use(tasks, len(addresses.workers))
