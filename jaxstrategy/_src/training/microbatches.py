"""Layers of a model, one after the other, on parts of a batch.

`in_turn` takes one part after the other through all layers. `in_stages` has the layers
divided over an inner axis: while the first stage works on a part, the second does on
the part before, and so on. One *tick* is one part of each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._src.replicas.inner_constraint import over_axis
from jaxstrategy._src.values.types import PyTree

Layer: TypeAlias = Callable[[PyTree, PyTree], PyTree]
"""From the parameters of one layer, and what goes into it, to what comes out."""


def in_turn(layer: Layer, params: PyTree, parts: PyTree) -> PyTree:
    """What comes out of all layers, part by part."""
    return lax.map(lambda part: _through(layer, params, part), parts)


def in_stages(
    layer: Layer, params: PyTree, parts: PyTree, stages: int, axis: str
) -> PyTree:
    """As `in_turn`, with the layers divided over an inner axis of that size."""
    # `vmap` and constraints rather than a `shard_map` over the axis: inside of that one
    # a layer may not use traced values that it is not given, and a step that is traced
    # by the names of its axes has none (JAX 0.10 and 0.12).
    params = _divided(_per_stage(params, stages), axis)
    number = jnp.arange(stages)
    run = jax.vmap(
        lambda own, part, is_real: _through(_guarded(layer, is_real), own, part),
        spmd_axis_name=axis,
    )

    def tick(before: PyTree, now: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        time, first = now
        given = jax.tree.map(lambda a, b: _handed_on(a, b, number), before, first)
        # Part i reaches stage s at tick i + s: before tick s it has none.
        after = _divided(run(params, _divided(given, axis), time >= number), axis)
        return after, after

    fed = jax.tree.map(lambda part: _fed(part, stages), parts)
    start = jax.tree.map(lambda part: _filled(part[0], stages), parts)
    ticks = jnp.arange(jax.tree.leaves(fed)[0].shape[0])
    _, after = lax.scan(tick, _divided(start, axis), (ticks, fed))
    return jax.tree.map(lambda out: _of_last(out[stages - 1 :], number), after)


def _through(layer: Layer, params: PyTree, part: PyTree) -> PyTree:
    return lax.scan(lambda given, own: (layer(own, given), None), part, params)[0]


def _divided(tree: PyTree, axis: str) -> PyTree:
    return jax.tree.map(lambda array: over_axis(array, axis), tree)


def _per_stage(params: PyTree, stages: int) -> PyTree:
    return jax.tree.map(lambda a: a.reshape(stages, -1, *a.shape[1:]), params)


def _fed(parts: jax.Array, stages: int) -> jax.Array:
    """For each tick what goes into the first stage."""
    # After the last part it works on that again. What comes out reaches no result; but
    # a row of zeros could make NaN of gradients that are multiplied by zero.
    return jnp.concatenate([parts, _filled(parts[-1], stages - 1)])


def _filled(part: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(lax.stop_gradient(part), (times, *part.shape))


def _handed_on(before: jax.Array, first: jax.Array, number: jax.Array) -> jax.Array:
    """What each stage is given: what the one before it returned."""
    # Of all ways to write it this is the one that XLA makes one exchange between
    # neighbours of, and one of its gradient; of a `concatenate` it makes three
    # all-to-alls (JAX 0.10 and 0.12).
    nothing = jnp.zeros((), before.dtype)
    padding = [(1, -1, 0), *[(0, 0, 0)] * (before.ndim - 1)]
    is_first = _along(0, number == 0, before)
    return jnp.where(is_first, first[None], lax.pad(before, nothing, padding))


def _of_last(after: jax.Array, number: jax.Array) -> jax.Array:
    """What the last stage returned, `[tick, ...]`, of what all did."""
    # A sum, as an index would send it twice.
    is_last = _along(1, number == number.shape[0] - 1, after)
    if after.dtype == bool:
        return (after & is_last).any(1)
    return jnp.where(is_last, after, 0).sum(1, dtype=after.dtype)


def _along(dimension: int, flags: jax.Array, like: jax.Array) -> jax.Array:
    """`flags` along one dimension of an array."""
    others = [i for i in range(like.ndim) if i != dimension]
    return lax.expand_dims(flags, others)


def _guarded(layer: Layer, is_real: jax.Array) -> Layer:
    """`layer`, whose parameters have no gradient while it works on no real part."""

    def called(params: PyTree, part: PyTree) -> PyTree:
        own = jax.tree.map(lambda array: _guard(array, is_real), params)
        return layer(own, part)

    return called


def _guard(array: jax.Array, is_real: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return _with_guarded_gradient(array, is_real)


# A rule for the derivative, and no `where` of the values: those of each tick would be
# kept for the backward pass.
@jax.custom_jvp
def _with_guarded_gradient(array: jax.Array, is_real: jax.Array) -> jax.Array:
    del is_real
    return array


@_with_guarded_gradient.defjvp
def _guarded_gradient(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (array, is_real), (tangent, _) = primals, tangents
    return array, jnp.where(is_real, tangent, 0)
