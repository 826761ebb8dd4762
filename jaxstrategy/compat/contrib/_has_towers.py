"""The towers of a strategy of 2018, its devices and its contexts: `HasTowers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from jaxstrategy._options import VariableAggregation, VariableSynchronization
from jaxstrategy.compat._face_scope import FaceScope
from jaxstrategy.compat._older_strategy import OlderStrategy
from jaxstrategy.compat.contrib import _cross_tower_checks, _tower_values
from jaxstrategy.contexts import _context
from jaxstrategy.replicas._devices import Device
from jaxstrategy.strategies import _current
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.variables._variable import Variable


class HasTowers(OlderStrategy):
    """The methods about towers, devices and contexts."""

    # Towers and devices.

    @property
    def num_towers(self) -> int:
        """The number of towers that take a step together."""
        return self._core.num_replicas_in_sync

    @property
    def is_single_tower(self) -> bool:
        """Whether there is one tower only, so that no value is wrapped."""
        return self.num_towers == 1

    @property
    def worker_devices(self) -> list[Device]:
        """The devices of the towers, in their order; a list of your own.

        Raises:
          ContextError: of the default strategy, which has none.
        """
        return list(self._core.extended.worker_devices)

    @property
    def parameter_devices(self) -> list[Device]:
        """The devices that hold mirrored variables; a list of your own.

        Raises:
          ContextError: of the default strategy, which has none.
        """
        return list(self._core.extended.parameter_devices)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The devices for an optimizer's state that is of no single variable.

        Args:
          var_list: the variables that it optimizes.

        Returns:
          All parameter devices, a list. The default strategy has the variable with the
          first name instead.

        Raises:
          ValueError: of the default strategy, no variable is given.
        """
        return self.parameter_devices

    @property
    def worker_device_index(self) -> PerReplica | int:
        """A value that is 0, 1, ... in the towers; the int 0 with one tower.

        Raises:
          ContextError: outside of cross-tower context; of the default strategy.
        """
        self._require_cross_tower("worker_device_index")
        return _tower_values.numbers_of_towers(self._core)

    # Contexts.

    def scope(self) -> AbstractContextManager[Self]:
        """A `with` block in which this strategy is current: the cross-tower context.

        It may be entered again inside.

        Raises:
          ContextError: inside a tower, or in another strategy's scope.
        """
        if _current.has_strategy():
            self._require_cross_tower("scope")
        return FaceScope(self, self._core.scope())

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[None]:
        """A `with` block in which variables are made beside others.

        Args:
          colocate_with_variable: a variable of this strategy, or devices, such as
            `non_slot_devices` gives.

        Raises:
          ContextError: outside of `scope()`.
          ValueError: the variable belongs to another strategy, or to none.
          TypeError: neither a variable nor devices.
        """
        self._require_scope("colocate_vars_with")
        return self._core.extended.colocate_vars_with(colocate_with_variable)

    @contextlib.contextmanager
    def tower_local_var_scope(
        self, reduce_method: VariableAggregation | str
    ) -> Iterator[None]:
        """A `with` block in which new variables are tower-local.

        Each tower has a copy that it changes freely; read in cross-tower context, the
        copies are combined. Variables that say themselves how they are kept are not
        concerned. Elsewhere, write `Variable(synchronization="on_read")`.

        Args:
          reduce_method: how the copies are combined: `VariableAggregation.SUM`, `.MEAN`
            or `.ONLY_FIRST_REPLICA`, or "sum", "mean" and so on.

        Raises:
          ContextError: outside of `scope()`.
          ValueError: no such aggregation.

        >>> import jaxstrategy as js
        >>> from jaxstrategy.compat import contrib
        >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
        >>> with strategy.scope(), strategy.tower_local_var_scope("sum"):
        ...     seen = js.Variable(0.0)
        >>> with strategy.scope():
        ...     _ = strategy.call_for_each_tower(lambda: seen.assign_add(2.0))
        >>> float(seen)
        4.0
        """
        self._require_scope("tower_local_var_scope")
        kept = VariableSynchronization.ON_READ, VariableAggregation(reduce_method)
        with _context.entered(new_variables=kept):
            yield

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: object = None,
        task_id: object = None,
    ) -> None:
        """Does nothing: there are no sessions.

        Args:
          session_config: of a session.
          cluster_spec: leave it out. A strategy of several processes learns of them
            when it is made.
          task_type: likewise.
          task_id: likewise.

        Raises:
          ValueError: a cluster is given.
        """
        if not (cluster_spec is task_type is task_id is None):
            raise ValueError(
                "`configure` was given a cluster, which this strategy cannot join any "
                "more. Set `TF_CONFIG` before a `CollectiveAllReduceStrategy` is made."
            )

    def initialize(self) -> list[object]:
        """An empty list: of what a session has to run before training."""
        return []

    def finalize(self) -> list[object]:
        """An empty list: of what a session has to run after training."""
        return []

    def _require_cross_tower(self, method: str) -> None:
        _cross_tower_checks.require_cross_tower(self, method)

    def _require_scope(self, method: str) -> None:
        _cross_tower_checks.require_scope(self, method)
