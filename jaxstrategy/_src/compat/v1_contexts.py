"""Contexts of `tf.compat.v1.distribute`, and functions that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import jax

from jaxstrategy._src.compat.adapters import NAMES_IN_V1, Adapter, same
from jaxstrategy._src.compat.v1 import Strategy, chosen_options
from jaxstrategy._src.contexts.replica_context import ReplicaContext as _ReplicaContext
from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies import current
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import PyTree


@final
class ReplicaContext(Adapter):
    """One replica's view, inside `run`: `v1.get_replica_context()` returns it.

    What has the name of a member of `jaxstrategy.ReplicaContext` does the same.

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

    _names = NAMES_IN_V1
    _way = "jaxstrategy.get_replica_context()"

    def __init__(self, core: _ReplicaContext) -> None:
        if not isinstance(core, _ReplicaContext):
            raise TypeError(
                f"`core` was {shown(core)}; what `jaxstrategy.get_replica_context()` "
                "returns in a step was wanted."
            )
        super().__init__(core)

    num_replicas_in_sync: int = same(_ReplicaContext.num_replicas_in_sync)
    replica_id_in_sync_group: jax.Array | int = same(
        _ReplicaContext.replica_id_in_sync_group
    )
    devices: tuple[Device, ...] = same(_ReplicaContext.devices)

    def __enter__(self) -> Self:
        """Enters the context where code already is: `run` enters replicas."""
        self._core._require_current("__enter__")
        return self

    def __exit__(
        self, exception_type: object, exception_value: object, traceback: object
    ) -> None:
        """Leaves the block; code stays where it is."""

    @property
    def core(self) -> _ReplicaContext:
        """The replica context of today."""
        return self._core

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return Strategy.over(self._core.strategy)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> PyTree:
        """`value` reduced over all replicas, leaf by leaf; all get the result."""
        chosen = chosen_options(options, experimental_hints)
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

        def with_adapter(core: Any, /, *across: PyTree, **named: PyTree) -> PyTree:
            return merge_fn(Strategy.over(core), *across, **named)

        return self._core.merge_call(with_adapter, args, kwargs)

    def __repr__(self) -> str:
        return f"compat.v1.ReplicaContext({self.strategy!r})"


def get_strategy() -> Strategy:
    """The current strategy; outside any scope, the default one with one replica.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_strategy() is v1.get_strategy()
    True
    """
    return Strategy.over(current.get_strategy())


# `| Any` rather than `| None`: as of `jaxstrategy.get_replica_context`.
def get_replica_context() -> ReplicaContext | Any:
    """The current replica context, or None in cross-replica context.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_replica_context().num_replicas_in_sync
    1
    """
    context = current.get_replica_context()
    return None if context is None else ReplicaContext._known(context)


def get_loss_reduction() -> ReduceOp:
    """The operation by which losses are added up: SUM, as outside of Estimators.

    >>> from jaxstrategy.compat import v1
    >>> v1.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
