"""The strategy in scope, the default one, and the types `Mirrored` and `Sharded`."""

from __future__ import annotations

import contextlib
from typing import Any, Self, final

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import (
    AnyStrategy,
    ReplicaContext,
    core_of,
)
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import EagerExecutor
from jaxstrategy._src.reductions.cross_device_ops import NcclAllReduce
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.policy import ORDINARY


@final
class DefaultStrategy(Strategy):
    """What `get_strategy()` returns outside any scope.

    `run` calls the function, `reduce` reduces one version, `merge_call` calls the merge
    function: library code written for replicas works unchanged with no strategy at all.
    """

    def __init__(self) -> None:
        # An all-reduce of each array by itself; others ask for the devices, which would
        # start JAX: before that, devices may be simulated and processes may meet.
        self._compose(
            Choices(
                ORDINARY.replicas,
                ops=NcclAllReduce(num_packs=0),
                variables=ORDINARY,
                executor=lambda strategy, processes: EagerExecutor(strategy),
            )
        )
        self._replica_context = ReplicaContext(self)

    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block that changes nothing."""
        context = _context.current()
        if context.strategy is not None and context.strategy is not self:
            raise ContextError(
                "Mixing different Strategy objects: the default strategy's scope was "
                f"entered inside {_context.describe(context)}. Leave that one first."
            )
        return contextlib.nullcontext(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return "DefaultStrategy(1 replica)"


_defaults: list[DefaultStrategy] = []


def _default() -> DefaultStrategy:
    """The default strategy, made when it is first asked for: most steps never do."""
    if not _defaults:
        _defaults.append(DefaultStrategy())
    return _defaults[0]  # of several that threads make at once, the first


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> import jaxstrategy as js
    >>> js.get_strategy()
    DefaultStrategy(1 replica)
    """
    strategy = _context.current().strategy
    if strategy is None:
        return _default()
    assert isinstance(strategy, Strategy)
    return strategy


def has_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> import jaxstrategy as js
    >>> js.has_strategy()
    False
    """
    return get_strategy() is not _default()


# `| Any` rather than `| None`: it is None only where nobody asks it for anything, and
# type checkers should not object to `get_replica_context().all_reduce` in every step.
def get_replica_context() -> ReplicaContext | Any:
    """The current replica context, or None in cross-replica context.

    Inside `run` it is the replica's; in `scope()` and `merge_call` there is none;
    outside any strategy it is that of the default strategy's single replica.

    >>> import jaxstrategy as js
    >>> js.get_replica_context().num_replicas_in_sync
    1
    """
    context = _context.current()
    if context.strategy is None:
        return _default()._replica_context
    return context.replica


def in_cross_replica_context() -> bool:
    """Whether code sees all replicas at once: in `scope()` and `merge_call`.

    >>> import jaxstrategy as js
    >>> js.in_cross_replica_context()
    False
    """
    return get_replica_context() is None


def experimental_set_strategy(strategy: AnyStrategy | None) -> None:
    """Makes `strategy` current for the rest of this thread, without a `with` block.

    None goes back to the default strategy.

    Raises:
      ContextError: inside a `scope()` or `run`.
      TypeError: `strategy` is not a strategy.

    >>> import jaxstrategy as js
    >>> js.experimental_set_strategy(js.MirroredStrategy(js.simulate(8)[:2]))
    >>> js.get_strategy()
    MirroredStrategy(2 replicas on cpu:0, cpu:1)
    >>> js.experimental_set_strategy(None)
    >>> js.has_strategy()
    False
    """
    core = core_of(strategy)
    if core is not None and not isinstance(core, Strategy):
        raise TypeError(
            f"`experimental_set_strategy` was given {strategy!r}; a strategy or None "
            "was wanted."
        )
    context = _context.current()
    if context.strategy is not None and not context.is_set:
        raise ContextError(
            "`experimental_set_strategy` must not be called inside a strategy's "
            f"`scope()` or `run`; this is {_context.describe(context)}."
        )
    _context.set_current(None if core is _default() else core)


class _MirroredType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            is_whole = value.copies_must_agree and value.division.is_whole
            return value.is_distributed and is_whole
        return arrays.is_mirrored(value)


class Mirrored(metaclass=_MirroredType):
    """The type of mirrored values: arrays that are whole and equal on every replica.

    A mirrored value is a plain `jax.Array` whose sharding replicates it over a
    strategy's devices, so there are no instances: `isinstance(x, Mirrored)` asks an
    array or a variable, and `Mirrored(tree)` places a pytree, as
    `get_strategy().mirror(tree)` does.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     state = js.Mirrored({"w": np.zeros(3), "name": "net"})
    >>> isinstance(state["w"], js.Mirrored), state["name"]
    (True, 'net')
    """

    def __new__(cls, tree: PyTree) -> Any:
        return get_strategy().mirror(tree)


class _ShardedType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            return not value.division.is_whole
        return arrays.is_sharded(value)


class Sharded(metaclass=_ShardedType):
    """The type of values sharded over replicas, for `isinstance`.

    Such a value is a plain `jax.Array` of its logical shape that is divided over the
    replicas' devices; to a step it is whole, and equal on all of them. A strategy with
    a `StateSharding` makes them. There are no instances: `isinstance(x, Sharded)` asks
    where an array lies, or a variable.

    Raises:
      TypeError: somebody makes one.

    >>> import jaxstrategy as js
    >>> everything = js.StateSharding("state", min_bytes=0)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2], sharding=everything)
    >>> w = strategy.mirror(np.arange(4.0))
    >>> isinstance(w, js.Sharded), isinstance(w, js.Mirrored), w.shape
    (True, False, (4,))
    """

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            "`js.Sharded` is a type to test for. To place a value as the strategy "
            "keeps its state, write `strategy.mirror(value)`."
        )
