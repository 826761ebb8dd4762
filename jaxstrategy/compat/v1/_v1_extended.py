"""The additional methods of a strategy of TensorFlow 1: `StrategyExtended`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._errors import ContextError
from jaxstrategy._options import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy.compat._absent_members import NAMES_IN_V1, missing_member
from jaxstrategy.compat.v1._v1_hints import options_of
from jaxstrategy.compat.v1._v1_steps import RunsOnIterator
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._call_arguments import check_arguments
from jaxstrategy.replicas._devices import Device
from jaxstrategy.strategies import _extended
from jaxstrategy.strategies._calls import check_function
from jaxstrategy.strategies._destinations import check_reduced, checked_pairs
from jaxstrategy.strategies._extending import checked_variable
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.values._types import Function, PyTree
from jaxstrategy.variables._variable import Variable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxstrategy.strategies._colocating import Beside
    from jaxstrategy.strategies._destinations import Destinations


class StrategyExtended(RunsOnIterator):
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
    def _core(self) -> _extended.StrategyExtended:
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
        """`strategy.run` under its older name: enters the scope by itself.

        Args:
          fn: the step, as one replica sees it.
          args: its positional arguments, a tuple or list.
          kwargs: its keyword arguments.

        Raises:
          ContextError: inside `run`, or in another strategy's scope.
          TracedValueError: Python code in `fn` needs the value of a traced array.
          TypeError: `fn` cannot be called, or arguments are none.
        """
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
        """`value` reduced over the replicas and placed on `destinations`.

        Args:
          reduce_op: a `ReduceOp`, its name in any case, or the `VariableAggregation`.
          value: a pytree of `PerReplica`s, arrays and numbers.
          destinations: a device or its name, several, a variable (which is not
            changed), a `PerReplica` or a mirrored value.
          options: how, instead of as the strategy does.
          experimental_hints: the older name of `options`.

        Raises:
          ValueError: there is no such reduction or destination; options by both names.
          TypeError: a leaf is not a number, or `destinations` names no devices.
          ContextError: inside `run`.
        """
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
        """Several `reduce_to` at once: one result per pair, in order.

        Args:
          reduce_op: as of `reduce_to`.
          value_destination_pairs: values with their destinations.
          options: how, instead of as the strategy does.
          experimental_hints: the older name of `options`.

        Raises:
          ValueError: something else than a sequence of pairs; else as `reduce_to`.
          TypeError: as `reduce_to`.
          ContextError: inside `run`.
        """
        chosen = options_of(options, experimental_hints)
        op = ReduceOp(reduce_op)
        pairs = checked_pairs(value_destination_pairs)
        for _, destinations in pairs:
            self._check_process(destinations)
        return self._core.batch_reduce_to(op, pairs, chosen)

    def _check_process(self, destinations: Destinations) -> None:
        """Raise if these are devices of a process that is out of reach."""

    def broadcast_to(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        """Copies of `tensor` on `destinations`.

        Args:
          tensor: a pytree of arrays, equal on all replicas. A number of Python's comes
            back as it is, so that it takes on the dtype of what it is added to.
          destinations: a device or its name, a list of them, a variable, a `PerReplica`
            or a mirrored value.

        Returns:
          A pytree like `tensor`, of the same shapes. With one replica it is `tensor`.

        Raises:
          ValueError: there is no destination, or no such device; `tensor` is a
            `PerReplica`.
          TypeError: `destinations` names no devices.
          ContextError: inside `run`.
        """
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

        Raises:
          ValueError: an on-read variable whose aggregation is NONE.
          TypeError: it is not a variable.
          ContextError: an on-read variable inside `run`; in another strategy's scope.
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
        """Calls `fn(var, *args, **kwargs)` to change each copy of a variable.

        Args:
          var: the variable. In `fn`, to read and assign it mean one copy.
          fn: called once for all copies, in cross-replica context.
          args: further arguments, a tuple or list.
          kwargs: further keyword arguments.
          group: whether to return what `fn` did. If not, each leaf of that is a tuple
            with one entry for each copy.

        Raises:
          ValueError: the copies of a mirrored variable would differ, or it belongs to
            another strategy.
          TypeError: `var` is not a variable; `args` is not a tuple or list.
          ContextError: inside `run`; use `merge_call`.
        """
        return self._core.update(var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Function,
        args: Sequence[PyTree] = (),
        kwargs: dict[str, PyTree] | None = None,
        group: bool = True,
    ) -> PyTree:
        """Calls `fn(*args, **kwargs)` to change what goes with no one variable.

        Args:
          colocate_with: what `non_slot_devices` returned, or None for that.
          fn: called once for all devices, in cross-replica context. Each variable that
            it changes is changed once, on all its copies.
          args: its arguments, a tuple or list.
          kwargs: its keyword arguments.
          group: as of `update`, with one entry for each device.

        Raises:
          ValueError: an argument is a `PerReplica`, outside a step; or a mirrored
            variable is assigned what may differ between replicas.
          TypeError: `colocate_with` names no devices; `args` is not a tuple or list.
          ContextError: inside `run`; use `merge_call`.
        """
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
        """The place for what an optimizer keeps for no one variable.

        Args:
          var_list: the variables that it changes.

        Returns:
          All devices that hold mirrored variables; if those are not this strategy's
          own, the variable whose name comes first.

        Raises:
          ValueError: there is no variable where one is wanted.
        """
        return self.parameter_devices

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself.

        Args:
          value: a variable, one of `experimental_local_results` of one, or another.
        """
        return self._core.value_container(value)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether `v` was made in this strategy's `scope()`.

        Raises:
          TypeError: it is not a variable.
        """
        return self._core.variable_created_in_scope(v)

    def colocate_vars_with(
        self, colocate_with_variable: Beside
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made on the same devices.

        Args:
          colocate_with_variable: a variable of the strategy; or devices, such as those
            of `non_slot_devices`.

        Raises:
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: it is neither a variable nor devices.
          ContextError: outside the strategy's `scope()`.
        """
        return self._core.colocate_vars_with(colocate_with_variable)

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core: Any = vars(self).get("_strategy")
            own = {x: y.removeprefix("extended.") for x, y in NAMES_IN_V1.items()}
            way = "strategy.core.extended"
            missing_member(self, core and core.extended, name, way, own)
