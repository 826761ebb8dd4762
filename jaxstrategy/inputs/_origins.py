"""Of which batch an array is, so that processes can compare it."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from jaxstrategy._values import PyTree, is_per_replica

_known: dict[int, tuple[weakref.ref[Any], str]] = {}


def note(batch: PyTree, name: str) -> None:
    """Let the arrays of `batch` be known by this name as long as they live."""
    for leaf in jax.tree.leaves(batch, is_leaf=is_per_replica):
        array = leaf.stacked  # its mask may be one of several batches
        key = id(array)

        def forget(_: object, key: int = key) -> None:
            _known.pop(key, None)

        _known[key] = weakref.ref(array, forget), name


def of(array: Any) -> str | None:
    """The name of the batch of an array, None if it is of none."""
    found = _known.get(id(array))
    return found[1] if found is not None and found[0]() is array else None
