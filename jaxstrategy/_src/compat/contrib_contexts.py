"""Contexts of `tf.contrib.distribute`, and functions that ask for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, final

import jax

from jaxstrategy._src.compat.adapters import NAMES_IN_2018, Adapter, require_function
from jaxstrategy._src.compat.contrib import DistributionStrategy
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import current as _current
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import PyTree, Value
from jaxstrategy._src.variables.variable import Variable


@final
class TowerContext(Adapter):
    """One tower's view, in a function of `call_for_each_tower`.

    `get_tower_context()` returns it; nobody else makes one.

    >>> from jaxstrategy.compat import contrib
    >>> context = contrib.get_tower_context()
    >>> context.num_towers, context.tower_id, context.is_single_tower
    (1, 0, True)
    """

    _names = NAMES_IN_2018
    _way = "jaxstrategy.get_replica_context()"

    def __init__(self, replica_context: ReplicaContext) -> None:
        if not isinstance(replica_context, ReplicaContext):
            raise TypeError(
                f"A `TowerContext` was made of {shown(replica_context)}. Use the one "
                "that `get_tower_context()` returns in `call_for_each_tower`."
            )
        super().__init__(replica_context)
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        """A `with` block in the context where code already is."""
        block = contextlib.nullcontext()
        if self.distribution_strategy is _DEFAULT and not _current.has_strategy():
            block = _context.outside()
        else:
            _require_current(self)
        block.__enter__()
        self._entered.append(block)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

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

    @property
    def num_towers(self) -> int:
        """The number of towers that take this step together."""
        return self.distribution_strategy.num_towers

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower only."""
        return self.distribution_strategy.is_single_tower

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


_DEFAULT = DistributionStrategy.over(_current.get_strategy())


def get_tower_context() -> TowerContext | Any:
    """The current tower context, or None in cross-tower context.

    Outside of all it is that of the default strategy's single tower.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.get_tower_context() is contrib.get_tower_context()
    True
    """
    context = _current.get_replica_context()
    return None if context is None else TowerContext._known(context)


def get_cross_tower_context() -> DistributionStrategy | Any:
    """The current strategy in cross-tower context, else None.

    >>> from jaxstrategy.compat import contrib
    >>> print(contrib.get_cross_tower_context())
    None
    """
    is_cross = _current.in_cross_replica_context()
    return get_distribution_strategy() if is_cross else None


def get_distribution_strategy() -> DistributionStrategy:
    """The current strategy; outside any scope the default one with one tower.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.get_distribution_strategy().num_towers
    1
    """
    return DistributionStrategy.over(_current.get_strategy())


def has_distribution_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.has_distribution_strategy()
    False
    """
    return _current.has_strategy()


def require_tower_context(tower_ctx: TowerContext) -> None:
    """Raises an error unless `tower_ctx` is the current tower context.

    Raises:
      ContextError: code is in cross-tower context, or in another step.

    >>> from jaxstrategy.compat import contrib
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

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> with contrib.UpdateContext("CPU:1"):
    ...     contrib.get_update_device()
    (CpuDevice(id=1),)
    """

    def __init__(self, device: Device | str | Sequence[Device | str]) -> None:
        given = [device] if isinstance(device, (Device, str)) else device
        self.devices = _devices.choose(given)
        self._blocks: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        updated = _context.current().updated
        block = _context.entered(update_device=(self.devices, updated))
        block.__enter__()
        self._blocks.append(block)
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)


def get_update_device() -> tuple[Device, ...] | None:
    """The devices of the copies that code changes; None outside of updates.

    A function of `update` is called once for all copies, so that these are the devices
    of all of them.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
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

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
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

    >>> from jaxstrategy.compat import contrib
    >>> contrib.get_loss_reduction()
    <VariableAggregation.MEAN: 'MEAN'>
    """
    return VariableAggregation.MEAN
