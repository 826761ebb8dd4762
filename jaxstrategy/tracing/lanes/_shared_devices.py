"""Functions of one replica, for replicas that share devices: `on_shared_devices`.

The replicas of a device are the lanes of a `jax.vmap`. A function is traced as if each
replica had a device of its own; then its collectives are replaced by those over lanes
and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.ref import AbstractRef

from jaxstrategy.replicas._replicas import SAME, SPLIT, Lies, Replicas
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._one_lane import OneLane, one_lane
from jaxstrategy.tracing.replication._jaxprs import closed
from jaxstrategy.values._types import Function, Leaf, PyTree


def on_shared_devices(
    fn: Function, replicas: Replicas, taken: Sequence[Lies], returned: PyTree
) -> Function:
    """As `on_replicas`, for replicas that share devices.

    References are values in `jax.vmap`. They are written when it has ended.
    """
    axes = LaneAxes.of(replicas)

    def all_replicas(*given: Leaf) -> PyTree:
        references = {i: x for i, x in enumerate(given) if _is_reference(x)}
        values = [x[...] if i in references else x for i, x in enumerate(given)]
        pairs = zip(values, taken, strict=True)
        types = [_type_of_one(value, lies, replicas) for value, lies in pairs]
        lane = one_lane(fn, types, list(references), axes)
        shapes: Any = lane.shapes
        lies = jax.tree.leaves(_like(returned, shapes))
        lies += [taken[i] for i in lane.written]
        of_inputs = [*taken, *(SAME for _ in lane.constants)]
        run = jax.shard_map(
            _of_device(lane, axes, of_inputs, lies),
            mesh=replicas.mesh,
            in_specs=tuple(map(replicas.spec_of, of_inputs)),
            out_specs=[replicas.spec_of(each) for each in lies],
            check_vma=False,
        )
        results = run(*values, *lane.constants)
        count = len(lies) - len(lane.written)
        for index, value in zip(lane.written, results[count:], strict=True):
            references[index][...] = value
        return jax.tree.unflatten(jax.tree.structure(shapes), results[:count])

    return all_replicas


def _of_device(
    lane: OneLane, axes: LaneAxes, taken: Sequence[Lies], returned: Sequence[Lies]
) -> Function:
    """Of what one device has of the arrays, what it has of the results."""
    is_own = [lies is SPLIT or i in lane.referred for i, lies in enumerate(taken)]
    lanes = jax.vmap(
        core.jaxpr_as_fun(closed(lane.jaxpr)),
        in_axes=tuple(0 if own else None for own in is_own),
        axis_name=axes.lanes,
        axis_size=axes.num_lanes,
    )

    def by_lane(array: jax.Array, lies: Lies, own: bool) -> jax.Array:
        if lies is SPLIT:
            return lax.expand_dims(array, (1,))
        return jnp.broadcast_to(array, (axes.num_lanes, *array.shape)) if own else array

    def on_device(*given: Leaf) -> list[jax.Array]:
        results = lanes(*map(by_lane, given, taken, is_own))
        return [
            lax.squeeze(x, (1,)) if lies is SPLIT else _first(x)
            for x, lies in zip(results, returned, strict=True)
        ]

    return on_device


def _first(lanes: jax.Array) -> jax.Array:
    """What is the same on all replicas, of the first lane."""
    is_number = jnp.issubdtype(lanes.dtype, jnp.inexact)
    return _first_number(lanes) if is_number else lanes[0]


@jax.custom_jvp
def _first_number(lanes: jax.Array) -> jax.Array:
    return lanes[0]


@_first_number.defjvp
def _with_share(
    lanes: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # So each replica has its share of a cotangent, as `shard_map` gives it to devices.
    return lanes[0][0], tangents[0].mean(0)


def _type_of_one(value: Leaf, lies: Lies, replicas: Replicas) -> jax.ShapeDtypeStruct:
    """The type of what one replica has of an array."""
    kind = jax.typeof(value)
    shape = list(kind.shape)
    if lies is SPLIT:
        shape[0] = 1
    elif isinstance(lies, int):
        shape[lies] //= replicas.parts
    weak_type = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak_type)


def _is_reference(value: Leaf) -> bool:
    return isinstance(jax.typeof(value), AbstractRef)


def _like(prefix: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.broadcast(prefix, tree)
