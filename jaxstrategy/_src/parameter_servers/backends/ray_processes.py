"""`RayProcesses`: workers and servers on a Ray cluster."""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.launch.options import PLACEMENTS
from jaxstrategy._src.launch.ray import (
    HANDED_ON,
    RayActors,
    RayCluster,
    RayStartedProcess,
)
from jaxstrategy._src.parameter_servers.backends import local_processes
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    NAMES,
    Job,
    Place,
    StartedProcesses,
    Task,
)
from jaxstrategy._src.parameter_servers.peer import PATIENCE
from jaxstrategy._src.processes import secret as _secret
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text import positive, shown

_PROGRAM = ("-m", "jaxstrategy.parameter_servers")
_NEWS_SECONDS = 5.0  # until it is heard of an end; under load, Ray takes more than one


def _config(job: Job, index: int, address: str) -> dict[str, object]:
    """A cluster for one task, which looks at no other address than its own."""
    cluster = {"worker": [address], "ps": [address]}
    cluster[job] = [address] * (index + 1)
    return {"cluster": cluster, "task": {"type": job, "index": index}}


_LOOPBACK = "127.0.0.1"


@final
class _Bundles(Place):
    """Processes of `python -m jaxstrategy.parameter_servers`, each in its bundle."""

    def __init__(
        self,
        cluster: RayCluster,
        bundles: Sequence[Mapping[str, float]],
        placement: str,
        seconds: float,
        environments: Mapping[Job, Mapping[str, str]],
        servers: int,
        secret: Secret,
    ) -> None:
        super().__init__(secret)
        self._cluster = cluster
        self._seconds = seconds
        self._environments = environments
        self._first_bundles = {"ps": 0, "worker": servers}
        try:
            # Nobody has to call from elsewhere if there is no other machine.
            self._host = _LOOPBACK if len(cluster.machines()) == 1 else None
            self._actors = RayActors(cluster, bundles, placement, seconds)
            # Registered after Ray's own end of this process, so it comes before that.
            atexit.register(self.close)
        except BaseException:
            cluster.close()
            raise

    def task(self, job: Job, number: int) -> Task:
        self.check_open()
        actors, name = self._actors, f"{NAMES[job]} {number}"
        try:
            actor = actors.start(self._first_bundles[job] + number)
            try:
                address = self._address(actor)
                config = json.dumps(_config(job, number, address))
                variables = {**self._environments[job], TF_CONFIG: config}
                arguments = _PROGRAM, variables, None, None, True
                actors.ask(lambda: actor.start.remote(*arguments), self._seconds)
            except BaseException:
                actors.end(actor)
                raise
        except self._cluster.ray.exceptions.RayError as error:
            *_, last = str(error).strip().splitlines()
            raise ClusterError(f"Ray does not start it: {last.strip()}.") from error
        return Task(
            name,
            address,
            lambda over: RayStartedProcess(actors, actor, name, over),
            release=lambda: actors.end(actor),
            # Who waits for whom is news where people start tasks, and none here.
            hidden=f"jaxstrategy: {job} {number}: ",
            news_seconds=_NEWS_SECONDS,
        )

    def _address(self, actor: Any) -> str:
        ask = self._actors.ask
        _, found = ask(lambda: actor.machine.remote(), self._seconds)
        host = self._host or found
        port = ask(lambda: actor.free_port.remote(host), self._seconds)
        return address_of(host, port)

    def end_all(self) -> None:
        atexit.unregister(self.close)
        self._actors.close()
        self._cluster.close()


@final
class RayProcesses(StartedProcesses):
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
        patience: float = PATIENCE,
    ) -> None:
        workers = positive("workers", workers)
        servers = positive("parameter_servers", parameter_servers)
        simulated = positive("devices_per_worker", devices_per_worker)
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
        devices = None if gpus_per_worker else simulated
        environments: dict[Job, dict[str, str]] = {
            "ps": _of_worker(environment, cpus_per_server, 1),
            "worker": _of_worker(environment, cpus_per_worker, devices),
        }
        cpus = math.ceil(sum(each.get("CPU", 0.0) for each in bundles))
        cluster = RayCluster(address, cpus, working_dir)
        start = bundles, placement, start_seconds, environments, servers
        place = _Bundles(cluster, *start, secret)
        super().__init__(place, workers, servers, start_seconds, patience)


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


def _of_worker(
    environment: Mapping[str, str], cpus: float, devices: int | None
) -> dict[str, str]:
    """The environment of a process, which simulates devices unless it has GPUs."""
    own = local_processes.of_child(environment, devices, max(1, int(cpus)))
    return own | {_secret.VARIABLE: environment[_secret.VARIABLE]}
