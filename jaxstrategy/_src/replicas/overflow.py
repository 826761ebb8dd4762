"""Numbers as arrays of JAX, none of which is cut to what its dtype holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.text.shown import shown


class NotHeldError(ValueError):
    """A number is larger than its dtype holds."""


def array_of(value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """`value` as `jnp.asarray` has it.

    Raises:
      NotHeldError: it has a number that `dtype` does not hold, by default an integer
        that no integer of JAX holds.
    """
    if dtype is None and isinstance(value, (np.ndarray, np.generic)):
        check_held(np.asarray(value))
    try:
        return jnp.asarray(value, dtype)
    except OverflowError:
        raise NotHeldError(too_large(value, dtype)) from None


def types_of(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of leaves as arguments of a step, which may be types of arrays.

    Raises:
      NotHeldError: one is an integer that no integer of JAX holds.
    """
    for leaf in leaves:
        if isinstance(leaf, (np.ndarray, np.generic)):
            check_held(np.asarray(leaf))
    try:
        return jax.eval_shape(list, leaves)
    except OverflowError:
        for leaf in leaves:
            if isinstance(leaf, int):
                array_of(leaf)
        raise


def too_large(value: Any, dtype: DTypeLike | None = None) -> str:
    """The complaint about a number that `dtype`, by default JAX's integer, lacks."""
    kind = jax.dtypes.canonicalize_dtype(int if dtype is None else dtype)
    is_integer = jnp.issubdtype(kind, jnp.integer)
    held = jnp.iinfo(kind) if is_integer else jnp.finfo(kind)
    ends = [
        end if is_integer else f"{end:.6g}" for end in map(int, (held.min, held.max))
    ]
    advice = ", such as `np.float32(value)`" if is_integer else ""
    if is_integer and kind.itemsize < 8:
        advice += (
            ", or let JAX have 64 bits: `jax.config.update('jax_enable_x64', True)`"
        )
    return (
        f"{shown(value)} was given, and {kind} holds {ends[0]} to {ends[1]}. Give an "
        f"array of a dtype that holds it{advice}."
    )


def check_held(host: np.ndarray) -> None:
    """Raise if JAX, without 64 bits, would cut integers of `host` without a word.

    Raises:
      NotHeldError: it would.
    """
    kind = jax.dtypes.canonicalize_dtype(host.dtype)
    if host.dtype.kind not in "iu" or kind == host.dtype or not host.size:
        return
    held = jnp.iinfo(kind)
    for extreme in (int(host.max()), int(host.min())):
        if not held.min <= extreme <= held.max:
            raise NotHeldError(too_large(extreme, kind))
