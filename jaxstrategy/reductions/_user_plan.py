"""The plan of a strategy whose user has written the operations."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._cross_device_ops import CrossDeviceOps
from jaxstrategy.reductions._plan import AbstractPlan
from jaxstrategy.reductions._reduce_operations import checked
from jaxstrategy.reductions._sums import Axes, Groups
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf


@final
@dataclasses.dataclass(frozen=True)
class UserPlan(AbstractPlan):
    """Arrays are given to a `CrossDeviceOps`, one pair for each.

    Attributes:
      ops: the operations.
      destinations: what is given to them as where the results go.
      as_per_replica: makes a `PerReplica` of this replica's array.
      cross_replica: a `with` block in cross-replica context, in which they are called.
      options: what they are given.
    """

    ops: CrossDeviceOps
    destinations: object
    as_per_replica: Callable[[jax.Array], PerReplica]
    cross_replica: Callable[[], contextlib.AbstractContextManager[object]]
    options: CommunicationOptions | None = None

    def with_options(
        self, options: CommunicationOptions | None, replicas: Replicas
    ) -> UserPlan:
        """The same with these options, if there are some."""
        return dataclasses.replace(self, options=options) if options else self

    def within(self, groups: Groups | None) -> UserPlan:
        """The same, for no groups.

        Raises:
          ValueError: there are groups.
        """
        if groups is None:
            return self
        raise ValueError(
            f"`groups` was given, but {type(self.ops).__name__} reduces over all "
            "replicas. Use a strategy with one of jaxstrategy's own cross-device "
            "operations."
        )

    def alone(self) -> UserPlan:
        """The same: the operations decide."""
        return self

    def in_eight_bits(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> NoReturn:
        """Nothing: the operations get whole arrays.

        Raises:
          ValueError: always.
        """
        raise ValueError(
            f"`compression='int8'` was given, but {type(self.ops).__name__} reduces "
            "whole arrays. Use a strategy with one of jaxstrategy's own cross-device "
            "operations, or `compression=jaxstrategy.PowerSGD()`, which gives them "
            "thin ones."
        )

    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """The results that the operations return.

        Raises:
          TypeError: a value has no such reduction.
          ValueError: they return another number of results.
        """
        pairs = [
            (self.as_per_replica(checked(op, value)), self.destinations)
            for value in values
        ]
        with self.cross_replica():
            results = self.ops.batch_reduce(op, pairs, self.options)
        if len(results) != len(pairs):
            raise ValueError(
                f"{type(self.ops).__name__} returned {len(results)} results for "
                f"{len(pairs)} values. `batch_reduce_implementation` must return one "
                "for each pair, in order."
            )
        return results
