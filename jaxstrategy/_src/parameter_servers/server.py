"""`Server`: one process of a cluster, and the task that it serves."""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, final

import jax
from jax import export

from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec, GivenTasks
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.parameter_servers import peer
from jaxstrategy._src.parameter_servers.backends import cluster_tasks
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    Hello,
    checked_secret,
    joined,
)
from jaxstrategy._src.parameter_servers.peer import (
    Answer,
    ReconnectingPeer,
    RemoteServer,
    Responder,
    answers_of_server,
    answers_of_worker,
)
from jaxstrategy._src.parameter_servers.store.store import Store
from jaxstrategy._src.parameter_servers.stream import (
    FrameError,
    Listener,
    Stream,
)
from jaxstrategy._src.parameter_servers.worker import WorkerEngine
from jaxstrategy._src.processes.job import TrainingTask
from jaxstrategy._src.processes.secret import Secret

_SECONDS = 10.0  # for the first word of who has proved to be of the job


@final
class SessionHost:
    """Answers connections for the newest coordinator, and for no earlier one."""

    def __init__(
        self,
        begin: Callable[[Hello], Answer],
        told: Callable[[], Mapping[str, Any]],
        is_kept: bool,
        say: Callable[[str], None],
    ) -> None:
        self._begin = begin
        self._told = told
        self._is_kept = is_kept
        self._say = say
        self._lock = threading.Lock()
        self._coordinator = ""
        self._past: set[str] = set()
        self._begun: dict[tuple[str, str], _Begun] = {}

    def take(self, stream: Stream) -> None:
        """Serve a connection, in a thread of its own."""
        threading.Thread(
            target=self._serve, args=(stream,), name="session", daemon=True
        ).start()

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            dropped, self._begun = self._begun, {}
        _close_all(dropped)

    def _serve(self, stream: Stream) -> None:
        try:
            hello = _received(stream)
            begun = self._answered(stream, hello)
        except (EOFError, OSError, FrameError):
            stream.close()
            return
        if begun is None:
            stream.close()
            return
        begun.responder.serve(stream)
        self._left(hello, begun, stream)

    def _answered(self, stream: Stream, hello: Hello) -> _Begun | None:
        if hello.wants in ("devices", "end"):
            if hello.wants == "end":
                self._end(hello)
            stream.send(("done", self._told()))
            return None
        try:
            begun = self._found(hello, stream)
        except ClusterError as error:
            stream.send_packed(peer.failed(error))
            return None
        stream.send(("done", self._told()))
        return begun

    def _found(self, hello: Hello, stream: Stream) -> _Begun:
        dropped: dict[tuple[str, str], _Begun] = {}
        with self._lock:
            if hello.coordinator in self._past:
                raise ClusterError("it works for another coordinator, which came later")
            if hello.wants == "begin" and hello.coordinator != self._coordinator:
                dropped, self._begun = self._begun, {}
                if self._coordinator:
                    self._past.add(self._coordinator)
                self._coordinator = hello.coordinator
                self._say("a new coordinator has come")
            begun = self._begun.get(hello.key)
            if begun is None or hello.coordinator != self._coordinator:
                if hello.wants != "begin":
                    raise ClusterError(
                        "it was started anew and has nothing of what was there before"
                    )
                begun = self._begun[hello.key] = _Begun(self._begin(hello))
            begun.streams.add(stream)
        _close_all(dropped)
        return begun

    def _end(self, hello: Hello) -> None:
        with self._lock:
            is_there = hello.coordinator == self._coordinator
            begun = self._begun.pop(hello.key, None) if is_there else None
        if begun is not None:
            begun.close()

    def _left(self, hello: Hello, begun: _Begun, stream: Stream) -> None:
        with self._lock:
            begun.streams.discard(stream)
            is_over = not begun.streams and not self._is_kept
            if is_over and self._begun.get(hello.key) is begun:
                del self._begun[hello.key]
        if is_over:
            begun.close()


@final
class _Begun:
    """Something that was begun, and the connections for it."""

    def __init__(self, answer: Answer) -> None:
        self.responder = Responder(answer)
        self.streams: set[Stream] = set()

    def close(self) -> None:
        for stream in tuple(self.streams):
            stream.close()
        self.responder.close()


def _close_all(dropped: Mapping[tuple[str, str], _Begun]) -> None:
    for begun in dropped.values():
        begun.close()


def _received(stream: Stream) -> Hello:
    stream.limit_silence(_SECONDS)
    hello = stream.receive()
    stream.limit_silence(None)
    if not isinstance(hello, Hello):
        raise FrameError(f"{hello!r} before any hello")
    return hello


SERVED = ("worker", "ps")


@final
class ServedTask:
    """One task of a cluster that a coordinator calls."""

    def __init__(self, spec: ClusterSpec, job: str, index: int) -> None:
        self._address = spec.task_address(job, index)
        self._name = f"{job} {index}"
        self._is_worker = job == "worker"
        self._listener: Listener | None = None
        self._host: SessionHost | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Listen at its address; a second call does nothing."""
        if self._listener is not None:
            return
        secret = checked_secret(self._address)
        if not self._is_worker:
            # GPUs of the host are those of workers.
            jax.config.update("jax_platforms", "cpu")
        try:
            listener = Listener(self._address, secret)
        except OSError as error:
            raise ClusterError(
                f"{self._name} cannot listen at its address {self._address}: {error}. "
                "It must be one of this host, with a free port."
            ) from error

        def begin(hello: Hello) -> Answer:
            return (
                _worker(secret, hello)
                if self._is_worker
                else answers_of_server(Store())
            )

        self._host = SessionHost(begin, told, not self._is_worker, self._say)
        self._listener = listener
        listener.start(self._host.take)
        self._say(f"waits for a coordinator at {self._address}")

    def join(self) -> None:
        """Serve until the process is ended, or `close` is called."""
        self.start()
        self._closed.wait()

    def close(self) -> None:
        """Listen no more, and drop what is held."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        if self._host is not None:
            self._host.close()

    def _say(self, text: str) -> None:
        if sys.stderr is not None:
            print(f"jaxstrategy: {self._name}: {text}", file=sys.stderr, flush=True)


def told() -> Mapping[str, Any]:
    """What a worker says of its devices."""
    return {
        "devices": jax.local_device_count(),
        "platform": export.default_export_platform(),
    }


def _worker(secret: Secret, hello: Hello) -> Answer:
    """A worker that reaches the parameter servers at the addresses it was told."""
    joining = Hello("join", hello.coordinator, hello.strategy)
    servers = [
        RemoteServer(
            ReconnectingPeer(
                f"Parameter server {number} at {address}",
                lambda address=address: joined(address, secret, joining)[0],
                peer.PATIENCE,
            )
        )
        for number, address in enumerate(hello.servers)
    ]
    return answers_of_worker(WorkerEngine(hello.index, servers, jax.local_devices()))


_T = TypeVar("_T")


@final
@dataclasses.dataclass(frozen=True)
class ServerDef:
    """The arguments that a `Server` was made from.

    Attributes:
      cluster: all tasks.
      job_name: the job of this one.
      task_index: its number.
      protocol: how its address is written.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"


@final
class Server:
    """Makes this process one task of a cluster.

    In a cluster of workers it meets the other processes, and returns when all are
    there; JAX then has the devices of all. A `MultiWorkerMirroredStrategy` made
    afterwards finds them. On several hosts, `JAXSTRATEGY_CLUSTER_SECRET` must be set,
    to the same for all.

    In a cluster with parameter servers (`ps`), this is a worker or parameter server
    that waits for the calls of a coordinator, which makes a `ParameterServerStrategy`:
    the script of such a task ends with `server.join()`. The secret must be set, on one
    host too. `python -m jaxstrategy.parameter_servers` does the same without a script,
    as TF_CONFIG says.

    Args:
      server_or_cluster_def: the cluster: a `ClusterSpec`, what one is made from, or the
        `server_def` of another server.
      job_name: the job of this process, not needed if there is one only.
      task_index: its task, not needed if there is one only.
      protocol: how `target` is written.
      start: whether to meet the others now, or when `start()` is called.

    Raises:
      ValueError: there is no such task, or it serves nobody: as the chief of a cluster
        with parameter servers, and an evaluator.
      ClusterError: the processes could not start together.

    >>> import jaxstrategy as js
    >>> server = js.Server.create_local_server()
    >>> server.server_def.job_name, server.server_def.task_index
    ('worker', 0)
    """

    def __init__(
        self,
        server_or_cluster_def: ServerDef | ClusterSpec | Mapping[str, GivenTasks],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        start: bool = True,
    ) -> None:
        given = server_or_cluster_def
        if isinstance(given, ServerDef):
            job_name = given.job_name if job_name is None else job_name
            task_index = given.task_index if task_index is None else task_index
            protocol, given = protocol or given.protocol, given.cluster
        cluster = ClusterSpec(given)
        job = _only(cluster.jobs, job_name, "job_name")
        task = _only(cluster.task_indices(job), task_index, "task_index")
        self._def = ServerDef(cluster, job, task, protocol or "grpc")
        self._task = _task(cluster, job, task)
        if start:
            self.start()

    @classmethod
    def create_local_server(cls, start: bool = True) -> Self:
        """The server of a cluster of one, on this host."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"localhost:{free.getsockname()[1]}"
        return cls(ClusterSpec({"worker": [address]}), start=start)

    def start(self) -> None:
        """Meet the others; a second call does nothing.

        Raises:
          ClusterError: the processes could not start together.
          ValueError: the task or an address cannot be right.
        """
        self._task.start()

    def join(self) -> None:
        """Wait until all other processes have finished, or wait here too.

        A worker or parameter server of a coordinator serves until its process is ended.

        Raises:
          ClusterError: one has died, or failed; or they could not start together.
          ValueError: the task or an address cannot be right.
        """
        self._task.join()

    @property
    def server_def(self) -> ServerDef:
        """The cluster and the task that the server was made from."""
        return self._def

    @property
    def target(self) -> str:
        """Its address, as `grpc://host:port`."""
        task = self._def.job_name, self._def.task_index
        return f"{self._def.protocol}://{self._def.cluster.task_address(*task)}"


def _task(cluster: ClusterSpec, job: str, index: int) -> TrainingTask | ServedTask:
    if not cluster_tasks.is_for_servers(cluster):
        return TrainingTask(cluster, job, index)
    cluster_tasks.checked_cluster(cluster, job)
    if job in SERVED:
        return ServedTask(cluster, job, index)
    advice = (
        "The chief is the coordinator, which calls the others: make a "
        "`ParameterServerStrategy` there, and no server."
        if job == "chief"
        else "An evaluator is a cluster of its own: load the checkpoints there that "
        "the coordinator saves, and make no server."
    )
    raise ValueError(f"This process is the {job!r} of {cluster}. {advice}")


def _only(known: Sequence[_T], given: _T | None, name: str) -> _T:
    """`given`, or the only one there is."""
    if given is not None:
        return given
    if len(known) != 1:
        raise ValueError(
            f"`{name}` is needed, for there are several: {', '.join(map(str, known))}."
        )
    return known[0]
