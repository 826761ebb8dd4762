"""A strategy with the methods of 2018: `DistributionStrategy`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self, final

from jaxstrategy._options import VariableAggregation
from jaxstrategy.compat._absent_members import NAMES_IN_2018
from jaxstrategy.compat._faces import Faces
from jaxstrategy.compat._older_strategy import checked_core
from jaxstrategy.compat.contrib import _cross_tower_checks, _tower_values
from jaxstrategy.compat.contrib._changes_variables import ChangesVariables
from jaxstrategy.compat.contrib._feeds_towers import FeedsTowers
from jaxstrategy.compat.contrib._map_output import MapOutput
from jaxstrategy.contexts._strategy_face import StrategyFace
from jaxstrategy.strategies._destinations import Destinations, checked_pairs
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.values._types import Function, PyTree


class DistributionStrategy(FeedsTowers, ChangesVariables):
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
        FACES.add(self)

    @staticmethod
    def over(core: Strategy | StrategyFace) -> DistributionStrategy:
        """The object with these methods for a strategy of today, the same each time.

        For what the classes of 2018 have no arguments for.

        Args:
          core: a strategy of `jaxstrategy`, or one of another generation.

        Raises:
          TypeError: it is something else.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=4)
        >>> contrib.DistributionStrategy.over(strategy)
        compat.contrib.MirroredStrategy(8 replicas, 4 on each device, on cpu:0, cpu:1)
        """
        return FACES.of(checked_core(core))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        own = {name: value for name, value in vars(self).items() if name[0] != "_"}
        vars(twin).update(own)
        return twin

    # Steps.

    def call_for_each_tower(self, fn: Function, *args: PyTree, **kwargs: Any) -> PyTree:
        """Calls `fn(*args, **kwargs)` in each tower: a step, as today's `run`.

        Args:
          fn: the step, as one tower sees it.
          *args: its arguments; each tower gets its own version of a `PerDevice`.
          **kwargs: its keyword arguments. `run_concurrently` is none of them, and
            changes nothing.

        Returns:
          A pytree like the one `fn` returns. What may differ between the towers is a
          `PerDevice`; a variable is that variable.

        Raises:
          ContextError: outside of cross-tower context.
          TypeError: `fn` cannot be called.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope():
        ...     strategy.call_for_each_tower(lambda x, y: x + y, 1, y=2)
        Array(3, dtype=int32, weak_type=True)
        """
        self._require_cross_tower("call_for_each_tower")
        _tower_values.require_function("call_for_each_tower", fn)
        kwargs.pop("run_concurrently", None)
        return self._core.run(fn, args, kwargs)

    def map(
        self, map_over: Iterable[Any], fn: Function, *args: PyTree, **kwargs: Any
    ) -> MapOutput:
        """Calls `fn(element, *args, **kwargs)` for each element, outside of towers.

        Args:
          map_over: the elements. They go to the towers in turn.
          fn: a function of an element.
          *args: further arguments, the same for all.
          **kwargs: further keyword arguments.

        Returns:
          The results, for `reduce`: of range(10), `lambda x, y: x * y` and 2, the sum
          is 90.

        Raises:
          ContextError: outside of cross-tower context.
          TypeError: `fn` cannot be called.
        """
        self._require_cross_tower("map")
        _tower_values.require_function("map", fn)
        results = [fn(element, *args, **kwargs) for element in map_over]
        return MapOutput(results, self.num_towers)

    # Values.

    def broadcast(
        self, tensor: PyTree, destinations: Destinations | None = None
    ) -> PyTree:
        """Copies of a value on several devices, or on one.

        In a function of `merge_call` it is on all devices already, and comes back.

        Args:
          tensor: a pytree of arrays and numbers.
          destinations: a device or its name, a list of them, or a variable, whose
            devices are meant; by default the worker devices.

        Raises:
          ContextError: outside of cross-tower context.
          ValueError: there is no such device.
          TypeError: the value differs between towers; `destinations` names no devices.
        """
        self._require_cross_tower("broadcast")
        _tower_values.require_equal("broadcast", tensor)
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

        Args:
          aggregation: `VariableAggregation.SUM` or `.MEAN`; "sum" or "mean".
          value: a pytree of `PerDevice`s, arrays and numbers, or what `map` gave.
          destinations: as of `broadcast`; by default the towers' devices.

        Returns:
          A pytree of mirrored arrays, on all destinations.

        Raises:
          ContextError: outside of cross-tower context.
          ValueError: another aggregation; no such device.
          TypeError: a leaf is no number; `destinations` names no devices.
        """
        self._require_cross_tower("reduce")
        op = _cross_tower_checks.operation_of(aggregation)
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
        """Several `reduce` in one: one result for each pair, in order.

        Args:
          aggregation: as of `reduce`.
          value_destination_pairs: pairs of a value and its destinations.

        Raises:
          ContextError: outside of cross-tower context.
          ValueError: something else than pairs; otherwise as `reduce`.
          TypeError: as `reduce`.
        """
        self._require_cross_tower("batch_reduce")
        op = _cross_tower_checks.operation_of(aggregation)
        pairs = [
            (value, self.worker_devices if destinations is None else destinations)
            for value, destinations in checked_pairs(value_destination_pairs)
        ]
        return self._core.extended.batch_reduce_to(op, pairs)

    def unwrap(self, value: PyTree) -> list[PyTree]:
        """The versions that the towers of this process have; `[value]` of a plain one.

        Raises:
          ContextError: outside of cross-tower context.
        """
        self._require_cross_tower("unwrap")
        if isinstance(value, MapOutput):
            return value.of_towers()
        if _tower_values.is_on_one_device(value):
            return [value]
        return list(self._core.experimental_local_results(value))

    def value_container(self, value: object) -> object:
        """The variable that `value` is a copy of; else `value` itself."""
        return self._core.extended.value_container(value)

    def group(self, value: PyTree, name: str | None = None) -> PyTree:
        """Waits until all that `value` holds is computed.

        Args:
          value: a pytree.
          name: of the operation that it was in a graph.

        Returns:
          None; a single plain value, without `name`, itself.

        Raises:
          ContextError: outside of cross-tower context.
        """
        self._require_cross_tower("group")
        return _tower_values.grouped(self.unwrap(value), name)


@final
class OtherDistributionStrategy(DistributionStrategy):
    """Of a strategy that 2018 had not."""

    def __repr__(self) -> str:
        return f"compat.contrib.DistributionStrategy.over({self.core!r})"


FACES: Faces[DistributionStrategy] = Faces(lambda: OtherDistributionStrategy)
"""The strategies with the methods of 2018, one for each strategy of today."""
