"""The ways to reduce that we have, each another lowering of one sum: `PlannedOps`."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import jax

from jaxstrategy._communication_options import CommunicationOptions
from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions import _sums
from jaxstrategy.reductions._cross_device_ops import CrossDeviceOps
from jaxstrategy.reductions._groups import chosen_groups
from jaxstrategy.reductions._packing import NumberOfPacks, best_on
from jaxstrategy.reductions._plan import Plan
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._per_replica import PerReplica


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


def _packs(num_packs: int) -> NumberOfPacks:
    number = whole(num_packs)
    if number is None or number < 0:
        raise ValueError(
            f"`num_packs` was {num_packs!r}; the number of packs was wanted, or 0 to "
            "pack nothing."
        )
    return NumberOfPacks(number)
