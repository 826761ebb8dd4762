"""What a strategy is made of on a worker that was sent a reference: `WorkerSide`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, final

from jaxstrategy.parameter_servers._protocol import (
    AbstractServer,
    AbstractWorkerBackend,
)
from jaxstrategy.parameter_servers._worker import WorkerSurroundings


@final
class WorkerSide(AbstractWorkerBackend):
    """Has the worker's connections to the servers, and starts nothing."""

    def __init__(self, surroundings: WorkerSurroundings, num_workers: int) -> None:
        self._surroundings = surroundings
        self._num_workers = num_workers

    @property
    def num_workers(self) -> int:
        """How many workers there are in all."""
        return self._num_workers

    @property
    def replicas_per_worker(self) -> int:
        """How many devices this one has."""
        return self._surroundings.replicas.count

    @property
    def servers(self) -> Sequence[AbstractServer]:
        """The parameter servers."""
        return self._surroundings.servers

    def start(self, worker: int, incarnation: int) -> NoReturn:
        """None: workers start no workers."""
        raise RuntimeError(
            "The function of a dataset, which a worker runs, was to start workers. "
            "Make the ClusterCoordinator outside of it."
        )

    def close(self) -> None:
        """Nothing: what there is belongs to the coordinator."""
