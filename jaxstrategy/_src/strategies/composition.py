"""A strategy as its parts: `ComposedStrategy`, and how they are made."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.reductions.cross_device_ops import (
    CrossDeviceOps,
    PlannedOps,
    UserPlan,
    checked_ops,
)
from jaxstrategy._src.reductions.packing import overlap_on
from jaxstrategy._src.reductions.plan import AbstractPlan
from jaxstrategy._src.reductions.reduction import MetReduction, OwnReduction, Reduction
from jaxstrategy._src.replicas import compilation_cache
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.cross_replica import CrossReplicaValues
from jaxstrategy._src.strategies.extended import StrategyExtended
from jaxstrategy._src.strategies.process_role import ProcessRole
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.policy import ReplicatedVariables, VariablePolicy


class ComposedStrategy(AbstractStrategy):
    """A strategy as its parts: replicas, a reduction, a variable policy, an executor.

    The public methods stand in classes over this one, by what they are about; each
    checks where it is called, and asks a part.
    """

    _choices: Choices
    _compiled_reduction: Reduction
    _variable_policy: VariablePolicy
    _executor: AbstractExecutor
    _values: CrossReplicaValues
    _extended: StrategyExtended

    def _compose(self, choices: Choices) -> None:
        """Make the parts."""
        compilation_cache.set_up_by_environment()
        self._choices = choices
        self._replicas = choices.replicas
        self._compiled_reduction = _reduction_for(self, choices)
        self._overlap = overlap_on(choices.replicas, choices.options)
        policy = choices.variables or ReplicatedVariables(self._replicas)
        # Its base class has what lower folders may ask of it.
        self._variable_policy = policy  # pyright: ignore[reportIncompatibleVariableOverride]
        self._executor = choices.executor(self, choices.processes)
        self._values = CrossReplicaValues(self, self._executor)
        self._extended = StrategyExtended(self, self._executor, _role_of(choices))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._compose(self._choices)
        return twin

    @property
    def mesh(self) -> Mesh:
        """The `jax.sharding.Mesh` of the replicas' devices.

        Its axes are `"replica"` and those of `logical_axes`.
        """
        return self._replicas.mesh

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each replica, the first if it has several, in replica order.

        With `replicas_per_device` a device is there as often as replicas share it.
        """
        return self._replicas.devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""
        return self._replicas.count

    @property
    def extended(self) -> StrategyExtended:
        """Reductions to chosen devices, for code that needs them."""
        return self._extended

    @property
    def _reduction(self) -> Reduction | OwnReduction | MetReduction:
        """The reduction by which the replicas' values become one, where code runs."""
        context = _context.current()
        if context.local is not None:
            return context.local.reduction
        if context.eager is not None:
            return context.eager.reduction
        return self._compiled_reduction

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that the strategy was given; None where there is no cluster."""
        return None

    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block in which this is the current strategy.

        Inside it, code is in cross-replica context: `get_strategy()` is this strategy.
        Entering it again inside is allowed. `run` enters it by itself.

        A function jitted by you is traced once, so what it learns about contexts
        (`has_strategy()`) stays what it was on the first call. Functions called inside
        `run` are traced there again.

        Raises:
          ContextError: inside another strategy's scope, or inside `run`.
        """
        return _context.Scope(self)


def _role_of(choices: Choices) -> ProcessRole:
    """What this process is among those of the job."""
    processes = choices.processes
    is_first = processes is None or processes.index == 0
    is_chief = is_first if choices.is_chief is None else choices.is_chief
    several = processes is not None and processes.count > 1
    waits = choices.is_between_graph and choices.is_chief is not None
    is_between = several or choices.is_between_graph
    return ProcessRole(is_chief, is_between, waits, choices.task)


def _reduction_for(strategy: AbstractStrategy, choices: Choices) -> Reduction:
    """The way in which the replicas of `strategy` combine values.

    Raises:
      TypeError: something else than operations was chosen.
      ValueError: the operations name other replicas or devices.
    """
    ops = checked_ops(choices.ops)
    if isinstance(ops, PlannedOps):
        plan = ops.plan(strategy._replicas)
    else:
        plan = _of_user(strategy, ops)
    return Reduction(
        strategy._replicas, plan.with_options(choices.options, strategy._replicas)
    )


def _of_user(strategy: AbstractStrategy, ops: CrossDeviceOps) -> AbstractPlan:
    replicas = strategy._replicas

    def as_per_replica(array: jax.Array) -> PerReplica:
        return per_replica.from_local(array, replicas)

    cross_replica = functools.partial(
        _context.entered, strategy=strategy, replica=None, in_step=True
    )
    return UserPlan(ops, strategy, as_per_replica, cross_replica)
