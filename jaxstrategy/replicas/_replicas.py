"""The replicas of a strategy, and their devices: `Replicas`."""

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

from jaxstrategy.replicas import _devices, _mesh
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._inner_sizes import checked_sizes
from jaxstrategy.replicas._state_sharding import ArrayLike, LeafSharding, StateSharding
from jaxstrategy.text._units import with_noun


class Meaning(enum.Enum):
    """The meaning of an array on the devices of all replicas."""

    SAME = "same"
    """Every replica holds the whole array."""

    SPLIT = "split"
    """Replica i holds entry i of the first dimension."""


SAME, SPLIT = Meaning.SAME, Meaning.SPLIT

_MOST_REPLICAS = 2**31 - 1

Lies: TypeAlias = Meaning | int
"""Its meaning; or the dimension along which it is divided, the same for all."""


def lies_along(dimension: int | None) -> Lies:
    """What is the same for all and divided along a dimension; None: whole."""
    return SAME if dimension is None else dimension


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a strategy: their number, their devices, their collectives' axes.

    Everything that is asked about replicas is asked here, so that nothing else depends
    on how many devices a replica has, or how many replicas a device.

    Attributes:
      mesh: the devices.
      axes: the names of the mesh axes along which replicas differ; none for the single
        replica of code that runs under no strategy, which has no collectives. Along
        the other axes, `inner_axes`, the devices of one replica differ.
      per_device: how many replicas share a device, numbered one after the other. They
        are the entries of a `jax.vmap` inside the program of the device.
      state_sharding: of which arrays that are equal on all replicas each keeps a part;
        None: of none.
    """

    mesh: Mesh
    axes: tuple[str, ...] = (_mesh.REPLICA_AXIS,)
    per_device: int = 1
    # Where arrays lie makes no other replicas of them.
    state_sharding: StateSharding | None = dataclasses.field(
        default=None, compare=False
    )

    @staticmethod
    def on(
        devices: Sequence[Device],
        state_sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        per_device: int = 1,
    ) -> Replicas:
        """Replicas on `devices`, in the order given.

        Args:
          devices: one for each replica, or as many as `logical_axes` say, or one for
            `per_device` replicas.
          state_sharding: of which arrays each replica keeps a part.
          logical_axes: the inner axes and their sizes.
          per_device: how many replicas share a device.

        Raises:
          TypeError: they are not devices, or not numbers.
          ValueError: there is none, or one twice; the numbers do not fit.
        """
        sizes, sharing = checked_sizes(logical_axes, per_device)
        mesh = _mesh.mesh_of(devices, sizes)
        found = Replicas(mesh, per_device=sharing, state_sharding=state_sharding)
        if found.count > _MOST_REPLICAS:
            raise ValueError(
                f"`replicas_per_device` was {sharing}: there would be {found.count} "
                "replicas, and they are numbered with 32 bits. Give a smaller number."
            )
        for i, group in enumerate(found._groups):
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

        It is on JAX's first device, which is looked up when somebody asks: before that,
        devices may be simulated, and processes may meet.
        """
        return _Alone()

    @staticmethod
    def dividing(array: jax.Array) -> Replicas | None:
        """The replicas over which `array`, of shape `[replica, ...]`, is divided.

        None for an array that is whole on its devices, or divided along another
        dimension or another mesh axis.
        """
        if not _mesh.is_split(array.sharding):
            return None
        assert isinstance(array.sharding, NamedSharding), "only these name axes"
        axes = _mesh.names(array.sharding.spec[0])
        if _mesh.REPLICA_AXIS not in axes:
            return None
        return _divided_over(array.sharding.mesh, axes, array.shape[0])

    # How many there are, and where.

    @functools.cached_property
    def inner_axes(self) -> tuple[str, ...]:
        """The names of the mesh axes along which the devices of one replica differ."""
        return tuple(name for name in self.mesh.axis_names if name not in self.axes)

    @property
    def inner_sizes(self) -> dict[str, int]:
        """The sizes of those, by name."""
        return {name: self.mesh.shape[name] for name in self.inner_axes}

    @functools.cached_property
    def count(self) -> int:
        """The number of replicas, those of other processes included."""
        return self.per_device * math.prod(self.mesh.shape[axis] for axis in self.axes)

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """The first device of each replica, in replica order."""
        return tuple(self.devices_of(i)[0] for i in range(self.count))

    @functools.cached_property
    def all_devices(self) -> frozenset[Device]:
        """The devices of all replicas."""
        return frozenset(self.mesh.devices.flat)

    @property
    def description(self) -> str:
        """Their number, and how they go with devices if not one to one, in words."""
        number = with_noun(self.count, "replica")
        if inner := self.inner_sizes:
            return f"{number} of {inner}"
        sharing = self.per_device
        return f"{number}, {sharing} on each device" if sharing > 1 else number

    @functools.cached_property
    def device_names(self) -> str:
        """The names of the devices of all replicas on one line."""
        return _devices.names([device for group in self._groups for device in group])

    def device_names_of(self, replica_id: int) -> str:
        """The names of the devices of one replica on one line."""
        return _devices.names(self.devices_of(replica_id))

    def devices_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica, in the order of the inner axes."""
        return self._groups[replica_id // self.per_device]

    @functools.cached_property
    def _groups(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of the replicas that share them, in replica order."""
        names = self.mesh.axis_names
        order = [names.index(axis) for axis in (*self.axes, *self.inner_axes)]
        groups = self.count // self.per_device
        found = self.mesh.devices.transpose(order).reshape(groups, -1)
        return tuple(tuple(row) for row in found)

    def replica_on(self, device: Device) -> int | None:
        """The first replica that `device` belongs to; None: it is another's."""
        return next(
            (i for i in range(self.count) if device in self.devices_of(i)), None
        )

    def _here_of(self, replica_id: int) -> tuple[Device, ...]:
        """The devices of one replica that are in this process."""
        here = jax.process_index()
        devices = self.devices_of(replica_id)
        return tuple(device for device in devices if device.process_index == here)

    @functools.cached_property
    def own(self) -> tuple[int, ...]:
        """The replicas that have a device in this process, in order."""
        return tuple(i for i in range(self.count) if self._here_of(i))

    @functools.cached_property
    def own_devices(self) -> tuple[Device, ...]:
        """The first device here of each replica of this process, in replica order."""
        return tuple(self._here_of(i)[0] for i in self.own)

    @functools.cached_property
    def are_all_own(self) -> bool:
        """Whether this process has the devices of all replicas."""
        return self.sharding(SAME).is_fully_addressable

    # Collectives, while a step is traced.

    @functools.cached_property
    def collective_axes(self) -> tuple[str, ...]:
        """The axes that a collective over all replicas names.

        Where replicas share devices, it is one axis all the same.
        """
        return self.axes

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes along which replicas have different parts of a divided array.

        Replicas that share a device have the same part.
        """
        return self.axes if self.per_device == 1 else (_mesh.DEVICE_AXIS,)

    @property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axis along which the replicas of one device differ, if there are any."""
        return (_mesh.LANE_AXIS,) if self.per_device > 1 else ()

    @property
    def axis_sizes(self) -> list[tuple[str, int]]:
        """The axes along which replicas differ, with sizes."""
        if self.per_device > 1:
            return [(self.axes[0], self.count)]
        return [(axis, self.mesh.shape[axis]) for axis in self.axes]

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The name of the only axis of collectives, or the names of all of them."""
        axes = self.collective_axes
        return axes[0] if len(axes) == 1 else axes

    def index(self) -> jax.Array | int:
        """The number of this replica: in a traced step a scalar; 0 without axes."""
        return lax.axis_index(self.collective_axes) if self.collective_axes else 0

    # Arrays on all replicas.

    def spec(self, meaning: Meaning) -> PartitionSpec:
        """The division of an array of this meaning over the mesh."""
        is_divided = meaning is SPLIT and self.axes
        return PartitionSpec(self.axes) if is_divided else PartitionSpec()

    def sharding(self, meaning: Meaning) -> NamedSharding:
        """The placement of an array of this meaning."""
        return self._shardings[meaning]

    @functools.cached_property
    def _shardings(self) -> dict[Meaning, NamedSharding]:
        return {
            meaning: NamedSharding(self.mesh, self.spec(meaning)) for meaning in Meaning
        }

    def differ(self, meaning: Meaning) -> bool:
        """Whether replicas may have different arrays of this meaning."""
        return meaning is SPLIT and bool(self.axes)

    def divides_over_replicas(self, sharding: Sharding) -> bool:
        """Whether a sharding names the axes along which replicas differ."""
        return isinstance(sharding, NamedSharding) and any(
            not set(self.axes).isdisjoint(_mesh.names(entry)) for entry in sharding.spec
        )

    def may_lie_inside(self, shape: Sequence[int]) -> bool:
        """Whether the devices of a replica may have parts of an array of this shape."""
        sizes = [size for size in self.inner_sizes.values() if size > 1]
        return any(length % size == 0 for length in shape for size in sizes)

    def inner_placement(
        self, array: jax.Array, meaning: Meaning
    ) -> NamedSharding | None:
        """The placement of `array`, `[...]`, if inner axes at most divide it besides.

        None if it lies elsewhere, or if replicas have other entries of it.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        entries = list(map(_mesh.names, sharding.spec))
        over_replicas = [not set(self.axes).isdisjoint(names) for names in entries]
        if meaning is SPLIT and (self.count > 1 or any(over_replicas)):
            if not over_replicas or entries[0] != self.axes:
                return None
            over_replicas[0] = False
        return None if any(over_replicas) else sharding

    def spec_of(self, lies: Lies) -> PartitionSpec:
        """The division of an array over the replicas' axes of the mesh."""
        return self.spec_along(lies) if isinstance(lies, int) else self.spec(lies)

    # Arrays of which each replica keeps a part.

    @functools.cached_property
    def parts(self) -> int:
        """The number of parts of an array that is divided over the replicas."""
        return self.count // self.per_device

    def division(
        self, path: str, leaf: ArrayLike, taken: Sequence[int] = ()
    ) -> LeafSharding:
        """The division of an array that is equal on all replicas.

        Args:
          path: of the array in its argument, for the user's choice.
          leaf: the array, or its type.
          taken: dimensions that the devices of each replica divide.

        Raises:
          ValueError: the user's choice cannot be.
          TypeError: it is no dimension.
        """
        if self.state_sharding is None:
            return LeafSharding(None, "the strategy has no `sharding`")
        return self.state_sharding.division(path, leaf, self.parts, taken)

    def usual_division(self, leaf: ArrayLike) -> LeafSharding:
        """The division of an array that is no state, of which the user chooses nothing.

        Args:
          leaf: the array, or its type.
        """
        if self.state_sharding is None:
            return LeafSharding(None, "the strategy has no `sharding`")
        return self.state_sharding.usual_division(leaf, self.parts)

    def is_divisible(self, leaf: ArrayLike) -> bool:
        """Whether state of this type lies divided, if its path is not excepted."""
        chosen = self.state_sharding
        return chosen is not None and chosen.is_divisible(leaf, self.parts)

    def spec_along(self, dimension: int | None) -> PartitionSpec:
        """The division of an array along one of its dimensions; None: it is whole."""
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * dimension, self.axes)

    def sharding_along(self, dimension: int | None) -> NamedSharding:
        """The placement of an array that is divided along one of its dimensions."""
        found = self._sharding_along.get(dimension)
        if found is None:
            found = NamedSharding(self.mesh, self.spec_along(dimension))
            self._sharding_along[dimension] = found
        return found

    @functools.cached_property
    def _sharding_along(self) -> dict[int | None, NamedSharding]:
        # One object for each, so that looking whether an array lies there is quick.
        return {None: self.sharding(SAME)}

    def constraint_along(self, dimension: int, rank: int) -> NamedSharding:
        """As `sharding_along`, for an array that XLA may divide over inner axes."""
        if not self.inner_axes:
            return self.sharding_along(dimension)
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * rank
        entries[dimension] = self.axes
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def on_mesh(self, sharding: NamedSharding) -> NamedSharding:
        """The same division, of an array on the devices of these replicas."""
        return _mesh.on_mesh(sharding, self.mesh)

    def as_one_replica(self) -> contextlib.AbstractContextManager[object]:
        """A block in which a trace sees the mesh as the devices of one replica do.

        So what divides values over the inner axes need not name it.
        """
        if not self.inner_axes:
            return contextlib.nullcontext()
        kinds = [
            AxisType.Manual if name in self.axes else AxisType.Auto
            for name in self.mesh.axis_names
        ]
        mesh = self.mesh.abstract_mesh.update(axis_types=tuple(kinds))
        return use_abstract_mesh(mesh)

    def dimension_of(self, array: jax.Array) -> int | None:
        """The dimension along which `array`, `[...]`, is divided over these replicas.

        None if it is not.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        return self.dimension_along(sharding)

    def dimension_along(self, sharding: NamedSharding) -> int | None:
        """The dimension that a sharding divides over all replicas; None: none."""
        for dimension, names in enumerate(sharding.spec):
            named = names if isinstance(names, tuple) else (names,)
            if not set(self.axes).isdisjoint(named):
                return dimension if named == self.axes else None
        return None

    def versions(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """The versions of `array` on this process's replicas, in replica order.

        Args:
          array: one of shape `[replica, ...]`, divided over the replicas.

        Returns:
          Arrays of shape `[...]`, each on its replica's devices.

        Raises:
          ValueError: the array is not divided over these replicas.
        """
        # Checked, because an array of the same devices in another order would give each
        # replica another one's version without a word.
        shards = {shard.device: shard for shard in array.addressable_shards}
        found: list[jax.Array] = []
        for i in self.own:
            place = i % self.per_device
            rows = slice(i - place, i - place + self.per_device)
            here = [shards[d] for d in self.devices_of(i) if d in shards]
            if not here or any(not _has_rows(each, rows, array) for each in here):
                raise ValueError(
                    f"An array of shape {array.shape} lies as {array.sharding}, and "
                    f"not with entry {i} on {self.devices_of(i)}."
                )
            parts = [each.data[place] for each in here]
            found.append(self._joined(array, i, parts, first=1))
        return tuple(found)

    def _joined(
        self,
        array: jax.Array,
        replica_id: int,
        parts: Sequence[jax.Array],
        first: int = 0,
    ) -> jax.Array:
        """What the devices of one replica have of `array`, as one array on them.

        Args:
          array: divided over the inner axes, and maybe over the replicas.
          replica_id: whose devices they are.
          parts: what each of them has, in order.
          first: the first dimension of `array` that the parts have.
        """
        if len(parts) == 1:
            return parts[0]
        assert isinstance(array.sharding, NamedSharding), "it lies on a mesh"
        spec = _mesh.along(array.sharding.spec, self.inner_axes)
        over_replicas = _mesh.along(array.sharding.spec, self.axes)
        shape = NamedSharding(self.mesh, over_replicas).shard_shape(array.shape)
        where = NamedSharding(self.mesh_of(replica_id), PartitionSpec(*spec[first:]))
        return jax.make_array_from_single_device_arrays(
            shape[first:], where, list(parts)
        )

    def mesh_of(self, replica_id: int) -> Mesh:
        """The devices of one replica, along the inner axes."""
        inside = [self.mesh.shape[axis] for axis in self.inner_axes]
        return Mesh(
            np.asarray(self.devices_of(replica_id)).reshape(inside),
            self.inner_axes,
            axis_types=_mesh.axis_types(len(inside)),
        )

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """What each of this process's replicas has of `array`, `[...]`, of all of them.

        Returns:
          Arrays in replica order, each on its replica's devices: all of `array`, or the
          replica's part of it.
        """
        at = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(
            self._joined(array, i, [at[device] for device in self._here_of(i)])
            for i in self.own
        )

    def stacked(self, versions: Sequence[jax.Array | np.ndarray]) -> jax.Array:
        """The versions of this process's replicas as one array `[replica, ...]`.

        Args:
          versions: arrays of one shape `[...]` and dtype, in replica order.

        Returns:
          An array divided over the replicas; `versions` of it are these.
        """
        return self.joined([version[None] for version in versions])

    def joined(
        self, rows: Sequence[jax.Array | np.ndarray], may_alias: bool | None = None
    ) -> jax.Array:
        """`stacked` of arrays `[1, ...]`: one of shape `[replica, ...]`.

        Args:
          rows: one for each replica of this process, in replica order.
          may_alias: whether the result may share their memory, see `jax.device_put`.
        """
        shape = (self.count, *rows[0].shape[1:])
        inside = self._inside_of_rows(rows)
        if inside is not None:
            own = map(jnp.copy, rows) if may_alias is False else rows
            parts = [part for row in own for part in _in_order(jnp.asarray(row))]
            sharding = NamedSharding(self.mesh, PartitionSpec(self.axes, *inside[1:]))
        else:
            parts = [
                _together_on(device, rows[first : first + self.per_device], may_alias)
                for first in range(0, len(rows), self.per_device)
                for device in self._here_of(self.own[first])
            ]
            sharding = self.sharding(SPLIT)
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _inside_of_rows(
        self, rows: Sequence[jax.Array | np.ndarray]
    ) -> PartitionSpec | None:
        """How the rows lie over inner axes, as `versions` do; None if one does not."""
        if not self.inner_axes:
            return None
        found: list[PartitionSpec] = []
        for i, row in zip(self.own, rows, strict=True):
            sharding = row.sharding if isinstance(row, jax.Array) else None
            if not isinstance(sharding, NamedSharding):
                return None
            if sharding.mesh != self.mesh_of(i):
                return None
            found.append(_mesh.along(sharding.spec, self.inner_axes))
        return found[0] if len(set(found)) == 1 else None


class _Alone(Replicas):
    """Replicas of which the mesh is not known yet."""

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


def _has_rows(shard: jax.Shard, rows: slice, array: jax.Array) -> bool:
    """Whether `shard` has just these entries of the first dimension."""
    return shard.index[0].indices(array.shape[0]) == (rows.start, rows.stop, 1)


def _in_order(row: jax.Array) -> list[jax.Array]:
    """The parts that devices have of `row`, in the order of its mesh."""
    sharding = row.sharding
    assert isinstance(sharding, NamedSharding), "the caller has looked"
    assert isinstance(sharding.mesh, Mesh), "arrays lie on devices"
    at = {shard.device: shard.data for shard in row.addressable_shards}
    return [at[device] for device in sharding.mesh.devices.flat]


def _together_on(
    device: Device, rows: Sequence[jax.Array | np.ndarray], may_alias: bool | None
) -> jax.Array:
    placed = [jax.device_put(row, device, may_alias=may_alias) for row in rows]
    return placed[0] if len(placed) == 1 else jnp.concatenate(placed)
