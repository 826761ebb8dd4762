"""The `Reduction` of a strategy, from what its user chose."""

from __future__ import annotations

import functools

import jax

from jaxstrategy._options import CommunicationOptions
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._context import AbstractStrategy
from jaxstrategy.reductions._cross_device_ops import (
    CrossDeviceOps,
    PlannedOps,
    checked_ops,
)
from jaxstrategy.reductions._plan import AbstractPlan
from jaxstrategy.reductions._reduction import Reduction
from jaxstrategy.reductions._user_plan import UserPlan
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PerReplica


def reduction_for(
    strategy: AbstractStrategy,
    ops: CrossDeviceOps | None = None,
    options: CommunicationOptions | None = None,
) -> Reduction:
    """How the replicas of `strategy` combine values.

    Args:
      strategy: knows its replicas already.
      ops: the operations, by default ours.
      options: the same, in more detail.

    Raises:
      TypeError: something else than operations.
      ValueError: the operations name other replicas or devices.
    """
    replicas = strategy.replicas
    chosen = checked_ops(ops)
    if isinstance(chosen, PlannedOps):
        plan = chosen.plan(replicas.devices)
    else:
        plan = _of_user(strategy, chosen)
    return Reduction(replicas, plan.with_options(options))


def _of_user(strategy: AbstractStrategy, ops: CrossDeviceOps) -> AbstractPlan:
    replicas = strategy.replicas

    def as_per_replica(array: jax.Array) -> PerReplica:
        return _per_replica.from_local(array, replicas)

    cross_replica = functools.partial(
        _context.entered, strategy=strategy, replica=None, in_step=True
    )
    return UserPlan(ops, strategy, as_per_replica, cross_replica)
