"""`LocalProcesses`: workers and parameter servers as processes of this host."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import final

from jaxstrategy._errors import ParameterServerLost, WorkerLost
from jaxstrategy.launch._child_process import Guard
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers._restarted_server import RestartedServer
from jaxstrategy.parameter_servers.backends import _child_environment, _child_roles
from jaxstrategy.parameter_servers.backends._child import Task
from jaxstrategy.parameter_servers.backends._child_devices import ChildDevices
from jaxstrategy.parameter_servers.backends._child_process import (
    START_SECONDS,
    ChildProcess,
)
from jaxstrategy.parameter_servers.backends._children import Children
from jaxstrategy.parameter_servers.backends._worker_place import Ended, WorkerPlace
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote import RemoteServer, RemoteWorker
from jaxstrategy.text._whole_numbers import positive

_ROLES = _child_roles.__name__


@final
class LocalProcesses(AbstractWorkerBackend):
    """Starts workers and parameter servers as processes, which end with this one.

    They are connected by pairs of sockets that only they have: there is no address at
    which a stranger could call. What they print appears behind their names in this
    process's standard error. A worker that ends is started again at once.

    Args:
      workers: how many.
      parameter_servers: how many.
      devices_per_worker: by default an equal share of the GPUs that JAX finds; where
        there are none, one CPU device. More of those are simulated.
      start_seconds: the time that a process has to start.
      patience: seconds without a sign of life after which one that was asked something
        is lost.

    Raises:
      ValueError: there is no such number of devices.
    """

    def __init__(
        self,
        workers: int,
        parameter_servers: int,
        devices_per_worker: int | None = None,
        *,
        start_seconds: float = START_SECONDS,
        patience: float = _peer.PATIENCE,
    ) -> None:
        workers = positive("workers", workers)
        parameter_servers = positive("parameter_servers", parameter_servers)
        if devices_per_worker is not None:
            positive("devices_per_worker", devices_per_worker)
        self._devices = ChildDevices.found(workers, devices_per_worker)
        self._patience = patience
        children = Children()
        weakref.finalize(self, children.close)
        self._close = children.close
        starter = _Starter(children, workers, self._devices, start_seconds)
        self._server_children = [starter.server(k) for k in range(parameter_servers)]
        self._servers = [
            RestartedServer(RemoteServer(self._peer(child)))
            for child in self._server_children
        ]
        self._start_server = starter.server
        self._places = [WorkerPlace(starter.worker(k)) for k in range(workers)]

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._places)

    @property
    def replicas_per_worker(self) -> int:
        """How many devices each worker has."""
        return self._devices.count

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platform of the workers' devices."""
        return (self._devices.platform,)

    @property
    def servers(self) -> Sequence[AbstractServer]:
        """The parameter servers."""
        return self._servers

    def start(self, worker: int, incarnation: int) -> RemoteWorker:
        """A new process of a worker; the one before is ended, if it has not.

        Raises:
          WorkerLost: it did not start; the message has the last lines that it wrote.
        """
        child = self._places[worker].fresh()
        if child is None:
            raise WorkerLost(f"Worker {worker} is lost: all processes were ended.")
        for server in self._server_children:
            # Or the worker, which waits for answers only, would take it for lost.
            server.is_ready()
        if not child.is_ready():
            child.kill()
            raise WorkerLost(
                f"Worker {worker} did not start. The last that it wrote:\n"
                f"{child.last_output()}"
            )
        return RemoteWorker(self._peer(child, WorkerLost), child.kill)

    def _peer(
        self, child: ChildProcess, lost: type[Exception] = ParameterServerLost
    ) -> Peer:
        name = child.name.capitalize()
        peer = Peer(name, child.dial, lost, self._patience, child.last_output)
        child.when_ended(peer.close)
        return peer

    def kill(self, worker: int) -> None:
        """End a worker's process, as a crash would; another one is started.

        Callable from any thread.
        """
        self._places[worker].kill()

    @property
    def can_restart_servers(self) -> bool:
        """True."""
        return True

    def restart_servers(self, servers: Sequence[int]) -> None:
        """New processes of parameter servers, and of all workers, which know them.

        Raises:
          ParameterServerLost: one did not start.
        """
        for number in servers:
            old, child = self._server_children[number], self._start_server(number)
            old.kill()
            old.close()
            self._server_children[number] = child
            if not child.is_ready():
                raise ParameterServerLost(
                    f"Parameter server {number} did not start again. The last that it "
                    f"wrote:\n{child.last_output()}"
                )
            self._servers[number].server = RemoteServer(self._peer(child))
        for place in self._places:
            place.renew()

    def close(self) -> None:
        """End all processes: asked to first, then made to."""
        self._close()


@final
class _Starter:
    """Starts the children; holds nothing that would keep the backend alive."""

    def __init__(
        self, children: Children, workers: int, devices: ChildDevices, seconds: float
    ) -> None:
        self._children = children
        self._workers = workers
        self._devices = devices
        self._seconds = seconds
        self._servers: list[ChildProcess] = []
        # The children see the environment as it is now, whatever becomes of it.
        self._environment = dict(os.environ)

    def server(self, number: int) -> ChildProcess:
        child = self._started(
            f"parameter server {number}",
            {"entry": f"{_ROLES}:{_child_roles.SERVER}", "is_light": True},
            _child_environment.of_child(self._environment, 1, 1),
            lambda child: None,
        )
        if child is None:
            raise ParameterServerLost(
                f"Parameter server {number} is lost: all processes were ended."
            )
        self._servers[number:] = [child, *self._servers[number + 1 :]]
        return child

    def worker(self, index: int) -> Callable[[Ended], ChildProcess | None]:
        task = {
            "entry": f"{_ROLES}:{_child_roles.WORKER}",
            "is_light": False,
            "index": index,
        }
        environment = self._devices.environment(self._environment, index, self._workers)

        def start(ended: Ended) -> ChildProcess | None:
            return self._started(f"worker {index}", task, environment, ended)

        return start

    def _started(
        self, name: str, task: Task, environment: Mapping[str, str], ended: Ended
    ) -> ChildProcess | None:
        def make(guard: Guard) -> ChildProcess:
            with contextlib.ExitStack() as closing:
                doors = [closing.enter_context(child.door()) for child in self._servers]
                return ChildProcess(
                    name, task, environment, guard, ended, doors, self._seconds
                )

        return self._children.start(make)
