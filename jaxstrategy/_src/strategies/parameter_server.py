"""Variables on parameter servers, functions on workers that may vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.contexts import context
from jaxstrategy._src.inputs.dataset import (
    DeferredDataset,
    refuse_for_each_replica,
)
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy._src.parameter_servers import worker
from jaxstrategy._src.parameter_servers.backends.chosen_backend import chosen_backend
from jaxstrategy._src.parameter_servers.backends.threads import WorkerSide
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractWorkerBackend,
    ServerPool,
)
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.scheduled.server_executor import ServerExecutor
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.dividing_data import require_function
from jaxstrategy._src.strategies.server_optimizer import ServerOptimizer
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.values.types import PyTree
from jaxstrategy._src.variables.partitioners import Partitioner
from jaxstrategy._src.variables.server_variables import ServerVariables

if TYPE_CHECKING:
    from optax import GradientTransformation


class Closing(Protocol):
    """What is to be closed before the workers end."""

    def close(self) -> None: ...


@final
class ParameterServerStrategy(Strategy):
    """Variables on parameter servers; workers run functions that a coordinator sends.

    The workers go on without each other: each pulls what a function reads, computes,
    and pushes what it changes. One that vanishes costs only the function that it was
    running, which another one runs again. Functions are scheduled by a
    `coordinator.ClusterCoordinator`. `strategy.run` in such a function runs a step on
    all devices of the worker, whose number is `num_replicas_in_sync`.

    Args:
      cluster_resolver: the cluster that the workers and servers are; by default that of
        `TF_CONFIG`, or of the launcher.
      variable_partitioner: divides variables into shards on several servers; see
        `experimental.partitioners`.
      workers: without a cluster: how many to start on this host.
      parameter_servers: likewise.
      backend: what starts them: "processes", the default, "threads" of this process, or
        "ray"; or an object such as `coordinator.LocalProcesses`.

    Raises:
      ValueError: a cluster without workers or servers, or with unknown jobs; both a
        cluster and numbers.
      TypeError: something else than these.

    Attributes:
      coordinator: the one that schedules functions; None before there is one.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> with strategy.scope():
    ...     total = js.Variable(0.0, name="total")
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     @coordinator.function
    ...     def add(x):
    ...         total.assign_add(x)
    ...     for _ in range(10):
    ...         _ = coordinator.schedule(add, (2.0,))
    ...     coordinator.join()
    >>> total.value()
    Array(20., dtype=float32)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        workers: int | None = None,
        parameter_servers: int | None = None,
        backend: str | AbstractWorkerBackend | None = None,
    ) -> None:
        self.coordinator: Closing | None = None
        self._cluster_resolver = cluster_resolver
        self._backend = chosen_backend(
            cluster_resolver, workers, parameter_servers, backend
        )
        replicas = Replicas.on(_stand_ins(self._backend.replicas_per_worker))
        self._pool = ServerPool(self._backend.servers)
        home = Replicas.on(list(_devices.default_devices()[:1]))
        variables = ServerVariables(self._pool, home, replicas, variable_partitioner)
        executor = lambda strategy, _: ServerExecutor(strategy, self._pool)  # noqa: E731
        self._compose(
            Choices(
                replicas,
                variables=variables,
                executor=executor,
                is_between_graph=True,
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that was given; None without one."""
        return self._cluster_resolver

    @property
    def backend(self) -> AbstractWorkerBackend:
        """The backend that starts the workers and servers."""
        return self._backend

    @property
    def server_pool(self) -> ServerPool:
        """The parameter servers, and which variables are there."""
        return self._pool

    def optimizer(
        self, tx: GradientTransformation, variables: PyTree
    ) -> ServerOptimizer:
        """An optimizer of Optax that updates variables on their servers.

        Only gradients travel, and no update is lost: a server changes a variable and
        what the optimizer keeps of it at once.

        Args:
          tx: the transformation, `optax.adam(1e-3)`. Each variable has its own state.
          variables: a pytree of variables of this strategy.

        Returns:
          An object whose `apply(gradients)` functions call.

        Raises:
          TypeError: a leaf is no variable; `tx` is no transformation.
          ValueError: a variable is not on a parameter server of this strategy.

        >>> import optax
        >>> import jaxstrategy as js
        >>> strategy = js.ParameterServerStrategy(workers=1, parameter_servers=1,
        ...                                       backend="threads")
        >>> with strategy.scope():
        ...     w = js.Variable(3.0, name="w")
        >>> optimizer = strategy.optimizer(optax.sgd(0.5), w)
        >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        ...     @coordinator.function
        ...     def step():
        ...         optimizer.apply(js.grad(lambda: w**2, w)())
        ...     _ = coordinator.schedule(step)
        ...     coordinator.join()
        >>> w.value()
        Array(0., dtype=float32)
        """
        return ServerOptimizer(self, tx, variables)

    def close(self) -> None:
        """End all workers and servers that were started; may be called twice."""
        if self.coordinator is not None:
            self.coordinator.close()
        self._backend.close()

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DeferredDataset:
        """`dataset`, each of its global batches divided over a worker's replicas.

        For the function given to `ClusterCoordinator.create_per_worker_dataset`, or to
        be given to that itself: the batches are read on the workers, each of which
        reads all of them.

        Args:
          dataset: where batches come from, as of other strategies.
          options: see `InputOptions`.

        Returns:
          What cannot be iterated over directly.

        Raises:
          TypeError: `dataset` is nothing that batches can be read from.
          ValueError: `options` ask for an input pipeline for each replica.
          ContextError: inside `run`.
        """
        context.require_host(self, "experimental_distribute_dataset")
        checked = checked_input_options(options)
        refuse_for_each_replica(checked)
        return DeferredDataset(dataset, is_function=False, options=checked)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DeferredDataset:
        """The batches of what `dataset_fn` makes, each for one replica of a worker.

        As `experimental_distribute_dataset`. The context says that there is one input
        pipeline, and as many replicas as one worker has.

        Args:
          dataset_fn: given an `InputContext`, returns where batches come from.
          options: see `InputOptions`.

        Returns:
          What cannot be iterated over directly.

        Raises:
          TypeError: `dataset_fn` cannot be called.
          ContextError: inside `run`.
        """
        context.require_host(self, "distribute_datasets_from_function")
        require_function(dataset_fn)
        checked = checked_input_options(options)
        return DeferredDataset(dataset_fn, is_function=True, options=checked)

    def __reduce__(self) -> tuple[object, ...]:
        if context.current().is_shipping:
            return _on_worker, (self._backend.num_workers,)
        return super().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            "A ParameterServerStrategy cannot be copied: it stands for processes that "
            "live. Make another one."
        )


def _on_worker(num_workers: int) -> ParameterServerStrategy:
    """The strategy on a worker to which something was sent that refers to it."""
    surroundings = worker.current()
    assert surroundings is not None, "a worker takes apart what it was sent"
    return ParameterServerStrategy(backend=WorkerSide(surroundings, num_workers))


def _stand_ins(count: int) -> list[_devices.Device]:
    """The devices of this process for which functions of workers are traced.

    Raises:
      ValueError: it has fewer than a worker.
    """
    devices = _devices.default_devices()
    if len(devices) < count:
        raise ValueError(
            f"Each worker has {count} devices, and this process {len(devices)}, of "
            f"which functions are traced. Call `js.simulate({count})` first, which "
            "makes some of the CPU."
        )
    return list(devices[:count])
