"""Training steps as callables, as in 2018: `Step`, `StandardSingleLossStep`."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from jaxstrategy._src.compat.contrib import (
    DistributionStrategy,
    MultiStepContext,
)
from jaxstrategy._src.contexts import step_outputs
from jaxstrategy._src.errors import OutOfRangeError
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.strategies import current
from jaxstrategy._src.text.shown import positive, shown
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.variables.gradients import value_and_grad, value_and_grad_of_read
from jaxstrategy._src.variables.variable import Variable


@final
class Monitor:
    """Calls a step so many times, or until the data ends.

    At the end of the data a step raises `OutOfRangeError`, as `get_next()` of an
    iterator does.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.Monitor(lambda: print("step")).run_steps(2)
    step
    step
    """

    def __init__(
        self, step_callable: Callable[[], object], session: object = None
    ) -> None:
        if not callable(step_callable):
            raise TypeError(
                f"`step_callable` was {shown(step_callable)}, which cannot be called."
            )
        if session is not None:
            raise ValueError(
                "Should not provide a `session`: steps are run without one."
            )
        self._step = step_callable

    def run_steps(self, num_steps: int | None = None) -> None:
        """Takes steps."""
        each = () if num_steps is None else (positive("num_steps", num_steps),)
        with contextlib.suppress(OutOfRangeError):
            for _ in itertools.repeat(None, *each):
                self._step()


class Step(abc.ABC):
    """Something that is called to train a little.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> class Count(contrib.Step):
    ...     def __call__(self):
    ...         return self.distribution.num_towers
    >>> Count(contrib.MirroredStrategy(js.simulate(8)[:2]))()
    2
    """

    def __init__(self, distribution: DistributionStrategy) -> None:
        if not isinstance(distribution, DistributionStrategy):
            raise TypeError(
                f"`distribution` was {shown(distribution)}; a strategy of "
                "`compat.contrib` was wanted."
            )
        self._distribution = distribution

    @property
    def distribution(self) -> DistributionStrategy:
        """The strategy."""
        return self._distribution

    def initialize(self) -> list[Any]:
        """An empty list: of what a session has to run before the first step."""
        return []

    @abc.abstractmethod
    def __call__(self) -> Any:
        """Trains a little."""


class StandardInputStep(Step):
    """A step that takes its elements from a dataset.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> class First(contrib.StandardInputStep):
    ...     def __call__(self):
    ...         return self.next_element().values[0]
    >>> step = First(lambda: range(4), contrib.MirroredStrategy(js.simulate(8)[:2]))
    >>> int(step()), int(step()), step.initialize(), int(step())
    (0, 2, [], 0)
    """

    def __init__(
        self, dataset_fn: Callable[[], Any], distribution: DistributionStrategy
    ) -> None:
        super().__init__(distribution)
        dataset = distribution.distribute_dataset(dataset_fn)
        self._iterator = dataset.make_initializable_iterator()

    def next_element(self) -> PyTree:
        """The next element of each tower."""
        return self._iterator.get_next()

    def initialize(self) -> list[Any]:
        """Begins again at the first element."""
        return self._iterator.initialize()


@final
class StandardSingleLossStep(StandardInputStep):
    """A training step of a model with one loss.

    Each tower differentiates its own loss with respect to the trainable variables that
    `loss_fn` reads when it is first called; it makes none then. The sum of the
    gradients over the towers goes to the optimizer; in 2018 optimizers divided it by
    the number of towers if the last loss was a mean: do so in `loss_fn`, if it is.

    Args:
      dataset_fn: as of `distribute_dataset`.
      loss_fn: is called in each tower with a `MultiStepContext` and the parts of an
        element, and returns the loss.
      optimizer: an optimizer of Optax.
      distribution: the strategy.
      iterations_per_step: how many updates one call makes.

    >>> import jaxstrategy as js
    >>> import optax
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     w = js.Variable(0.0)
    >>> step = contrib.StandardSingleLossStep(
    ...     lambda: [np.float32([1])] * 4, lambda context, x: ((w * x - 1) ** 2).sum(),
    ...     optax.sgd(0.05), strategy)
    >>> for _ in range(2):
    ...     step()
    ...     print(round(float(w), 4))
    0.2
    0.36
    """

    def __init__(
        self,
        dataset_fn: Callable[[], Any],
        loss_fn: Callable[..., Any],
        optimizer: Any,
        distribution: DistributionStrategy,
        iterations_per_step: int = 1,
    ) -> None:
        super().__init__(dataset_fn, distribution)
        if not callable(loss_fn):
            raise TypeError(
                f"`loss_fn` was {shown(loss_fn)}; a function of a context and an "
                "element was wanted."
            )
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise TypeError(
                f"`optimizer` was {shown(optimizer)}; an optimizer of Optax was "
                "wanted, such as `optax.sgd(0.1)`."
            )
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._iterations = positive("iterations_per_step", iterations_per_step)
        self._state: PyTree = None
        self._variables: tuple[Variable, ...] | None = None
        # That of the last call, with the outputs that `loss_fn` set.
        self.last_context: MultiStepContext | None = None

    def __call__(self) -> None:
        """Makes so many updates as `iterations_per_step` says."""
        strategy = self._distribution
        with strategy.scope():
            replica = current.get_replica_context()
            if replica is None:
                self._train(strategy)
            else:  # the default strategy's scope changes nothing
                replica.merge_call(self._train)

    def _train(self, _: object) -> None:
        self.last_context = self._distribution.run_steps_on_dataset(
            self._update, self._iterator, self._iterations
        )

    def _update(self, context: MultiStepContext, *inputs: PyTree) -> None:
        """One update of all variables."""
        update = _updating(self._loss_fn, self._optimizer, self._variables)
        self._variables, self._state = self._distribution.core.run(
            update, (context, self._state, *inputs)
        )


def _updating(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    variables: tuple[Variable, ...] | None,
) -> Callable[..., tuple[tuple[Variable, ...], PyTree]]:
    """The step of one tower."""

    def update(
        context: MultiStepContext, state: PyTree, *inputs: PyTree
    ) -> tuple[tuple[Variable, ...], PyTree]:
        replica = current.get_replica_context()
        loss = step_outputs.with_outputs(loss_fn)
        if variables is None:
            differentiated = value_and_grad_of_read(loss, replica.strategy)
        else:
            differentiated = value_and_grad(loss, variables, has_aux=True)
        (_, posted), grads = differentiated(context, *inputs)
        for message in posted:
            step_outputs.post(message, "ctx.set_last_step_output")
        trained = variables
        if trained is None:
            trained, grads = tuple(v for _, v in grads), tuple(g for g, _ in grads)
        if not trained:
            raise ValueError(
                "`loss_fn` reads no trainable variable, so that there is nothing to "
                "train. Make variables in the strategy's scope, of a floating-point "
                "type."
            )

        def apply(strategy: Any, grads: Sequence[PyTree]) -> PyTree:
            pairs = list(zip(grads, trained, strict=True))
            summed = tuple(strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs))
            values = tuple(variable.value() for variable in trained)
            known = optimizer.init(values) if state is None else state
            changes, known = optimizer.update(summed, known, values)
            for variable, change in zip(trained, changes, strict=True):
                strategy.extended.update(variable, Variable.assign_add, (change,))
            return known

        return trained, replica.merge_call(apply, (grads,))

    return update
