"""The replicas of a strategy, their devices and the sizes of inner axes: `Replicas`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    use_abstract_mesh,
)

from jaxstrategy._src import text
from jaxstrategy._src.replicas import devices as _devices, mesh as _mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped, StateSharding
from jaxstrategy._src.text import listed, positive, shown, whole, with_noun


class ReplicaLayout(enum.Enum):
    """How the replicas hold an array."""

    REPLICATED = "replicated"
    """Every replica holds the whole array."""

    STACKED = "stacked"
    """Replica i holds entry i of the first dimension."""


REPLICATED, STACKED = ReplicaLayout.REPLICATED, ReplicaLayout.STACKED

LayoutOrDimension: TypeAlias = ReplicaLayout | int
"""A layout, or the dimension along which an array equal on all is sharded."""


Rows: TypeAlias = Sequence[jax.Array | np.ndarray]


def sharded_along(dimension: int | None) -> LayoutOrDimension:
    """The layout of an array that is sharded along a dimension; None: replicated."""
    return REPLICATED if dimension is None else dimension


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy: their number, devices, shardings, collective axes.

    Nothing else depends on how many devices a replica has, or how many replicas a
    device.

    Attributes:
      mesh: the devices.
      axes: the names of the mesh axes along which replicas differ; none for the single
        replica of code that runs under no strategy, which has no collectives. Along
        the other axes, `inner_axes`, the devices of one replica differ.
      per_device: how many replicas share a device, numbered one after the other. They
        are the entries of a `jax.vmap` inside the program of the device.
      state_sharding: of which arrays that are equal on all replicas each keeps a part;
        None: of none.
      in_turn: whether the replicas of a device compute one after the other, so that
        numbers do not depend on how many there are.
    """

    mesh: Mesh
    axes: tuple[str, ...] = (_mesh.REPLICA_AXIS,)
    per_device: int = 1
    # Not compared: where arrays lie and when replicas compute makes no other replicas.
    state_sharding: StateSharding | None = dataclasses.field(
        default=None, compare=False
    )
    in_turn: bool = dataclasses.field(default=False, compare=False)

    @staticmethod
    def on(
        devices: Sequence[Device],
        state_sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        per_device: int = 1,
    ) -> Replicas:
        """Replicas on `devices`, in order; checks the sizes of inner axes."""
        sizes, sharing = checked_sizes(logical_axes, per_device)
        mesh = _mesh.mesh_of(devices, sizes)
        found = Replicas(mesh, per_device=sharing, state_sharding=state_sharding)
        if found.count >= 2**31:
            raise ValueError(
                f"`replicas_per_device` was {sharing}: there would be {found.count} "
                "replicas, and they are numbered with 32 bits. Give a smaller number."
            )
        for i, group in enumerate(found.groups):
            owners = sorted({each.process_index for each in group})
            if len(owners) > 1:
                raise ValueError(
                    f"`logical_axes` was {sizes}: replica {i} would have devices of "
                    f"processes {', '.join(map(str, owners))}. Give sizes whose "
                    "product divides the number of devices of each process."
                )
        return found

    @staticmethod
    def alone() -> Replicas:
        """The single replica of code that runs under no strategy, without axes.

        JAX's first device is looked up when it is used: before that, devices may be
        simulated and `jax.distributed` started.
        """
        return _Alone()

    @staticmethod
    def dividing(array: jax.Array) -> Replicas | None:
        """The replicas over which `array`, `[replica, ...]`, is sharded, if it is."""
        if not _mesh.is_split(array.sharding):
            return None
        assert isinstance(array.sharding, NamedSharding), "only these name axes"
        axes = _mesh.axes_of(array.sharding.spec[0])
        if _mesh.REPLICA_AXIS not in axes:
            return None
        return _divided_over(array.sharding.mesh, axes, array.shape[0])

    @functools.cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes along which the devices of one replica differ."""
        return tuple(name for name in self.mesh.axis_names if name not in self.axes)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The sizes of the inner axes, by name."""
        return {name: self.mesh.shape[name] for name in self.inner_axes}

    @functools.cached_property
    def count(self) -> int:
        """The number of replicas, those of other processes included."""
        return self.per_device * math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def description(self) -> str:
        """The number of replicas in words, with how they share or have devices."""
        number = with_noun(self.count, "replica")
        if inner := self.inner_sizes:
            return f"{number} of {inner}"
        sharing = self.per_device
        return f"{number}, {sharing} on each device" if sharing > 1 else number

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The first device of each replica, in replica order."""
        return tuple(self.devices_of(i)[0] for i in range(self.count))

    @functools.cached_property
    def all_devices(self) -> frozenset[Device]:
        """The devices of all replicas."""
        return frozenset(self.mesh.devices.flat)

    @functools.cached_property
    def device_names(self) -> str:
        """The names of the devices of all replicas on one line."""
        return _devices.names([device for group in self.groups for device in group])

    def device_names_of(self, replica_id: int) -> str:
        """The names of the devices of one replica on one line."""
        return _devices.names(self.devices_of(replica_id))

    def devices_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica, in the order of the inner axes."""
        return self.groups[replica_id // self.per_device]

    @functools.cached_property
    def groups(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of the replicas that share them, in replica order."""
        names = self.mesh.axis_names
        order = [names.index(axis) for axis in (*self.axes, *self.inner_axes)]
        groups = self.count // self.per_device
        found = self.mesh.devices.transpose(order).reshape(groups, -1)
        return tuple(tuple(row) for row in found)

    def replica_on(self, device: Device) -> int | None:
        """The first replica that `device` belongs to, if it belongs to one."""
        return next(
            (i for i in range(self.count) if device in self.devices_of(i)), None
        )

    def local_devices_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica that are in this process."""
        here = jax.process_index()
        devices = self.devices_of(replica_id)
        return tuple(device for device in devices if device.process_index == here)

    @functools.cached_property
    def local_ids(self) -> tuple[int, ...]:
        """The replicas that have a device in this process, in order."""
        return tuple(i for i in range(self.count) if self.local_devices_of(i))

    @functools.cached_property
    def local_devices(self) -> tuple[Device, ...]:
        """The first device here of each replica of this process, in replica order."""
        return tuple(self.local_devices_of(i)[0] for i in self.local_ids)

    @functools.cached_property
    def are_all_local(self) -> bool:
        """Whether all replicas' devices are in this process."""
        return self.sharding(REPLICATED).is_fully_addressable

    def spec(self, layout: LayoutOrDimension) -> PartitionSpec:
        """The partition spec of an array of this layout over the replicas' axes."""
        if isinstance(layout, int):
            return PartitionSpec(*(None,) * layout, self.axes)
        is_stacked = layout is STACKED and self.axes
        return PartitionSpec(self.axes) if is_stacked else PartitionSpec()

    def sharding(self, layout: LayoutOrDimension) -> NamedSharding:
        """The sharding of an array of this layout."""
        known = self._shardings.get(layout)
        if known is None:
            known = NamedSharding(self.mesh, self.spec(layout))
            self._shardings[layout] = known
        return known

    @functools.cached_property
    def _shardings(self) -> dict[LayoutOrDimension, NamedSharding]:
        return {}  # One object for each, so that they are compared by identity.

    def differ(self, layout: ReplicaLayout) -> bool:
        """Whether replicas may have different arrays of this layout."""
        return layout is STACKED and bool(self.axes)

    def divides_over_replicas(self, sharding: Sharding) -> bool:
        """Whether a sharding shards over the replicas' axes."""
        return isinstance(sharding, NamedSharding) and any(
            not set(self.axes).isdisjoint(_mesh.axes_of(entry))
            for entry in sharding.spec
        )

    def may_lie_inside(self, shape: Sequence[int]) -> bool:
        """Whether an array of this shape can be sharded over the inner axes."""
        sizes = [size for size in self.inner_sizes.values() if size > 1]
        return any(length % size == 0 for length in shape for size in sizes)

    def inner_placement(
        self, array: jax.Array, layout: ReplicaLayout
    ) -> NamedSharding | None:
        """The sharding of `array` if it has this layout, apart from inner axes."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        entries = list(map(_mesh.axes_of, sharding.spec))
        over_replicas = [not set(self.axes).isdisjoint(names) for names in entries]
        if layout is STACKED and (self.count > 1 or any(over_replicas)):
            if not over_replicas or entries[0] != self.axes:
                return None
            over_replicas[0] = False
        return None if any(over_replicas) else sharding

    @functools.cached_property
    def parts(self) -> int:
        """The number of shards of an array that is sharded over the replicas."""
        return self.count // self.per_device

    def constraint_along(self, dimension: int, rank: int) -> NamedSharding:
        """As `sharding`, but inner axes are left to XLA."""
        if not self.inner_axes:
            return self.sharding(dimension)
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * rank
        entries[dimension] = self.axes
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def dimension_of(self, array: jax.Array) -> int | None:
        """The dimension along which `array` is sharded over these replicas, if any."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        for dimension, names in enumerate(map(_mesh.axes_of, sharding.spec)):
            if not set(self.axes).isdisjoint(names):
                return dimension if names == self.axes else None
        return None

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes along which replicas have different parts of a divided array.

        Replicas that share a device have the same part.
        """
        return self.axes if self.per_device == 1 else (_mesh.DEVICE_AXIS,)

    @property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axis along which the replicas of one device differ, if there are any."""
        return (_mesh.SHARED_DEVICE_AXIS,) if self.per_device > 1 else ()

    @property
    def axis_sizes(self) -> list[tuple[str, int]]:
        """The axes along which replicas differ, with sizes."""
        if self.per_device > 1:
            return [(self.axes[0], self.count)]
        return [(axis, self.mesh.shape[axis]) for axis in self.axes]

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The name of the only axis of collectives, or the names of all of them."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def index(self) -> jax.Array | int:
        """The number of this replica: in a traced step a scalar; 0 without axes."""
        return lax.axis_index(self.axes) if self.axes else 0

    def division(
        self, path: str, leaf: Shaped, taken: Sequence[int] = ()
    ) -> LeafSharding:
        """The dimension to shard of an array that is equal on all replicas.

        `taken` are dimensions that are sharded over the devices of each replica.
        """
        if self.state_sharding is None:
            return LeafSharding(None, "the strategy has no `sharding`")
        return self.state_sharding.division(path, leaf, self.parts, taken)

    def usual_division(self, leaf: Shaped) -> LeafSharding:
        """As `division`, of an array that is no state, without the user's choice."""
        if self.state_sharding is None:
            return LeafSharding(None, "the strategy has no `sharding`")
        return self.state_sharding.usual_division(leaf, self.parts)

    def is_divisible(self, leaf: Shaped) -> bool:
        """Whether state of this type may be sharded, by its size and shape."""
        chosen = self.state_sharding
        return chosen is not None and chosen.is_divisible(leaf, self.parts)

    def as_one_replica(self) -> contextlib.AbstractContextManager[object]:
        """Enters the mesh as one replica sees it, so that specs may name inner axes."""
        if not self.inner_axes:
            return contextlib.nullcontext()
        kinds = [
            AxisType.Manual if name in self.axes else AxisType.Auto
            for name in self.mesh.axis_names
        ]
        mesh = self.mesh.abstract_mesh.update(axis_types=tuple(kinds))
        return use_abstract_mesh(mesh)

    def versions(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """The versions of `array`, `[replica, ...]`, on this process's replicas."""
        # Checked, because an array on the same devices in another order would silently
        # give each replica another one's version.
        shards = {shard.device: shard for shard in array.addressable_shards}
        versions: list[jax.Array] = []
        for i in self.local_ids:
            place = i % self.per_device
            rows = (i - place, i - place + self.per_device, 1)
            local = [shards[d] for d in self.devices_of(i) if d in shards]
            if not local or any(x.index[0].indices(len(array)) != rows for x in local):
                raise ValueError(
                    f"An array of shape {array.shape} lies as {array.sharding}, and "
                    f"not with entry {i} on {self.devices_of(i)}."
                )
            parts = [shard.data[place] for shard in local]
            versions.append(self._on_replica(array, i, parts, first=1))
        return tuple(versions)

    def _on_replica(
        self, array: jax.Array, replica_id: int, parts: list[jax.Array], first: int = 0
    ) -> jax.Array:
        """The shards of `array` on one replica's devices as an array on its mesh."""
        if len(parts) == 1:
            return parts[0]
        assert isinstance(array.sharding, NamedSharding), "it lies on a mesh"
        spec = _mesh.spec_over(array.sharding.spec, self.inner_axes)
        over_replicas = _mesh.spec_over(array.sharding.spec, self.axes)
        shape = NamedSharding(self.mesh, over_replicas).shard_shape(array.shape)
        where = NamedSharding(self.mesh_of(replica_id), PartitionSpec(*spec[first:]))
        return jax.make_array_from_single_device_arrays(shape[first:], where, parts)

    def mesh_of(self, replica_id: int) -> Mesh:
        """The devices of one replica, along the inner axes."""
        inside = [self.mesh.shape[axis] for axis in self.inner_axes]
        return Mesh(
            np.asarray(self.devices_of(replica_id)).reshape(inside),
            self.inner_axes,
            axis_types=_mesh.axis_types(len(inside)),
        )

    def place_of(self, replica_id: int) -> Device | NamedSharding:
        """Where an array of one replica is placed: its device, or all of its mesh."""
        if not self.inner_axes:
            return self.devices_of(replica_id)[0]
        return NamedSharding(self.mesh_of(replica_id), PartitionSpec())

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """The copy, or the shard, of `array` on each of this process's replicas."""
        at = {shard.device: shard.data for shard in array.addressable_shards}
        parts = {i: [at[d] for d in self.local_devices_of(i)] for i in self.local_ids}
        return tuple(self._on_replica(array, i, parts[i]) for i in parts)

    def stacked(self, versions: Rows) -> jax.Array:
        """The versions of this process's replicas as one array `[replica, ...]`."""
        return self.joined([version[None] for version in versions])

    def joined(self, rows: Rows, may_alias: bool | None = None) -> jax.Array:
        """`stacked` of arrays `[1, ...]`; `may_alias` as of `jax.device_put`."""
        shape = (self.count, *rows[0].shape[1:])
        inner = self._inner_spec_of_rows(rows)
        if inner is not None:
            copied = map(jnp.copy, rows) if may_alias is False else rows
            parts = [part for row in copied for part in _shards(jnp.asarray(row))]
            sharding = NamedSharding(self.mesh, PartitionSpec(self.axes, *inner[1:]))
        else:
            parts = [
                _joined_on(device, rows[first : first + self.per_device], may_alias)
                for first in range(0, len(rows), self.per_device)
                for device in self.local_devices_of(self.local_ids[first])
            ]
            sharding = self.sharding(STACKED)
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _inner_spec_of_rows(self, rows: Rows) -> PartitionSpec | None:
        """The spec over inner axes that all rows have, if they have one."""
        if not self.inner_axes:
            return None
        specs: set[PartitionSpec] = set()
        for i, row in zip(self.local_ids, rows, strict=True):
            sharding = row.sharding if isinstance(row, jax.Array) else None
            is_named = isinstance(sharding, NamedSharding)
            if not is_named or sharding.mesh != self.mesh_of(i):
                return None
            specs.add(_mesh.spec_over(sharding.spec, self.inner_axes))
        return specs.pop() if len(specs) == 1 else None


class _Alone(Replicas):
    """The single replica of no strategy, whose mesh is made when it is asked for."""

    def __init__(self) -> None:
        # A frozen dataclass; the mesh is no field here.
        vars(self).update(axes=(), per_device=1, state_sharding=None)

    @functools.cached_property
    def mesh(self) -> Mesh:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of JAX's first device."""
        return _mesh.mesh_of(jax.local_devices()[:1])


# A `PerReplica` asks at each use, and `Replicas` keep what they have found out.
@functools.lru_cache(maxsize=256)
def _divided_over(mesh: Mesh, axes: tuple[str, ...], count: int) -> Replicas:
    groups = math.prod(mesh.shape[axis] for axis in axes)
    return Replicas(mesh, axes, count // groups)


def _shards(row: jax.Array) -> list[jax.Array]:
    """The shards of `row`, in the order of its mesh."""
    assert isinstance(row.sharding, NamedSharding), "the caller has looked"
    assert isinstance(row.sharding.mesh, Mesh), "arrays lie on devices"
    at = {shard.device: shard.data for shard in row.addressable_shards}
    return [at[device] for device in row.sharding.mesh.devices.flat]


def _joined_on(device: Device, rows: Rows, may_alias: bool | None) -> jax.Array:
    placed = [jax.device_put(row, device, may_alias=may_alias) for row in rows]
    return placed[0] if len(placed) == 1 else jnp.concatenate(placed)


def checked_sizes(
    logical_axes: Mapping[str, int] | None, replicas_per_device: int
) -> tuple[dict[str, int], int]:
    """The inner axes by name, and the number of replicas that share a device."""
    sizes, sharing = inner_sizes(logical_axes), whole(replicas_per_device)
    if sharing is None:
        raise TypeError(
            f"`replicas_per_device` was {shown(replicas_per_device)}; a whole number "
            "was wanted."
        )
    if sharing < 1:
        raise ValueError(f"`replicas_per_device` was {sharing}; at least 1 was wanted.")
    if sizes and sharing > 1:
        raise ValueError(
            f"`logical_axes` was {shown(logical_axes)} and `replicas_per_device` "
            f"{sharing}: a replica has several devices, or a device several replicas. "
            "Give one of the two."
        )
    return sizes, sharing


def inner_sizes(logical_axes: Mapping[str, int] | None) -> dict[str, int]:
    """The sizes of the axes along which the devices of one replica differ, by name."""
    if logical_axes is None:
        return {}
    if not isinstance(logical_axes, Mapping):
        raise TypeError(
            f"`logical_axes` was {shown(logical_axes)}; the names of axes and their "
            'sizes were wanted, such as `{"core": 2}`.'
        )
    return {name: _size(name, size) for name, size in logical_axes.items()}


def _size(name: object, value: object) -> int:
    if not isinstance(name, str):
        raise TypeError(
            f"`logical_axes` has {shown(name)} as the name of an axis; a text was "
            "wanted, such as `'core'`."
        )
    if not name:
        raise ValueError(
            "`logical_axes` has an empty text as the name of an axis; a name was "
            "wanted, such as `'core'`."
        )
    if name == _mesh.REPLICA_AXIS:
        raise ValueError(
            f"`logical_axes` has an axis {name!r}, which is the name of the axis along "
            "which replicas differ. Give those inside a replica another name."
        )
    size = whole(value)
    if size is None:
        raise TypeError(
            f"`logical_axes` has {shown(value)} as the size of {name!r}; a whole "
            "number was wanted."
        )
    if size < 1:
        raise ValueError(
            f"`logical_axes` has {size} as the size of {name!r}; at least 1 was wanted."
        )
    return size


def devices_for(
    num_replicas: int | None,
    devices: Sequence[Device],
    logical_axes: Mapping[str, int] | None = None,
    replicas_per_device: int = 1,
) -> tuple[list[Device], int]:
    """The devices that `num_replicas` use, and how many replicas share each device.

    As many devices as can have equally many replicas, of each process equally many.
    """
    if num_replicas is None:
        return list(devices), replicas_per_device
    count = positive("num_replicas", num_replicas)
    if replicas_per_device != 1:
        raise ValueError(
            f"`num_replicas` was {count} and `replicas_per_device` "
            f"{replicas_per_device}: one follows from the other and the devices. Give "
            "one of the two."
        )
    size = math.prod(inner_sizes(logical_axes).values())
    by_process: dict[int, list[Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    of_process, rest = divmod(count, len(by_process))
    if rest:
        raise ValueError(
            f"`num_replicas` was {count}, which {len(by_process)} processes cannot "
            "have in equal parts. Choose a multiple, or start a number of processes "
            "that divides it."
        )
    places = min(len(group) for group in by_process.values()) // size
    if size > 1 and of_process > places:
        raise ValueError(
            f"`num_replicas` was {count}, of {size} devices each (`logical_axes`), and "
            f"there are {with_noun(len(devices), 'device')}: replicas of several "
            "devices share none."
        )
    used = max(k for k in range(1, places + 1) if of_process % k == 0)
    sharing = of_process // used
    chosen = [
        device for group in by_process.values() for device in group[: used * size]
    ]
    idle = [str(device) for device in devices if device not in chosen]
    if idle:
        text.warn(
            f"`num_replicas` was {count}: {listed(idle, 8)} "
            f"{'stays' if len(idle) == 1 else 'stay'} idle, because only "
            f"{len(chosen)} of {len(devices)} devices can have equally many. A "
            "number that the number of devices divides uses all of them.",
            RuntimeWarning,
        )
    return chosen, sharing
