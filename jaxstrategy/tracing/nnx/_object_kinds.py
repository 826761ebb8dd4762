"""Tests for objects that a step may change in place, those of Flax NNX."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable
from typing import TypeGuard

import jax

from jaxstrategy.tracing.nnx._flax_types import FlaxVariable
from jaxstrategy.values import _trees
from jaxstrategy.values._trees import is_object, object_kinds


def is_changed_in_place(node: object) -> bool:
    """Whether a step may change `node` in place: an object, or a variable alone."""
    return bool(object_kinds()) and (is_object(node) or is_variable(node))


def is_variable(node: object) -> TypeGuard[FlaxVariable]:
    """Whether `node` holds an array of an object."""
    return _holds(type(node))


@functools.lru_cache(maxsize=1024)
def _holds(kind: type) -> bool:
    # Flax's own `isinstance` takes ten times as long.
    return issubclass(kind, sys.modules["flax.nnx"].Variable)


def structure_of(node: object) -> tuple[Hashable, list[int]]:
    """Equal as long as an object has the same variables and static attributes."""
    variables, structure = jax.tree.flatten(node, is_leaf=is_variable)
    # By identity: `==` of two variables compares their arrays, and returns an array.
    return structure, list(map(id, variables))


def is_whole_object(node: object) -> bool:
    if is_changed_in_place(node) or _trees.is_whole(node):
        return True
    # The variables of a state are copies: it is passed, and returned, as a pytree.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)
