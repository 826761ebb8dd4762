"""Ways to reduce that a strategy is given: ours, and those of users."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import jax

from jaxstrategy._src.options import CommunicationOptions, ReduceOp
from jaxstrategy._src.reductions import operations
from jaxstrategy._src.reductions.operations import Axes, Groups, checked, chosen_groups
from jaxstrategy._src.reductions.packing import NumberOfPacks, best_on
from jaxstrategy._src.reductions.plan import AbstractPlan, Plan
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text.shown import whole
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.per_replica import PerReplica


class CrossDeviceOps(abc.ABC):
    """Base class of ways to reduce; subclass it for your own.

    The methods ending in `_implementation` are called while a step is traced, in
    cross-replica context: a value is a `PerReplica` around this replica's array, whose
    `values` has those of all replicas.

    >>> import jaxstrategy as js
    >>> class InOrder(js.CrossDeviceOps):
    ...     def reduce_implementation(self, op, value, destinations, options):
    ...         total = sum(value.values)
    ...         mean = op is js.ReduceOp.MEAN
    ...         return total / value.num_replicas if mean else total
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], cross_device_ops=InOrder())
    >>> strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    Array(10., dtype=float32)
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """One array `[...]` from all replicas' versions, each `[...]`.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          per_replica_value: the versions.
          destinations: where the result is wanted; it is on all replicas.
          options: by default those of the class.

        Raises:
          ValueError: `reduce_op` is not a reduction.
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        op = ReduceOp(reduce_op)
        options = options or CommunicationOptions()
        return self.reduce_implementation(op, per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """One array for each pair of a value and its destinations, in the same order.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value_destination_pairs: values with versions `[...]`, and where each result,
            `[...]`, is wanted.
          options: by default those of the class.

        Raises:
          ValueError: `reduce_op` is not a reduction.
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        op = ReduceOp(reduce_op)
        options = options or CommunicationOptions()
        return self.batch_reduce_implementation(op, value_destination_pairs, options)

    def broadcast(self, tensor: jax.Array, destinations: object) -> jax.Array:
        """`tensor` on all replicas, in its own shape."""
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions,
    ) -> jax.Array:
        """One array from all replicas' versions; every replica must get it.

        Args:
          reduce_op: SUM, MEAN, MIN or MAX; raise `ValueError` for what you do not do.
          per_replica_value: versions of shape `[...]`.
          destinations: where the result is wanted; it is on all replicas.
          options: the strategy's, or those of the call.

        Returns:
          An array of shape `[...]`, the same on all replicas.
        """

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, object]],
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Several of them; by default one after the other, in their own shapes.

        Raises:
          TypeError: a class of this library is called by itself: give it to a strategy.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: jax.Array, destinations: object
    ) -> jax.Array:
        """By default `tensor` as it is: a step's array is on all replicas already.

        Its shape is kept.
        """
        return tensor


class PlannedOps(CrossDeviceOps):
    """Operations of ours, about which a `Plan` says everything."""

    @abc.abstractmethod
    def plan(self, replicas: Replicas) -> Plan:
        """The plan of these replicas' reductions."""

    @final
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: object,
        options: CommunicationOptions,
    ) -> NoReturn:
        """Not called: a strategy follows the plan.

        Raises:
          TypeError: somebody has called it.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be called by itself: give it to a strategy, "
            "`MirroredStrategy(cross_device_ops=...)`."
        )


@final
class DefaultOps(PlannedOps):
    """One all-reduce for each pack of small arrays, and for each large one."""

    def plan(self, replicas: Replicas) -> Plan:
        """Packing as is best there."""
        devices = replicas.all_devices
        processes = len({device.process_index for device in devices})
        platform = next(iter(devices)).platform
        packing = best_on(platform, replicas.count, processes)
        # Between processes each collective more waits for messages, at each call.
        return Plan(packing, is_packing_free=processes == 1)


@final
class NcclAllReduce(PlannedOps):
    """All arrays of one dtype in one all-reduce, or in `num_packs` of them.

    Args:
      num_packs: how many; with 0 each array has its own.

    Raises:
      ValueError: a negative number.

    >>> import jaxstrategy as js
    >>> ops = js.NcclAllReduce(num_packs=2)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], cross_device_ops=ops)
    >>> strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    Array(10., dtype=float32)
    """

    def __init__(self, num_packs: int = 1) -> None:
        self._packing = _packs(num_packs)

    def plan(self, replicas: Replicas) -> Plan:
        """All-reduces."""
        return Plan(self._packing)


@final
class HierarchicalCopyAllReduce(PlannedOps):
    """Sums inside groups of near devices, then between the groups, then back to all.

    Only one part of each array per device goes between groups, where links are slow.

    Args:
      num_packs: as for `NcclAllReduce`.
      groups: replica ids in groups of one size. By default the devices of each process
        or slice, if there are several; else the most groups that are not more than
        the replicas in each: 2 groups of 4, for 8 replicas.

    Raises:
      ValueError: a negative number; groups of several sizes; when a strategy is made,
        groups that are not of its replicas.

    >>> import jaxstrategy as js
    >>> ops = js.HierarchicalCopyAllReduce(groups=[[0, 1], [2, 3]])
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], cross_device_ops=ops)
    >>> strategy.reduce("mean", strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    Array(2.5, dtype=float32)
    """

    def __init__(
        self, num_packs: int = 1, groups: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._packing = _packs(num_packs)
        self._groups = groups

    def plan(self, replicas: Replicas) -> Plan:
        """Sums in two levels.

        Raises:
          ValueError: the groups are not of these replicas.
        """
        return Plan(self._packing).in_levels(chosen_groups(self._groups, replicas))


@final
class ReductionToOneDevice(PlannedOps):
    """All arrays go to one device, which sums them; the sum goes to all.

    Args:
      reduce_to_device: the device, one of the strategy's, or its name; by default the
        first replica's.
      accumulation_fn: the sum, `[...]`, of a list of arrays `[...]`, one from each
        replica, in order. By default they are added from the first to the last.

    Raises:
      ValueError: when a strategy is made, a device that is not one of its replicas'.

    >>> import jaxstrategy as js
    >>> ops = js.ReductionToOneDevice("CPU:1", accumulation_fn=sum)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4], cross_device_ops=ops)
    >>> strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0]))
    Array(10., dtype=float32)
    """

    def __init__(
        self,
        reduce_to_device: Device | str | None = None,
        accumulation_fn: Callable[[Sequence[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self._device = reduce_to_device
        self._accumulate = accumulation_fn or operations.in_order

    def plan(self, replicas: Replicas) -> Plan:
        """Every array by itself, to one replica and back.

        Raises:
          TypeError: `reduce_to_device` is no device and no name.
          ValueError: no replica is there.
        """
        return Plan(
            NumberOfPacks(0),
            functools.partial(
                operations.to_one_device,
                root=self._root(replicas),
                accumulate=self._accumulate,
            ),
        )

    def _root(self, replicas: Replicas) -> int:
        if self._device is None:
            return 0
        device = _devices.find(self._device)
        root = replicas.replica_on(device)
        if root is None:
            raise ValueError(
                f"`reduce_to_device` is {_devices.name(device)}, where no replica is: "
                f"they are on {replicas.device_names}. Name one of these."
            )
        return root


def checked_ops(given: CrossDeviceOps | None) -> CrossDeviceOps:
    """`given`, or the default."""
    if given is None:
        return DefaultOps()
    if not isinstance(given, CrossDeviceOps):
        raise TypeError(
            f"`cross_device_ops` was {given!r}; an object of a class such as "
            "`NcclAllReduce()`, or of a subclass of `CrossDeviceOps`, was wanted."
        )
    return given


def _packs(num_packs: int) -> NumberOfPacks:
    number = whole(num_packs)
    if number is None or number < 0:
        raise ValueError(
            f"`num_packs` was {num_packs!r}; the number of packs was wanted, or 0 to "
            "pack nothing."
        )
    return NumberOfPacks(number)


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
        """The same, for no groups."""
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
        """Nothing: the operations get whole arrays."""
        raise ValueError(
            f"`compression='int8'` was given, but {type(self.ops).__name__} reduces "
            "whole arrays. Use a strategy with one of jaxstrategy's own cross-device "
            "operations, or `compression=jaxstrategy.experimental.PowerSGD()`, "
            "which gives them thin ones."
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
