"""The processes of one strategy on a Ray cluster: `RayTasks`."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

from jaxstrategy._errors import ClusterError, WorkerLost
from jaxstrategy.launch._ray import RayActors, RayCluster
from jaxstrategy.parameter_servers.backends._called_tasks import (
    CalledTask,
    CalledTasks,
)
from jaxstrategy.parameter_servers.backends._ray_task import Job, RayTask
from jaxstrategy.parameter_servers.backends._worker_place import Ended, WorkerPlace
from jaxstrategy.processes._secret import Secret

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
