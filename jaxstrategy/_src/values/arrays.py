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
from jaxstrategy._src.text import shown

PyTree: TypeAlias = Any
"""A JAX pytree."""

TreeT = TypeVar("TreeT")
"""A pytree that is returned with the same structure, with arrays as leaves."""

Number: TypeAlias = complex | np.ndarray | np.generic
"""A leaf that is returned as a JAX array."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array, a number, a string, or whatever object a user has."""

Value: TypeAlias = Any
"""An array, a number, nested lists of numbers, a variable: all `jnp.asarray` takes."""

Index: TypeAlias = Any
"""As in `array[index]`."""

Function: TypeAlias = Callable[..., Any]
"""A user's function."""

Arguments: TypeAlias = tuple[Sequence[PyTree], dict[str, PyTree]]
"""The positional and keyword arguments of a call."""

TreeFunction: TypeAlias = Callable[[PyTree], PyTree]


class TreeStructure(Protocol):
    """JAX's `PyTreeDef`, which to type checkers is no class."""

    @property
    def num_leaves(self) -> int: ...

    @property
    def num_nodes(self) -> int: ...

    def node_data(self) -> tuple[type, object] | None: ...

    def children(self) -> Sequence[TreeStructure]: ...

    def unflatten(self, leaves: Iterable[Leaf], /) -> PyTree: ...

    def flatten_up_to(self, tree: PyTree, /) -> list[PyTree]: ...


NOT_TRACED = get_opaque_trace_state()


def is_traced() -> bool:
    """Whether JAX is tracing the caller."""
    return get_opaque_trace_state() != NOT_TRACED


def is_staged() -> bool:
    """Whether JAX stages the caller's operations, of constants too.

    It does under `jax.jit`, `jax.lax.scan`, `jax.checkpoint`, but not under `jax.grad`.
    """
    return is_traced() and isinstance(jax.lax.neg(np.int32(1)), Tracer)


def is_array(value: object) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether `value` is an array or array scalar of JAX or NumPy."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_mirrored(value: object) -> bool:
    """Whether `value` is an array replicated over the replicas of some strategy."""
    return is_placed(value) and mesh.is_replicated(value.sharding)


def is_sharded(value: object) -> bool:
    """Whether `value` is an array sharded over the replicas of some strategy."""
    return is_placed(value) and mesh.is_split(value.sharding)


def as_array(value: Value, what: str) -> jax.Array | np.ndarray:
    """`value` as an array of a dtype that JAX has."""
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
    """Raise if `value` is a masked array of NumPy, whose mask JAX would drop."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(
            f"{what} is a masked array of NumPy, and its mask would be lost. Choose "
            "the numbers there, `array.filled(0)`, and pass `array.mask` as an array "
            "of its own where it is needed."
        )


def is_placed(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is a JAX array and no tracer."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def has_place(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array, or a type, which may have a sharding."""
    return is_placed(value) or isinstance(value, jax.ShapeDtypeStruct)


def is_deleted(value: object) -> bool:
    """Whether `value` is an array that was donated."""
    return is_placed(value) and value.is_deleted()


def check_alive(value: object, what: str) -> None:
    """Raise if `value` is an array that was donated."""
    if is_deleted(value):
        raise DonatedValueError(
            f"{what} was donated to an earlier call, which has reused its memory. Go "
            "on with the value that call returned, or leave the argument out of "
            "`donate_argnums`."
        )
