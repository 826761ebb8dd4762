"""The current strategy and replica context, with the default ones to fall back on."""

from __future__ import annotations

from typing import Any

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.contexts.strategy_face import AnyStrategy, core_of
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.strategies.default import DefaultStrategy
from jaxstrategy._src.strategies.strategy import Strategy

_default = DefaultStrategy()


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> import jaxstrategy as js
    >>> js.get_strategy()
    DefaultStrategy(1 replica)
    """
    strategy = _context.current().strategy
    if strategy is None:
        return _default
    assert isinstance(strategy, Strategy)
    return strategy


def has_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> import jaxstrategy as js
    >>> js.has_strategy()
    False
    """
    return get_strategy() is not _default


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
    return _default._replica_context if context.strategy is None else context.replica


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
    _context.set_current(None if core is _default else core)
