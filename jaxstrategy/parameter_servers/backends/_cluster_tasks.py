"""`ClusterTasks`: workers and parameter servers that somebody else has started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers.backends._called_tasks import (
    CalledTask,
    CalledTasks,
)
from jaxstrategy.parameter_servers.backends._checked_cluster import checked_cluster
from jaxstrategy.parameter_servers.backends._served_task import checked_secret
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._remote import RemoteWorker


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
        self._workers = workers
        self._calls = CalledTasks(
            workers,
            servers,
            workers.__getitem__,
            checked_secret(servers[0].address),
            start_seconds,
            patience,
        )

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return len(self._workers)

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
        """A new life of a worker, as soon as its process is there."""
        return self._calls.start(worker, incarnation)

    def close(self) -> None:
        """Let go of the tasks, which wait for another coordinator."""
        self._calls.close()
