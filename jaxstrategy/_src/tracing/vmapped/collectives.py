"""Collectives of vmapped replicas: over those of a device, and over devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

    replicas: str
    parts: str
    devices: str
    vmapped: str
    num_devices: int
    per_device: int
    in_turn: bool = False

    @staticmethod
    def of(replicas: Replicas) -> VmappedAxes:
        (axis,), (parts,) = replicas.axes, replicas.part_axes
        (vmapped,) = replicas.sharing_axes
        return VmappedAxes(
            axis,
            parts,
            axis,
            vmapped,
            replicas.parts,
            replicas.per_device,
            replicas.in_turn,
        )

    @property
    def in_steps(self) -> list[tuple[str, int]]:
        """The axes in steps, and their sizes; the last two with sharded state only."""
        return [
            (self.replicas, self.count),
            (self.parts, self.num_devices),
            (self.vmapped, self.per_device),
        ]

    @property
    def in_vmap(self) -> list[tuple[str, int]]:
        """The axes of vmapped replicas, and their sizes."""
        return [(self.devices, self.num_devices), (self.vmapped, self.per_device)]

    @property
    def both(self) -> tuple[str, str]:
        """The axes along which replicas differ."""
        return self.devices, self.vmapped

    @property
    def count(self) -> int:
        return self.num_devices * self.per_device

    def index(self) -> jax.Array:
        """The id of this replica."""
        return lax.axis_index(self.devices) * self.per_device + self.vmapped_index()

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
        gathered = lax.all_gather(on_device, self.devices)
        return gathered.reshape(self.count, *array.shape)


_Groups: TypeAlias = Sequence[Sequence[int]] | None

_SUMS = {"psum": lax.psum, "psum_invariant": lax.psum}
_EXTREMES = {"pmax": (lax.pmax, jnp.max), "pmin": (lax.pmin, jnp.min)}
_REDUCTIONS = frozenset((*_SUMS, *_EXTREMES))


# JAX has no rules for most collectives over an axis of `jax.vmap` and one of the mesh
# at once, nor for groups along an axis of `jax.vmap` (0.10 and 0.12). These gather the
# arrays of all replicas, from which each takes what it needs.
@final
@dataclasses.dataclass(frozen=True)
class VmappedCollectives:
    """Replaces collectives over all replicas."""

    axes: VmappedAxes

    def replacement(self, eqn: Equation) -> Function | None:
        name, params = eqn.primitive.name, eqn.params
        if is_along(eqn, [self.axes.parts]):
            return self._over_devices(eqn)
        if name == "axis_index":
            is_ours = params["axis_name"] == self.axes.replicas
            return (lambda: [self.axes.index()]) if is_ours else None
        if not is_along(eqn, [self.axes.replicas]):
            return None
        rule = getattr(self, f"_{name}", None)
        if name in _SUMS:
            rule = self._sum
        elif name in _EXTREMES:
            rule = self._extreme
        if rule is None or (self._other_axes(eqn) and name not in _REDUCTIONS):
            raise NotImplementedError(
                f"The step uses the collective `{name}`, which has no rule for "
                "replicas that share a device:\n"
                f"  {Site((eqn,)).line or 'unknown'}\n"
                "Use `psum`, `all_gather`, `ppermute`, `all_to_all` or `psum_scatter` "
                "over the replicas alone, or give each replica its own device."
            )
        return rule(eqn)

    def _over_devices(self, eqn: Equation) -> Function:
        """The same collective, with the name of the devices' axis under `jax.vmap`."""
        primitive, params = eqn.primitive, dict(eqn.params)
        key = "axes" if "axes" in params else "axis_name"
        is_tuple = isinstance(params[key], tuple)
        params[key] = (self.axes.devices,) if is_tuple else self.axes.devices

        def computed(*operands: jax.Array) -> Sequence[jax.Array]:
            results = primitive.bind(*operands, **params)
            return results if primitive.multiple_results else [results]

        return computed

    def _other_axes(self, eqn: Equation) -> tuple[Any, ...]:
        """The other axes: numbers of those of the user's `jax.vmap`."""
        return tuple(name for name in axis_names(eqn) if name != self.axes.replicas)

    def _sum(self, eqn: Equation) -> Function:
        groups = _groups_of(eqn)
        if groups is None:
            axes = (*self.axes.both, *self._other_axes(eqn))
            return lambda *arrays: lax.psum(list(map(unfolded, arrays)), axes)
        return lambda *arrays: [self._sum_of(array, groups) for array in arrays]

    def _extreme(self, eqn: Equation) -> Function:
        groups = _groups_of(eqn)
        over_all, over_group = _EXTREMES[eqn.primitive.name]
        if groups is None:
            axes = (*self.axes.both, *self._other_axes(eqn))
            return lambda *arrays: over_all(arrays, axes)
        return lambda *arrays: [
            over_group(self._members(array, groups), axis=0) for array in arrays
        ]

    def _all_gather(self, eqn: Equation) -> Function:
        groups, axis = _groups_of(eqn), eqn.params["all_gather_dimension"]
        is_tiled = eqn.params["tiled"]

        def gathered(array: jax.Array) -> list[jax.Array]:
            return [_joined(self._members(array, groups), axis, is_tiled)]

        return gathered

    _all_gather_invariant = _all_gather

    def _reduce_scatter(self, eqn: Equation) -> Function:
        groups, axis = _groups_of(eqn), eqn.params["scatter_dimension"]
        is_tiled = eqn.params["tiled"]

        def scattered(array: jax.Array) -> list[jax.Array]:
            if groups is None:
                # First over vmapped replicas, which would send an array each.
                total = lax.psum(unfolded(array), self.axes.vmapped)
                parts = _parts(total, axis, self.axes.count, is_tiled)
                on_device = lax.psum_scatter(parts, self.axes.devices, tiled=True)
                return [_at(self.axes.vmapped_index(), on_device)]
            total = self._sum_of(array, groups)
            parts = _parts(total, axis, len(groups[0]), is_tiled)
            return [_at(self._index_in_group(groups), parts)]

        return scattered

    def _ppermute(self, eqn: Equation) -> Function:
        sources = np.full(self.axes.count, -1)
        for source, target in eqn.params["perm"]:
            sources[target] = source

        def permuted(array: jax.Array) -> list[jax.Array]:
            source = jnp.asarray(sources)[self.axes.index()]
            received = _at(jnp.maximum(source, 0), self.axes.gather(array))
            return [jnp.where(source < 0, jnp.zeros_like(received), received)]

        return permuted

    def _pbroadcast(self, eqn: Equation) -> Function:
        source = eqn.params["source"]
        return lambda array: [self.axes.gather(array)[source]]

    def _all_to_all(self, eqn: Equation) -> Function:
        groups, params = _groups_of(eqn), eqn.params
        split, concat = params["split_axis"], params["concat_axis"]

        def exchanged(array: jax.Array) -> list[jax.Array]:
            members = self._members(array, groups)
            # Without `tiled`, `jax.lax` has inserted the new dimension already.
            length = array.shape[split] // members.shape[0]
            start = self._index_in_group(groups) * length
            mine = lax.dynamic_slice_in_dim(members, start, length, split + 1)
            return [_joined(mine, concat, True)]

        return exchanged

    def _members(self, array: jax.Array, groups: _Groups) -> jax.Array:
        """The arrays of a replica's group: `[...]` -> `[member, ...]`."""
        gathered = self.axes.gather(array)
        if groups is None:
            return gathered
        # Smaller groups are padded with their first member.
        size = max(map(len, groups))
        padded = [
            [*group, *group[:1] * (size - len(group))] for group in map(list, groups)
        ]
        members = {i: group for group in padded for i in group}
        table = jnp.asarray([members[i] for i in range(self.axes.count)])
        return gathered[table[self.axes.index()]]

    def _sum_of(self, array: jax.Array, groups: Sequence[Sequence[int]]) -> jax.Array:
        members = self._members(array, groups)
        sizes = {i: len(group) for group in groups for i in group}
        size = jnp.asarray([sizes[i] for i in range(self.axes.count)])
        is_real = jnp.arange(members.shape[0]) < size[self.axes.index()]
        is_real = jnp.expand_dims(is_real, range(1, members.ndim))
        return jnp.where(is_real, members, 0).sum(0, dtype=array.dtype)

    def _index_in_group(self, groups: _Groups) -> jax.Array:
        if groups is None:
            return self.axes.index()
        indices = {i: index for group in groups for index, i in enumerate(group)}
        table = jnp.asarray([indices[i] for i in range(self.axes.count)])
        return table[self.axes.index()]


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
    return jnp.moveaxis(array.reshape(shape), axis, 0)
