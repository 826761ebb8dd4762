"""The replicas of a strategy, their devices and the sizes of inner axes: `Replicas`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxstrategy._src.replicas import mesh as _mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replica_placements import (
    SPLIT,
    ReplicaPlacements,
)
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped, StateSharding
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import listed, positive, shown, whole, with_noun


def checked_sizes(
    logical_axes: Mapping[str, int] | None, replicas_per_device: int
) -> tuple[dict[str, int], int]:
    """The inner axes by name, and the number of replicas that share a device."""
    sizes, sharing = inner_sizes(logical_axes), checked_sharing(replicas_per_device)
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
    return {_name(name): _size(name, size) for name, size in logical_axes.items()}


def _name(name: object) -> str:
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
    return name


def _size(name: str, given: object) -> int:
    size = whole(given)
    if size is None:
        raise TypeError(
            f"`logical_axes` has {shown(given)} as the size of {name!r}; a whole "
            "number was wanted."
        )
    if size < 1:
        raise ValueError(
            f"`logical_axes` has {size} as the size of {name!r}; at least 1 was wanted."
        )
    return size


def checked_sharing(given: int) -> int:
    """The number of replicas that share a device."""
    count = whole(given)
    if count is None:
        raise TypeError(
            f"`replicas_per_device` was {shown(given)}; a whole number was wanted."
        )
    if count < 1:
        raise ValueError(f"`replicas_per_device` was {count}; at least 1 was wanted.")
    return count


def places_of(
    num_replicas: int | None,
    devices: Sequence[Device],
    logical_axes: Mapping[str, int] | None = None,
    replicas_per_device: int = 1,
) -> tuple[list[Device], int]:
    """The devices on which so many replicas lie, and how many share each device.

    As many devices as can have equally many replicas, of each process equally many.

    Raises:
      TypeError: `num_replicas` is no whole number.
      ValueError: it is not positive, or does not fit.
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
    own: dict[int, list[Device]] = {}
    for device in devices:
        own.setdefault(device.process_index, []).append(device)
    of_process, rest = divmod(count, len(own))
    if rest:
        raise ValueError(
            f"`num_replicas` was {count}, which {len(own)} processes cannot have in "
            "equal parts. Choose a multiple, or start a number of processes that "
            "divides it."
        )
    places = min(len(group) for group in own.values()) // size
    if size > 1 and of_process > places:
        raise ValueError(
            f"`num_replicas` was {count}, of {size} devices each (`logical_axes`), and "
            f"there are {with_noun(len(devices), 'device')}: replicas of several "
            "devices share none."
        )
    used = max(k for k in range(1, places + 1) if of_process % k == 0)
    sharing = of_process // used
    chosen = [device for group in own.values() for device in group[: used * size]]
    idle = [str(device) for device in devices if device not in chosen]
    if idle:
        user_code.warn(
            f"`num_replicas` was {count}: {listed(idle, 8)} "
            f"{'stays' if len(idle) == 1 else 'stay'} idle, because only "
            f"{len(chosen)} of {len(devices)} devices can have equally many. A "
            "number that the number of devices divides uses all of them.",
            RuntimeWarning,
        )
    return chosen, sharing


_MOST_REPLICAS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Replicas(ReplicaPlacements):
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
      in_turn: whether the replicas of a device compute one after the other, so that
        numbers do not depend on how many there are.
    """

    # Where arrays lie makes no other replicas of them, nor when they compute.
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

    def device_index(self) -> jax.Array:
        """The number of this device in its replica, a scalar; inner axes have names."""
        return lax.axis_index(self.inner_axes)

    # Arrays of which each replica keeps a part.

    def division(
        self, path: str, leaf: Shaped, taken: Sequence[int] = ()
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

    def usual_division(self, leaf: Shaped) -> LeafSharding:
        """The division of an array that is no state, of which the user chooses nothing.

        Args:
          leaf: the array, or its type.
        """
        if self.state_sharding is None:
            return LeafSharding(None, "the strategy has no `sharding`")
        return self.state_sharding.usual_division(leaf, self.parts)

    def is_divisible(self, leaf: Shaped) -> bool:
        """Whether state of this type lies divided, if its path is not excepted."""
        chosen = self.state_sharding
        return chosen is not None and chosen.is_divisible(leaf, self.parts)

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
        """What the devices of one replica have of `array`, as one array on them."""
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

    def place_of(self, replica_id: int) -> Device | NamedSharding:
        """Where an array is that one replica has whole."""
        if not self.inner_axes:
            return self.devices_of(replica_id)[0]
        return NamedSharding(self.mesh_of(replica_id), PartitionSpec())

    def copies(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """What each of this process's replicas has of `array`, `[...]`, of all of them.

        Returns:
          Arrays in replica order, each on its replica's devices: all of `array`, or the
          replica's part of it.
        """
        at = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(
            self._joined(array, i, [at[device] for device in self.here_of(i)])
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
                for device in self.here_of(self.own[first])
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
