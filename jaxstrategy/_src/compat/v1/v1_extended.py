"""What TensorFlow 1 says otherwise of some strategies: kinds of `StrategyExtended`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.compat import older_inputs
from jaxstrategy._src.compat.adapters import (
    NAMES_IN_V1,
    first_named,
    missing_member,
)
from jaxstrategy._src.compat.multi_steps import (
    AbstractMultiStepContext,
    run_steps_on_iterator,
)
from jaxstrategy._src.compat.older_inputs import NumpyDataset, numpy_dataset
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import check_arguments
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import extended
from jaxstrategy._src.strategies.choices import check_function
from jaxstrategy._src.strategies.destinations import (
    Destinations,
    check_reduced,
    checked_pairs,
)
from jaxstrategy._src.strategies.extended import checked_variable
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.variables.variable import Variable


def options_of(
    options: CommunicationOptions | None, hints: CommunicationOptions | None
) -> CommunicationOptions | None:
    """The options by whichever name they were given."""
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


@final
class MultiStepContext(AbstractMultiStepContext):
    """Named outputs of the last of several steps.

    Made by `experimental_run_steps_on_iterator`, which passes it to the function first.

    >>> context = MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    _operation_example = "`reduce_op=ReduceOp.MEAN`"

    @classmethod
    def of_steps(cls) -> MultiStepContext:
        """The context that steps are given."""
        return _OF_STEPS

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of this step; those of the last one stay."""
        op = None if reduce_op is None else ReduceOp(reduce_op)
        self._set_output(name, output, op)


_OF_STEPS = MultiStepContext()


if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxstrategy._src.strategies.destinations import Destinations
    from jaxstrategy._src.strategies.extended import Beside


class StrategyExtended:
    """The methods of `tf.compat.v1.distribute.StrategyExtended`.

    It is `strategy.extended` of a strategy of `compat.v1`.

    Args:
      container_strategy: a strategy of today.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> strategy.extended.call_for_each_replica(lambda x: x + 1, (np.int32(2),))
    Array(3, dtype=int32)
    """

    def __init__(self, container_strategy: Strategy) -> None:
        self._strategy = container_strategy

    @property
    def _core(self) -> extended.StrategyExtended:
        return self._strategy.extended

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order."""
        return self._core.worker_devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold mirrored variables."""
        return self._core.parameter_devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the one that saves checkpoints, in TensorFlow."""
        return self._core.should_checkpoint

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the one that writes metrics."""
        return self._core.should_save_summary

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process of the job runs the whole program."""
        return self._core.experimental_between_graph

    @property
    def experimental_should_init(self) -> bool:
        """Whether initial values that this process makes count."""
        return self._core.experimental_should_init

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: one program is compiled for all replicas."""
        return self._core.experimental_require_static_shapes

    # Steps.

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

    # Values.

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
        chosen = options_of(options, experimental_hints)
        op = ReduceOp(reduce_op)
        self._check_process(destinations)
        return self._core.reduce_to(op, value, destinations, chosen)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | VariableAggregation | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """Several `reduce_to` at once: one result per pair, in order."""
        chosen = options_of(options, experimental_hints)
        op = ReduceOp(reduce_op)
        pairs = checked_pairs(value_destination_pairs)
        for _, destinations in pairs:
            self._check_process(destinations)
        return self._core.batch_reduce_to(op, pairs, chosen)

    def _check_process(self, destinations: Destinations) -> None:
        """Raise if these are devices of a process that is out of reach."""

    def broadcast_to(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        """Copies of `tensor` on `destinations`."""
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

    # Variables.

    def read_var(self, v: Variable) -> jax.Array:
        """The value of a variable, of its shape; never the variable.

        That of an on-read variable is what it aggregates to. In `run` it is this
        replica's value, of a mirrored variable.
        """
        context = _context.current()
        _context.require_same(context, self._strategy)
        variable = checked_variable(v, "read_var")
        on_read = variable.synchronization is VariableSynchronization.ON_READ
        if context.replica is not None and on_read:
            raise ContextError(
                f"`extended.read_var` was called inside `run` on variable "
                f"{variable.name!r}, which is brought together when it is read in "
                "cross-replica context. This replica's own value is `v.value()`; or "
                "read it outside, or in `merge_call`."
            )
        return variable.value()

    def update(
        self,
        var: Variable,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable."""
        return self._core.update(var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change what goes with no one variable."""
        method = "extended.update_non_slot"
        context = _context.require_cross_replica(self._strategy, method)
        check_function(fn, "extended.update_non_slot")
        check_arguments(args, kwargs)
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

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself."""
        return self._core.value_container(value)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's `scope()`."""
        return self._core.variable_created_in_scope(v)

    def colocate_vars_with(
        self, colocate_with_variable: Beside
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made on the same devices."""
        return self._core.colocate_vars_with(colocate_with_variable)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], object],
        iterator: older_inputs.GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, element)` so many times, in cross-replica context.

        A step that `fn` starts, and that sets outputs on the context, is compiled once,
        however often this is called; the context may be among its arguments, or in its
        closure.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import v1
        >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
        >>> def step(context, x):
        ...     context.set_last_step_output("loss", x.sum(), v1.ReduceOp.MEAN)
        >>> def fn(context, x):
        ...     strategy.extended.call_for_each_replica(step, args=(context, x))
        >>> iterator = strategy.make_dataset_iterator(js.batches(np.arange(8.0), 4))
        >>> run = strategy.extended.experimental_run_steps_on_iterator
        >>> run(fn, iterator, iterations=2).last_step_outputs
        {'loss': Array(11., dtype=float32)}
        """
        context = MultiStepContext()
        return run_steps_on_iterator(
            self._strategy,
            context,
            lambda element: fn(context, element),
            iterator,
            iterations,
            initial_loop_values,
        )

    def experimental_make_numpy_dataset(
        self, numpy_input: PyTree, session: object = None
    ) -> NumpyDataset:
        """The rows of arrays as a dataset, as of the strategy's method."""
        return numpy_dataset(numpy_input)

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core: Any = vars(self).get("_strategy")
            own = {x: y.removeprefix("extended.") for x, y in NAMES_IN_V1.items()}
            way = "strategy.core.extended"
            missing_member(self, core and core.extended, name, way, own)


_TASK = re.compile(r"^/job:(\w+)(?:/replica:\d+)?/task:(\d+)(?:/|$)")


@final
class CentralStorageExtended(StrategyExtended):
    """Of variables on one device: to TensorFlow, those of a parameter server."""

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow, though there is one process."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: the initial values of this process count."""
        return True

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "extended.non_slot_devices")


@final
class MultiWorkerExtended(StrategyExtended):
    """Of several processes, also where there is one."""

    @property
    def experimental_between_graph(self) -> bool:
        """True: each process runs the whole program."""
        return True


@final
class ParameterServerExtended(StrategyExtended):
    """Of variables on parameter servers."""

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "extended.non_slot_devices")

    def _check_process(self, destinations: Destinations) -> None:
        names = destinations if isinstance(destinations, (list, tuple)) else ()
        resolver = self._strategy.cluster_resolver
        if resolver is None:
            return
        own = resolver.task_type, resolver.task_id
        for name in names or (destinations,):
            found = _TASK.match(name) if isinstance(name, str) else None
            if found and found[1] == own[0] and int(found[2]) != own[1]:
                raise ValueError(
                    f"Cannot reduce to another worker: {name!r}; this process is "
                    f"{own[0]} {own[1]}. Name one of its devices, or a variable."
                )


@final
class OneDeviceExtended(StrategyExtended):
    """Of one replica, on whose device all is."""

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        if isinstance(tensor, jax.Array):
            return tensor
        return super()._broadcast(tensor, self.worker_devices[0])


@final
class DefaultExtended(StrategyExtended):
    """Of the default strategy, which has no devices."""

    @property
    def worker_devices(self) -> NoReturn:
        """Refused: there is none."""
        raise _of_no_devices("worker_devices")

    @property
    def parameter_devices(self) -> NoReturn:
        """Refused: there is none."""
        raise _of_no_devices("parameter_devices")

    @property
    def experimental_between_graph(self) -> NoReturn:
        """Refused: there is none."""
        raise _of_no_job("experimental_between_graph")

    @property
    def experimental_should_init(self) -> NoReturn:
        """Refused: there is none."""
        raise _of_no_job("experimental_should_init")

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first."""
        return first_named(var_list, "extended.non_slot_devices")

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        return tensor


def _of_no_devices(name: str) -> RuntimeError:
    return RuntimeError(
        f"`extended.{name}` was asked of the default strategy, which computes wherever "
        "its code does. Ask inside the scope of another strategy, or after "
        "`has_strategy()`."
    )


def _of_no_job(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"`extended.{name}` was asked of the default strategy, which is part of no "
        "job. Ask inside the scope of another strategy, or after `has_strategy()`."
    )
