"""Collectives, branches, loops and callbacks of vmapped replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core

from jaxstrategy._src.reductions.operations import unfolded
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing.jaxprs import (
    Equation,
    axis_names,
    function_of,
    inner_eqns,
    is_along,
    jaxpr_of,
    on_contents,
    references,
    rewritten,
    with_contents,
)
from jaxstrategy._src.tracing.replication.types import Site
from jaxstrategy._src.values.arrays import Function, Leaf


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


def in_turn(eqn: Equation, axes: VmappedAxes) -> Function:
    """Evaluates an equation without collectives for one replica after the other."""
    refs = references(eqn)
    function = on_contents(function_of(eqn), refs)
    if any(_is_index(each, axes) for each in inner_eqns(eqn.params)):
        return with_contents(_unrolled(eqn, function, refs, axes), refs)

    return with_contents(sequential(function), refs)


def sequential(function: Function) -> Function:
    """`function`, which `jax.vmap` calls in a loop."""

    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    # Not `called` in the loop: JAX 0.10 has no rule for its references there.
    @called.def_vmap
    def _in_loop(
        size: int, is_batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        pairs = list(zip(operands, is_batched, strict=True))

        def one(number: jax.Array) -> list[jax.Array]:
            return function(*(x[number] if batched else x for x, batched in pairs))

        results = lax.map(one, jnp.arange(size))
        return results, [True] * len(results)

    return called


def _unrolled(
    eqn: Equation, function: Function, refs: Sequence[int], axes: VmappedAxes
) -> Function:
    """As `in_turn`, unrolled with the index of each replica as a constant.

    In a loop over vmapped replicas the name of their axis would be unbound.
    """

    @custom_vmap
    def called(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_vmapped(
        size: int, is_batched: list[bool], index: jax.Array, *operands: jax.Array
    ) -> Any:
        results: list[list[jax.Array]] = []
        for number in range(size):
            one = on_contents(function_of(_with_index(eqn, number, axes)), refs)
            pairs = zip(operands, is_batched[1:], strict=True)
            results.append(one(*(x[number] if b else x for x, b in pairs)))
        stacked = [jnp.stack(each) for each in zip(*results, strict=True)]
        return stacked, [True] * len(stacked)

    # The index is batched, even if no operand is.
    return lambda *operands: called(axes.vmapped_index(), *operands)


def _with_index(eqn: Equation, number: int, axes: VmappedAxes) -> Equation:
    """`eqn` with a constant for the index of the vmapped replica."""

    def rule(each: Equation) -> Function | None:
        if not _is_index(each, axes):
            return None
        dtype = each.outvars[0].aval.dtype
        return lambda: [jnp.copy(jnp.asarray(number, dtype))]

    alone = jaxpr_of(eqn.invars, [eqn], eqn.outvars)
    (new,) = rewritten(alone, rule, axes.in_vmap).eqns
    return new


def _is_index(eqn: Equation, axes: VmappedAxes) -> bool:
    return eqn.primitive.name == "axis_index" and is_along(eqn, (axes.vmapped,))


_CALLBACKS = frozenset(
    ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")
)


# Where the predicates of vmapped replicas differ, `jax.vmap` computes all branches, and
# loops until the last replica has ended. Callbacks would be called for all of them.
def control_flow(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """Replaces branches, loops and callbacks; None for other equations."""
    name = eqn.primitive.name
    if name in _CALLBACKS:
        return _callback(eqn, axes)
    if name not in ("cond", "while"):
        return None
    inside = list(inner_eqns(eqn.params))
    has_callbacks = any(each.primitive.name in _CALLBACKS for each in inside)
    if any(
        is_along(each, axes.both) and each.primitive.name != "axis_index"
        for each in inside
    ):
        if has_callbacks and axes.has_groups:
            raise NotImplementedError(_callback_in_groups(eqn))
        return _branch(eqn, axes) if name == "cond" else _loop(eqn, axes)
    if has_callbacks:
        return in_turn(eqn, axes)
    # `jax.vmap` selects between values, not between contents of references.
    return _switch(eqn) if name == "cond" and references(eqn) else None


def _branch(eqn: Equation, axes: VmappedAxes) -> Function:
    """A branch with collectives, for which all replicas decide alike."""
    switch = _switch(eqn)
    if axes.has_groups:
        return switch

    def agreed(index: jax.Array, *operands: Leaf) -> Sequence[jax.Array]:
        # Of all replicas of a device, unbatched under `jax.vmap`.
        return switch(lax.pmax(index, axes.vmapped), *operands)

    return agreed


def _loop(eqn: Equation, axes: VmappedAxes) -> Function:
    """A loop with collectives, which all replicas end together.

    With collectives of groups, some of which may end before others, all go on until the
    last has ended, as the collectives are here those of all.
    """
    n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = core.jaxpr_as_fun(eqn.params["cond_jaxpr"])
    over = axes.both if axes.has_groups else (axes.vmapped,)
    refs = [i - n for i in references(eqn) if axes.has_groups and n <= i < n + m]
    body = on_contents(core.jaxpr_as_fun(eqn.params["body_jaxpr"]), refs)

    def repeated(*operands: Leaf) -> Sequence[jax.Array]:
        cond_consts, body_consts = operands[:n], list(operands[n : n + m])
        count = len(operands) - n - m

        def decision(carry: Sequence[jax.Array]) -> jax.Array:
            return condition(*cond_consts, *carry[:count])[0]

        def any_goes_on(carry: Sequence[jax.Array]) -> jax.Array:
            number = lax.convert_element_type(decision(carry), jnp.int32)
            return lax.pmax(number, over) != 0

        def iteration(carry: Sequence[jax.Array]) -> list[jax.Array]:
            for index, content in zip(refs, carry[count:], strict=True):
                body_consts[index] = content
            after = body(*body_consts, *carry[:count])
            if not axes.has_groups:
                return list(after)
            goes_on = decision(carry)
            pairs = zip(after, carry, strict=True)
            return [jnp.where(goes_on, new, old) for new, old in pairs]

        contents = [operands[n + index] for index in refs]
        start = [*operands[n + m :], *contents]
        return lax.while_loop(any_goes_on, iteration, start)

    return with_contents(repeated, [index + n for index in refs])


def _callback(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """A callback that is called once for each replica."""
    params = dict(eqn.params)
    if params.get("ordered"):
        return in_turn(eqn, axes)
    if "vmap_method" not in params:
        return None  # JAX does so
    params["vmap_method"] = "sequential"
    primitive: Any = eqn.primitive
    return lambda *operands: primitive.bind(*operands, **params)


def _switch(eqn: Equation) -> Function:
    """A branch on the contents of references."""
    refs = references(eqn)
    branches = [
        on_contents(core.jaxpr_as_fun(branch), [index - 1 for index in refs])
        for branch in eqn.params["branches"]
    ]

    def switch(index: jax.Array, *operands: Leaf) -> Sequence[jax.Array]:
        return lax.switch(index, branches, *operands)

    return with_contents(switch, refs)


def _callback_in_groups(eqn: Equation) -> str:
    return (
        f"A `{eqn.primitive.name}` has a callback and a collective in it, and the step "
        "has collectives of groups of replicas, so that not all may come there:\n"
        f"  {Site((eqn,)).line or 'unknown'}\n"
        "Replicas that share a device compute what any of them needs, and would call "
        "it too often. Move the callback out, or give each replica its own device."
    )
