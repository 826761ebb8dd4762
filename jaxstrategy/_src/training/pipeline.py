"""Pipeline parallelism over the devices of a replica: `pipeline`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import over_axis
from jaxstrategy._src.text import array_type, listed, shown, whole
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.per_replica import is_per_replica

Layer: TypeAlias = Callable[[PyTree, PyTree], PyTree]
"""From the parameters of one layer, and what goes into it, to what comes out."""


def on_one_device(layer: Layer, params: PyTree, parts: PyTree) -> PyTree:
    return lax.map(lambda part: _apply_layers(layer, params, part), parts)


def in_stages(
    layer: Layer, params: PyTree, parts: PyTree, stages: int, axis: str
) -> PyTree:
    """As `on_one_device`, with the layers divided over an inner axis of that size."""
    # `vmap` and constraints rather than a `shard_map` over the axis: inside of that one
    # a layer may not use traced values that it is not given, and a step that is traced
    # by the names of its axes has none (JAX 0.10 and 0.12).
    params = jax.tree.map(lambda a: a.reshape(stages, -1, *a.shape[1:]), params)
    params = _divided_rows(params, axis)
    number = jnp.arange(stages)
    run = jax.vmap(
        lambda own, part, is_real: _apply_layers(_guarded(layer, is_real), own, part),
        spmd_axis_name=axis,
    )

    def tick(before: PyTree, now: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        time, first = now
        given = jax.tree.map(lambda a, b: _shifted(a, b, number), before, first)
        # Part i reaches stage s at tick i + s: before tick s it has none.
        after = _divided_rows(
            run(params, _divided_rows(given, axis), time >= number), axis
        )
        return after, after

    fed = jax.tree.map(lambda part: _tick_inputs(part, stages), parts)
    start = jax.tree.map(lambda part: _repeated(part[0], stages), parts)
    ticks = jnp.arange(jax.tree.leaves(fed)[0].shape[0])
    _, after = lax.scan(tick, _divided_rows(start, axis), (ticks, fed))
    return jax.tree.map(lambda out: _of_last(out[stages - 1 :], number), after)


def _apply_layers(layer: Layer, params: PyTree, part: PyTree) -> PyTree:
    return lax.scan(lambda given, own: (layer(own, given), None), part, params)[0]


def _divided_rows(tree: PyTree, axis: str) -> PyTree:
    return jax.tree.map(lambda array: over_axis(array, axis), tree)


def _tick_inputs(parts: jax.Array, stages: int) -> jax.Array:
    """For each tick what goes into the first stage."""
    # After the last part it works on that again. What comes out reaches no result; but
    # a row of zeros could make NaN of gradients that are multiplied by zero.
    return jnp.concatenate([parts, _repeated(parts[-1], stages - 1)])


def _repeated(part: jax.Array, times: int) -> jax.Array:
    return jnp.broadcast_to(lax.stop_gradient(part), (times, *part.shape))


def _shifted(before: jax.Array, first: jax.Array, number: jax.Array) -> jax.Array:
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


_USUAL_AXIS = "stage"


def pipeline(
    layer: Callable[[PyTree, PyTree], PyTree],
    params: PyTree,
    x: PyTree,
    *,
    microbatches: int,
    axis: str | None = None,
) -> PyTree:
    """`x` after all layers of a model, which the devices of a replica share.

    In a step of a strategy with `logical_axes={"stage": S}`, each of a replica's S
    devices has, and computes, one S-th of the layers, a *stage*. The batch goes through
    in `microbatches` equal parts, so that all stages work at the same time (GPipe,
    Huang et al. 2019); of the time they wait for (S - 1) / (microbatches + S - 1).
    Elsewhere one device computes all layers, part by part: the same numbers.

    May be differentiated, by `jax.grad` and other functions of JAX. The backward pass
    needs what the layers keep for it of the whole batch; `jax.checkpoint(layer)` keeps
    only what goes into each.

    Args:
      layer: called as `layer(params_of_one_layer, x)`, with the rows of one part;
        returns what has the structure, shapes and dtypes of that `x`, for the next
        layer. It may reduce over the replicas, and it may use other arrays, which are
        whole on each device. It changes no variable, and is also called with rows of
        which nothing comes out, while a stage waits. In stages it is mapped by
        `jax.vmap`: of a `jax.lax.cond` it computes both branches.
      params: a pytree of arrays `[layers, ...]`, of all layers; S must divide their
        number. Built by `strategy.init(fn, specs=jax.P("stage"))`, each device has
        those of its own stage only; and so has what a step returns in their place, and
        what `strategy.init(optimizer.init, params)` makes of them.
      x: this replica's batch: a pytree of arrays `[rows, ...]`.
      microbatches: a number that divides the rows. A layer that mixes the rows of its
        batch sees those of one part.
      axis: the inner axis of the stages, "stage" by default.

    Returns:
      What the last layer returns for all rows, with the structure and shapes of `x`.

    Raises:
      ValueError: the batch or the layers cannot be divided; arrays have different
        numbers of rows or layers; the layer returns something else than it is given;
        the strategy has other inner axes, but none of the name that was given.
      TypeError: an argument is of another type; something is a `PerReplica`.

    >>> import jax, jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8))
    >>> params = {"scale": np.array([2.0, 3.0, 5.0])}  # three layers
    >>> @strategy.run
    ... def loss():
    ...     x = np.ones((4, 2), np.float32)
    ...     scaled = lambda p, h: p["scale"] * h
    ...     return js.training.pipeline(scaled, params, x, microbatches=2)
    >>> loss[0]
    Array([30., 30.], dtype=float32)
    """
    if not callable(layer):
        raise TypeError(
            f"`layer` was {shown(layer)}; a function `layer(params, x)` was wanted."
        )
    named = _stages(axis)
    params, layers = _arrays(params, "params", "layers")
    x, rows = _arrays(x, "x", "rows")
    parts = _divided(x, rows, _number_of_parts(microbatches, rows))
    of_numbers, checked = _of_numbers(parts), _of_keys(_checked(layer), parts)
    if named is None:
        result = on_one_device(checked, params, of_numbers)
    else:
        _check_layers(layers, *named)
        result = in_stages(checked, params, of_numbers, named[1], named[0])
    return jax.tree.map(_joined, _with_keys(result, parts))


def _stages(axis: str | None) -> tuple[str, int] | None:
    """The inner axis that stages are to be divided over, and its size; None: none."""
    if axis is not None and not isinstance(axis, str):
        raise TypeError(
            f"`axis` was {shown(axis)}; the name of an inner axis was wanted."
        )
    context, name = _context.current(), axis or _USUAL_AXIS
    if context.strategy is None or context.replica is None:
        return None
    replicas = context.strategy._replicas
    if name in replicas.inner_axes:
        return name, replicas.inner_sizes[name]
    # With no inner axes at all it is a strategy of another kind, for which the step
    # was not written.
    if axis is not None and replicas.inner_axes or name in replicas.axes:
        known = listed(replicas.inner_axes, 8, quote="`") or "none"
        other = (
            "that is the axis along which replicas differ"
            if name in replicas.axes
            else f"or make the strategy with `logical_axes={{{name!r}: ...}}`"
        )
        raise ValueError(
            f"`axis` was {name!r}; the inner axes of the strategy are {known}. Give "
            f"one of them; {other}."
        )
    return None


def _check_layers(layers: int, axis: str, stages: int) -> None:
    if layers % stages:
        raise ValueError(
            f"`params` has {layers} layers, and the axis {axis!r} {stages} stages, "
            "which do not divide them: each stage has the same number of layers. Give "
            f"{layers - layers % stages + stages} layers, or a strategy with another "
            f"number of stages, `logical_axes={{{axis!r}: ...}}`."
        )


def _arrays(tree: PyTree, name: str, entries: str) -> tuple[PyTree, int]:
    """`tree` as arrays, and how many entries the first dimension of each has."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_per_replica)
    if any(is_per_replica(leaf) for _, leaf in leaves):
        raise TypeError(
            f"`{name}` has a PerReplica, which stands for the arrays of all replicas. "
            "Call `pipeline` inside `run`, with one replica's own."
        )
    found: dict[int | None, str] = {}
    arrays: list[jax.Array] = []
    for path, leaf in leaves:
        where = f"`{name}{jax.tree_util.keystr(path)}`"
        arrays.append(_array(leaf, where))
        count = arrays[-1].shape[0] if arrays[-1].ndim else None
        found.setdefault(count, where)
    (count,) = found if len(found) == 1 else (None,)
    if not count:
        raise ValueError(_cannot_count(found, name, entries))
    return jax.tree.unflatten(jax.tree.structure(tree), arrays), count


def _array(leaf: Leaf, where: str) -> jax.Array:
    try:
        return jnp.asarray(leaf)
    except TypeError:
        raise TypeError(f"{where} was {shown(leaf)}; an array was wanted.") from None


def _cannot_count(found: dict[int | None, str], name: str, entries: str) -> str:
    if not found:
        came = f"`{name}` has no arrays"
    else:
        each = [
            f"{where} is a scalar" if count is None else f"{where} has {count}"
            for count, where in found.items()
        ]
        came = f"of `{name}`, {listed(each, 3)}"
    return (
        f"The {entries} cannot be told: {came}. A pytree of arrays [{entries}, ...] is "
        "wanted, of the same number, at least 1, each."
    )


def _number_of_parts(microbatches: object, rows: int) -> int:
    number = whole(microbatches)
    if number is None:
        raise TypeError(
            f"`microbatches` was {shown(microbatches)}; a whole number was wanted."
        )
    if number < 1 or rows % number:
        fitting = [count for count in range(1, rows + 1) if rows % count == 0]
        raise ValueError(
            f"`microbatches` was {number}, and `x` has {rows} rows on each replica, of "
            "which that many equal parts cannot be made. Give one of "
            f"{listed(fitting, 12)}; or batches of another size, see `InputOptions`."
        )
    return number


def _divided(x: PyTree, rows: int, parts: int) -> PyTree:
    return jax.tree.map(
        lambda array: array.reshape(parts, rows // parts, *array.shape[1:]), x
    )


def _joined(parts: jax.Array) -> jax.Array:
    return parts.reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:])


def _checked(layer: Layer) -> Layer:
    """`layer`, checked: the next one can take what it returns."""

    def called(params: PyTree, given: PyTree) -> PyTree:
        returned = layer(params, given)
        _check_returned(given, returned)
        return returned

    return called


def _check_returned(given: PyTree, returned: PyTree) -> None:
    wanted, came = (
        {
            jax.tree_util.keystr(path): _type_of(leaf)
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for tree in (given, returned)
    )
    if jax.tree.structure(given) != jax.tree.structure(returned):
        raise ValueError(
            "The layer returned a pytree of another structure than it was given: "
            f"{shown(jax.tree.structure(returned))} for "
            f"{shown(jax.tree.structure(given))}. {_NEXT}"
        )
    wrong = [
        f"{came[path]} for {wanted[path]}{f' at x{path}' if path else ''}"
        for path in wanted
        if came[path] != wanted[path]
    ]
    if wrong:
        raise ValueError(
            "The layer returned arrays of other types than it was given: "
            f"{listed(wrong, 3)}. {_NEXT}"
        )


_NEXT = (
    "The next layer takes what it returns, so shapes and dtypes must be the same for "
    "all: put what changes them (an embedding, a head) before or after `pipeline`, or "
    "cast the result."
)


def _type_of(leaf: Leaf) -> str:
    array = _array(leaf, "What the layer returned")
    return array_type(array.dtype, array.shape)


# Random keys: only their numbers can be sent from stage to stage.


def _of_numbers(x: PyTree) -> PyTree:
    return jax.tree.map(mesh.as_numbers, x)


def _with_keys(numbers: PyTree, like: PyTree) -> PyTree:
    """`numbers` with those as random keys that are some in `like`."""
    return jax.tree.map(
        lambda array, key: (
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(key))
            if mesh.is_key(key.dtype)
            else array
        ),
        numbers,
        like,
    )


def _of_keys(layer: Layer, like: PyTree) -> Layer:
    """`layer` as a function of the numbers of keys."""
    return lambda params, given: _of_numbers(layer(params, _with_keys(given, like)))
