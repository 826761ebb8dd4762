"""The strategy of code that runs under none: one replica, nothing compiled."""

from __future__ import annotations

import contextlib
from typing import Any, Self, final

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import EagerExecutor
from jaxstrategy._src.reductions.cross_device_ops import NcclAllReduce
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
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
        """A `with` block that changes nothing.

        Raises:
          ContextError: inside another strategy's scope or `run`.
        """
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
