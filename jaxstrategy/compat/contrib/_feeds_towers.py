"""The inputs of a strategy of 2018, and steps over them: `FeedsTowers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxstrategy.compat import _inputs
from jaxstrategy.compat._steps_on_iterator import run_steps_on_iterator
from jaxstrategy.compat.contrib._aggregating_context import MultiStepContext
from jaxstrategy.compat.contrib._has_towers import HasTowers
from jaxstrategy.compat.contrib._per_device_dataset import (
    PerDeviceDataset,
    per_device_dataset,
)


class FeedsTowers(HasTowers):
    """The methods that give towers their elements, and take steps with them."""

    # Whether elements are prepared ahead; None for whatever is best.
    prefetch_on_device: bool | None = None

    def distribute_dataset(self, dataset_fn: Callable[[], Any]) -> PerDeviceDataset:
        """Elements for all towers: each goes to one tower, in turn, undivided.

        Args:
          dataset_fn: is called once, without arguments, and returns a dataset: a list,
            a generator function, `jaxstrategy.batches`, a dataset of another library.

        Raises:
          TypeError: `dataset_fn` is no function.
          ValueError: it returns no dataset.

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
        iterator: _inputs.GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, *element)` so many times, in cross-tower context.

        Args:
          fn: sets outputs on the context, and runs steps. The parts of an element that
            is a tuple are arguments of their own.
          iterator: of what `distribute_dataset` returned.
          iterations: how many times; 0 leaves `initial_loop_values` as the outputs.
          initial_loop_values: the outputs before the first step, a dict by name. They
            are not needed.

        Returns:
          The context, with the outputs of the last step.

        Raises:
          ContextError: outside of cross-tower context.
          OutOfRangeError: there are fewer elements. The steps before have been taken.
          TypeError: `iterator` is none, or `iterations` is no whole number.
          ValueError: `iterations` is negative; or it is 0, and the initial values have
            no names.

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
        self._require_cross_tower("run_steps_on_dataset")
        context = MultiStepContext()

        def call(element: Any) -> None:
            parts = element if isinstance(element, tuple) else (element,)
            fn(context, *parts)

        return run_steps_on_iterator(
            self._core, context, call, iterator, iterations, initial_loop_values
        )
