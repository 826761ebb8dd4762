"""`RayProcesses`: workers and servers on a Ray cluster."""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.errors import ClusterError, WorkerLost
from jaxstrategy._src.launch.child_process import OutputThread, described
from jaxstrategy._src.launch.options import PLACEMENTS
from jaxstrategy._src.launch.ray import (
    HANDED_ON,
    RayActors,
    RayCluster,
    RayStartedProcess,
)
from jaxstrategy._src.parameter_servers import peer
from jaxstrategy._src.parameter_servers.backends import local_processes
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    CalledTask,
    CalledTasks,
)
from jaxstrategy._src.parameter_servers.backends.local_processes import (
    Ended,
    WorkerPlace,
    show,
)
from jaxstrategy._src.parameter_servers.peer import RemoteWorker
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractWorkerBackend,
)
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text.shown import positive, shown

Job = Literal["worker", "ps"]
_PROGRAM = ("-m", "jaxstrategy.parameter_servers")
_NAMES = {"worker": "Worker", "ps": "Parameter server"}
_DRAIN_SECONDS = 1.0
_NEWS_SECONDS = 5.0  # until it is heard of an end; under load, Ray takes more than one


@final
class RayTask:
    """A process of `python -m jaxstrategy.parameter_servers` on a machine of Ray's."""

    def __init__(
        self,
        actors: RayActors,
        bundle: int,
        job: Job,
        index: int,
        variables: Mapping[str, str],
        host: str | None,
        seconds: float,
        ended: Callable[[RayTask], None],
    ) -> None:
        self._actors = actors
        self._name = f"{_NAMES[job]} {index}"
        self._own_lines = f"jaxstrategy: {job} {index}: ".encode()
        self._code: int | None = None
        self._over = threading.Event()
        self._building = threading.Lock()
        self._actor = actors.start(bundle)
        try:
            where = self._address(host, seconds)
            own = {TF_CONFIG: json.dumps(_config(job, index, where))}
            arguments = _PROGRAM, {**variables, **own}, None, None, True
            actors.ask(lambda: self._actor.start.remote(*arguments), seconds)
        except BaseException:
            actors.end(self._actor)
            raise
        with self._building:
            self._process = RayStartedProcess(
                actors, self._actor, self._name, lambda code: self._end(code, ended)
            )
            self._output = OutputThread(
                self._name, functools.partial(self._process.read, 0), self._show
            )
        self.called = CalledTask(
            self._name, where, self._over, self.kill, self.last_output
        )

    @property
    def end(self) -> str | None:
        """How it has ended, in words; None while it has not."""
        return None if self._code is None else f"it ended with {described(self._code)}"

    def last_output(self) -> str:
        """The last lines that it wrote, and how it has ended if it has."""
        # Its connections break before it is known that it is over.
        if self._over.wait(_NEWS_SECONDS):
            self._output.finish(_DRAIN_SECONDS)
        lines = [line.decode(errors="replace") for line in self._output.tail]
        lines += [f"({self.end})"] if self.end else []
        return "\n".join(lines)

    def kill(self) -> None:
        """End it now, and what it has started."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end, and give its place to the next one."""
        self._process.close()
        self._output.finish(_DRAIN_SECONDS)
        self._actors.end(self._actor)

    def _address(self, host: str | None, seconds: float) -> str:
        ask = self._actors.ask
        _, found = ask(lambda: self._actor.machine.remote(), seconds)
        chosen = host or found
        port = ask(lambda: self._actor.free_port.remote(chosen), seconds)
        return address_of(chosen, port)

    def _show(self, line: bytes) -> None:
        # Who waits for whom is news where people start tasks, and none here.
        if not line.startswith(self._own_lines):
            show(self._name.lower(), line)

    def _end(self, code: int, ended: Callable[[RayTask], None]) -> None:
        with self._building:  # some end at once
            self._code = code
        self._over.set()
        self.close()
        ended(self)


def _config(job: Job, index: int, address: str) -> dict[str, object]:
    """A cluster for one task, which looks at no other address than its own."""
    cluster = {"worker": [address], "ps": [address]}
    cluster[job] = [address] * (index + 1)
    return {"cluster": cluster, "task": {"type": job, "index": index}}


_LOOPBACK = "127.0.0.1"


@final
class RayTasks:
    """Workers and parameter servers, each in a bundle of its own."""

    def __init__(
        self,
        cluster: RayCluster,
        bundles: Sequence[Mapping[str, float]],
        placement: str,
        seconds: float,
    ) -> None:
        self.places: list[WorkerPlace[RayTask]] = []
        self._cluster = cluster
        self._seconds = seconds
        self._servers: list[RayTask] = []
        self._calls: CalledTasks | None = None
        self._is_closed = False
        self._failures: dict[tuple[Job, int], str] = {}
        try:
            # Nobody has to call from elsewhere if there is no other machine.
            self._host = _LOOPBACK if len(cluster.machines()) == 1 else None
            self._actors = RayActors(cluster, bundles, placement, seconds)
            # Registered after Ray's own end of this process, so it comes before that.
            atexit.register(self.close)
        except BaseException:
            cluster.close()
            raise

    def start(
        self,
        servers: Sequence[Mapping[str, str]],
        workers: Sequence[Mapping[str, str]],
    ) -> None:
        """Start processes with these environments."""

        def serving(number: int) -> RayTask | None:
            return self._started("ps", number, number, servers[number], lambda _: None)

        def working(number: int) -> WorkerPlace[RayTask]:
            def start(ended: Ended) -> RayTask | None:
                bundle = len(servers) + number
                return self._started("worker", number, bundle, workers[number], ended)

            return WorkerPlace(start)

        with ThreadPoolExecutor(len(servers) + len(workers)) as pool:
            serve = pool.map(serving, range(len(servers)))
            self.places = list(pool.map(working, range(len(workers))))
            self._servers = [task for task in serve if task is not None]
        if self._failures:
            raise ClusterError(" ".join(self._failures.values()))

    def call(self, secret: Secret, patience: float) -> CalledTasks:
        """The connections to them."""
        workers = (place.current for place in self.places)
        self._calls = CalledTasks(
            [task.called for task in workers if task is not None],
            [task.called for task in self._servers],
            self._renewed,
            secret,
            self._seconds,
            patience,
        )
        return self._calls

    def close(self) -> None:
        """End all, and let go of the cluster; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._calls is not None:
            self._calls.hang_up()
        self._actors.close()
        self._cluster.close()

    def _renewed(self, worker: int) -> CalledTask:
        task = self.places[worker].fresh()
        if task is None:
            why = self._failures.get(("worker", worker), "All processes were ended.")
            raise WorkerLost(f"Worker {worker} is lost. {why}")
        return task.called

    def _started(
        self,
        job: Job,
        number: int,
        bundle: int,
        variables: Mapping[str, str],
        ended: Ended,
    ) -> RayTask | None:
        """A process; None, with the reason kept, if there is none."""
        if self._is_closed or not threading.main_thread().is_alive():
            return None
        try:
            task = RayTask(
                self._actors,
                bundle,
                job,
                number,
                variables,
                self._host,
                self._seconds,
                ended,
            )
        except self._cluster.ray.exceptions.RayError as error:
            *_, last = str(error).strip().splitlines()
            self._failures[job, number] = f"Ray does not start it: {last.strip()}."
            return None
        self._failures.pop((job, number), None)
        return task


@final
class RayProcesses(AbstractWorkerBackend):
    """Starts workers and parameter servers on the machines of a Ray cluster.

    Ray finds room for them, starts them and sees when they end; a worker that ends is
    started again, on another machine if its own was lost. Variables and functions do
    not go through Ray but over TCP, between processes that know each other by a secret
    that is made here. What they print appears behind their names in this process's
    standard error. All machines need the same Python packages as this one.

    Args:
      workers: how many.
      parameter_servers: how many.
      devices_per_worker: how many CPU devices each worker simulates, without GPUs.
      cpus_per_worker: as Ray counts them, and as many threads compute for it.
      gpus_per_worker: each of them is a replica.
      resources_per_worker: other resources of Ray's, by name.
      cpus_per_server: as Ray counts them.
      placement: "SPREAD" on many machines, or Ray's other words for it.
      address: of the cluster; by default that to which this process is connected, or
        `RAY_ADDRESS`, or a Ray of this machine that is started, and ended with this.
      working_dir: a folder that is copied to all machines, with modules of yours.
      start_seconds: the time for Ray to find room, and for processes to start.
      patience: seconds without a sign of life after which one that was asked something
        is lost.

    Attributes:
      num_workers: how many workers there are.
      replicas_per_worker: how many devices each worker has.
      platforms: the platform of these devices.
      servers: the parameter servers.

    Raises:
      ValueError: a number or word that cannot be.
      MissingExtraError: Ray is not installed.
      ClusterError: Ray does not answer, or has no room; or a process did not start.
    """

    def __init__(
        self,
        workers: int,
        parameter_servers: int,
        devices_per_worker: int = 1,
        *,
        cpus_per_worker: float = 1.0,
        gpus_per_worker: int = 0,
        resources_per_worker: Mapping[str, float] | None = None,
        cpus_per_server: float = 1.0,
        placement: str = "SPREAD",
        address: str | None = None,
        working_dir: str | None = None,
        start_seconds: float = 300.0,
        patience: float = peer.PATIENCE,
    ) -> None:
        self.num_workers = positive("workers", workers)
        servers = positive("parameter_servers", parameter_servers)
        simulated = positive("devices_per_worker", devices_per_worker)
        devices = None if gpus_per_worker else simulated
        if placement not in PLACEMENTS:
            raise ValueError(
                f"`placement` was {shown(placement)}; one of {', '.join(PLACEMENTS)} "
                "was wanted."
            )
        needs = {"CPU": cpus_per_worker, "GPU": gpus_per_worker}
        bundle = _bundle({**needs, **(resources_per_worker or {})})
        bundles = [_bundle({"CPU": cpus_per_server})] * servers + [bundle] * workers
        secret = Secret.random()
        environment = _environment(secret, with_modules=working_dir is None)
        cpus = math.ceil(sum(each.get("CPU", 0.0) for each in bundles))
        cluster = RayCluster(address, cpus, working_dir)
        tasks = RayTasks(cluster, bundles, placement, start_seconds)
        self._close = weakref.finalize(self, tasks.close)
        try:
            tasks.start(
                [_of_server(environment, cpus_per_server)] * servers,
                [_of_worker(environment, cpus_per_worker, devices)] * workers,
            )
            self._calls = tasks.call(secret, patience)
        except BaseException:
            self._close()
            raise
        self._tasks, self.servers = tasks, self._calls.servers
        self.replicas_per_worker = self._calls.told["devices"]
        self.platforms = (self._calls.told["platform"],)

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new process of a worker; the one before is ended, if it has not.

        Raises:
          WorkerLost: it did not start; the message has the last lines that it wrote.
        """
        return self._calls.start(worker, incarnation)

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        self._tasks.places[worker].kill()

    def close(self) -> None:
        """End all processes, and a Ray that was started for them."""
        self._close()


def _bundle(resources: Mapping[str, float]) -> dict[str, float]:
    """What Ray has to find for one process."""
    bundle = {name: number for name, number in resources.items() if number}
    if not bundle or min(bundle.values()) < 0:
        raise ValueError(
            f"A process was to have {dict(resources)} of Ray's resources; numbers from "
            "0 on were wanted, and something above 0, such as 0.1 CPUs."
        )
    return bundle


def _environment(secret: Secret, with_modules: bool) -> dict[str, str]:
    """What processes get of this one's environment, and the secret."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(HANDED_ON)}
    if with_modules:
        own = [os.path.abspath(entry) for entry in sys.path]
        installed = (sys.prefix, sys.base_prefix)
        own = [entry for entry in own if not entry.startswith(installed)]
        kept["PYTHONPATH"] = os.pathsep.join(own)
    return kept | secret.variables()


def _of_server(environment: Mapping[str, str], cpus: float) -> dict[str, str]:
    return _of_worker(environment, cpus, 1)


def _of_worker(
    environment: Mapping[str, str], cpus: float, devices: int | None
) -> dict[str, str]:
    """The environment of a process, which simulates devices unless it has GPUs."""
    own = local_processes.of_child(environment, devices or 1, max(1, int(cpus)))
    own |= {_secret.VARIABLE: environment[_secret.VARIABLE]}
    if devices is None:
        del own["JAX_PLATFORMS"]
        own |= {k: v for k, v in environment.items() if k == "JAX_PLATFORMS"}
    return own
