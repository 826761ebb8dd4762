"""Workers and parameter servers in processes at addresses, whoever starts them.

A `Task` is one of these processes, a `Place` starts those of one strategy where that is
its own affair. `ClusterTasks` is the backend of processes that somebody else starts.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeAlias, cast, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec, host_and_port
from jaxstrategy._src.errors import ClusterError, ParameterServerLost, WorkerLost
from jaxstrategy._src.parameter_servers.peer import (
    COORDINATOR,
    PATIENCE,
    Hello,
    Peer,
    Task,
    joined,
)
from jaxstrategy._src.parameter_servers.store import Store
from jaxstrategy._src.parameter_servers.stream import Stream
from jaxstrategy._src.parameter_servers.worker import (
    AbstractWorkerBackend,
    WorkerEngine,
)
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


Job: TypeAlias = Literal["worker", "ps"]
NAMES: Mapping[Job, str] = {"worker": "worker", "ps": "parameter server"}
_PAUSE, _SHORT_PAUSE = 0.2, 0.02  # between two tries to reach a task; on this host
_SAID_SECONDS = 15.0  # without one, after which a line says so
_lives = itertools.count()


def reached(
    task: Task,
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


class Place(abc.ABC):
    """Where the processes of one strategy run, and who starts them."""

    def __init__(self, secret: Secret | None) -> None:
        self.secret = secret  # of the job; None if all are of this host, at paths
        self.strategy = secrets.token_hex(8)
        self.closed = threading.Event()
        self._pid = os.getpid()

    @abc.abstractmethod
    def task(self, job: Job, number: int) -> Task:
        """A process, started if that is to be done here."""

    @abc.abstractmethod
    def end_all(self) -> None:
        """End the processes, or let go of them."""

    def close(self, *called: Iterable[Peer]) -> None:
        """Close all connections and end all; may be called twice."""
        # A fork of this process has no children.
        if self.closed.is_set() or os.getpid() != self._pid:
            return
        self.closed.set()
        for peer in itertools.chain(*map(tuple, called)):
            peer.close()
        self.end_all()

    def check_open(self) -> None:
        """Raise if nothing is to be started any more."""
        if self.closed.is_set() or not threading.main_thread().is_alive():
            raise ClusterError(ALL_ENDED)


ALL_ENDED = "All processes were ended."


def called_server(
    task: Task, secret: Secret | None, hello: Hello, patience: float = PATIENCE
) -> Peer:
    """A parameter server, whose session has begun."""
    # On this host connections break with their processes only.
    lost, reconnects = ParameterServerLost, secret is not None
    return Peer(task, secret, hello, lost, patience=patience, reconnects=reconnects)


class TaskBackend(AbstractWorkerBackend):
    """A backend of processes at addresses."""

    def __init__(
        self,
        place: Place,
        workers: int,
        servers: int,
        start_seconds: float,  # the time in which all must be there
        patience: float,
        # What workers would say of their devices.
        told: Mapping[str, Any] | None = None,
        are_own: bool = True,
    ) -> None:
        self._place = place
        self._start_seconds, self._patience = start_seconds, patience
        self.num_workers = workers
        self._locks = [threading.Lock() for _ in range(workers)]
        self._unused = set(range(workers))  # those whose process was never given out
        self._lives: dict[int, Peer] = {}
        self._called: list[Peer] = []  # the servers
        close = functools.partial(place.close, self._lives.values(), self._called)
        # What was started here ends when nobody has this any more.
        self._close: Callable[[], object] = (
            weakref.finalize(self, close) if are_own else close
        )
        try:
            with ThreadPoolExecutor(workers + servers) as pool:
                serving = [pool.submit(place.task, "ps", k) for k in range(servers)]
                working = [pool.submit(place.task, "worker", k) for k in range(workers)]
            errors = [e for each in (*working, *serving) if (e := each.exception())]
            if errors and all(isinstance(each, ClusterError) for each in errors):
                raise ClusterError(" ".join(map(str, errors)))
            self._workers = [each.result() for each in working]
            self._servers = [each.result() for each in serving]
            end = time.monotonic() + start_seconds
            for task in self._servers:
                self._reach_server(task, end)
                hello = Hello("join", COORDINATOR, place.strategy)
                called = called_server(task, place.secret, hello, patience)
                self._called.append(called)
            told = told or self._first_worker(end)
        except BaseException:
            self.close()
            raise
        self.servers = cast("Sequence[Store]", self._called)
        self.replicas_per_worker = told["devices"]
        self.platforms = (told["platform"],)

    def start(self, worker: int, incarnation: int) -> WorkerEngine:
        """A new life of a worker, as soon as its process is there.

        Raises:
          WorkerLost: it did not start; the message has the last lines that it wrote.
        """
        task, place = self._renewed(worker), self._place
        addresses = tuple(each.address for each in self._servers)
        life = f"{incarnation}.{next(_lives)}"
        hello = Hello("begin", COORDINATOR, place.strategy, life, worker, addresses)
        # A process of this host ends if it does not start; others somebody else starts.
        is_here = place.secret is None
        end = time.monotonic() + self._start_seconds if is_here else None
        try:
            stream, _ = reached(task, place.secret, hello, end, place.closed)
        except ConnectionError as error:
            task.kill()
            raise WorkerLost(task.why("is lost", error)) from error
        options: Any = {"patience": self._patience, "first": stream}
        joining = hello._replace(wants="join")
        begun = Peer(task, place.secret, joining, WorkerLost, **options)
        with self._locks[worker]:
            old, self._lives[worker] = self._lives.get(worker), begun
        # The task then forgets the life before.
        for each in (old, begun if place.closed.is_set() else None):
            if each is not None:
                each.close()
        return cast("WorkerEngine", begun)

    def close(self) -> None:
        """End all that was started, or let go of it; may be called twice."""
        self._close()

    def _renewed(self, worker: int) -> Task:
        """The process of a worker that is to begin a new life."""
        with self._locks[worker]:
            old = self._workers[worker]
            if worker in self._unused:
                self._unused.discard(worker)
                if not old.over.is_set():
                    return old
            old.kill()  # it may have what the next one needs
            try:
                self._workers[worker] = task = self._place.task("worker", worker)
            except ClusterError as error:
                raise WorkerLost(f"Worker {worker} is lost. {error}") from error
        old.close()
        return task

    def _reach_server(self, task: Task, end: float) -> None:
        """Begin the session of a server."""
        place = self._place
        hello = Hello("begin", COORDINATOR, place.strategy)
        try:
            reached(task, place.secret, hello, end, place.closed)[0].close()
        except ConnectionError as error:
            raise ClusterError(task.why("cannot be reached", error)) from error

    def _first_worker(self, end: float) -> Mapping[str, Any]:
        """What the first of all workers that is there says of its devices."""
        place, there = self._place, threading.Event()
        hello = Hello("devices", COORDINATOR, place.strategy)

        def ask(task: Task) -> Mapping[str, Any] | ConnectionError:
            given_up = place.closed, there
            try:
                stream, told = reached(task, place.secret, hello, end, *given_up)
            except ConnectionError as error:
                return error
            stream.close()
            there.set()
            return told

        with ThreadPoolExecutor(len(self._workers)) as pool:
            # A worker with another secret is an error, also where others are there.
            answers = list(pool.map(ask, self._workers))
        for answer in answers:
            if not isinstance(answer, ConnectionError):
                return answer
        first, addresses = self._workers[0], [task.address for task in self._workers]
        raise ClusterError(
            f"None of the workers at {', '.join(addresses)} can be reached. Each runs "
            "`python -m jaxstrategy.parameter_servers`, or `jaxstrategy.Server(...)."
            f"join()`. {first.why('cannot be reached', answers[0])}"
        )


class StartedProcesses(TaskBackend):
    """A backend that starts its processes."""

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        self._workers[worker].kill()


@final
class _Addresses(Place):
    """Processes that somebody else starts."""

    def __init__(self, addresses: ClusterAddresses) -> None:
        super().__init__(checked_secret(addresses.servers[0]))
        self._addresses = addresses

    def task(self, job: Job, number: int) -> Task:
        addresses = self._addresses
        own = addresses.workers if job == "worker" else addresses.servers
        return Task(f"{NAMES[job]} {number}", own[number])

    def end_all(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        hello = Hello("end", COORDINATOR, self.strategy)

        def end(address: str) -> None:
            # One that cannot be reached holds nothing any more.
            with contextlib.suppress(ConnectionError, ClusterError):
                joined(address, self.secret, hello)[0].close()

        with ThreadPoolExecutor(len(self._addresses.servers)) as pool:
            list(pool.map(end, self._addresses.servers))


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
        patience: float = PATIENCE,
    ) -> None:
        found = checked_cluster(resolver.cluster_spec(), resolver.task_type)
        counts = len(found.workers), len(found.servers)
        super().__init__(
            _Addresses(found), *counts, start_seconds, patience, are_own=False
        )
