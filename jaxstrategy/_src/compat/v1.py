"""`tf.compat.v1.distribute` over today's classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Self, final

import jax

from jaxstrategy._src import options as _options
from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.compat.adapters import (
    NAMES_IN_V1,
    Adapter,
    AdapterScope,
    OlderStrategy,
    delegated,
    first_named,
    made_by,
    read_variable,
    refused,
    wait_for,
)
from jaxstrategy._src.compat.inputs import (
    WHOLE_GROUPS,
    GetsNext,
    InputIterator,
    MultiStepContext,
    NumpyDataset,
    OlderDataset,
    as_dataset,
    numpy_dataset,
    require_iterator,
)
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import (
    ReplicaContext as _ReplicaContext,
    core_of,
)
from jaxstrategy._src.inputs.input_options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from jaxstrategy._src.options import (
    CommunicationOptions,
    ReduceOp,
    VariableAggregation,
)
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import (
    between_graph,
    current,
    mirrored,
    strategy as _strategy,
    tpu,
)
from jaxstrategy._src.strategies.choices import check_function
from jaxstrategy._src.strategies.destinations import Destinations, check_reduced
from jaxstrategy._src.strategies.extended import StrategyExtended as _Extended
from jaxstrategy._src.text import positive, shown
from jaxstrategy._src.tpu.device_assignment import DeviceAssignment
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.variables.variable import Variable


class RunOptions(NamedTuple):
    """Options of `Strategy.run` in TensorFlow 1. None of them has an effect here.

    Shapes are static, and XLA compiles each step in any case. What can be chosen here
    is in `jaxstrategy.RunOptions`, which `run` takes, too.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.run(lambda x: 2 * x, (3,), options=v1.RunOptions())
    Array(6, dtype=int32, weak_type=True)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


def _options_of(
    options: CommunicationOptions | None, hints: CommunicationOptions | None
) -> CommunicationOptions | None:
    if hints is None:
        return options
    if options is not None:
        raise ValueError(
            "`options` and `experimental_hints` are two names of one argument, and "
            "both were given. Use `options`."
        )
    if not isinstance(hints, CommunicationOptions):
        raise TypeError(
            f"`experimental_hints` was {hints!r}; `experimental.CollectiveHints(...)` "
            "were wanted, for example with `bytes_per_pack=2**20`."
        )
    return hints


class StrategyExtended(Adapter):
    """The methods of `tf.compat.v1.distribute.StrategyExtended`.

    It is `strategy.extended` of a strategy of `compat.v1`. Members that
    `jaxstrategy.StrategyExtended` has, too, do the same.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.extended.call_for_each_replica(lambda x: x + 1, (np.int32(2),))
    Array(3, dtype=int32)
    """

    _names = NAMES_IN_V1
    _core_path = "strategy.core.extended"
    _core: _Extended

    def __init__(self, container_strategy: _strategy.Strategy) -> None:
        core = core_of(container_strategy)
        if not isinstance(core, _strategy.Strategy):
            raise TypeError(
                f"`container_strategy` was {shown(container_strategy)}; a strategy was "
                "wanted. `strategy.extended` is the one that it has."
            )
        super().__init__(core.extended)
        self._strategy = core

    worker_devices: tuple[Device, ...] = delegated(_Extended.worker_devices)
    parameter_devices: tuple[Device, ...] = delegated(_Extended.parameter_devices)
    should_checkpoint: bool = delegated(_Extended.should_checkpoint)
    should_save_summary: bool = delegated(_Extended.should_save_summary)
    experimental_between_graph: bool = delegated(_Extended.experimental_between_graph)
    experimental_should_init: bool = delegated(_Extended.experimental_should_init)
    experimental_require_static_shapes: bool = delegated(
        _Extended.experimental_require_static_shapes
    )
    update = delegated(_Extended.update)
    value_container = delegated(_Extended.value_container)
    variable_created_in_scope = delegated(_Extended.variable_created_in_scope)
    colocate_vars_with = delegated(_Extended.colocate_vars_with)

    def call_for_each_replica(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        """`strategy.run` under its older name: enters the scope by itself."""
        check_function(fn, "extended.call_for_each_replica")
        _context.require_cross_replica(self._strategy, "extended.call_for_each_replica")
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(
        self,
        reduce_op: ReduceOp | VariableAggregation | str,
        value: PyTree,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over the replicas and placed on `destinations`."""
        chosen = _options_of(options, experimental_hints)
        return self._core.reduce_to(ReduceOp(reduce_op), value, destinations, chosen)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | VariableAggregation | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """Several `reduce_to` at once: one result per pair, in order."""
        chosen, op = _options_of(options, experimental_hints), ReduceOp(reduce_op)
        return self._core.batch_reduce_to(op, value_destination_pairs, chosen)

    def broadcast_to(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        """Copies of `tensor` on `destinations`; a Python number comes back itself."""
        method = "extended.broadcast_to"
        context = _context.require_cross_replica(self._strategy, method)
        is_list = isinstance(destinations, (list, tuple))
        if destinations is None or (is_list and not destinations):
            raise ValueError(
                f"`extended.broadcast_to` was given {destinations!r} as "
                "`destinations`; a device or its name was wanted, a list of them, or a "
                "variable or a value whose devices are meant."
            )
        if isinstance(tensor, (int, float)):
            return tensor
        if not context.in_step:
            check_reduced(tensor, "broadcast_to")
        return self._broadcast(tensor, destinations)

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        return self._core.copy_to(tensor, destinations)

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable, of its shape; never the variable.

        That of an on-read variable is what it aggregates to. In `run` it is this
        replica's value, of a mirrored variable.
        """
        _context.require_same(_context.current(), self._strategy)
        return read_variable(v, "extended.read_var", "called inside `run` on")

    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Today's `update_on`; None are the parameter devices."""
        method = "extended.update_non_slot"
        context = _context.require_cross_replica(self._strategy, method)
        check_function(fn, method)
        if not context.in_step:
            check_reduced((args, kwargs), "update_non_slot")
        if colocate_with is None:
            colocate_with = self._core.parameter_devices
        return self._core.update_on(colocate_with, fn, args, kwargs, group)

    def non_slot_devices(
        self, var_list: Sequence[Variable]
    ) -> tuple[Device, ...] | Variable:
        """The place for what an optimizer keeps for no one variable."""
        return self.parameter_devices

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], object],
        iterator: GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, element)` so many times, in cross-replica context.

        A step that `fn` starts, and that sets outputs on the context, is compiled once,
        however often this is called; the context may be among its arguments, or in its
        closure.
        """
        return MultiStepContext().run_steps(
            self._strategy, fn, iterator, iterations, initial_loop_values
        )

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: object = None
    ) -> NumpyDataset:
        """The rows of arrays as a dataset, for `make_dataset_iterator`."""
        return numpy_dataset(numpy_input)


class _FirstVariableExtended(StrategyExtended):
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        return first_named(var_list, "extended.non_slot_devices")


@final
class _CentralStorageExtended(_FirstVariableExtended):
    """Of variables on one device: to TensorFlow, those of a parameter server."""

    experimental_between_graph = True  # as in TensorFlow, though there is one process
    experimental_should_init = True


@final
class _MultiWorkerExtended(StrategyExtended):
    experimental_between_graph = True  # also where there is one


@final
class _OneDeviceExtended(StrategyExtended):
    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        if isinstance(tensor, jax.Array):
            return tensor
        return super()._broadcast(tensor, self.worker_devices[0])


def _refused(name: str, error: type[Exception], why: str) -> Any:
    return refused(
        error,
        f"`extended.{name}` was asked of the default strategy, which {why}. Ask inside "
        "the scope of another strategy, or after `has_strategy()`.",
    )


_NO_DEVICES = RuntimeError, "computes wherever its code does"
_NO_JOB = NotImplementedError, "is part of no job"


@final
class _DefaultExtended(_FirstVariableExtended):
    worker_devices = _refused("worker_devices", *_NO_DEVICES)
    parameter_devices = _refused("parameter_devices", *_NO_DEVICES)
    experimental_between_graph = _refused("experimental_between_graph", *_NO_JOB)
    experimental_should_init = _refused("experimental_should_init", *_NO_JOB)

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        return tensor


class Strategy(OlderStrategy):
    """A strategy with the methods of `tf.compat.v1.distribute.Strategy`.

    `MirroredStrategy` and the others make one, and `over` of a strategy of today, which
    is `strategy.core`. What has the name of a member of `jaxstrategy.Strategy` does the
    same.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     v1.get_strategy() is strategy, js.get_strategy() is strategy.core
    (True, True)
    >>> v1.Strategy.over(js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=4))
    compat.v1.MirroredStrategy(8 replicas, 4 on each device, on cpu:0, cpu:1)
    """

    _module = "compat.v1"
    _era = "TensorFlow 1"
    _names = NAMES_IN_V1
    extended_class: ClassVar[type[StrategyExtended]] = StrategyExtended

    @property
    def extended(self) -> StrategyExtended:
        """The additional methods, for library code and optimizers."""
        return self.extended_class._cached(self._core)

    num_replicas_in_sync: int = delegated(_strategy.Strategy.num_replicas_in_sync)
    cluster_resolver: ClusterResolver | None = delegated(
        _strategy.Strategy.cluster_resolver
    )
    reduce = delegated(_strategy.Strategy.reduce)
    experimental_local_results = delegated(
        _strategy.Strategy.experimental_local_results
    )

    # Contexts and steps.

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block in which this is the current strategy."""
        return AdapterScope(self)

    def run(
        self,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        options: RunOptions | _options.RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn(*args, **kwargs)` on every replica, as one compiled program."""
        chosen = None if isinstance(options, RunOptions) else options
        return self._core.run(fn, args, kwargs, chosen)

    experimental_run_v2 = run

    def experimental_run(
        self, fn: Function, input_iterator: GetsNext | None = None
    ) -> PyTree:
        """Runs `fn` on each replica with the next element, as one argument."""
        if input_iterator is None:
            return self._core.run(fn, ())
        return self._core.run(fn, (require_iterator(input_iterator).get_next(),))

    # Values.

    def unwrap(self, value: PyTree) -> tuple[PyTree, ...]:
        """`experimental_local_results` under its older name."""
        _context.require_cross_replica(self._core, "unwrap")
        return self._core.experimental_local_results(value)

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until `value` is computed, as running a `tf.group` of it did.

        While a step is traced there is nothing to wait for.
        """
        _context.require_cross_replica(self._core, "group")
        return wait_for(self._core.experimental_local_results(value), name)

    # Data.

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> OlderDataset:
        """`dataset`, each of its global batches divided over the replicas."""
        return OlderDataset(
            self._core.experimental_distribute_dataset(dataset, options)
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> OlderDataset:
        """The batches of what `dataset_fn` makes, each for one replica."""
        made = self._core.distribute_datasets_from_function(dataset_fn, options)
        return OlderDataset(made)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_dataset_iterator(
        self, dataset: Any, options: InputOptions | None = None
    ) -> InputIterator:
        """An iterator over global batches, which are divided over the replicas."""
        made = self._core.experimental_distribute_dataset(dataset, options)
        return InputIterator(made)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """An iterator over the elements of an input function, each for one replica.

        The function is called once, and not again by `initialize()`. Its elements go to
        the replicas in turn, undivided, scalars too. At the end, elements that are
        fewer than the replicas are left out.
        """
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"Input replication mode not supported: {shown(replication_mode)}. "
                "Input functions of `make_input_fn_iterator` are called once for each "
                "worker, InputReplicationMode.PER_WORKER; for one pipeline per replica "
                "use `distribute_datasets_from_function` with `InputOptions`."
            )

        def dataset_fn(context: InputContext) -> Any:
            return as_dataset(input_fn(context))

        # What cannot be called is refused, by its type.
        given = dataset_fn if callable(input_fn) else input_fn
        made = self._core.distribute_datasets_from_function(given, WHOLE_GROUPS)
        return InputIterator(made)

    experimental_make_numpy_dataset = StrategyExtended.experimental_make_numpy_dataset

    # Variables, and sessions, which JAX has not.

    colocate_vars_with = delegated(_Extended.colocate_vars_with, "_core.extended")

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: there are no sessions, and a cluster comes from a resolver."""

    def update_config_proto(self, config_proto: Any) -> Any:
        """A copy of the configuration of a session; there are none here."""
        return copy.deepcopy(config_proto)

    def experimental_initialize(self) -> list[Any]:
        """An empty list: of what a session has to run before training."""
        return []

    def experimental_finalize(self) -> list[Any]:
        """An empty list: of what a session has to run after training."""
        return []


@final
class DefaultStrategy(Strategy, cores=(current.DefaultStrategy,)):
    """One replica wherever code runs: `get_strategy()` outside any scope."""

    extended_class = _DefaultExtended


@final
class MirroredStrategy(Strategy, cores=(mirrored.MirroredStrategy,)):
    """One replica per device of this host, as `jaxstrategy.MirroredStrategy`.

    >>> v1.MirroredStrategy(js.simulate(8)[:2])
    compat.v1.MirroredStrategy(2 replicas on cpu:0, cpu:1)
    """

    __init__ = made_by(mirrored.MirroredStrategy)


@final
class OneDeviceStrategy(Strategy, cores=(mirrored.OneDeviceStrategy,)):
    """One replica on one device, as `jaxstrategy.OneDeviceStrategy`.

    >>> v1.OneDeviceStrategy("CPU:0")
    compat.v1.OneDeviceStrategy(1 replica on cpu:0)
    """

    extended_class = _OneDeviceExtended

    __init__ = made_by(mirrored.OneDeviceStrategy)


@final
class CentralStorageStrategy(Strategy, cores=(mirrored.CentralStorageStrategy,)):
    """Variables on one device, as `jaxstrategy.experimental.CentralStorageStrategy`.

    >>> devices = js.simulate(8)[:2]
    >>> v1.experimental.CentralStorageStrategy(devices).extended.parameter_devices
    (CpuDevice(id=0),)
    """

    extended_class = _CentralStorageExtended

    __init__ = made_by(mirrored.CentralStorageStrategy)


@final
class MultiWorkerMirroredStrategy(
    Strategy,
    cores=(
        mirrored.MultiWorkerMirroredStrategy,
        mirrored.ExperimentalMultiWorkerMirroredStrategy,
    ),
):
    """Replicas of all processes, as `jaxstrategy.MultiWorkerMirroredStrategy`.

    >>> _ = js.simulate(8)
    >>> alone = js.cluster_resolver.SimpleClusterResolver({})
    >>> v1.experimental.MultiWorkerMirroredStrategy(cluster_resolver=alone)
    compat.v1.MultiWorkerMirroredStrategy(8 replicas on cpu:0..7)
    """

    extended_class = _MultiWorkerExtended

    __init__ = made_by(mirrored.ExperimentalMultiWorkerMirroredStrategy)


@final
class TPUStrategy(Strategy, cores=(tpu.TPUStrategy, tpu.ExperimentalTPUStrategy)):
    """Replicas on TPUs, and on any other platform, as `jaxstrategy.TPUStrategy`.

    `steps_per_run`, of TensorFlow's Estimators, is kept and does nothing.

    >>> _ = js.simulate(8)
    >>> strategy = v1.experimental.TPUStrategy()
    >>> strategy.num_replicas_in_sync, strategy.steps_per_run
    (8, 1)
    """

    steps_per_run = 1

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        steps = 1 if steps_per_run is None else positive("steps_per_run", steps_per_run)
        core = tpu.ExperimentalTPUStrategy(tpu_cluster_resolver, device_assignment)
        super().__init__(core)
        self.steps_per_run = steps


@final
class ParameterServerStrategy(Strategy, cores=(between_graph.BetweenGraphStrategy,)):
    """Asynchronous training: each worker runs the whole program by itself.

    There is no coordinator. Each worker process makes this strategy, the same variables
    in its scope, and its own loop over `run`: a step pulls what it reads, and pushes
    what it changes as one operation of each variable. The workers do not wait for each
    other; the chief (worker 0 without one) makes the initial values. Parameter servers
    are processes with `jaxstrategy.Server(...).join()`. The cluster is by default that
    of `TF_CONFIG`; without one, variables are in the host's memory, or on the only
    device.

    Raises:
      ValueError: the cluster has no servers or workers, or it is not known which of its
        tasks this process is.
      ClusterError: a server cannot be reached, or the job has no secret.

    >>> _ = js.simulate(8)
    >>> strategy = v1.experimental.ParameterServerStrategy()
    >>> strategy.extended.experimental_between_graph
    True
    """

    extended_class = _FirstVariableExtended

    __init__ = made_by(between_graph.BetweenGraphStrategy)


@final
class ReplicaContext(Adapter):
    """One replica's view, inside `run`: `v1.get_replica_context()` returns it.

    What has the name of a member of `jaxstrategy.ReplicaContext` does the same; `core`
    is that.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> def step():
    ...     context = v1.get_replica_context()
    ...     return context.merge_call(lambda s, x: s.reduce("sum", x), args=(3.0,))
    >>> strategy.run(step)
    Array(6., dtype=float32)
    """

    _names = NAMES_IN_V1
    _core_path = "jaxstrategy.get_replica_context()"

    def __init__(self, core: _ReplicaContext) -> None:
        if not isinstance(core, _ReplicaContext):
            raise TypeError(
                f"`core` was {shown(core)}; what `jaxstrategy.get_replica_context()` "
                "returns in a step was wanted."
            )
        super().__init__(core)

    num_replicas_in_sync: int = delegated(_ReplicaContext.num_replicas_in_sync)
    replica_id_in_sync_group: jax.Array | int = delegated(
        _ReplicaContext.replica_id_in_sync_group
    )
    devices: tuple[Device, ...] = delegated(_ReplicaContext.devices)

    def __enter__(self) -> Self:
        """Enters the context where code already is: `run` enters replicas."""
        self._core._require_current("__enter__")
        return self

    def __exit__(
        self, exception_type: object, exception_value: object, traceback: object
    ) -> None:
        """Leaves the block; code stays where it is."""

    @property
    def core(self) -> _ReplicaContext:
        """The replica context of today."""
        return self._core

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return Strategy.over(self._core.strategy)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over all replicas, leaf by leaf; all get the result."""
        chosen = _options_of(options, experimental_hints)
        return self._core.all_reduce(reduce_op, value, chosen)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Steps across to all replicas: calls `merge_fn(strategy, *args, **kwargs)`."""
        if not callable(merge_fn):
            return self._core.merge_call(merge_fn)  # says so

        def with_adapter(core: Any, /, *across: PyTree, **named: PyTree) -> PyTree:
            return merge_fn(Strategy.over(core), *across, **named)

        return self._core.merge_call(with_adapter, args, kwargs)

    def __repr__(self) -> str:
        return f"compat.v1.ReplicaContext({self.strategy!r})"


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> v1.get_strategy() is v1.get_strategy()
    True
    """
    return Strategy.over(current.get_strategy())


# `| Any` rather than `| None`: as of `jaxstrategy.get_replica_context`.
def get_replica_context() -> ReplicaContext | Any:
    """The current replica context, or None in cross-replica context.

    >>> v1.get_replica_context().num_replicas_in_sync
    1
    """
    context = current.get_replica_context()
    return None if context is None else ReplicaContext._cached(context)


def get_loss_reduction() -> ReduceOp:
    """The operation by which losses are added up: SUM, as outside of Estimators.

    >>> v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
