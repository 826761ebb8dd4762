"""Ways to reduce that a strategy is given, ours and users', and the plans of both."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxstrategy._src.options import (
    CommunicationImplementation as Implementation,
    CommunicationOptions,
    ReduceOp,
)
from jaxstrategy._src.reductions import compression, operations, packing
from jaxstrategy._src.reductions.operations import OPERATIONS, Axes, Groups, checked
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import whole
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

        As `reduce_implementation`, but that `reduce_op` may be a name, and `options`
        are by default those of the class.

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

        Otherwise as `reduce`.
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
        """Several of them; by default one after the other, in their own shapes."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: jax.Array, destinations: object
    ) -> jax.Array:
        """By default `tensor` as it is: a step's array is on all replicas already."""
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
        raise TypeError(
            f"{type(self).__name__} cannot be called by itself: give it to a strategy, "
            "`MirroredStrategy(cross_device_ops=...)`."
        )


@final
class DefaultOps(PlannedOps):
    """One all-reduce for each pack of small arrays, and for each large one."""

    def plan(self, replicas: Replicas) -> Plan:
        devices = replicas.all_devices
        processes = len({device.process_index for device in devices})
        platform = next(iter(devices)).platform
        best = packing.best_on(platform, replicas.count, processes)
        # Between processes each collective more waits for messages, at each call.
        return Plan(best, is_packing_free=processes == 1)


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
        return Plan(self._packing).in_levels(
            operations.chosen_groups(self._groups, replicas)
        )


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
        root: int | None = 0
        if self._device is not None:
            device = _devices.find(self._device)
            root = replicas.replica_on(device)
            if root is None:
                raise ValueError(
                    f"`reduce_to_device` is {_devices.name(device)}, where no replica "
                    f"is: they are on {replicas.device_names}. Name one of these."
                )
        way = functools.partial(
            operations.to_one_device, root=root, accumulate=self._accumulate
        )
        return Plan(packing.NumberOfPacks(0), way)


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


def _packs(num_packs: int) -> packing.NumberOfPacks:
    number = whole(num_packs)
    if number is None or number < 0:
        raise ValueError(
            f"`num_packs` was {num_packs!r}; the number of packs was wanted, or 0 to "
            "pack nothing."
        )
    return packing.NumberOfPacks(number)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A reduction of the replicas' arrays by collectives, decided before the trace."""

    packing: packing.AbstractPacking  # which arrays are joined first
    sum: operations.Sum = operations.direct
    groups: Groups | None = None  # reduced are the replicas of each group
    # What floating-point numbers are summed in; None: their own, those of 16 bits and
    # less in float32.
    reduce_dtype: DTypeLike | None = None
    near: Groups | None = None  # replicas inside which sums are made first
    # Sums stand in a trace as equations in a row, whose arrays are joined when it is
    # known in which order they are computed.
    is_packed_later: bool = False
    is_packing_free: bool = False  # nobody chose it

    def in_levels(self, groups: Groups) -> Plan:
        """The same, with sums inside these groups, between them, and back to all."""
        in_groups = functools.partial(operations.hierarchical, groups=groups)
        return dataclasses.replace(self, sum=in_groups, near=groups)

    def with_options(
        self, options: CommunicationOptions | None, replicas: Replicas
    ) -> Plan:
        """The same, but for what `options` say."""
        if options is None:
            return self
        new: dict[str, Any] = {}
        if size := options.bytes_per_pack:
            new |= {"packing": packing.Packing(size, size), "is_packing_free": False}
        if size or options.overlap:
            new["is_packed_later"] = options.overlap
        if options.reduce_dtype is not None:
            new["reduce_dtype"] = options.reduce_dtype
        plan = self
        match options.implementation:
            case Implementation.RING:
                new |= {"sum": operations.ring, "near": None}
            case Implementation.NCCL:
                new |= {"sum": operations.direct, "near": None}
            case Implementation.HIERARCHICAL:
                plan = self.in_levels(
                    operations.chosen_groups(options.groups, replicas)
                )
        if options.deterministic:
            new |= {"sum": operations.in_replica_order, "near": None}
            new["is_packed_later"] = False
        return dataclasses.replace(plan, **new)

    def within(self, groups: Groups | None) -> Plan:
        """The same, but over the replicas of each group."""
        if groups is None or len(groups) == 1:  # one group is all replicas
            return self
        is_ordered = self.sum is operations.in_replica_order
        way = operations.in_replica_order if is_ordered else operations.grouped
        sum_ = functools.partial(way, groups=groups)
        return dataclasses.replace(self, sum=sum_, groups=groups)

    def alone(self) -> Plan:
        """The same, but that arrays are not joined unless somebody chose how."""
        if not self.is_packing_free:
            return self
        return dataclasses.replace(self, packing=packing.NumberOfPacks(0))

    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """Each of `values` reduced over all replicas, which all get the results.

        SUM, MIN and MAX keep each dtype (so small integers wrap in a sum as they do in
        NumPy); MEAN of integers has JAX's default float dtype. With no axes there is
        one replica, and the values stay what they are.
        """
        row = OPERATIONS[op]
        arrays = [row.prepared(checked(op, value)) for value in values]
        if not axes:
            return arrays
        if any(array.size == 0 for array in arrays):
            # These are equal on all; zeros do not vary to the analysis of a step.
            reduced = iter(self.reduce(op, [x for x in arrays if x.size], axes))
            return [next(reduced) if x.size else jnp.zeros_like(x) for x in arrays]
        if (across := row.across) is not None:
            return packing.in_packs(
                lambda x: across(x, axes, self.groups), arrays, self.packing
            )
        members = lax.axis_size(axes) if self.groups is None else len(self.groups[0])
        divisor = members if row.divides else 1
        wide = [array.astype(self._dtype_for(array)) for array in arrays]
        if self.is_packed_later and self.sum is operations.direct:
            sums = operations.all_direct(wide, axes, divisor)
        else:
            unfolded = operations.unfolded
            sums = packing.in_packs(
                lambda x: unfolded(self.sum(unfolded(x), axes, divisor)),
                wide,
                self.packing,
            )
        return [
            done.astype(array.dtype) for done, array in zip(sums, arrays, strict=True)
        ]

    def in_eight_bits(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> list[tuple[jax.Array, jax.Array]]:
        """For each array the sum or mean, and what of this replica's is not in it."""
        if self.near is None and self.sum not in (operations.direct, operations.ring):
            raise ValueError(
                "`compression='int8'` was given, but this strategy's cross-device "
                "operations add up whole arrays. Use the default ones, "
                "`NcclAllReduce` or `HierarchicalCopyAllReduce`."
            )
        divisor = lax.axis_size(axes) if OPERATIONS[op].divides else 1
        summed = functools.partial(
            compression.summed, axes=axes, divisor=divisor, near=self.near
        )
        return packing.pairs_in_packs(summed, arrays, self.packing)

    def _dtype_for(self, array: jax.Array) -> DTypeLike:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array.dtype
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        return jnp.float32 if array.dtype.itemsize <= 2 else array.dtype


@final
@dataclasses.dataclass(frozen=True)
class UserPlan:
    """Arrays are given to a `CrossDeviceOps`, one pair with the destinations for each.

    `cross_replica` is a `with` block in cross-replica context for that.
    """

    ops: CrossDeviceOps
    destinations: object
    as_per_replica: Callable[[jax.Array], PerReplica]
    cross_replica: Callable[[], contextlib.AbstractContextManager[object]]
    options: CommunicationOptions | None = None

    def with_options(
        self, options: CommunicationOptions | None, replicas: Replicas
    ) -> UserPlan:
        return dataclasses.replace(self, options=options) if options else self

    def within(self, groups: Groups | None) -> UserPlan:
        if groups is None:
            return self
        raise ValueError(
            f"`groups` was given, but {type(self.ops).__name__} reduces over all "
            "replicas. Use a strategy with one of jaxstrategy's own cross-device "
            "operations."
        )

    def alone(self) -> UserPlan:
        return self

    def in_eight_bits(
        self, op: ReduceOp, arrays: Sequence[jax.Array], axes: Axes
    ) -> NoReturn:
        raise ValueError(
            f"`compression='int8'` was given, but {type(self.ops).__name__} reduces "
            "whole arrays. Use a strategy with one of jaxstrategy's own cross-device "
            "operations, or `compression=jaxstrategy.experimental.PowerSGD()`, "
            "which gives them thin ones."
        )

    def reduce(self, op: ReduceOp, values: Sequence[Leaf], axes: Axes) -> list[Leaf]:
        """The results that the operations return."""
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


AnyPlan: TypeAlias = Plan | UserPlan
