"""Entries of the record, one for each value, and the arrays that belong to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxstrategy._errors import DonatedValueError
from jaxstrategy.replicas._random_keys import is_key

Entry = dict[str, Any]
"""The record of a value: its kind, and what that kind needs."""

Array: TypeAlias = jax.Array | np.ndarray
"""On devices, or of the host."""
AnyArray: TypeAlias = jax.Array | np.ndarray | np.generic


@final
@dataclasses.dataclass(frozen=True)
class Reading:
    """The shape, dtype and place in which an array is to be read.

    Attributes:
      shape: of it.
      dtype: of it.
      sharding: where it is to lie; None for an array of NumPy.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None = None


def is_array(dtype: str, shape: Sequence[object], more: Entry) -> bool:
    """Whether `array_entry` can have said this."""
    if not all(type(size) is int and size >= 0 for size in shape):
        return False
    match more:
        case {"impl": str(), "words": list(words), **others}:
            is_key = dtype.startswith("key<")
            return is_key and not others and all(type(each) is int for each in words)
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return not more


def array_entry(value: AnyArray, kind: str = "array") -> tuple[Entry, Array | None]:
    """An array, or a struct like one, and what is written of it."""
    entry = {"kind": kind, "dtype": str(value.dtype), "shape": list(value.shape)}
    if is_key(value.dtype):
        keys = cast(jax.Array, value)  # NumPy has none
        entry["impl"] = str(jax.random.key_impl(keys))
        value = jax.random.key_data(keys)
        entry["words"] = list(value.shape[len(entry["shape"]) :])
    return entry, None if value.size == 0 else _writable(value)


def _writable(value: AnyArray) -> Array:
    """The form that Orbax takes: an array of all processes, or one of the host."""
    if isinstance(value, jax.Array):
        # Of several processes, Orbax refuses an array that only one of them has.
        is_own = jax.process_count() > 1 and value.is_fully_addressable
        return np.asarray(value) if is_own else value
    return np.array(value)  # a copy: the user may change it while it is written


def array_reading(entry: Entry, sharding: Sharding | None) -> Reading | None:
    """The reading of an entry's array; None if it has no elements."""
    shape = (*entry["shape"], *entry.get("words", ()))
    if 0 in shape:
        return None
    dtype = "uint32" if "impl" in entry else entry["dtype"]
    if sharding is not None and sharding.is_fully_addressable:
        if jax.process_count() > 1:
            sharding = None  # Orbax reads for all processes, or for the host
    return Reading(shape, jnp.dtype(dtype), sharding)


def array_of(entry: Entry, array: Array | None) -> Array:
    """The array, or none at all, as it was before it was written."""
    if array is None:
        shape = (*entry["shape"], *entry.get("words", ()))
        dtype = "uint32" if "impl" in entry else entry["dtype"]
        # Nothing was written of an array without elements.
        array = np.zeros(shape, jnp.dtype(dtype))
    if "impl" in entry:
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
    return array


def check_alive(value: object, name: str) -> None:
    """Raise `DonatedValueError` if `value` is no more."""
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedValueError(
            f"`{name}` was donated to an earlier step, so it cannot be saved. Save the "
            "state that the step returned."
        )
