"""The current strategy and replica context of TensorFlow 1."""

from __future__ import annotations

from typing import Any

from jaxstrategy._options import ReduceOp
from jaxstrategy.compat.v1._v1_replica_context import CONTEXTS, ReplicaContext
from jaxstrategy.compat.v1._v1_strategies import DefaultStrategy
from jaxstrategy.compat.v1._v1_strategy import FACES, Strategy
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._strategy_face import core_of
from jaxstrategy.strategies import _current, _strategy

with _context.outside():
    # Held for ever, so that they are the same objects each time.
    _DEFAULT = DefaultStrategy(_current.get_strategy())
    _DEFAULT_CONTEXT = CONTEXTS.of(_current.get_replica_context())


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_strategy() is v1.get_strategy()
    True
    """
    return FACES.of(_current.get_strategy())


def has_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> from jaxstrategy.compat import v1
    >>> v1.has_strategy()
    False
    """
    return _current.has_strategy()


# `| Any` rather than `| None`: as of `jaxstrategy.get_replica_context`.
def get_replica_context() -> ReplicaContext | Any:
    """The current replica context, or None in cross-replica context.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_replica_context().num_replicas_in_sync
    1
    """
    context = _current.get_replica_context()
    return None if context is None else CONTEXTS.of(context)


def in_cross_replica_context() -> bool:
    """Whether code sees all replicas at once: in `scope()` and `merge_call`.

    >>> from jaxstrategy.compat import v1
    >>> v1.in_cross_replica_context()
    False
    """
    return _current.in_cross_replica_context()


def experimental_set_strategy(strategy: Strategy | _strategy.Strategy | None) -> None:
    """Makes `strategy` current for the rest of this thread, without a `with` block.

    Args:
      strategy: of `compat.v1` or of today; None goes back to the default one.

    Raises:
      ContextError: inside a `scope()` or `run`.
      TypeError: `strategy` is not a strategy.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> v1.experimental_set_strategy(strategy)
    >>> v1.get_strategy() is strategy
    True
    >>> v1.experimental_set_strategy(None)
    """
    core: Any = core_of(strategy)
    _current.experimental_set_strategy(core)


def get_loss_reduction() -> ReduceOp:
    """The operation by which losses are added up: SUM, as outside of Estimators.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
