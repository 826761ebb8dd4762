"""Whether arguments are arrays that can be dispatched as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib import metadata

import jax

from jaxstrategy._src.values.arrays import Leaf


def are_live_arrays(leaves: Sequence[Leaf]) -> bool:
    """Whether all leaves are arrays on devices, none of them donated before."""
    for is_deleted in (_plain_is_deleted(), _is_deleted):
        try:
            return not any(map(is_deleted, leaves))
        except (TypeError, AttributeError, jax.errors.ConcretizationTypeError):
            continue
    return False


@functools.cache
def are_looked_for() -> bool:
    """Whether calls must look for deleted arrays, because JAX does not refuse them."""
    # On JAX 0.10, dispatching one on several devices ends the process; 0.12 raises.
    major, minor, *_ = metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) < (0, 12)


def _is_deleted(leaf: Leaf) -> bool:
    """Whether an array is deleted; of random keys too, at three times the cost."""
    # A variable of Flax NNX has all methods of the array in it.
    if not isinstance(leaf, jax.Array):
        raise TypeError
    return leaf.is_deleted()


@functools.cache
def _plain_is_deleted() -> Callable[[jax.Array], bool]:
    """The method of the class of ordinary arrays, a name that JAX does not export."""
    with jax.ensure_compile_time_eval():
        return type(jax.device_put(0)).is_deleted
