"""Collectives of vmapped replicas: over those of a device, and over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxstrategy._src.reductions.operations import unfolded
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs.visit import Equation, axis_names, is_along
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Function


@final
@dataclasses.dataclass(frozen=True)
class VmappedAxes:
    """Axis names of replicas that share devices; those of a device are consecutive."""

    replicas: str  # of all replicas in steps, of devices under `jax.vmap`
    parts: str  # of devices in steps
    vmapped: str
    num_devices: int
    per_device: int
    has_groups: bool = False  # whether the step has collectives of groups

    @staticmethod
    def of(replicas: Replicas) -> VmappedAxes:
        (axis,), (parts,) = replicas.axes, replicas.part_axes
        (vmapped,) = replicas.sharing_axes
        return VmappedAxes(axis, parts, vmapped, replicas.parts, replicas.per_device)

    @property
    def in_steps(self) -> list[tuple[str, int]]:
        """The axes in steps, and their sizes; the last two with sharded state only."""
        devices = (self.parts, self.num_devices)
        return [(self.replicas, self.count), devices, (self.vmapped, self.per_device)]

    @property
    def in_vmap(self) -> list[tuple[str, int]]:
        """The axes of vmapped replicas, and their sizes."""
        return list(zip(self.both, (self.num_devices, self.per_device), strict=True))

    @property
    def both(self) -> tuple[str, str]:
        """The axes along which replicas differ."""
        return self.replicas, self.vmapped

    @property
    def count(self) -> int:
        return self.num_devices * self.per_device

    def index(self) -> jax.Array:
        """The id of this replica."""
        return lax.axis_index(self.replicas) * self.per_device + self.vmapped_index()

    def vmapped_index(self) -> jax.Array:
        """The index of this replica on its device."""
        return lax.axis_index(self.vmapped)

    def batched(self, *arrays: jax.Array) -> list[jax.Array]:
        """Makes `jax.vmap` treat arrays as batched, whether they are or not."""
        is_any = self.vmapped_index() >= 0
        return [lax.select(is_any, x, x) for x in arrays]

    def gather(self, array: jax.Array) -> jax.Array:
        """All replicas' arrays: `[...]` -> `[replica, ...]`."""
        on_device = lax.all_gather(array, self.vmapped)
        gathered = lax.all_gather(on_device, self.replicas)
        return gathered.reshape(self.count, *array.shape)


_Groups: TypeAlias = Sequence[Sequence[int]] | None
_Rule: TypeAlias = Callable[[Equation, VmappedAxes], Function]


# JAX has no rules for most collectives over an axis of `jax.vmap` and one of the mesh
# at once, nor for groups along an axis of `jax.vmap` (0.10 and 0.12). These gather the
# arrays of all replicas, from which each takes what it needs.
def collective(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """Replaces a collective over the replicas; None for other equations."""
    name = eqn.primitive.name
    if is_along(eqn, [axes.parts]):
        return _over_devices(eqn, axes)
    if not is_along(eqn, [axes.replicas]):
        return None
    if name == "axis_index":
        return lambda: [axes.index()]
    rule = _RULES.get(name)
    if rule is None or (rule not in (_sum, _extreme) and _other_axes(eqn, axes)):
        raise NotImplementedError(
            f"The step uses the collective `{name}`, which has no rule for "
            "replicas that share a device:\n"
            f"  {Site((eqn,)).line or 'unknown'}\n"
            "Use `psum`, `all_gather`, `ppermute`, `all_to_all` or `psum_scatter` "
            "over the replicas alone, or give each replica its own device."
        )
    return rule(eqn, axes)


def _over_devices(eqn: Equation, axes: VmappedAxes) -> Function:
    """The same collective, with the name of the devices' axis under `jax.vmap`."""
    primitive, params = eqn.primitive, dict(eqn.params)
    key = "axes" if "axes" in params else "axis_name"
    params[key] = (axes.replicas,) if isinstance(params[key], tuple) else axes.replicas

    def computed(*operands: jax.Array) -> Sequence[jax.Array]:
        results = primitive.bind(*operands, **params)
        return results if primitive.multiple_results else [results]

    return computed


def _other_axes(eqn: Equation, axes: VmappedAxes) -> tuple[Any, ...]:
    """The other axes: numbers of those of the user's `jax.vmap`."""
    return tuple(name for name in axis_names(eqn) if name != axes.replicas)


def _sum(eqn: Equation, axes: VmappedAxes) -> Function:
    groups, over = _groups_of(eqn), (*axes.both, *_other_axes(eqn, axes))
    if groups is None:
        return lambda *arrays: lax.psum(list(map(unfolded, arrays)), over)
    return lambda *arrays: [_sum_of(array, groups, axes) for array in arrays]


_EXTREMES = {"pmax": (lax.pmax, jnp.max), "pmin": (lax.pmin, jnp.min)}


def _extreme(eqn: Equation, axes: VmappedAxes) -> Function:
    groups, over = _groups_of(eqn), (*axes.both, *_other_axes(eqn, axes))
    over_all, over_group = _EXTREMES[eqn.primitive.name]
    if groups is None:
        return lambda *arrays: over_all(arrays, over)
    return lambda *arrays: [
        over_group(_members(array, groups, axes), axis=0) for array in arrays
    ]


def _all_gather(eqn: Equation, axes: VmappedAxes) -> Function:
    groups, dimension = _groups_of(eqn), eqn.params["all_gather_dimension"]
    is_tiled = eqn.params["tiled"]
    return lambda array: [_joined(_members(array, groups, axes), dimension, is_tiled)]


def _reduce_scatter(eqn: Equation, axes: VmappedAxes) -> Function:
    groups, dimension = _groups_of(eqn), eqn.params["scatter_dimension"]
    is_tiled = eqn.params["tiled"]

    def scattered(array: jax.Array) -> list[jax.Array]:
        if groups is None:
            # First over vmapped replicas, which would send an array each.
            total = lax.psum(unfolded(array), axes.vmapped)
            parts = _parts(total, dimension, axes.count, is_tiled)
            on_device = lax.psum_scatter(parts, axes.replicas, tiled=True)
            return [_at(axes.vmapped_index(), on_device)]
        total = _sum_of(array, groups, axes)
        parts = _parts(total, dimension, len(groups[0]), is_tiled)
        return [_at(_index_in_group(groups, axes), parts)]

    return scattered


def _ppermute(eqn: Equation, axes: VmappedAxes) -> Function:
    sources = np.full(axes.count, -1)
    for source, target in eqn.params["perm"]:
        sources[target] = source

    def permuted(array: jax.Array) -> list[jax.Array]:
        source = jnp.asarray(sources)[axes.index()]
        received = _at(jnp.maximum(source, 0), axes.gather(array))
        return [jnp.where(source < 0, jnp.zeros_like(received), received)]

    return permuted


def _pbroadcast(eqn: Equation, axes: VmappedAxes) -> Function:
    return lambda array: [axes.gather(array)[eqn.params["source"]]]


def _all_to_all(eqn: Equation, axes: VmappedAxes) -> Function:
    groups, params = _groups_of(eqn), eqn.params
    split, concat = params["split_axis"], params["concat_axis"]

    def exchanged(array: jax.Array) -> list[jax.Array]:
        members = _members(array, groups, axes)
        # Without `tiled`, `jax.lax` has inserted the new dimension already.
        length = array.shape[split] // members.shape[0]
        start = _index_in_group(groups, axes) * length
        mine = lax.dynamic_slice_in_dim(members, start, length, split + 1)
        return [_joined(mine, concat, True)]

    return exchanged


_RULES: dict[str, _Rule] = {
    "psum": _sum,
    "psum_invariant": _sum,
    "pmax": _extreme,
    "pmin": _extreme,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
    "all_to_all": _all_to_all,
}


def _members(array: jax.Array, groups: _Groups, axes: VmappedAxes) -> jax.Array:
    """The arrays of a replica's group: `[...]` -> `[member, ...]`."""
    gathered = axes.gather(array)
    if groups is None:
        return gathered
    # Smaller groups are padded with their first member.
    size = max(map(len, groups))
    members = {i: [*g, *[g[0]] * (size - len(g))] for g in groups for i in g}
    return gathered[_of_replica(members, axes)]


def _sum_of(
    array: jax.Array, groups: Sequence[Sequence[int]], axes: VmappedAxes
) -> jax.Array:
    members = _members(array, groups, axes)
    size = _of_replica({i: len(group) for group in groups for i in group}, axes)
    is_real = jnp.arange(members.shape[0]) < size
    is_real = jnp.expand_dims(is_real, range(1, members.ndim))
    return jnp.where(is_real, members, 0).sum(0, dtype=array.dtype)


def _index_in_group(groups: _Groups, axes: VmappedAxes) -> jax.Array:
    if groups is None:
        return axes.index()
    indices = {i: index for group in groups for index, i in enumerate(group)}
    return _of_replica(indices, axes)


def _of_replica(values: Mapping[int, Any], axes: VmappedAxes) -> jax.Array:
    """The entry of this replica in a table."""
    return jnp.asarray([values[i] for i in range(axes.count)])[axes.index()]


def _groups_of(eqn: Equation) -> _Groups:
    return eqn.params["axis_index_groups"]


def _at(index: jax.Array, stacked: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stacked, index, 0, keepdims=False)


def _joined(members: jax.Array, axis: int, is_tiled: bool) -> jax.Array:
    """Concatenates `[member, ...]` along a dimension if tiled; else stacks them."""
    stacked = jnp.moveaxis(members, 0, axis)
    if not is_tiled:
        return stacked
    shape: Any = list(stacked.shape)
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    return stacked.reshape(shape)


def _parts(array: jax.Array, axis: int, count: int, is_tiled: bool) -> jax.Array:
    """Splits an array along a dimension: `[part, ...]`."""
    if not is_tiled:
        return jnp.moveaxis(array, axis, 0)
    shape: Any = list(array.shape)
    shape[axis : axis + 1] = [count, shape[axis] // count]
    return jnp.moveaxis(array.reshape(shape), axis, 0)
