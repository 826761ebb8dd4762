"""`ParameterServerStrategy` of TensorFlow 1: each worker runs the whole program."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, cast, final

import jax
import numpy as np

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.environment import TFConfigClusterResolver
from jaxstrategy._src.errors import ClusterError, ParameterServerLost
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.input_options import InputContext, InputOptions
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    Task,
    checked_cluster,
    checked_secret,
    reached,
)
from jaxstrategy._src.parameter_servers.peer import Hello, Peer
from jaxstrategy._src.parameter_servers.store import ServerPool, Store
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.scheduled.functions import ServerExecutor
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy, require_function
from jaxstrategy._src.variables.policy import ReplicatedVariables, ServerVariables

_START_SECONDS = 300.0


@final
class BetweenGraphStrategy(Strategy):
    """Asynchronous training as in TensorFlow 1: each worker runs the whole program."""

    def __init__(self, cluster_resolver: ClusterResolver | None = None) -> None:
        resolver = cluster_resolver or TFConfigClusterResolver()
        self._resolver = resolver
        spec, task_type, task_id = resolver._now()
        if not spec:
            self._pipeline, self._num_pipelines = 0, 1
            self._compose(_alone())
            return
        if task_type is None or task_id is None:
            raise ValueError(
                "It is not known which task of the cluster this process is: the "
                "cluster spec came without task type and id. Give both, in TF_CONFIG "
                'as "task": {"type": "worker", "index": 0}.'
            )
        addresses = checked_cluster(spec, task_type)
        # The tasks that train, the chief first.
        pipelines = [
            (job, index)
            for job in ("chief", "worker")
            if job in spec.jobs
            for index in range(spec.num_tasks(job))
        ]
        self._pipeline = pipelines.index((task_type, task_id))
        self._num_pipelines = len(pipelines)
        is_chief = self._pipeline == 0
        servers = [
            _connected(number, address, addresses.servers)
            for number, address in enumerate(addresses.servers)
        ]
        self._pool = _JointPool(servers, is_chief)
        devices = _devices.default_devices()
        # All accelerators of this process; of CPU devices one, as in TensorFlow.
        is_cpu = devices[0].platform == "cpu"
        replicas = Replicas.on(devices[:1] if is_cpu else devices)
        home = Replicas.on(devices[:1])
        self._compose(
            Choices(
                replicas,
                variables=ServerVariables(self._pool, home, replicas),
                executor=lambda strategy, _: ServerExecutor(strategy, self._pool),
                is_chief=is_chief,
                is_between_graph=True,
                task=lambda: (task_type, task_id),
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """As of other strategies; the context says which of the workers this one is."""
        require_function(dataset_fn)

        def of_worker(context: InputContext) -> Any:
            count = context.num_replicas_in_sync
            return dataset_fn(InputContext(self._num_pipelines, self._pipeline, count))

        return super().distribute_datasets_from_function(of_worker, options)


def _alone() -> Choices:
    """Without a cluster: all devices, with variables on the only accelerator or CPU."""
    devices = _devices.default_devices()
    home = devices[0] if len(devices) == 1 else jax.local_devices(backend="cpu")[0]
    replicas = Replicas.on(devices)
    return Choices(
        replicas,
        variables=ReplicatedVariables(replicas, Replicas.on([home])),
        is_chief=True,
        is_between_graph=True,
    )


_PAUSE = 0.05  # between two looks whether a variable is there


@final
class _JointPool(ServerPool):
    """The servers of a strategy, one for each worker process."""

    def __init__(self, servers: Sequence[Store], is_chief: bool) -> None:
        super().__init__(servers)
        self._is_chief = is_chief
        self._in_order = itertools.count()

    def create(self, server: int, value: np.ndarray) -> int:
        """The number of the next variable, once it is there."""
        number, end = next(self._in_order), time.monotonic() + _START_SECONDS
        while not self._is_there(server, number):
            if self._is_chief:
                self.servers[server].create(number, value)
                break
            if time.monotonic() > end:
                raise ClusterError(
                    f"The chief has not made variable number {number} within "
                    f"{_START_SECONDS:.0f} s. All workers run the same program, which "
                    "makes the same variables in the same order; is the chief (or "
                    "worker 0) running?"
                )
            time.sleep(_PAUSE)
        self.know(number, server)
        return number

    def forget(self, number: int) -> None:
        """Nothing: other processes have the variable."""

    def _is_there(self, server: int, number: int) -> bool:
        try:
            self.servers[server].versions([number])
        except LookupError:
            return False
        return True


def _connected(number: int, address: str, servers: Sequence[str]) -> Store:
    """Waits for a server of the job and connects to it."""
    secret = checked_secret(address)
    # All workers of a cluster are one coordinator to its servers.
    job = hashlib.sha256(b"between graph " + repr(tuple(servers)).encode())
    hello = Hello("begin", job.hexdigest(), "between graph")
    task = Task(f"parameter server {number}", address)
    try:
        stream, _ = reached(task, secret, hello, time.monotonic() + _START_SECONDS)
    except ConnectionError as error:
        refuses = isinstance(error, ConnectionAbortedError)
        what = "refuses" if refuses else "cannot be reached"
        raise ClusterError(task.why(what, error)) from error
    peer = Peer(task, secret, hello, ParameterServerLost, first=stream)
    return cast("Store", peer)
