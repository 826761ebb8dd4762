"""Workers and parameter servers in this process: `Threads`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast, final

from jax import export

from jaxstrategy._src.errors import ParameterServerLost
from jaxstrategy._src.parameter_servers.store import Store
from jaxstrategy._src.parameter_servers.worker import (
    AbstractWorkerBackend,
    WorkerContext,
    WorkerEngine,
)
from jaxstrategy._src.replicas import devices
from jaxstrategy._src.text import positive


@final
class WorkerSide(AbstractWorkerBackend):
    """Has the worker's connections to the servers, and starts nothing."""

    def __init__(self, surroundings: WorkerContext, num_workers: int) -> None:
        self.num_workers = num_workers
        self.replicas_per_worker = surroundings.replicas.count
        self.servers = surroundings.servers

    def start(self, worker: int, incarnation: int) -> NoReturn:
        """None: workers start no workers."""
        raise RuntimeError(
            "The function of a dataset, which a worker runs, was to start workers. "
            "Make the ClusterCoordinator outside of it."
        )

    def close(self) -> None:
        """Nothing: what there is belongs to the coordinator."""


@final
class KillableServer:
    """A server of this process: may be killed, and started again with nothing."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.store: Store | None = Store()

    def __getattr__(self, name: str) -> Any:
        store = self.store  # once: another thread may kill it meanwhile
        if store is None:
            raise ParameterServerLost(f"Parameter server {self._number} was killed.")
        return getattr(store, name)


@final
class Threads(AbstractWorkerBackend):
    """Everything in this process: for notebooks, and for tests of what functions mean.

    A worker is a thread with devices of its own, as far as there are enough; a server
    is a dictionary. Reading a variable copies nothing. No worker is safe from what
    another one does to the process; `kill` simulates the death of one.

    Args:
      workers: how many.
      parameter_servers: how many.
      devices_per_worker: how many devices each worker has.

    Attributes:
      num_workers: how many workers there are.
      replicas_per_worker: how many devices each worker has.
      platforms: the platform of these devices.
      servers: the parameter servers.

    Raises:
      ValueError: there are fewer devices than one worker is to have.

    >>> import jaxstrategy as js
    >>> backend = js.coordinator.Threads(workers=2, parameter_servers=1)
    >>> strategy = js.ParameterServerStrategy(backend=backend)
    """

    can_restart_servers = True

    def __init__(
        self, workers: int, parameter_servers: int, devices_per_worker: int = 1
    ) -> None:
        self.num_workers = positive("workers", workers)
        count = positive("parameter_servers", parameter_servers)
        self.replicas_per_worker = positive("devices_per_worker", devices_per_worker)
        self._devices = devices.default_devices()
        if len(self._devices) < devices_per_worker:
            raise ValueError(
                f"`devices_per_worker` was {devices_per_worker}, and there are "
                f"{len(self._devices)} devices. `js.simulate(n)` makes some."
            )
        self.platforms = (export.default_export_platform(),)
        self._killable = tuple(map(KillableServer, range(count)))
        self.servers = cast("Sequence[Store]", self._killable)
        self._lives: dict[int, WorkerEngine] = {}

    def start(self, worker: int, incarnation: int) -> WorkerEngine:
        """A new life of a worker; it has nothing of the last one."""
        each, all_devices = self.replicas_per_worker, self._devices
        own = [all_devices[(worker * each + i) % len(all_devices)] for i in range(each)]
        life = self._lives[worker] = WorkerEngine(worker, self.servers, own)
        return life

    def kill(self, worker: int) -> None:
        """End a worker as if its process had died; another one is started."""
        self._lives[worker].kill()

    def kill_server(self, server: int) -> None:
        """End a parameter server as if its process had died, with what it has."""
        self._killable[server].store = None

    def restart_servers(self, servers: Sequence[int]) -> None:
        """New parameter servers, which have nothing."""
        for number in servers:
            self._killable[number].store = Store()

    def close(self) -> None:
        """End all workers."""
        for life in self._lives.values():
            life.kill()
