"""Contexts and steps of `tf.contrib.distribute`, and functions that ask for them."""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, final

import jax

from jaxstrategy._src.compat.adapters import (
    NAMES_IN_2018,
    Adapter,
    delegated,
    require_function,
)
from jaxstrategy._src.compat.contrib import DistributionStrategy, MultiStepContext
from jaxstrategy._src.compat.inputs import in_cross_replica
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError, OutOfRangeError
from jaxstrategy._src.options import ReduceOp, VariableAggregation
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import current as _current
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import positive, shown
from jaxstrategy._src.values.arrays import PyTree, Value
from jaxstrategy._src.variables.gradients import value_and_grad, value_and_grad_of_read
from jaxstrategy._src.variables.variable import Variable


@final
class TowerContext(Adapter):
    """One tower's view, in a function of `call_for_each_tower`.

    `get_tower_context()` returns it; nobody else makes one.

    >>> context = contrib.get_tower_context()
    >>> context.num_towers, context.tower_id, context.is_single_tower
    (1, 0, True)
    """

    _names = NAMES_IN_2018
    _core_path = "jaxstrategy.get_replica_context()"

    def __init__(self, replica_context: ReplicaContext) -> None:
        if not isinstance(replica_context, ReplicaContext):
            raise TypeError(
                f"A `TowerContext` was made of {shown(replica_context)}. Use the one "
                "that `get_tower_context()` returns in `call_for_each_tower`."
            )
        super().__init__(replica_context)

    def __enter__(self) -> Self:
        """Enters the context where code already is."""
        _require_current(self)
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves the block; code stays where it is."""

    def merge_call(
        self, merge_fn: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` once for all towers."""
        _require_current(self)
        require_function("merge_call", merge_fn)

        def with_adapter(core: Any, /, *args: Any, **kwargs: Any) -> PyTree:
            return merge_fn(DistributionStrategy.over(core), *args, **kwargs)

        return self._core.merge_call(with_adapter, args, kwargs)

    @property
    def distribution_strategy(self) -> DistributionStrategy:
        """The strategy whose tower this is."""
        return DistributionStrategy.over(self._core.strategy)

    num_towers: int = delegated(Strategy.num_replicas_in_sync, "_core.strategy")

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower only."""
        return self.num_towers == 1

    @property
    def tower_id(self) -> jax.Array | int:
        """The number of this tower, from 0.

        One program serves all towers, so that in `call_for_each_tower` it is an int32
        scalar known only on the devices. Outside any strategy it is the int 0.
        """
        _require_current(self)
        return self._core.replica_id_in_sync_group

    @property
    def device(self) -> tuple[Device, ...]:
        """The devices of all towers, in their order: one program serves them."""
        _require_current(self)
        return self._core.devices

    def __repr__(self) -> str:
        return f"TowerContext({self.distribution_strategy!r})"


def get_tower_context() -> TowerContext | Any:
    """The current tower context, or None in cross-tower context.

    Outside of all it is that of the default strategy's single tower.

    >>> contrib.get_tower_context() is contrib.get_tower_context()
    True
    """
    context = _current.get_replica_context()
    return None if context is None else TowerContext._cached(context)


def get_cross_tower_context() -> DistributionStrategy | Any:
    """The current strategy in cross-tower context, else None.

    >>> print(contrib.get_cross_tower_context())
    None
    """
    is_cross = _current.in_cross_replica_context()
    return get_distribution_strategy() if is_cross else None


def get_distribution_strategy() -> DistributionStrategy:
    """The current strategy; outside any scope the default one with one tower.

    >>> contrib.get_distribution_strategy().num_towers
    1
    """
    return DistributionStrategy.over(_current.get_strategy())


def has_distribution_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> contrib.has_distribution_strategy()
    False
    """
    return _current.has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Raises an error unless `tower_ctx` is the current tower context.

    Raises:
      ContextError: code is in cross-tower context, or in another step.

    >>> contrib.require_tower_context(contrib.get_tower_context())
    """
    if not isinstance(tower_ctx, TowerContext):
        raise TypeError(
            f"`require_tower_context` was given {shown(tower_ctx)}; a TowerContext of "
            "`get_tower_context()` was wanted."
        )
    _require_current(tower_ctx)


def _require_current(tower_ctx: TowerContext) -> None:
    current = get_tower_context()
    if current is tower_ctx:
        return
    if current is None:
        raise ContextError(
            "Need to be inside `call_for_each_tower()`, where code sees one tower. "
            "Here it sees all: use the methods of the strategy."
        )
    here = current.distribution_strategy
    if here is tower_ctx.distribution_strategy:
        raise ContextError(
            "Mismatching tower context. This one belongs to another call of "
            "`call_for_each_tower`: call `get_tower_context()` where it is used."
        )
    raise ContextError(
        "Mismatching DistributionStrategy objects: "
        f"{tower_ctx.distribution_strategy!r} is not {here!r}. Call "
        "`get_tower_context()` where the context is used."
    )


@final
class UpdateContext:
    """A `with` block in which `get_update_device()` says these devices.

    `DistributionStrategy.update` enters one by itself. This one changes nothing but
    what `get_update_device()` returns in this thread.

    Args:
      device: a device or its name, or several.

    >>> _ = js.simulate(8)
    >>> with contrib.UpdateContext("CPU:1"):
    ...     contrib.get_update_device()
    (CpuDevice(id=1),)
    """

    def __init__(self, device: Device | str | Sequence[Device | str]) -> None:
        given = [device] if isinstance(device, (Device, str)) else device
        self.devices = _devices.choose(given)
        self._blocks: list[AbstractContextManager[Any]] = []  # it may be entered again

    def __enter__(self) -> Self:
        place = self.devices, _context.current().updated
        self._blocks.append(_context.entered(update_device=place))
        self._blocks[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)


def get_update_device() -> tuple[Device, ...] | None:
    """The devices of the copies that code changes; None outside of updates.

    A function of `update` is called once for all copies, so that these are the devices
    of all of them.

    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     v = js.Variable(1.0)
    ...     strategy.update(v, lambda v: print(contrib.get_update_device()))
    (CpuDevice(id=0), CpuDevice(id=1))
    """
    context = _context.current()
    if context.update_device is not None:
        devices, updated = context.update_device
        if updated == context.updated:  # else an update was entered inside
            return devices
    return context.updated or None


def increment_var(v: Variable, amount: Value = 1) -> jax.Array:
    """Adds `amount` to each copy of a variable, once for all towers.

    For counters of steps, in a tower or outside any scope. Returns the new value.

    Raises:
      ContextError: in cross-tower context; use `distribution_strategy.update` there.

    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     steps = js.Variable(6)
    ...     strategy.call_for_each_tower(lambda: contrib.increment_var(steps))
    Array(7, dtype=int32)
    """
    context = get_tower_context()
    if context is None:
        raise ContextError(
            "`increment_var` was called in cross-tower context; it is for towers. Use "
            "`distribution_strategy.update(v, lambda v: v.assign_add(amount))` here."
        )
    return context.merge_call(
        lambda strategy, v: strategy.update(v, lambda v: v.assign_add(amount)), v
    )


def get_loss_reduction() -> VariableAggregation:
    """The aggregation of gradients for the loss at hand: MEAN.

    Nobody records losses here, so that it stays MEAN after a summed one, too, where
    2018 gave SUM.

    >>> contrib.get_loss_reduction()
    <VariableAggregation.MEAN: 'MEAN'>
    """
    return VariableAggregation.MEAN


@final
class Monitor:
    """Calls a step so many times, or until `OutOfRangeError`, the end of the data.

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

    `dataset_fn` is that of `distribute_dataset`; `loss_fn` is called in each tower with
    a `MultiStepContext` and the parts of an element, and returns the loss; `optimizer`
    is one of Optax; one call makes `iterations_per_step` updates.

    >>> import optax
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
        in_cross_replica(self._distribution.core, self._train)

    def _train(self, _: object) -> None:
        self.last_context = self._distribution.run_steps_on_dataset(
            self._update, self._iterator, self._iterations
        )

    def _update(self, context: MultiStepContext, *inputs: PyTree) -> None:
        update = _updating(self._loss_fn, self._optimizer, self._variables)
        self._variables, self._state = self._distribution.core.run(
            update, (context, self._state, *inputs)
        )


def _updating(
    loss_fn: Callable[..., Any], optimizer: Any, variables: tuple[Variable, ...] | None
) -> Callable[..., tuple[tuple[Variable, ...], PyTree]]:
    """The step of one tower."""

    def update(
        context: MultiStepContext, state: PyTree, *inputs: PyTree
    ) -> tuple[tuple[Variable, ...], PyTree]:
        replica = _current.get_replica_context()
        loss = _context.with_outputs(loss_fn)
        if variables is None:
            differentiated = value_and_grad_of_read(loss, replica.strategy)
        else:
            differentiated = value_and_grad(loss, variables, has_aux=True)
        (_, messages), grads = differentiated(context, *inputs)
        for message in messages:
            _context.emit(message, "ctx.set_last_step_output")
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
