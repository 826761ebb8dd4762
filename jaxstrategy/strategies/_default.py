"""The strategy of code that runs under none: one replica, nothing compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self, final

from jaxstrategy._errors import ContextError
from jaxstrategy._options import RunOptions
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._context import (
    AbstractStrategy,
    Context,
)
from jaxstrategy.contexts._replica_context import ReplicaContext
from jaxstrategy.executors._eager import EagerPrograms
from jaxstrategy.reductions._packing import NumberOfPacks
from jaxstrategy.reductions._plan import Plan
from jaxstrategy.reductions._reduction import Reduction
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.strategies._base import Strategy
from jaxstrategy.strategies._extended import StrategyExtended
from jaxstrategy.strategies._reducers import TreeFunctions
from jaxstrategy.values import (
    _building,
    _per_replica,
)
from jaxstrategy.values._per_replica import (
    PerReplica,
    PyTree,
)


@final
class DefaultStrategy(Strategy):
    """What `get_strategy()` returns outside any scope.

    `run` calls the function, `reduce` reduces one version, `merge_call` calls the merge
    function: library code written for replicas works unchanged with no strategy at all.
    """

    is_default = True

    def __init__(self) -> None:
        self._replicas = Replicas.alone()
        self._programs = EagerPrograms(self._run)
        # One replica has nothing to pack; ours ask for the devices, which start JAX.
        self._reduction = Reduction(self._replicas, Plan(NumberOfPacks(0)))
        self._functions = TreeFunctions(self._reduction)
        self._extended = StrategyExtended(self)
        self.replica_context = ReplicaContext(self)

    @property
    def num_replicas_in_sync(self) -> int:
        """One."""
        return 1

    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block that changes nothing.

        Raises:
          ContextError: inside another strategy's scope or `run`.
        """
        context = _context.current()
        if context.strategy not in (None, self):
            raise ContextError(
                "Mixing different Strategy objects: the default strategy's scope was "
                f"entered inside {_context.describe(context)}. Leave that one first."
            )
        return contextlib.nullcontext(self)

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: RunOptions | None,
    ) -> Any:
        _context.require_same(_context.current(), self)
        args, kwargs = _alone((args, kwargs))
        with _context.outside():
            return fn(*args, **kwargs)

    def _across(
        self, context: Context, function: Callable[..., Any], value: PyTree
    ) -> PyTree:
        return function(_alone(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return "DefaultStrategy(1 replica)"


def _alone(tree: PyTree) -> PyTree:
    """`tree` with each `PerReplica` as its only version."""

    def unwrap(leaf: Any) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        _building.check_stacked(_per_replica.contents(leaf), 1, "value")
        return leaf.local(0)

    return _per_replica.map_around_objects(unwrap, tree)
