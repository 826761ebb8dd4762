"""Batches that are filled up with copies of their last row: which rows are real.

Outside of steps, where masks have values. Inside one see `_step_masks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxstrategy._src.errors import PaddedRowsWarning
from jaxstrategy._src.text import user_code
from jaxstrategy._src.values import per_replica, trees
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import PyTree


def row_mask(counts: Sequence[int], rows: int) -> np.ndarray:
    """The mask of so many rows, `bool[replica, rows]`."""
    return np.arange(rows) < np.asarray(counts)[:, None]


# The masks of batches that were filled up, as long as they live. That of a full batch
# is not here, so that nobody waits for a device to learn that all rows are real.
_filled: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def note(mask: jax.Array) -> None:
    """`mask` has rows that are not real."""
    _filled[id(mask)] = mask


def is_noted(mask: object) -> bool:
    """Whether it is known that `mask` has rows that are not real."""
    return mask is not None and _filled.get(id(mask)) is mask


def real_versions(
    value: PerReplica, versions: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """`versions` of `value` without the rows that only fill up those of a batch."""
    if value.mask is None:
        return versions
    rows = np.asarray(value.mask)
    if len(versions) < len(rows):
        rows = rows[list(per_replica.own_replicas(value))]
    return tuple(
        version if real.all() else version[np.flatnonzero(real)]
        for version, real in zip(versions, rows, strict=True)
    )


def is_of_rows(axis: int, array: ArrayLike) -> bool:
    """Whether `axis` is the first dimension of `array`, from either end."""
    return axis in (0, -np.ndim(array))


def without_filling(value: PyTree, joined: PyTree, axis: int) -> PyTree:
    """`joined`, what all replicas have of `value`, with the real rows only."""
    leaves, treedef = jax.tree.flatten(joined)
    given = jax.tree.leaves(value, is_leaf=trees.is_whole)
    masks = [
        leaf.mask if isinstance(leaf, PerReplica) and is_of_rows(axis, whole) else None
        for leaf, whole in zip(given, leaves, strict=True)
    ]
    if any(isinstance(mask, Tracer) for mask in masks):
        warn_of_traced("gather")
        return joined
    if not any(map(is_noted, masks)):
        return joined
    real = [
        leaf[np.flatnonzero(np.asarray(mask))] if is_noted(mask) else leaf
        for leaf, mask in zip(leaves, masks, strict=True)
    ]
    return jax.tree.unflatten(treedef, real)


def number_of_examples(batch: PyTree) -> int | None:
    """The number of real rows of `batch`; None if it has no arrays with rows."""
    for leaf in jax.tree.leaves(batch, is_leaf=per_replica.is_per_replica):
        if isinstance(leaf, PerReplica):
            if is_noted(leaf.mask):
                return int(np.asarray(leaf.mask).sum())
            if leaf.shape:
                return leaf.num_replicas * leaf.shape[0]
        elif getattr(leaf, "shape", None):
            return int(leaf.shape[0])
    return None


def warn_of_traced(method: str) -> None:
    """Warn that `strategy.method` keeps all rows of a batch while JAX traces."""
    user_code.warn(
        f"`{method}` was given a batch of a dataset inside a function that JAX traces "
        "(`jax.jit`), where shapes are static, so that rows that only fill up the "
        f"batch stay in the result. Call `{method}` outside that function; or gather "
        "`strategy.run(js.batch_mask, (array,))` as well, which says which rows are "
        'real; or choose `InputOptions(remainder="drop")` or `"error"`, with which '
        "all rows are.",
        PaddedRowsWarning,
    )
