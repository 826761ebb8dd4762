"""The additional methods of a strategy of TensorFlow 1: `StrategyExtended`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.compat._absent_members import missing_member
from jaxstrategy.compat.v1._v1_hints import options_of
from jaxstrategy.contexts import _context
from jaxstrategy.replicas._devices import Device
from jaxstrategy.strategies import _extended
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.values._types import Function, PyTree
from jaxstrategy.variables._variable import Variable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jaxstrategy.strategies._destinations import Destinations


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
        _require_function(fn, "call_for_each_replica")
        _context.require_cross_replica(self._strategy, "extended.call_for_each_replica")
        return self._strategy.run(fn, args, kwargs)

    # Values.

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over the replicas and placed on `destinations`.

        Args:
          reduce_op: a `ReduceOp`, or its name in any case.
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
        return self._core.reduce_to(reduce_op, value, destinations, chosen)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
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
        return self._core.batch_reduce_to(reduce_op, value_destination_pairs, chosen)

    # Variables.

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
        self, colocate_with_variable: Variable
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made on the same devices.

        Args:
          colocate_with_variable: a variable of the strategy.

        Raises:
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: it is not a variable.
          ContextError: outside the strategy's `scope()`.
        """
        return self._core.colocate_vars_with(colocate_with_variable)

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core: Any = vars(self).get("_strategy")
            way = "strategy.core.extended"
            missing_member(self, core and core.extended, name, way)


def _require_function(fn: object, method: str) -> None:
    if not callable(fn):
        raise TypeError(
            f"`extended.{method}` was given {fn!r}, which cannot be called. Give the "
            "function itself, and its arguments as `args`."
        )
