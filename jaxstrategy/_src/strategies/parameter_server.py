"""`ParameterServerStrategy`, and optimizers whose variables are on servers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

import jax
import jax.numpy as jnp

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.environment import (
    VARIABLE as TF_CONFIG,
    TFConfigClusterResolver,
)
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.inputs.dataset import DeferredDataset, refuse_for_each_replica
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    checked_input_options,
)
from jaxstrategy._src.parameter_servers import worker
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    ClusterTasks,
    is_for_servers,
)
from jaxstrategy._src.parameter_servers.backends.local_processes import LocalProcesses
from jaxstrategy._src.parameter_servers.backends.ray_processes import RayProcesses
from jaxstrategy._src.parameter_servers.backends.threads import Threads, WorkerSide
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.parameter_servers.worker import AbstractWorkerBackend
from jaxstrategy._src.reductions.rows import named
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.scheduled.functions import ServerExecutor
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy, require_function
from jaxstrategy._src.text import listed, shown
from jaxstrategy._src.values.arrays import PyTree, Value
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.slices import is_slices
from jaxstrategy._src.variables import access, remote_kinds
from jaxstrategy._src.variables.policy import ServerVariables
from jaxstrategy._src.variables.remote_kinds import exported_update, server_kind_of
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.sharding_choice import Partitioner
from jaxstrategy._src.variables.variable import Variable

if TYPE_CHECKING:
    from optax import GradientTransformation


def update_together(
    variables: Sequence[Variable],
    fn: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Value],
) -> None:
    """Assigns variables of one server the results of `fn` of them, in one update."""
    found = map(server_kind_of, variables)
    kinds = [kind for kind in found if kind is not None]
    assert len(kinds) == len(variables), "the optimizer has checked its variables"
    arrays = [jnp.asarray(operand) for operand in operands]
    if access.tracing() is None:
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        program = exported_update(fn, [*types, *arrays])
        others = [kind.cell.number for kind in kinds[1:]]
        kinds[0].push_update(program, arrays, others)
        return
    name, count = f"{remote_kinds.UPDATE}_of_{len(variables)}", len(arrays)
    marked = named(name, lambda *given: tuple(fn(*given[count:], *given[:count])))
    holders = [variable._access().holder for variable in variables]
    new = marked(*arrays, *(holder[...] for holder in holders))
    for kind, holder, value in zip(kinds, holders, new, strict=True):
        kind.note("update")
        holder[...] = value


@final
class ServerOptimizer:
    """Updates variables on their servers, with a transformation of Optax.

    Only gradients travel. A server changes a variable and what the optimizer keeps of
    it together, so that no update of another worker is lost. Each variable, or shard of
    one, has a state of its own: transformations that need all gradients at once, such
    as `optax.clip_by_global_norm`, belong into the function, before `apply`.

    Gradients that are `IndexedSlices` update their rows only, and only their rows of
    the state ("lazy": a row that is not used is not decayed); rows that are there more
    than once are added up.

    Made by `strategy.optimizer(tx, variables)`.

    Args:
      strategy: the strategy.
      tx: the transformation.
      variables: a pytree of variables of the strategy.

    Attributes:
      slots: what it keeps of each variable, as variables beside it, in the order of
        `variables`; `js.checkpoint` saves them like others.

    Raises:
      TypeError: a leaf is no variable.
      ValueError: a variable is not on a parameter server of the strategy.
    """

    def __init__(
        self,
        strategy: AbstractStrategy,
        tx: GradientTransformation,
        variables: PyTree,
    ) -> None:
        if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
            raise TypeError(
                f"`tx` was {shown(tx)}; a transformation of Optax was wanted: "
                "`optax.adam(1e-3)`."
            )
        self._tx: Any = tx
        leaves, self._treedef = jax.tree.flatten(variables, is_leaf=_is_variable)
        self._variables = [_checked(leaf, strategy) for leaf in leaves]
        self.slots = [
            [_slots(strategy, tx, shard) for shard in _shards(variable)]
            for variable in self._variables
        ]

    def apply(self, gradients: PyTree) -> None:
        """Updates all variables; in a function when it has ended, outside at once."""
        leaves, structure = jax.tree.flatten(gradients, is_leaf=is_slices)
        if structure != self._treedef:
            raise ValueError(
                f"`gradients` has the structure {structure}; that of the variables, "
                f"{self._treedef}, was wanted."
            )
        for variable, slots, gradient in zip(
            self._variables, self.slots, leaves, strict=True
        ):
            self._apply(variable, slots, gradient)

    def _apply(
        self,
        variable: Variable | ShardedVariable,
        slots: Sequence[Sequence[Variable]],
        gradient: Value,
    ) -> None:
        shards = _shards(variable)
        rows = [shard.shape[0] for shard in shards[:-1]]
        starts = itertools.accumulate(rows, initial=0)
        if is_slices(gradient):
            ids = jnp.asarray(gradient.indices).reshape(-1)
            values = jnp.asarray(gradient.values).reshape(-1, *variable.shape[1:])
            for shard, own, start in zip(shards, slots, starts, strict=True):
                update = functools.partial(self._updated_rows, start)
                update_together([shard, *own], update, [ids, values])
            return
        gradient, shape = jnp.asarray(gradient), tuple(variable.shape)
        if gradient.shape != shape:
            raise ValueError(
                f"The gradient of variable {variable.name!r} has shape "
                f"{gradient.shape}; {shape} was wanted."
            )
        for shard, own, start in zip(shards, slots, starts, strict=True):
            one = len(shards) == 1
            part = gradient if one else gradient[start : start + shard.shape[0]]
            update_together([shard, *own], self._updated, [part])

    def _updated(
        self, value: jax.Array, *slots_and_gradient: jax.Array
    ) -> list[jax.Array]:
        *slots, gradient = slots_and_gradient
        changes, state = self._tx.update(gradient, self._state(value, slots), value)
        return [(value + changes).astype(value.dtype), *jax.tree.leaves(state)]

    def _updated_rows(
        self, start: int, value: jax.Array, *slots_ids_and_gradients: jax.Array
    ) -> list[jax.Array]:
        *slots, ids, gradients = slots_ids_and_gradients
        rows, sums = _summed_by_row(ids - start, gradients, value.shape[0])
        old, *parts = [
            each.at[rows].get(mode="fill", fill_value=0)
            if each.shape == value.shape
            else each
            for each in (value, *slots)
        ]
        changes, state = self._tx.update(sums, self._state(value, parts), old)
        changed = (old + changes).astype(value.dtype)
        return [
            each.at[rows].set(new, mode="drop") if each.shape == value.shape else new
            for each, new in zip(
                (value, *slots), (changed, *jax.tree.leaves(state)), strict=True
            )
        ]

    def _state(self, value: jax.Array, slots: Sequence[jax.Array]) -> PyTree:
        like = jax.eval_shape(self._tx.init, value)
        return jax.tree.unflatten(jax.tree.structure(like), slots)


def _summed_by_row(
    ids: jax.Array, values: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Distinct row numbers and the sums of their values; `length` for other ids."""
    ids = jnp.where((ids >= 0) & (ids < length), ids, length)
    rows, inverse = jnp.unique(
        ids, return_inverse=True, size=ids.size, fill_value=length
    )
    return rows, jax.ops.segment_sum(values, inverse.reshape(-1), ids.size)


def _slots(strategy: AbstractStrategy, tx: Any, shard: Variable) -> list[Variable]:
    """The optimizer state of one shard, as variables on its server."""
    state = tx.init(shard.value())
    extended: Any = getattr(strategy, "extended")  # noqa: B009
    made = []
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f"{shard.name}{jax.tree_util.keystr(path)}"
        with strategy.scope(), extended.colocate_vars_with(shard):
            made.append(Variable(leaf, trainable=False, name=name))
    return made


def _shards(variable: Variable | ShardedVariable) -> list[Variable]:
    is_sharded = isinstance(variable, ShardedVariable)
    return list(variable.variables) if is_sharded else [variable]


def _is_variable(node: object) -> bool:
    return isinstance(node, (Handle, ShardedVariable))


def _checked(leaf: object, strategy: AbstractStrategy) -> Variable | ShardedVariable:
    if not isinstance(leaf, (Variable, ShardedVariable)):
        raise TypeError(
            f"`variables` holds {shown(leaf)}, a {type(leaf).__name__}; variables "
            "were wanted."
        )
    for shard in _shards(leaf):
        if server_kind_of(shard) is None or shard.strategy is not strategy:
            raise ValueError(
                f"Variable {shard.name!r} is not on a parameter server of "
                f"{strategy!r}. Make it in the scope of the strategy."
            )
    return leaf


class Closing(Protocol):
    """A coordinator, which is to be closed before the workers end."""

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
        self._backend = _chosen_backend(
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
        be given to that itself: the batches are read on the workers, and each of them
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
    """Unpickles, on a worker, a strategy that a shipped object refers to."""
    surroundings = worker.current()
    assert surroundings is not None, "a worker unpickles it"
    return ParameterServerStrategy(backend=WorkerSide(surroundings, num_workers))


def _stand_ins(count: int) -> list[_devices.Device]:
    """Devices of this process in place of a worker's, to trace functions for."""
    devices = _devices.default_devices()
    if len(devices) < count:
        raise ValueError(
            f"Each worker has {count} devices, and this process {len(devices)}, of "
            f"which functions are traced. Call `js.simulate({count})` first, which "
            "makes some of the CPU."
        )
    return list(devices[:count])


def _chosen_backend(
    resolver: ClusterResolver | None,
    workers: int | None,
    parameter_servers: int | None,
    backend: str | AbstractWorkerBackend | None,
) -> AbstractWorkerBackend:
    if isinstance(backend, AbstractWorkerBackend):
        _check_nothing_else(
            resolver, workers, parameter_servers, "`backend` is an object"
        )
        return backend
    if backend == "threads":
        return Threads(workers or 1, parameter_servers or 1)
    if backend == "ray":
        if workers is None or resolver is not None:
            raise ValueError(
                "backend='ray' starts workers and parameter servers by itself: say how "
                "many, as in workers=4, parameter_servers=2, and give no cluster."
            )
        return RayProcesses(workers, parameter_servers or 1)
    if backend not in (None, "processes"):
        raise TypeError(
            f"`backend` was {shown(backend)}; 'processes', 'threads', 'ray' or an "
            "object that starts workers was wanted."
        )
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"`cluster_resolver` was {shown(resolver)}; one of "
            "`jaxstrategy.cluster_resolver` was wanted, such as a "
            "`SimpleClusterResolver`."
        )
    of_environment = TFConfigClusterResolver()
    if resolver is None and is_for_servers(of_environment.cluster_spec()):
        resolver = of_environment
    if resolver is None and workers is not None:
        servers = 1 if parameter_servers is None else parameter_servers
        return LocalProcesses(workers, servers)
    _check_nothing_else(None, workers, parameter_servers, "there is a cluster")
    return ClusterTasks(resolver or of_environment)


def _check_nothing_else(
    resolver: ClusterResolver | None,
    workers: int | None,
    parameter_servers: int | None,
    how: str,
) -> None:
    given = {
        "cluster_resolver": resolver,
        "workers": workers,
        "parameter_servers": parameter_servers,
    }
    names = [f"`{name}`" for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"{how[0].upper()}{how[1:]}, which says which workers and parameter "
            f"servers there are, and {listed(names, 3)} was given too. Leave one out; "
            f"a cluster may be that of {TF_CONFIG} in the environment."
        )
