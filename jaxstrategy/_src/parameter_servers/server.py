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
from jaxstrategy._src.parameter_servers.backends import cluster_tasks
from jaxstrategy._src.parameter_servers.peer import Hello, SessionHost
from jaxstrategy._src.parameter_servers.store import host_of_server
from jaxstrategy._src.parameter_servers.worker import WorkerEngine
from jaxstrategy._src.processes.job import TrainingTask
from jaxstrategy._src.processes.secret import Secret

SERVED = ("worker", "ps")


@final
class ServedTask:
    """One task of a cluster that a coordinator calls."""

    def __init__(self, spec: ClusterSpec, job: str, index: int) -> None:
        self._address = spec.task_address(job, index)
        self._name = f"{job} {index}"
        self._is_worker = job == "worker"
        self._host: SessionHost | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Listen at its address; a second call does nothing."""
        if self._host is not None:
            return
        secret = cluster_tasks.checked_secret(self._address)
        if self._is_worker:
            host = worker_host(secret, self._say)
        else:
            # GPUs of the host are those of workers.
            jax.config.update("jax_platforms", "cpu")
            host = host_of_server(told, self._say)
        try:
            host.listen(self._address, secret)
        except OSError as error:
            raise ClusterError(
                f"{self._name} cannot listen at its address {self._address}: {error}. "
                "It must be one of this host, with a free port."
            ) from error
        self._host = host
        self._say(f"waits for a coordinator at {self._address}")

    def join(self) -> None:
        """Serve until the process is ended, or `close` is called."""
        self.start()
        self._closed.wait()

    def close(self) -> None:
        """Listen no more, and drop what is held."""
        self._closed.set()
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


def worker_host(
    secret: Secret | None, say: Callable[[str], None] = lambda text: None
) -> SessionHost:
    """Sessions with workers of this process."""

    def begin(hello: Hello) -> WorkerEngine:
        joining = Hello("join", hello.coordinator, hello.strategy)
        servers: list[Any] = [
            cluster_tasks.called_server(
                cluster_tasks.Task(f"parameter server {number}", address),
                secret,
                joining,
            )
            for number, address in enumerate(hello.servers)
        ]
        return WorkerEngine(hello.worker, servers, jax.local_devices())

    return SessionHost(begin, told, False, say)


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
