"""The sorts of values that a checkpoint holds, and what each is on disk.

A sort is made of a value of the state. When that is saved, it says what to write; when
it is restored into, the value says what is wanted: dtype, shape and placement.
"""

from __future__ import annotations

import abc
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jaxstrategy._options import VariableAggregation, VariableSynchronization
from jaxstrategy.checkpoint import (
    _entries,
    _operations,
)
from jaxstrategy.checkpoint._entries import Entry, Reading
from jaxstrategy.inputs._iterator import DistributedIterator
from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.replicas._replicas import SAME, Replicas
from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import (
    _building,
    _per_replica,
)
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.variables._variable import Variable


class Sort(abc.ABC):
    """One value of a state.

    Args:
      name: of its place.
      value: it.
      replicas: where values go that lie nowhere yet, None for JAX's default device.
    """

    def __init__(self, name: str, value: Any, replicas: Replicas | None) -> None:
        self.name = name
        self.value = value
        self.replicas = replicas

    @property
    @abc.abstractmethod
    def describe(self) -> str:
        """What messages call such a value."""

    @abc.abstractmethod
    def saved(self) -> tuple[Entry, Any]:
        """What the record says of it, and the array to write, None if there is none."""

    @abc.abstractmethod
    def difference(self, entry: Entry) -> str | None:
        """Why what was saved cannot be restored into it; None if it can."""

    @abc.abstractmethod
    def reading(self, entry: Entry) -> Reading | None:
        """How the array that was saved is to be read; None if there is none."""

    @abc.abstractmethod
    def restored(self, entry: Entry, array: Any) -> Any:
        """The new value."""

    def placed(self) -> Any:
        """The value as it is, where a restored one would be."""
        return self.value

    def _differs(self, entry: Entry) -> str:
        return (
            f"`{self.name}` is {_entries.described(entry)} in the checkpoint, and "
            f"{self.describe} was wanted"
        )


class _AnyArray(Sort):
    """An array, of JAX or NumPy."""

    @property
    def describe(self) -> str:
        return array_type(self.value.dtype, self.value.shape)

    def saved(self) -> tuple[Entry, Any]:
        _entries.check_alive(self.value, self.name)
        return _entries.array_entry(self.value)

    def difference(self, entry: Entry) -> str | None:
        if entry["kind"] == "number" and self.value.shape == ():
            fits = not is_key(self.value.dtype) and _entries.fits_number(
                entry, self.value.dtype
            )
        else:
            fits = _entries.described(entry) == self.describe
        return None if fits else self._differs(entry)


@final
class DeviceArray(_AnyArray):
    """An array of JAX, or a `jax.ShapeDtypeStruct`."""

    def reading(self, entry: Entry) -> Reading | None:
        if entry["kind"] == "number":
            return None
        return _entries.array_reading(entry, self._sharding)

    def restored(self, entry: Entry, array: Any) -> Any:
        if entry["kind"] == "number":
            array = np.asarray(_entries.number_of(entry), self.value.dtype)
        else:
            array = _entries.array_of(entry, array)
        if isinstance(array, jax.Array) and self._sharding in (None, array.sharding):
            return array
        if self._sharding is None:
            return jnp.asarray(array)
        return _mesh.put(array, self._sharding)

    def placed(self) -> Any:
        if isinstance(self.value, jax.Array) and self.replicas is not None:
            if self._sharding != self.value.sharding:
                return _building.replicate(self.value, self.replicas)
        return self.value

    @property
    def _sharding(self) -> Sharding | None:
        """Where it belongs; None for JAX's default device, and to no device firmly."""
        own = self.value.sharding
        is_free = own is None or isinstance(own, SingleDeviceSharding)
        if is_free and self.replicas is not None:
            return self.replicas.sharding(SAME)
        return own if getattr(self.value, "committed", True) else None


@final
class HostArray(_AnyArray):
    """An array of NumPy, or a scalar of it."""

    def saved(self) -> tuple[Entry, Any]:
        if self.value.dtype.kind in "OSUMm":
            raise TypeError(
                f"`{self.name}` is an array of {self.value.dtype}, which a checkpoint "
                "cannot hold. Save numbers, or what JSON can say in `extra`."
            )
        return super().saved()

    def reading(self, entry: Entry) -> Reading | None:
        return (
            None if entry["kind"] == "number" else _entries.array_reading(entry, None)
        )

    def restored(self, entry: Entry, array: Any) -> Any:
        if entry["kind"] == "number":
            array = np.asarray(_entries.number_of(entry), self.value.dtype)
        array = np.asarray(_entries.array_of(entry, array))
        return array[()] if isinstance(self.value, np.generic) else array


@final
class Versions(Sort):
    """A `PerReplica`, which is no logical value, but one for each replica."""

    @property
    def describe(self) -> str:
        held = _per_replica.contents(self.value)
        shape = array_type(held.dtype, held.shape[1:])
        return f"a PerReplica of {shape} for {held.shape[0]} replicas"

    def saved(self) -> tuple[Entry, Any]:
        held = _per_replica.contents(self.value)
        if not hasattr(held, "dtype"):
            raise TypeError(
                f"`{self.name}` is a PerReplica of a {type(held).__name__}; one of an "
                "array was wanted."
            )
        _entries.check_alive(held, self.name)
        entry, array = _entries.array_entry(held, "per_replica")
        if self.value.mask is not None:
            entry["mask"] = np.asarray(self.value.mask).tolist()
        return entry, array

    def difference(self, entry: Entry) -> str | None:
        if _entries.described(entry) == self.describe:
            return None
        text = self._differs(entry)
        if entry["kind"] != "per_replica":
            return text
        return (
            f"{text}; versions of single replicas mean nothing to another number of "
            "them: reduce the value before saving (`strategy.reduce`)"
        )

    def reading(self, entry: Entry) -> Reading | None:
        return _entries.array_reading(entry, self._sharding)

    def restored(self, entry: Entry, array: Any) -> Any:
        array = _entries.array_of(entry, array)
        if self._sharding is not None:
            array = _mesh.put(array, self._sharding)
        restored = PerReplica(array)
        if "mask" not in entry:
            return restored
        mask = np.asarray(entry["mask"], bool)
        if isinstance(self.value.mask, jax.Array):
            mask = _mesh.put(mask, self.value.mask.sharding)
        return _per_replica.with_mask(restored, mask)

    @property
    def _sharding(self) -> Sharding | None:
        held = _per_replica.contents(self.value)
        return getattr(held, "sharding", None)


@final
class VariableSort(Sort):
    """A `Variable`, of which the value is saved: that of all copies together."""

    @property
    def describe(self) -> str:
        return array_type(self.value.dtype, self.value.shape)

    def saved(self) -> tuple[Entry, Any]:
        self._check()
        return _entries.array_entry(self.value.value())

    def difference(self, entry: Entry) -> str | None:
        self._check()
        return DeviceArray(self.name, self._struct, None).difference(entry)

    def reading(self, entry: Entry) -> Reading | None:
        return DeviceArray(self.name, self._struct, None).reading(entry)

    def restored(self, entry: Entry, array: Any) -> Any:
        return DeviceArray(self.name, self._struct, None).restored(entry, array)

    @property
    def _struct(self) -> jax.ShapeDtypeStruct:
        where = _mesh.replicated(self.value.mesh)
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype, sharding=where)

    def _check(self) -> None:
        variable = self.value
        on_read = variable.synchronization is VariableSynchronization.ON_READ
        has_copies = on_read and variable.strategy is not None
        if has_copies and variable.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"`{self.name}`, variable {variable.name!r}, has a copy per replica "
                "and aggregation NONE, so it has no one value to save or restore. Make "
                "it with `aggregation='sum'`, 'mean' or 'only_first_replica', or save "
                "the copies: `variable.distributed()`."
            )


# What is written into the record itself.


@final
class Number(Sort):
    """A number of Python."""

    @property
    def describe(self) -> str:
        return f"a Python {type(self.value).__name__}"

    def saved(self) -> tuple[Entry, Any]:
        value = self.value
        if isinstance(value, complex):
            value = [value.real, value.imag]
        kind = type(self.value).__name__
        return {"kind": "number", "type": kind, "value": value}, None

    def difference(self, entry: Entry) -> str | None:
        kind = type(self.value).__name__
        if entry["kind"] == "number":
            fits = entry["type"] == kind
        else:
            fits = entry["kind"] == "array" and entry["shape"] == []
            fits = fits and "impl" not in entry
            fits = fits and jnp.issubdtype(
                jnp.dtype(entry["dtype"]), _entries.ABSTRACT[kind]
            )
        return None if fits else self._differs(entry)

    def reading(self, entry: Entry) -> Reading | None:
        return (
            None if entry["kind"] == "number" else _entries.array_reading(entry, None)
        )

    def restored(self, entry: Entry, array: Any) -> Any:
        if entry["kind"] == "number":
            return _entries.number_of(entry)
        return type(self.value)(array.item())


@final
class Text(Sort):
    """A string."""

    @property
    def describe(self) -> str:
        return "a string"

    def saved(self) -> tuple[Entry, Any]:
        return {"kind": "text", "value": self.value}, None

    def difference(self, entry: Entry) -> str | None:
        return None if entry["kind"] == "text" else self._differs(entry)

    def reading(self, entry: Entry) -> Reading | None:
        return None

    def restored(self, entry: Entry, array: Any) -> Any:
        return entry["value"]


@final
class InputPosition(Sort):
    """The position of a pass over a dataset."""

    @property
    def describe(self) -> str:
        return "an iterator"

    def saved(self) -> tuple[Entry, Any]:
        try:
            state = self.value.get_state()
        except TypeError as error:
            raise TypeError(f"`{self.name}` cannot be saved: {error}") from error
        what = f"save the position of `{self.name}`"
        return {"kind": "iterator", "states": _operations.gather(what, state)}, None

    def difference(self, entry: Entry) -> str | None:
        if entry["kind"] != "iterator":
            return self._differs(entry)
        states = entry["states"]
        if len(states) == jax.process_count() or states.count(states[0]) == len(states):
            return None
        return (
            f"`{self.name}` was read by {len(states)} processes, each a part of its "
            f"own, and there are {jax.process_count()} now; use as many, or a source "
            "that all processes read alike (`jaxstrategy.batches`)"
        )

    def reading(self, entry: Entry) -> Reading | None:
        return None

    def restored(self, entry: Entry, array: Any) -> Any:
        states = entry["states"]
        is_own = len(states) == jax.process_count()
        return states[jax.process_index() if is_own else 0]


def sort_of(name: str, value: Any, replicas: Replicas | None) -> Sort:
    """What `value` is to a checkpoint.

    Raises:
      TypeError: a checkpoint cannot hold it.
    """
    if isinstance(value, Variable):
        return VariableSort(name, value, replicas)
    if isinstance(value, PerReplica):
        return Versions(name, value, replicas)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return DeviceArray(name, value, replicas)
    if isinstance(value, (np.ndarray, np.generic)):
        return HostArray(name, value, replicas)
    if type(value) in _entries.NUMBERS.values():
        return Number(name, value, replicas)
    if isinstance(value, str):
        return Text(name, value, replicas)
    if isinstance(value, DistributedIterator):
        return InputPosition(name, value, replicas)
    raise TypeError(
        f"`{name}` is a {type(value).__name__}, which a checkpoint cannot hold. It "
        "holds arrays, numbers, strings, variables, PerReplicas, objects of Flax NNX "
        "and iterators of distributed datasets. Keep functions and other objects out "
        "of the state, or put what JSON can say into `extra`."
    )
