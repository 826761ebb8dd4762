"""`RayProcesses`: workers and parameter servers on the machines of a Ray cluster."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy.launch._options import PLACEMENTS
from jaxstrategy.launch._ray import HANDED_ON, RayCluster
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers.backends import _child_environment
from jaxstrategy.parameter_servers.backends._ray_tasks import RayTasks
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._remote import RemoteWorker
from jaxstrategy.processes import _secret
from jaxstrategy.processes._secret import Secret
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import positive


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
        patience: float = _peer.PATIENCE,
    ) -> None:
        self._num_workers = positive("workers", workers)
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
        self._tasks = tasks

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._num_workers

    @property
    def replicas_per_worker(self) -> int:
        """How many devices each worker has."""
        return self._calls.told["devices"]

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platform of the workers' devices."""
        return (self._calls.told["platform"],)

    @property
    def servers(self) -> Sequence[AbstractServer]:
        """The parameter servers."""
        return self._calls.servers

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
    own = _child_environment.of_child(environment, devices or 1, max(1, int(cpus)))
    own |= {_secret.VARIABLE: environment[_secret.VARIABLE]}
    if devices is None:
        del own["JAX_PLATFORMS"]
        own |= {k: v for k, v in environment.items() if k == "JAX_PLATFORMS"}
    return own
