"""A strategy with the methods of 2018: `DistributionStrategy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, final

import jax
from jax.core import Tracer

from jaxstrategy._src.compat.adapters import (
    NAMES_IN_2018,
    AdapterScope,
    OlderStrategy,
    StrategyAdapters,
    checked_core,
)
from jaxstrategy._src.compat.multi_steps import (
    AbstractMultiStepContext,
    run_steps_on_iterator,
)
from jaxstrategy._src.compat.older_inputs import OF_GROUPS, GetsNext, MakesIterators
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import StrategyAdapter
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.input_options import InputContext
from jaxstrategy._src.inputs.library_sources import as_source
from jaxstrategy._src.options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy._src.reductions.operations import OPERATIONS
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import current as _current
from jaxstrategy._src.strategies.destinations import Destinations, checked_pairs
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.variable import Variable

_ADVICE = (
    "Methods of 2018 do not enter the scope by themselves: write "
    "`with distribution_strategy.scope():` around the call."
)


def require_scope(adapter: StrategyAdapter, method: str) -> None:
    """Raise unless code is part of this strategy, on either side."""
    current = _current.get_strategy()
    if current is adapter.core:
        return
    if not _current.has_strategy():
        raise ContextError(
            'Need to be inside "with distribution_strategy.scope()" for '
            f"{adapter!r}: `{method}` was called outside. {_ADVICE}"
        )
    raise ContextError(
        f"Mixing different DistributionStrategy objects: {adapter!r} is not "
        f"{current!r}, which is the current one where `{method}` was called."
    )


def require_cross_tower(adapter: StrategyAdapter, method: str) -> None:
    """Raise unless code is in the cross-tower context of this strategy."""
    context = _context.current()
    if context.strategy is adapter.core and context.replica is None:
        return
    require_scope(adapter, method)
    raise ContextError(
        "Method requires being in cross-tower context, use "
        f"get_tower_context().merge_call(): `{method}` was called in a tower."
    )


def operation_of(aggregation: VariableAggregation | str) -> ReduceOp:
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


def require_function(method: str, fn: object) -> None:
    """Raise unless this can be called."""
    if not callable(fn):
        raise TypeError(
            f"`{method}` was given {shown(fn)}, which cannot be called. Its arguments "
            f"follow the function: `{method}(..., fn, *args, **kwargs)`."
        )


def require_equal(method: str, arguments: PyTree) -> None:
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


def numbers_of_towers(strategy: Strategy) -> PerReplica | int:
    """A value that is 0, 1, ... on the replicas; the int 0 on a single one."""
    if strategy.num_replicas_in_sync == 1:
        return 0
    return strategy.run(_own_number)


def _own_number() -> jax.Array | int:
    return _current.get_replica_context().replica_id_in_sync_group


def is_on_one_device(value: object) -> bool:
    """Whether it is a single array with one copy."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return len(value.sharding.device_set) == 1


def grouped(values: Sequence[PyTree], name: str | None) -> PyTree:
    """None when all is computed; a single leaf itself, if it has no name."""
    leaves = jax.tree.leaves(list(values))
    jax.block_until_ready([leaf for leaf in leaves if not isinstance(leaf, Tracer)])
    return leaves[0] if len(leaves) == 1 and name is None else None


def read_variable(v: Variable) -> jax.Array:
    """The value that the copies of a variable have together."""
    if not isinstance(v, Variable):
        raise TypeError(
            f"`read_var` was given {shown(v)}; a jaxstrategy.Variable was wanted."
        )
    in_tower = _context.current().replica is not None
    if in_tower and v.synchronization is VariableSynchronization.ON_READ:
        raise ContextError(
            f"`read_var` was given the tower-local variable {v.name!r} in a tower, "
            "where it has a value of its own: `v.value()`. The value of all towers is "
            "known in cross-tower context only."
        )
    return v.value()


@final
class MapOutput:
    """What `DistributionStrategy.map` returns, for `reduce` and `unwrap`.

    Args:
      results: a pytree for each element, of one structure.
      num_towers: the number of towers to which the elements go in turn.
    """

    def __init__(self, results: Sequence[PyTree], num_towers: int) -> None:
        self._results = results
        self._num_towers = num_towers

    def reduced(self, op: ReduceOp) -> PyTree:
        """The sum or the mean over all elements."""
        if not self._results:
            raise ValueError(
                "`map` was given no elements, so there is nothing to reduce."
            )
        sums = jax.tree.map(
            lambda *leaves: functools.reduce(operator.add, leaves), *self._results
        )
        if not OPERATIONS[op].divides:
            return sums
        return jax.tree.map(lambda leaf: leaf / len(self._results), sums)

    def of_towers(self) -> list[list[PyTree]]:
        """For each tower the results of its elements, in their order."""
        n = self._num_towers
        return [list(self._results[i::n]) for i in range(n)]

    def __repr__(self) -> str:
        return f"MapOutput({len(self._results)} elements on {self._num_towers} towers)"


@final
class MultiStepContext(AbstractMultiStepContext):
    """Named outputs of the last of several steps.

    Made by `run_steps_on_dataset`, which passes it to the function first.

    >>> context = MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    _operation_example = "`aggregation=VariableAggregation.MEAN`"

    @classmethod
    def of_steps(cls) -> MultiStepContext:
        """The context that steps are given."""
        return _OF_STEPS

    def set_last_step_output(
        self,
        name: str,
        output: PyTree,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        """Sets an output of this step; those of the last one stay."""
        is_none = aggregation is VariableAggregation.NONE
        op: ReduceOp | None = None if is_none else operation_of(aggregation)
        self._set_output(name, output, op)

    def _several(self, values: tuple[Any, ...]) -> list[Any]:
        """The different values of the towers, a list."""
        return list(values)


_OF_STEPS = MultiStepContext()


@final
class PerDeviceDataset(MakesIterators):
    """Elements for all towers: each is for one tower, in turn.

    Made by `distribute_dataset` of a `DistributionStrategy`. Elements are not divided.
    At the end, elements that are fewer than the towers are left out.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.distribute_dataset(lambda: range(5))
    >>> [[int(x) for x in element.values] for element in dataset]
    [[0, 1], [2, 3]]
    >>> iterator = dataset.make_initializable_iterator()
    >>> iterator.initializer
    []
    >>> iterator.get_next().values
    (Array(0, dtype=int32), Array(1, dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def _read(self) -> DistributedDataset:
        return self._dataset

    def __iter__(self) -> Iterator[PyTree]:
        return self.make_one_shot_iterator()

    def __repr__(self) -> str:
        return f"PerDeviceDataset({self._dataset!r})"


def per_device_dataset(
    core: Strategy, dataset_fn: Callable[[], Any], reads_ahead: bool = True
) -> PerDeviceDataset:
    """The elements of what `dataset_fn` returns, for the towers in turn."""
    if not callable(dataset_fn):
        raise TypeError(
            f"`distribute_dataset` was given {shown(dataset_fn)}; a function without "
            "arguments was wanted that returns the dataset: `lambda: dataset`."
        )

    def elements(_: InputContext) -> Any:
        return _checked(dataset_fn())

    elements.__name__ = getattr(dataset_fn, "__name__", type(dataset_fn).__name__)
    options = OF_GROUPS
    if not reads_ahead:
        options = dataclasses.replace(options, experimental_per_replica_buffer_size=0)
    return PerDeviceDataset(core.distribute_datasets_from_function(elements, options))


def _checked(dataset: Any) -> Any:
    """What `dataset_fn` has returned, if it is a dataset."""
    try:
        as_source(dataset)
    except TypeError as error:
        raise ValueError(
            "dataset_fn() must return a tf.data.Dataset when using a "
            f"DistributionStrategy, or another dataset. {error}"
        ) from None
    return dataset


class DistributionStrategy(OlderStrategy):
    """A strategy with the methods of `tf.contrib.distribute.DistributionStrategy`.

    `MirroredStrategy` and the others make one. Behind each is a strategy of today,
    `strategy.core`; each of those has one such object. A *tower* is what is a replica
    today. Methods that are about all towers want to be called inside
    `with strategy.scope():`, or in a function of `merge_call`.

    Args:
      core: a strategy of today, given by the class of a strategy.

    Raises:
      TypeError: it is made itself, or of something else; `over` is for that.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
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
    _names = NAMES_IN_2018

    def __init__(self, core: Strategy) -> None:
        if type(self) is DistributionStrategy:
            raise TypeError(
                "`DistributionStrategy` is what all strategies of 2018 have in common. "
                "Make one of them, such as `MirroredStrategy()`; or of a strategy of "
                "`jaxstrategy`: `DistributionStrategy.over(strategy)`."
            )
        super().__init__(core)
        ADAPTERS.add(self)

    @staticmethod
    def over(core: Strategy | StrategyAdapter) -> DistributionStrategy:
        """The object with these methods for a strategy of today, the same each time.

        For what the classes of 2018 have no arguments for.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=4)
        >>> contrib.DistributionStrategy.over(strategy)
        compat.contrib.MirroredStrategy(8 replicas, 4 on each device, on cpu:0, cpu:1)
        """
        return ADAPTERS.of(checked_core(core))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        own = {name: value for name, value in vars(self).items() if name[0] != "_"}
        vars(twin).update(own)
        return twin

    # Steps.

    def call_for_each_tower(self, fn: Function, *args: PyTree, **kwargs: Any) -> PyTree:
        """Calls `fn(*args, **kwargs)` in each tower: a step, as today's `run`.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     strategy.call_for_each_tower(lambda x, y: x + y, 1, y=2)
        Array(3, dtype=int32, weak_type=True)
        """
        require_cross_tower(self, "call_for_each_tower")
        require_function("call_for_each_tower", fn)
        kwargs.pop("run_concurrently", None)
        return self._core.run(fn, args, kwargs)

    def map(
        self, map_over: Iterable[Any], fn: Function, *args: PyTree, **kwargs: Any
    ) -> MapOutput:
        """Calls `fn(element, *args, **kwargs)` for each element, outside of towers."""
        require_cross_tower(self, "map")
        require_function("map", fn)
        results = [fn(element, *args, **kwargs) for element in map_over]
        return MapOutput(results, self.num_towers)

    # Values.

    def broadcast(
        self, tensor: PyTree, destinations: Destinations | None = None
    ) -> PyTree:
        """Copies of a value on several devices, or on one.

        In a function of `merge_call` it is on all devices already, and comes back.
        """
        require_cross_tower(self, "broadcast")
        require_equal("broadcast", tensor)
        if destinations is None:
            destinations = self.worker_devices
        return self._core.extended.copy_to(tensor, destinations)

    def reduce(
        self,
        aggregation: VariableAggregation | str,
        value: PyTree,
        destinations: Destinations | None = None,
    ) -> PyTree:
        """One value from those of all towers, leaf by leaf.

        What is no `PerDevice` counts as what every tower has.
        """
        require_cross_tower(self, "reduce")
        op = operation_of(aggregation)
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
        require_cross_tower(self, "batch_reduce")
        op = operation_of(aggregation)
        pairs = [
            (value, self.worker_devices if destinations is None else destinations)
            for value, destinations in checked_pairs(value_destination_pairs)
        ]
        return self._core.extended.batch_reduce_to(op, pairs)

    def unwrap(self, value: PyTree) -> list[PyTree]:
        """The versions of this process's towers, a list; `[value]` of a plain one."""
        require_cross_tower(self, "unwrap")
        if isinstance(value, MapOutput):
            return value.of_towers()
        if is_on_one_device(value):
            return [value]
        return list(self._core.experimental_local_results(value))

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself."""
        return self._core.extended.value_container(value)

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until all that `value` holds is computed."""
        require_cross_tower(self, "group")
        return grouped(self.unwrap(value), name)

    @property
    def num_towers(self) -> int:
        """The number of towers that take a step together."""
        return self._core.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower only, so that no value is wrapped."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> list[Device]:
        """The devices of the towers, in their order; a list of your own."""
        return list(self._core.extended.worker_devices)

    @property
    def parameter_devices(self) -> list[Device]:
        """The devices that hold mirrored variables; a list of your own."""
        return list(self._core.extended.parameter_devices)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The devices for an optimizer's state that is of no single variable."""
        return self.parameter_devices

    @property
    def worker_device_index(self) -> PerReplica | int:
        """A value that is 0, 1, ... in the towers; the int 0 with one tower."""
        require_cross_tower(self, "worker_device_index")
        return numbers_of_towers(self._core)

    # Contexts.

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block in which this strategy is current: the cross-tower context.

        It may be entered again inside.
        """
        if _current.has_strategy():
            require_cross_tower(self, "scope")
        return AdapterScope(self, self._core.scope())

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made beside others."""
        require_scope(self, "colocate_vars_with")
        return self._core.extended.colocate_vars_with(colocate_with_variable)

    @contextlib.contextmanager
    def tower_local_var_scope(
        self, reduce_method: VariableAggregation | str
    ) -> Iterator[None]:
        """A `with` block in which new variables are tower-local.

        Each tower has a copy that it changes freely; read in cross-tower context, the
        copies are combined. Variables that say themselves how they are kept are not
        concerned. Elsewhere, write `Variable(synchronization="on_read")`.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope(), strategy.tower_local_var_scope("sum"):
        ...     seen = js.Variable(0.0)
        >>> with strategy.scope():
        ...     _ = strategy.call_for_each_tower(lambda: seen.assign_add(2.0))
        >>> float(seen)
        4.0
        """
        require_scope(self, "tower_local_var_scope")
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

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable; of a tower-local one what its copies are together.

        It has the shape of the variable.
        """
        return read_variable(v)

    def fetch(
        self,
        val: PyTree,
        destination: Device | str | None = None,
        fn: Callable[[PyTree], PyTree] | None = None,
    ) -> PyTree:
        """`fn(val)`, or a copy of `val`, on one device."""
        require_cross_tower(self, "fetch")
        value = self.read_var(val) if isinstance(val, Variable) else val
        if fn is not None:
            require_function("fetch", fn)
            value = fn(value)
        if destination is None:
            return value
        require_equal("fetch", value)
        return self._core.extended.copy_to(value, destination)

    def update(
        self, var: Variable, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable.

        In it, reading and assigning variables mean one copy of them. It is called once
        for all copies.
        """
        require_cross_tower(self, "update")
        require_function("update", fn)
        grouped = kwargs.pop("grouped", True)
        require_equal("update", (args, kwargs))
        return self._core.extended.update(var, fn, args, kwargs, group=bool(grouped))

    def update_non_slot(
        self, colocate_with: Any, fn: Function, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change an optimizer's state of no variable."""
        require_cross_tower(self, "update_non_slot")
        require_function("update_non_slot", fn)
        grouped = kwargs.pop("grouped", True)
        require_equal("update_non_slot", (args, kwargs))
        return self._core.extended.update_on(
            colocate_with, fn, args, kwargs, group=bool(grouped)
        )

    # Whether elements are prepared ahead; None for whatever is best.
    prefetch_on_device: bool | None = None

    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> PerDeviceDataset:
        """Elements for all towers: each goes to one tower, in turn, undivided.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     dataset = strategy.distribute_dataset(lambda: range(4))
        ...     iterator = dataset.make_one_shot_iterator()
        ...     result = strategy.call_for_each_tower(
        ...         lambda x: 10 * x, iterator.get_next())
        ...     [int(x) for x in strategy.unwrap(result)]
        [0, 10]
        """
        reads_ahead = self.prefetch_on_device is not False
        return per_device_dataset(self._core, dataset_fn, reads_ahead)

    def run_steps_on_dataset(
        self,
        fn: Callable[..., object],
        iterator: GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, *element)` so many times, in cross-tower context.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> def step(context, x):
        ...     context.set_last_step_output(
        ...         "x", x, aggregation=contrib.VariableAggregation.SUM)
        >>> def fn(context, x):
        ...     strategy.call_for_each_tower(step, context, x)
        >>> dataset = strategy.distribute_dataset(lambda: range(6))
        >>> with strategy.scope():
        ...     context = strategy.run_steps_on_dataset(
        ...         fn, dataset.make_one_shot_iterator(), iterations=3)
        >>> context.last_step_outputs
        {'x': Array(9, dtype=int32)}
        """
        require_cross_tower(self, "run_steps_on_dataset")
        context = MultiStepContext()

        def call(element: Any) -> None:
            parts = element if isinstance(element, tuple) else (element,)
            fn(context, *parts)

        return run_steps_on_iterator(
            self._core, context, call, iterator, iterations, initial_loop_values
        )


@final
class OtherDistributionStrategy(DistributionStrategy):
    """Of a strategy that 2018 had not."""

    def __repr__(self) -> str:
        return f"compat.contrib.DistributionStrategy.over({self.core!r})"


def _common() -> type[DistributionStrategy]:
    """The class for strategies without one of their own, once those with are known."""
    importlib.import_module("jaxstrategy._src.compat.contrib.contrib_strategies")
    return OtherDistributionStrategy


ADAPTERS: StrategyAdapters[DistributionStrategy] = StrategyAdapters(_common)
"""The strategies with the methods of 2018, one for each strategy of today."""
