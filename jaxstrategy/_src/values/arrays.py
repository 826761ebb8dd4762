"""Types of values, and predicates: placed, mirrored, traced, donated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.text.shown import shown

PyTree: TypeAlias = Any
"""A tree of tuples, lists, dicts and other nodes that JAX knows, or a leaf alone."""

TreeT = TypeVar("TreeT")
"""What comes back as the same kind of tree, with arrays of JAX as its leaves."""

Number: TypeAlias = complex | np.ndarray | np.generic
"""A leaf that is no array of JAX, and comes back as one."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, a string, or whatever object a user has."""

Value: TypeAlias = Any
"""An array, a number, nested lists of numbers, a variable: all `jnp.asarray` takes."""

Index: TypeAlias = Any
"""An index of an array, as in `array[index]`."""

Function: TypeAlias = Callable[..., Any]
"""A function of the user's, of whose arguments and results nothing is known."""


class TreeStructure(Protocol):
    """The structure of a pytree; to type checkers JAX's `PyTreeDef` is no class."""

    @property
    def num_leaves(self) -> int:
        """The number of its leaves."""
        ...

    @property
    def num_nodes(self) -> int:
        """The number of its leaves and inner nodes."""
        ...

    def node_data(self) -> tuple[type, object] | None:
        """The class of the outermost node and what it keeps; None of a leaf."""
        ...

    def children(self) -> Sequence[TreeStructure]:
        """The structures of what the outermost node holds."""
        ...

    def unflatten(self, leaves: Iterable[Leaf], /) -> PyTree:
        """A pytree of this structure."""
        ...

    def flatten_up_to(self, tree: PyTree, /) -> list[PyTree]:
        """What `tree` holds in the places of the leaves."""
        ...


_NOT_TRACED = get_opaque_trace_state()


def is_traced() -> bool:
    """Whether JAX is tracing the code that asks."""
    return get_opaque_trace_state() != _NOT_TRACED


def is_staged() -> bool:
    """Whether JAX records what the code computes, of known numbers too, for later.

    It does under `jax.jit`, `jax.lax.scan`, `jax.checkpoint`, but not under `jax.grad`.
    """
    return is_traced() and isinstance(jax.lax.neg(np.int32(1)), Tracer)


def is_array(value: object) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether `value` is an array of JAX or NumPy (a scalar of theirs included)."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_mirrored(value: object) -> bool:
    """Whether `value` is an array placed whole on every replica of some strategy."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and mesh.is_replicated(value.sharding)
    )


def is_sharded(value: object) -> bool:
    """Whether `value` is a plain array that is divided over the replicas."""
    return is_placed(value) and mesh.is_split(value.sharding)


def as_array(value: Value, what: str) -> jax.Array | np.ndarray:
    """`value` as an array that devices can hold; 64-bit types as JAX is set up."""
    if isinstance(value, jax.Array):
        return value
    check_unmasked(value, f"`{what}`")
    array = np.asarray(value)
    if array.dtype == object and isinstance(value, int):
        raise mesh.DtypeRangeError(mesh.too_large(value))
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"`{what}` is {shown(value)}, which is not an array or a number and cannot "
            "be placed on a device."
        )
    mesh.check_range(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def check_unmasked(value: object, what: str) -> None:
    """Raise if some numbers of `value` are masked, which arrays of JAX cannot say."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(
            f"{what} is a masked array of NumPy, and its mask would be lost. Choose "
            "the numbers there, `array.filled(0)`, and pass `array.mask` as an array "
            "of its own where it is needed."
        )


def is_placed(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array on devices, and not one that is being traced."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def has_place(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array on devices, or a type, which may say where it is."""
    return is_placed(value) or isinstance(value, jax.ShapeDtypeStruct)


def is_deleted(value: object) -> bool:
    """Whether `value` is an array whose memory was given to a step."""
    return is_placed(value) and value.is_deleted()


def check_alive(value: object, what: str) -> None:
    """Raise if `value` is an array whose memory was given to a step."""
    if is_deleted(value):
        raise DonatedValueError(
            f"{what} was donated to an earlier call, which has reused its memory. Go "
            "on with the value that call returned, or leave the argument out of "
            "`donate_argnums`."
        )
