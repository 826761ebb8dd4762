"""The ways in which a strategy reduces, each class another lowering of one sum."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, final

import jax

from jaxstrategy._options import CommunicationOptions, ReduceOp
from jaxstrategy.reductions import _sums
from jaxstrategy.reductions._packing import NumberOfPacks, best_on
from jaxstrategy.reductions._plan import Plan
from jaxstrategy.reductions._sums import Groups
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text._whole_numbers import several_whole, whole
from jaxstrategy.values._per_replica import PerReplica


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
        devices = replicas.devices
        processes = len({device.process_index for device in devices})
        return Plan(best_on(devices[0].platform, replicas.count, processes))


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
        if self._groups is None:
            chosen = near(replicas.devices)
        else:
            chosen = checked_groups(self._groups, replicas.count)
        return Plan(self._packing, functools.partial(_sums.hierarchical, groups=chosen))


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
        self._accumulate = accumulation_fn or _sums.in_order

    def plan(self, replicas: Replicas) -> Plan:
        """Every array by itself, to one replica and back.

        Raises:
          TypeError: `reduce_to_device` is no device and no name.
          ValueError: no replica is there.
        """
        return Plan(
            NumberOfPacks(0),
            functools.partial(
                _sums.to_one_device,
                root=self._root(replicas.devices),
                accumulate=self._accumulate,
            ),
        )

    def _root(self, devices: Sequence[Device]) -> int:
        if self._device is None:
            return 0
        device = _devices.find(self._device)
        if device not in devices:
            raise ValueError(
                f"`reduce_to_device` is {_devices.name(device)}, where no replica is: "
                f"they are on {_devices.names(devices)}. Name one of these."
            )
        return list(devices).index(device)


def checked_ops(given: CrossDeviceOps | None) -> CrossDeviceOps:
    """`given`, or the default.

    Raises:
      TypeError: it is something else.
    """
    if given is None:
        return DefaultOps()
    if not isinstance(given, CrossDeviceOps):
        raise TypeError(
            f"`cross_device_ops` was {given!r}; an object of a class such as "
            "`NcclAllReduce()`, or of a subclass of `CrossDeviceOps`, was wanted."
        )
    return given


def near(devices: Sequence[Device]) -> Groups:
    """Replica ids in groups of devices that are close to each other."""
    by_place: dict[object, list[int]] = {}
    for replica, device in enumerate(devices):
        place = device.process_index, getattr(device, "slice_index", 0)
        by_place.setdefault(place, []).append(replica)
    groups = list(by_place.values())
    if len(groups) > 1 and len({len(group) for group in groups}) == 1:
        return tuple(map(tuple, groups))
    n = len(devices)
    count = next(count for count in range(math.isqrt(n), 0, -1) if n % count == 0)
    size = n // count
    return tuple(tuple(range(i, i + size)) for i in range(0, n, size))


def checked_groups(groups: Sequence[Sequence[int]], replicas: int) -> Groups:
    """`groups`, which hold each replica once and are of one size.

    Raises:
      ValueError: they do not, or are not.
    """
    found = map(several_whole, groups) if isinstance(groups, Iterable) else [None]
    given = tuple(group or () for group in found)
    members = sorted(member for group in given for member in group)
    if members != list(range(replicas)) or len({len(group) for group in given}) != 1:
        raise ValueError(
            f"`groups` was {groups!r}; groups of one size were wanted in which each "
            f"replica from 0 to {replicas - 1} stands once, such as "
            f"{[list(range(replicas))]}."
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
