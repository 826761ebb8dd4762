"""`tf.contrib.distribute` of TensorFlow 1.7 to 1.12 over today's classes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, final

import jax
from jax.core import Tracer

from jaxstrategy._src.cluster.resolvers.tpu import TPUClusterResolver
from jaxstrategy._src.compat import inputs
from jaxstrategy._src.compat.adapters import (
    NAMES_IN_2018,
    AdapterScope,
    OlderStrategy,
    delegated,
    first_named,
    read_variable,
    refused,
    require_function,
    wait_for,
)
from jaxstrategy._src.compat.inputs import WHOLE_GROUPS, GetsNext, PerDeviceDataset
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.inputs.input_options import InputContext
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.reductions.operations import OPERATIONS
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import (
    between_graph,
    current as _current,
    mirrored,
    tpu,
)
from jaxstrategy._src.strategies.destinations import Destinations, checked_pairs
from jaxstrategy._src.strategies.extended import StrategyExtended
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import at_least, positive, shown
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.variable import Variable


def _require_scope(strategy: DistributionStrategy, method: str) -> None:
    current = _current.get_strategy()
    if current is strategy.core:
        return
    if not _current.has_strategy():
        raise ContextError(
            'Need to be inside "with distribution_strategy.scope()" for '
            f"{strategy!r}: `{method}` was called outside. Methods of 2018 do not "
            "enter the scope by themselves: write "
            "`with distribution_strategy.scope():` around the call."
        )
    raise ContextError(
        f"Mixing different DistributionStrategy objects: {strategy!r} is not "
        f"{current!r}, which is the current one where `{method}` was called."
    )


def _require_cross_tower(strategy: DistributionStrategy, method: str) -> None:
    """Raise unless code is in the cross-tower context of this strategy."""
    context = _context.current()
    if context.strategy is not strategy.core or context.replica is not None:
        _require_scope(strategy, method)
        raise ContextError(
            "Method requires being in cross-tower context, use "
            f"get_tower_context().merge_call(): `{method}` was called in a tower."
        )


def _operation_of(aggregation: VariableAggregation | str) -> ReduceOp:
    """SUM or MEAN, the aggregations that reduce values."""
    try:
        op = ReduceOp(aggregation)
    except (ValueError, TypeError):
        op = None
    if op is not None and OPERATIONS[op].is_sum:
        return op
    raise ValueError(
        f"`aggregation` was {aggregation!r}; `VariableAggregation.SUM` or "
        "`VariableAggregation.MEAN` was wanted."
    )


def _require_equal(method: str, arguments: PyTree) -> None:
    """Raise if an argument differs between towers, outside of steps."""
    if _context.current().in_step:
        return
    leaves = jax.tree.leaves(arguments, is_leaf=trees.is_whole)
    if any(isinstance(leaf, PerReplica) for leaf in leaves):
        raise TypeError(
            f"`{method}` was given a PerDevice, which differs between towers, so that "
            "the copies would differ. Reduce it first: "
            "`distribution_strategy.reduce(aggregation, value, destinations=var)`."
        )


@final
@dataclasses.dataclass(frozen=True)
class MapOutput:
    """What `map` returns, for `reduce` and `unwrap`: a result for each element."""

    results: list[PyTree]
    num_towers: int

    def reduced(self, op: ReduceOp) -> PyTree:
        """The sum or the mean over all elements."""
        if not self.results:
            raise ValueError(
                "`map` was given no elements, so there is nothing to reduce."
            )

        def total(*leaves: Any) -> Any:
            added = functools.reduce(operator.add, leaves)
            return added / len(leaves) if OPERATIONS[op].divides else added

        return jax.tree.map(total, *self.results)

    def __repr__(self) -> str:
        return f"MapOutput({len(self.results)} elements on {self.num_towers} towers)"


@final
class MultiStepContext(inputs.MultiStepContext):
    """Named outputs of the last of several steps.

    Made by `run_steps_on_dataset`, which passes it to the function first.

    >>> context = MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    _operation_example = "`aggregation=VariableAggregation.MEAN`"
    _several = list

    def set_last_step_output(  # pyright: ignore[reportIncompatibleMethodOverride] - 2018
        self,
        name: str,
        output: PyTree,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        """Sets an output of this step; those of the last one stay."""
        is_none = aggregation is VariableAggregation.NONE
        self._set_output(name, output, None if is_none else _operation_of(aggregation))


class DistributionStrategy(OlderStrategy):
    """A strategy with the methods of `tf.contrib.distribute.DistributionStrategy`.

    `MirroredStrategy` and the others make one, and `over` of a strategy of today, which
    is `strategy.core`. A *tower* is what is a replica today. Methods that are about all
    towers want to be called inside `with strategy.scope():`, or in a function of
    `merge_call`.

    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> def merge_fn(strategy, v):
    ...     return sum(strategy.unwrap(v))
    >>> def fn(three):
    ...     context = contrib.get_tower_context()
    ...     v = three + context.tower_id
    ...     return context.merge_call(merge_fn, v) + v
    >>> with strategy.scope():
    ...     [int(v) for v in strategy.unwrap(strategy.call_for_each_tower(fn, 3))]
    [10, 11]
    """

    _module = "compat.contrib"
    _era = "2018"
    _names = NAMES_IN_2018

    # Steps.

    def call_for_each_tower(self, fn: Function, *args: PyTree, **kwargs: Any) -> PyTree:
        """Calls `fn(*args, **kwargs)` in each tower: a step, as today's `run`."""
        _require_cross_tower(self, "call_for_each_tower")
        require_function("call_for_each_tower", fn)
        kwargs.pop("run_concurrently", None)
        return self._core.run(fn, args, kwargs)

    def map(
        self, map_over: Iterable[Any], fn: Function, *args: PyTree, **kwargs: Any
    ) -> MapOutput:
        """Calls `fn(element, *args, **kwargs)` for each element, outside of towers."""
        _require_cross_tower(self, "map")
        require_function("map", fn)
        results = [fn(element, *args, **kwargs) for element in map_over]
        return MapOutput(results, self.num_towers)

    # Values.

    def broadcast(
        self, tensor: PyTree, destinations: Destinations | None = None
    ) -> PyTree:
        """Copies of a value on several devices, or on one, as today's `copy_to`."""
        _require_cross_tower(self, "broadcast")
        _require_equal("broadcast", tensor)
        if destinations is None:
            destinations = self.worker_devices
        return self._core.extended.copy_to(tensor, destinations)

    def reduce(
        self,
        aggregation: VariableAggregation | str,
        value: PyTree,
        destinations: Destinations | None = None,
    ) -> PyTree:
        """One value from those of all towers, as today's `reduce` and `reduce_to`."""
        _require_cross_tower(self, "reduce")
        op = _operation_of(aggregation)
        if isinstance(value, MapOutput):
            return self.broadcast(value.reduced(op), destinations)
        if destinations is None:
            return self._core.reduce(op, value)
        return self._core.extended.reduce_to(op, value, destinations)

    def batch_reduce(
        self,
        aggregation: VariableAggregation | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations | None]],
    ) -> list[PyTree]:
        """Several `reduce` in one: one result for each pair, in order."""
        _require_cross_tower(self, "batch_reduce")
        op = _operation_of(aggregation)
        pairs = [
            (value, self.worker_devices if destinations is None else destinations)
            for value, destinations in checked_pairs(value_destination_pairs)
        ]
        return self._core.extended.batch_reduce_to(op, pairs)

    def unwrap(self, value: PyTree) -> list[PyTree]:
        """The versions of this process's towers, a list; `[value]` of a plain one."""
        _require_cross_tower(self, "unwrap")
        if isinstance(value, MapOutput):
            return [value.results[i :: self.num_towers] for i in range(self.num_towers)]
        is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
        if is_array and len(value.sharding.device_set) == 1:
            return [value]
        return list(self._core.experimental_local_results(value))

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until all that `value` holds is computed."""
        _require_cross_tower(self, "group")
        return wait_for(self.unwrap(value), name)

    num_towers: int = delegated(Strategy.num_replicas_in_sync)
    worker_devices: list[Device] = delegated(
        StrategyExtended.worker_devices, "_core.extended", convert=list
    )
    parameter_devices: list[Device] = delegated(
        StrategyExtended.parameter_devices, "_core.extended", convert=list
    )
    value_container = delegated(StrategyExtended.value_container, "_core.extended")

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower only, so that no value is wrapped."""
        return self.num_towers == 1

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The devices for an optimizer's state that is of no single variable."""
        return self.parameter_devices

    @property
    def worker_device_index(self) -> PerReplica | int:
        """A value that is 0, 1, ... in the towers; the int 0 with one tower."""
        _require_cross_tower(self, "worker_device_index")
        if self.is_single_tower:
            return 0
        return self._core.run(
            lambda: _current.get_replica_context().replica_id_in_sync_group
        )

    # Contexts.

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block in which this strategy is current: the cross-tower context."""
        if _current.has_strategy():
            _require_cross_tower(self, "scope")
        return AdapterScope(self)

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made beside others."""
        _require_scope(self, "colocate_vars_with")
        return self._core.extended.colocate_vars_with(colocate_with_variable)

    @contextlib.contextmanager
    def tower_local_var_scope(
        self, reduce_method: VariableAggregation | str
    ) -> Iterator[None]:
        """A `with` block in which new variables are on-read, unless they say how."""
        _require_scope(self, "tower_local_var_scope")
        kept = VariableSynchronization.ON_READ, VariableAggregation(reduce_method)
        with _context.entered(new_variables=kept):
            yield

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: object = None,
        task_id: object = None,
    ) -> None:
        """Does nothing: there are no sessions."""
        if not (cluster_spec is task_type is task_id is None):
            raise ValueError(
                "`configure` was given a cluster, which this strategy cannot join any "
                "more. Set `TF_CONFIG` before a `CollectiveAllReduceStrategy` is made."
            )

    def initialize(self) -> list[object]:
        """An empty list: of what a session has to run before training."""
        return []

    def finalize(self) -> list[object]:
        """An empty list: of what a session has to run after training."""
        return []

    # Variables.

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable; of a tower-local one that of all copies together."""
        return read_variable(v, "read_var", "given the tower-local")

    def fetch(
        self,
        val: PyTree,
        destination: Device | str | None = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """`fn(val)`, or a copy of `val`, on one device."""
        _require_cross_tower(self, "fetch")
        value = self.read_var(val) if isinstance(val, Variable) else val
        if fn is not None:
            require_function("fetch", fn)
            value = fn(value)
        if destination is None:
            return value
        _require_equal("fetch", value)
        return self._core.extended.copy_to(value, destination)

    def update(
        self, var: Variable, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` once to change each copy of a variable."""
        grouped = self._checked_update("update", fn, args, kwargs)
        return self._core.extended.update(var, fn, args, kwargs, grouped)

    def update_non_slot(
        self, colocate_with: Any, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change an optimizer's state of no variable."""
        grouped = self._checked_update("update_non_slot", fn, args, kwargs)
        return self._core.extended.update_on(colocate_with, fn, args, kwargs, grouped)

    def _checked_update(
        self, method: str, fn: object, args: PyTree, kwargs: dict[str, PyTree]
    ) -> bool:
        _require_cross_tower(self, method)
        require_function(method, fn)
        grouped = bool(kwargs.pop("grouped", True))
        _require_equal(method, (args, kwargs))
        return grouped

    # Data.

    # Whether elements are prepared ahead; None for whatever is best.
    prefetch_on_device: bool | None = None

    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> PerDeviceDataset:
        """Elements for all towers: each goes to one tower, in turn, undivided."""
        if not callable(dataset_fn):
            raise TypeError(
                f"`distribute_dataset` was given {shown(dataset_fn)}; a function "
                "without arguments was wanted that returns the dataset: "
                "`lambda: dataset`."
            )

        def elements(_: InputContext) -> Any:
            dataset = dataset_fn()
            try:
                as_source(dataset)
            except TypeError as error:
                raise ValueError(
                    "dataset_fn() must return a tf.data.Dataset when using a "
                    f"DistributionStrategy, or another dataset. {error}"
                ) from None
            return dataset

        elements.__name__ = getattr(dataset_fn, "__name__", type(dataset_fn).__name__)
        options = WHOLE_GROUPS
        if self.prefetch_on_device is False:
            options = dataclasses.replace(
                options, experimental_per_replica_buffer_size=0
            )
        made = self._core.distribute_datasets_from_function(elements, options)
        return PerDeviceDataset(made)

    def run_steps_on_dataset(
        self,
        fn: Callable[..., object],
        iterator: GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, *element)` so many times, in cross-tower context."""
        _require_cross_tower(self, "run_steps_on_dataset")

        def call(context: MultiStepContext, element: Any) -> None:
            fn(context, *(element if isinstance(element, tuple) else (element,)))

        return MultiStepContext().run_steps(
            self._core, call, iterator, iterations, initial_loop_values
        )


_UNSUPPORTED = (
    "`{}` is not supported by the default strategy, which has no devices of its own. "
    "Ask the strategy that your code is run with."
)


@final
class DefaultDistributionStrategy(
    DistributionStrategy, cores=(_current.DefaultStrategy,)
):
    """The strategy of code that runs under none; `get_distribution_strategy()` has it.

    Functions are called as they are, and values come back as they are. Its methods
    about all towers are for functions of `merge_call`.
    """

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block that changes nothing."""
        if _current.has_strategy():
            raise ContextError(
                "Must not nest DistributionStrategy scopes. The default strategy's was "
                f"entered inside that of {_current.get_strategy()!r}."
            )
        return super().scope()

    worker_devices = refused(ContextError, _UNSUPPORTED.format("worker_devices"))
    parameter_devices = refused(ContextError, _UNSUPPORTED.format("parameter_devices"))

    worker_device_index: Any = refused(
        ContextError, _UNSUPPORTED.format("worker_device_index")
    )

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "non_slot_devices")

    def broadcast(self, tensor: PyTree, destinations: Any = None) -> PyTree:
        """`tensor` as it is."""
        _require_cross_tower(self, "broadcast")
        return tensor

    def reduce(
        self, aggregation: Any, value: PyTree, destinations: Any = None
    ) -> PyTree:
        """`value` as it is; of what `map` gave, the sum or the mean of all elements."""
        _require_cross_tower(self, "reduce")
        op = _operation_of(aggregation)
        return value.reduced(op) if isinstance(value, MapOutput) else value

    def batch_reduce(
        self, aggregation: Any, value_destination_pairs: Sequence[tuple[PyTree, Any]]
    ) -> list[PyTree]:
        """The values as they are."""
        _operation_of(aggregation)
        pairs = checked_pairs(value_destination_pairs)
        return [self.reduce(aggregation, value) for value, _ in pairs]


@final
class MirroredStrategy(DistributionStrategy, cores=(mirrored.MirroredStrategy,)):
    """One tower per device of this host, as `jaxstrategy.MirroredStrategy`.

    `num_gpus` (also `num_gpus_per_worker`) takes so many of the devices that there are,
    instead of `devices`. `distribute_dataset` reads ahead unless `prefetch_on_device`
    is False.

    >>> _ = js.simulate(8)
    >>> contrib.MirroredStrategy(num_gpus=2).worker_devices
    [CpuDevice(id=0), CpuDevice(id=1)]
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | None = None,
        num_gpus: int | None = None,
        cross_tower_ops: CrossDeviceOps | None = None,
        prefetch_on_device: bool | None = None,
        *,
        num_gpus_per_worker: int | None = None,
    ) -> None:
        if num_gpus is not None and num_gpus_per_worker is not None:
            raise ValueError(
                "Must only specify one of `num_gpus` and `num_gpus_per_worker`."
            )
        number = num_gpus_per_worker if num_gpus is None else num_gpus
        if devices is not None and number is not None:
            raise ValueError("Must only specify one of `devices` and `num_gpus`.")
        chosen = devices if number is None else _first_devices(number, "num_gpus")
        super().__init__(mirrored.MirroredStrategy(chosen, cross_tower_ops))
        self.prefetch_on_device = prefetch_on_device


@final
class OneDeviceStrategy(DistributionStrategy, cores=(mirrored.OneDeviceStrategy,)):
    """One tower on one device; values are never wrapped.

    `distribute_dataset` reads ahead unless `prefetch_on_device` is False.

    >>> _ = js.simulate(8)
    >>> contrib.OneDeviceStrategy("CPU:1").is_single_tower
    True
    """

    def __init__(
        self, device: Device | str, prefetch_on_device: bool | None = None
    ) -> None:
        super().__init__(mirrored.OneDeviceStrategy(device))
        self.prefetch_on_device = prefetch_on_device


@final
class CollectiveAllReduceStrategy(
    DistributionStrategy, cores=(mirrored.MultiWorkerMirroredStrategy,)
):
    """One tower per device of every process; today's `MultiWorkerMirroredStrategy`.

    `num_gpus_per_worker` is only checked, if it is not 0: which devices JAX finds is
    said when the process is started (`CUDA_VISIBLE_DEVICES`).

    Raises:
      ValueError: another number of devices was found; the cluster makes no sense.

    >>> import os
    >>> _ = js.simulate(8)
    >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["localhost:2222"]}}'
    >>> contrib.CollectiveAllReduceStrategy().num_towers
    8
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        number = at_least(0, "num_gpus_per_worker", num_gpus_per_worker)
        # The rendezvous of the processes comes before JAX looks for devices.
        strategy = mirrored.MultiWorkerMirroredStrategy()
        _check_all(number)
        super().__init__(strategy)


@final
class ParameterServerStrategy(
    DistributionStrategy,
    cores=(between_graph.BetweenGraphStrategy, mirrored.CentralStorageStrategy),
):
    """Variables on parameter servers, each worker by itself; alone, on one device.

    With a cluster in `TF_CONFIG` it is
    `compat.v1.experimental.ParameterServerStrategy`, and `num_gpus_per_worker` is only
    checked, if it is not 0. Without one it is today's `CentralStorageStrategy` on so
    many devices of this host, at least on the first.

    Raises:
      ValueError: the cluster has no servers or workers; there are fewer devices, or
        with a cluster another number.
      ClusterError: a server cannot be reached.

    >>> _ = js.simulate(8)
    >>> contrib.ParameterServerStrategy(num_gpus_per_worker=2).num_towers
    2
    """

    def __init__(self, num_gpus_per_worker: int = 0) -> None:
        number = at_least(0, "num_gpus_per_worker", num_gpus_per_worker)
        resolver = between_graph.TFConfigClusterResolver()
        if resolver.cluster_spec():
            _check_all(number)
            super().__init__(between_graph.BetweenGraphStrategy(resolver))
        else:
            devices = _first_devices(number or 1, "num_gpus_per_worker")
            super().__init__(mirrored.CentralStorageStrategy(devices))

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "non_slot_devices")


@final
class TPUStrategy(DistributionStrategy, cores=(tpu.TPUStrategy,)):
    """One tower per core of a TPU system, or per device: `jaxstrategy.TPUStrategy`.

    `steps_per_run` is for your own use; `num_cores`, of towers, is only checked.

    >>> _ = js.simulate(8)
    >>> contrib.TPUStrategy(num_cores=8).num_towers
    8
    """

    steps_per_run = 1

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int = 1,
        num_cores: int | None = None,
    ) -> None:
        steps = positive("steps_per_run", steps_per_run)
        strategy = tpu.TPUStrategy(tpu_cluster_resolver)
        found = strategy.num_replicas_in_sync
        if num_cores is not None and positive("num_cores", num_cores) != found:
            raise ValueError(
                f"`num_cores` was {num_cores}, but the system has {found} cores."
            )
        super().__init__(strategy)
        self.steps_per_run = steps


def _check_all(number: int) -> None:
    """Raise unless this is the number of this process's devices, or 0."""
    found = len(_devices.default_devices())
    if number not in (0, found):
        raise ValueError(
            f"`num_gpus_per_worker` was {number}, but this process has {found} "
            "devices, all of which are used. Start it with so many "
            "(`CUDA_VISIBLE_DEVICES`), or leave the number out."
        )


def _first_devices(given: object, name: str) -> tuple[Device, ...]:
    number, found = positive(name, given), _devices.default_devices()
    if number > len(found):
        raise ValueError(
            f"`{name}` was {number}, but this host has {len(found)} devices: "
            f"{_devices.names(found)}."
        )
    return found[:number]
