"""The steps of `strategy.extended` of TensorFlow 1: `RunsOnIterator`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxstrategy.compat import _inputs
from jaxstrategy.compat._numpy_dataset import NumpyDataset, numpy_dataset
from jaxstrategy.compat._steps_on_iterator import run_steps_on_iterator
from jaxstrategy.compat.v1._v1_multi_step_context import MultiStepContext
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.values._types import PyTree


class RunsOnIterator:
    """The methods of `extended` that take several steps, and make datasets for them."""

    _strategy: Strategy

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], object],
        iterator: _inputs.GetsNext,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Calls `fn(context, element)` so many times, in cross-replica context.

        A step that `fn` starts, and that sets outputs on the context, is compiled once,
        however often this is called; the context may be among its arguments, or in its
        closure.

        Args:
          fn: sets outputs, and runs steps.
          iterator: what `make_dataset_iterator` or `make_input_fn_iterator` returned.
          iterations: how many times; 0 leaves `initial_loop_values` as the outputs.
          initial_loop_values: the outputs before the first step, a dict by name. They
            are not needed.

        Returns:
          The context, with the outputs of the last step.

        Raises:
          OutOfRangeError: there are fewer elements. The steps before have been taken.
          TypeError: `iterator` is none, or `iterations` is no whole number.
          ValueError: `iterations` is negative; or it is 0, and the initial values have
            no names.
          ContextError: inside `run`, or in another strategy's scope.

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
        """The rows of arrays as a dataset, as of the strategy's method.

        Args:
          numpy_input: arrays with equally many rows, in tuples and dicts.
          session: of a graph, in TensorFlow; nothing here.

        Raises:
          ValueError: there are no arrays, or they differ in their rows.
        """
        return numpy_dataset(numpy_input)
