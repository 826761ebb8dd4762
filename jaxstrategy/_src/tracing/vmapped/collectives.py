"""Collectives of vmapped replicas: over those of a device, then over devices."""

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
from jaxstrategy._src.tracing.jaxprs.visit import Equation, is_along
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Function


@final
@dataclasses.dataclass(frozen=True)
class VmappedAxes:
    """The axes of replicas that share devices, those of each device in a row."""

    replicas: str
    parts: str
    devices: str
    vmapped: str
    num_devices: int
    per_device: int
    in_turn: bool = False

    @staticmethod
    def of(replicas: Replicas) -> VmappedAxes:
        """Those of some replicas."""
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
    def of_steps(self) -> list[tuple[str, int]]:
        """The axes that steps know, and their sizes; the last two if divided only."""
        return [
            (self.replicas, self.count),
            (self.parts, self.num_devices),
            (self.vmapped, self.per_device),
        ]

    @property
    def of_vmapped(self) -> list[tuple[str, int]]:
        """The axes that vmapped replicas know, and their sizes."""
        return [(self.devices, self.num_devices), (self.vmapped, self.per_device)]

    @property
    def both(self) -> tuple[str, str]:
        """The axes along which replicas differ."""
        return self.devices, self.vmapped

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.num_devices * self.per_device

    def index(self) -> jax.Array:
        """The number of this replica."""
        return lax.axis_index(self.devices) * self.per_device + self.vmapped_index()

    def vmapped_index(self) -> jax.Array:
        """The number of this vmapped replica on its device."""
        return lax.axis_index(self.vmapped)

    def own(self, *arrays: jax.Array) -> list[jax.Array]:
        """`arrays`, which to `jax.vmap` each vmapped replica then has for itself."""
        is_any = self.vmapped_index() >= 0
        return [lax.select(is_any, x, x) for x in arrays]

    def versions(self, array: jax.Array) -> jax.Array:
        """All replicas' arrays: `[...]` -> `[replica, ...]`."""
        own = lax.all_gather(array, self.vmapped)
        everything = lax.all_gather(own, self.devices)
        return everything.reshape(self.count, *array.shape)


_Groups: TypeAlias = Sequence[Sequence[int]] | None

_SUMS = {"psum": lax.psum, "psum_invariant": lax.psum}
_EXTREMES = {"pmax": (lax.pmax, jnp.max), "pmin": (lax.pmin, jnp.min)}
_REDUCTIONS = frozenset((*_SUMS, *_EXTREMES))


# JAX has no rules for most collectives over an axis of `jax.vmap` and one of the mesh
# at once, nor for groups along an axis of `jax.vmap` (0.10 and 0.12). Here, what it
# lacks is a gather of all versions, of which each replica picks.
@final
@dataclasses.dataclass(frozen=True)
class VmappedCollectives:
    """What takes the place of the collectives over all replicas."""

    axes: VmappedAxes

    def in_place_of(self, eqn: Equation) -> Function | None:
        """The function that takes the place of an equation; None: it stays."""
        name, params = eqn.primitive.name, eqn.params
        if is_along(eqn, [self.axes.parts]):
            return self._of_parts(eqn)
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

    def _of_parts(self, eqn: Equation) -> Function:
        """The same of the devices, which have another name under `jax.vmap`."""
        primitive, params = eqn.primitive, dict(eqn.params)
        key = "axes" if "axes" in params else "axis_name"
        is_tuple = isinstance(params[key], tuple)
        params[key] = (self.axes.devices,) if is_tuple else self.axes.devices

        def computed(*operands: jax.Array) -> Sequence[jax.Array]:
            results = primitive.bind(*operands, **params)
            return results if primitive.multiple_results else [results]

        return computed

    def _other_axes(self, eqn: Equation) -> tuple[Any, ...]:
        """The axes besides: numbers of those that a user's `jax.vmap` has made."""
        found = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        names = found if isinstance(found, (tuple, list)) else (found,)
        return tuple(name for name in names if name != self.axes.replicas)

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
                # Over vmapped replicas first: they would send an array each.
                total = lax.psum(unfolded(array), self.axes.vmapped)
                parts = _parts(total, axis, self.axes.count, is_tiled)
                of_device = lax.psum_scatter(parts, self.axes.devices, tiled=True)
                return [_picked(of_device, self.axes.vmapped_index())]
            total = self._sum_of(array, groups)
            parts = _parts(total, axis, len(groups[0]), is_tiled)
            return [_picked(parts, self._place(groups))]

        return scattered

    def _ppermute(self, eqn: Equation) -> Function:
        sources = np.full(self.axes.count, -1)
        for source, target in eqn.params["perm"]:
            sources[target] = source

        def permuted(array: jax.Array) -> list[jax.Array]:
            source = jnp.asarray(sources)[self.axes.index()]
            found = _picked(self.axes.versions(array), jnp.maximum(source, 0))
            return [jnp.where(source < 0, jnp.zeros_like(found), found)]

        return permuted

    def _pbroadcast(self, eqn: Equation) -> Function:
        source = eqn.params["source"]
        return lambda array: [self.axes.versions(array)[source]]

    def _all_to_all(self, eqn: Equation) -> Function:
        groups, params = _groups_of(eqn), eqn.params
        split, concat = params["split_axis"], params["concat_axis"]

        def exchanged(array: jax.Array) -> list[jax.Array]:
            members = self._members(array, groups)
            # `jax.lax` has put in the dimension that is new without `tiled`.
            length = array.shape[split] // members.shape[0]
            start = self._place(groups) * length
            mine = lax.dynamic_slice_in_dim(members, start, length, split + 1)
            return [_joined(mine, concat, True)]

        return exchanged

    def _members(self, array: jax.Array, groups: _Groups) -> jax.Array:
        """The versions of a replica's group: `[...]` -> `[member, ...]`."""
        versions = self.axes.versions(array)
        if groups is None:
            return versions
        # Of a smaller group than others one member stands for those that it lacks.
        size = max(map(len, groups))
        full = [
            [*group, *group[:1] * (size - len(group))] for group in map(list, groups)
        ]
        members = {i: group for group in full for i in group}
        table = jnp.asarray([members[i] for i in range(self.axes.count)])
        return versions[table[self.axes.index()]]

    def _sum_of(self, array: jax.Array, groups: Sequence[Sequence[int]]) -> jax.Array:
        members = self._members(array, groups)
        sizes = {i: len(group) for group in groups for i in group}
        size = jnp.asarray([sizes[i] for i in range(self.axes.count)])
        is_there = jnp.arange(members.shape[0]) < size[self.axes.index()]
        is_there = jnp.expand_dims(is_there, range(1, members.ndim))
        return jnp.where(is_there, members, 0).sum(0, dtype=array.dtype)

    def _place(self, groups: _Groups) -> jax.Array:
        """The place of a replica in its group."""
        if groups is None:
            return self.axes.index()
        places = {i: place for group in groups for place, i in enumerate(group)}
        table = jnp.asarray([places[i] for i in range(self.axes.count)])
        return table[self.axes.index()]


def _groups_of(eqn: Equation) -> _Groups:
    return eqn.params["axis_index_groups"]


def _picked(versions: jax.Array, index: jax.Array) -> jax.Array:
    """One of the arrays that are stacked along the first dimension."""
    return lax.dynamic_index_in_dim(versions, index, 0, keepdims=False)


def _joined(members: jax.Array, axis: int, is_tiled: bool) -> jax.Array:
    """Arrays `[member, ...]` along one of their own dimensions, or along a new one."""
    stacked = jnp.moveaxis(members, 0, axis)
    if not is_tiled:
        return stacked
    shape: Any = list(stacked.shape)
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    return stacked.reshape(shape)


def _parts(array: jax.Array, axis: int, count: int, is_tiled: bool) -> jax.Array:
    """The parts of an array along a dimension, `[part, ...]`."""
    if not is_tiled:
        return jnp.moveaxis(array, axis, 0)
    shape: Any = list(array.shape)
    shape[axis : axis + 1] = [count, shape[axis] // count]
    return jnp.moveaxis(array.reshape(shape), axis, 0)
    return jnp.moveaxis(array.reshape(shape), axis, 0)
