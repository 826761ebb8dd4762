"""The current strategy and replica context of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import jax

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.compat.adapters import (
    NAMES_IN_V1,
    ContextAdapters,
    missing_member,
)
from jaxstrategy._src.compat.v1.v1_extended import options_of
from jaxstrategy._src.compat.v1.v1_strategies import DefaultStrategy
from jaxstrategy._src.compat.v1.v1_strategy import ADAPTERS, Strategy
from jaxstrategy._src.contexts import context as _context, replica_context
from jaxstrategy._src.contexts.replica_context import core_of
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import current, strategy as _strategy
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import PyTree


@final
class ReplicaContext:
    """One replica's view, inside `run`: `v1.get_replica_context()` returns it.

    Args:
      core: the replica context of today.

    Raises:
      TypeError: it is something else.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> def step():
    ...     context = v1.get_replica_context()
    ...     return context.merge_call(lambda s, x: s.reduce("sum", x), args=(3.0,))
    >>> strategy.run(step)
    Array(6., dtype=float32)
    """

    def __init__(self, core: replica_context.ReplicaContext) -> None:
        if not isinstance(core, replica_context.ReplicaContext):
            raise TypeError(
                f"`core` was {shown(core)}; what `jaxstrategy.get_replica_context()` "
                "returns in a step was wanted."
            )
        self._core = core

    def __enter__(self) -> Self:
        """Enters the context where code already is: `run` enters replicas."""
        self._core._require_current("__enter__")
        return self

    def __exit__(
        self, exception_type: object, exception_value: object, traceback: object
    ) -> None:
        """Leaves the block; code stays where it is."""

    @property
    def core(self) -> replica_context.ReplicaContext:
        """The replica context of today."""
        return self._core

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return ADAPTERS.of(self._core.strategy)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take this step together."""
        return self._core.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> jax.Array | int:
        """The id of this replica, from 0: an int32 scalar that the devices know."""
        return self._core.replica_id_in_sync_group

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all replicas, in replica order; one program serves them."""
        return self._core.devices

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over all replicas, leaf by leaf; all get the result."""
        chosen = options_of(options, experimental_hints)
        return self._core.all_reduce(reduce_op, value, chosen)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Steps across to all replicas: calls `merge_fn(strategy, *args, **kwargs)`."""
        if not callable(merge_fn):
            return self._core.merge_call(merge_fn)  # says so

        def of_face(core: object, /, *across: PyTree, **named: PyTree) -> PyTree:
            return merge_fn(ADAPTERS.of(core), *across, **named)

        return self._core.merge_call(of_face, args, kwargs)

    def __repr__(self) -> str:
        return f"compat.v1.ReplicaContext({ADAPTERS.of(self._core.strategy)!r})"

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core: Any = vars(self).get("_core")
            way = "jaxstrategy.get_replica_context()"
            missing_member(self, core, name, way, NAMES_IN_V1)


CONTEXTS: ContextAdapters[ReplicaContext] = ContextAdapters(ReplicaContext)
"""The replica contexts of TensorFlow 1, one for each of today's."""


with _context.outside():
    # Held for ever, so that they are the same objects each time.
    _DEFAULT = DefaultStrategy(current.get_strategy())
    _DEFAULT_CONTEXT = CONTEXTS.of(current.get_replica_context())


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_strategy() is v1.get_strategy()
    True
    """
    return ADAPTERS.of(current.get_strategy())


def has_strategy() -> bool:
    """Whether the current strategy is another than the default one.

    >>> from jaxstrategy.compat import v1
    >>> v1.has_strategy()
    False
    """
    return current.has_strategy()


# `| Any` rather than `| None`: as of `jaxstrategy.get_replica_context`.
def get_replica_context() -> ReplicaContext | Any:
    """The current replica context, or None in cross-replica context.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_replica_context().num_replicas_in_sync
    1
    """
    context = current.get_replica_context()
    return None if context is None else CONTEXTS.of(context)


def in_cross_replica_context() -> bool:
    """Whether code sees all replicas at once: in `scope()` and `merge_call`.

    >>> from jaxstrategy.compat import v1
    >>> v1.in_cross_replica_context()
    False
    """
    return current.in_cross_replica_context()


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
    current.experimental_set_strategy(core)


def get_loss_reduction() -> ReduceOp:
    """The operation by which losses are added up: SUM, as outside of Estimators.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
