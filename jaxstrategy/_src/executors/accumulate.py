"""A large batch in several small ones: gradients with the memory of one of them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src import masks
from jaxstrategy._src.contexts import context
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text.shown import whole
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.slices import is_slices


def accumulated(
    fn: Callable[..., PyTree], k: int, mean: bool, has_aux: bool
) -> Callable[..., PyTree]:
    """`fn` called on `k` parts of its arguments, one after the other."""

    @functools.wraps(fn)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        parts = _split((args, kwargs), k)

        def of_part(index: jax.Array) -> tuple[PyTree, PyTree]:
            args, kwargs = parts(index)
            with masks.part(index, k):
                returned = fn(*args, **kwargs)
            sums, aux = returned if has_aux else (returned, None)
            return jax.tree.map(_summable, sums, is_leaf=is_slices), aux

        def turn(total: PyTree, index: jax.Array) -> tuple[PyTree, PyTree]:
            result, aux = of_part(index)
            return jax.tree.map(jnp.add, total, jax.tree.map(_wide, result)), aux

        if context.current().eager is not None:  # what is traced has no values
            return _in_turn(of_part, k, mean, has_aux)
        # This traces `fn` once more: the loop must be told of what type the sums are
        # before it begins.
        shapes, _ = jax.eval_shape(of_part, jnp.int32(0))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide_dtype(x.dtype)), shapes)
        total, aux = jax.lax.scan(turn, zeros, jnp.arange(k))
        result = jax.tree.map(lambda x, like: _narrow(x, like, k, mean), total, shapes)
        return (result, aux) if has_aux else result

    return call


def _in_turn(
    of_part: Callable[[jax.Array], tuple[PyTree, PyTree]],
    k: int,
    mean: bool,
    has_aux: bool,
) -> PyTree:
    """The same by a loop in Python, for replicas that run eagerly."""
    found = [of_part(jnp.int32(index)) for index in range(k)]
    results = [result for result, _ in found]
    total = jax.tree.map(lambda *each: sum(map(_wide, each)), *results)
    result = jax.tree.map(lambda x, like: _narrow(x, like, k, mean), total, results[0])
    aux = jax.tree.map(lambda *each: jnp.stack(each), *(aux for _, aux in found))
    return (result, aux) if has_aux else result


def checked_parts(k: object) -> int:
    """`k`, a number of parts."""
    number = whole(k)
    if number is None:
        raise TypeError(
            f"`k` was {k!r}; the number of parts of a batch was wanted, a whole number."
        )
    if number < 1:
        raise ValueError(f"`k` was {number}; a batch has at least one part.")
    return number


def _split(tree: PyTree, k: int) -> Callable[[jax.Array], PyTree]:
    """A function of `i` that returns part `i` of each array in `tree`."""
    leaves, treedef = jax.tree.flatten_with_path(tree)
    for path, leaf in leaves:
        _check_rows(path, leaf, k)

    def part(index: jax.Array) -> PyTree:
        return treedef.unflatten([_part(leaf, index, k) for _, leaf in leaves])

    return part


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _check_rows(path: KeyPath, leaf: Leaf, k: int) -> None:
    if not _is_array(leaf) or leaf.ndim == 0:
        return
    (_, *inner) = path
    where = f"argument {jax.tree_util.keystr(tuple(inner))}"
    if leaf.shape == (2,) and leaf.dtype == jnp.uint32:
        raise ValueError(
            f"`accumulate`: {where} looks like a random key of the old kind, which "
            "would be split as if it were two rows. Make it with `jax.random.key`, or "
            "wrap it: `jax.random.wrap_key_data(key)`."
        )
    if leaf.shape[0] % k:
        raise ValueError(
            f"`accumulate`: {where} has {leaf.shape[0]} rows on each replica, which "
            f"{k} parts cannot share equally. Use a batch that they can, or close over "
            "what is not to be split."
        )


def _part(leaf: Leaf, index: jax.Array, k: int) -> Leaf:
    if not _is_array(leaf):
        return leaf
    if leaf.ndim == 0:
        # With the same key all parts would draw the same numbers.
        return jax.random.fold_in(leaf, index) if is_key(leaf.dtype) else leaf
    rows = leaf.shape[0] // k
    return jax.lax.dynamic_slice_in_dim(leaf, index * rows, rows)


def _summable(leaf: Leaf) -> jax.Array:
    if is_slices(leaf):
        raise TypeError(
            "`accumulate` was given a function that returns IndexedSlices, which have "
            "no sum of the same size. Return `slices.to_dense()`."
        )
    return mesh.array_of(leaf)


def _wide_dtype(dtype: np.dtype) -> DTypeLike:
    """The dtype that numbers of `dtype` are summed in: 16 bits are too few for it."""
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2
    return jnp.float32 if is_small else dtype


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(_wide_dtype(array.dtype))


def _narrow(
    total: jax.Array, like: jax.Array | jax.ShapeDtypeStruct, k: int, mean: bool
) -> jax.Array:
    if not mean:
        return total.astype(like.dtype)
    average = total / k
    is_inexact = jnp.issubdtype(like.dtype, jnp.inexact)
    return average.astype(like.dtype) if is_inexact else average
