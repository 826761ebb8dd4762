"""How each kind of value is written to a checkpoint and read from it: the handlers.

A value has an entry in the record: its kind, and what that kind needs. Arrays are
written beside it, by Orbax.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.inputs.iterator import AbstractInputIterator
from jaxstrategy._src.options import (
    VariableAggregation,
    VariableSynchronization,
)
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text.shown import array_type
from jaxstrategy._src.values import building, per_replica
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.kinds.per_worker_kind import per_worker_kind_of
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

Entry = dict[str, Any]
Array: TypeAlias = jax.Array | np.ndarray


@final
@dataclasses.dataclass(frozen=True)
class Reading:
    """What an array is read as; `sharding` is None for one of NumPy."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None = None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value of a state, with its name.

    Attributes:
      home: where it goes if it lies nowhere yet, None for JAX's default device.
    """

    name: str
    value: Any
    home: NamedSharding | None = None

    def like(self, value: object) -> Leaf:
        """Another value under the same name."""
        return dataclasses.replace(self, value=value)


def _same(leaf: Leaf, restored: object) -> object:
    return restored


@final
@dataclasses.dataclass(frozen=True)
class Handler:
    """One kind of value.

    Attributes:
      takes: whether a value is of this kind.
      describe: a value in words.
      save: its entry, and the array to write, if there is one.
      mismatch: why an entry cannot be restored into it; None if it can.
      restore: the new value, from the entry and the array that was read.
      reading: what the array is read as; None if there is none.
      place: the value as it is, where a restored one would be.
      put: changes the value in place where it is an object; what then stands there.
      undo: if `put` may refuse: a function that takes a later `put` back.
    """

    takes: Callable[[object], bool]
    describe: Callable[[Any], str]
    save: Callable[[Leaf], tuple[Entry, Array | None]]
    mismatch: Callable[[Leaf, Entry], str | None]
    restore: Callable[[Leaf, Entry, Array | None], object]
    reading: Callable[[Leaf, Entry], Reading | None] = lambda leaf, entry: None
    place: Callable[[Leaf], object] = lambda leaf: leaf.value
    put: Callable[[Leaf, Any], object] = _same
    undo: Callable[[Leaf], Callable[[], object]] | None = None


def handler_of(leaf: Leaf) -> Handler:
    """The handler of a value."""
    for handler in _HANDLERS:
        if handler.takes(leaf.value):
            return handler
    raise TypeError(
        f"`{leaf.name}` is a {type(leaf.value).__name__}, which a checkpoint cannot "
        "hold. It holds arrays, numbers, strings, variables, PerReplicas, objects of "
        "Flax NNX and iterators of distributed datasets. Keep functions and other "
        "objects out of the state, or put what JSON can say into `extra`."
    )


def _differs(leaf: Leaf, entry: Entry) -> str:
    wanted = handler_of(leaf).describe(leaf.value)
    return (
        f"`{leaf.name}` is {described(entry)} in the checkpoint, and {wanted} was "
        "wanted"
    )


# Entries of the record.


def is_entry(value: object) -> bool:
    """Whether a handler can have written this of a value."""
    match value:
        case {"kind": "array", "dtype": str(dtype), "shape": list(shape), **more}:
            return _is_array(dtype, shape, more)
        case {"kind": "per_replica", "dtype": str(dtype), "shape": [_, *_] as shape,
              **more}:  # fmt: skip
            return _is_mask(more.pop("mask", [])) and _is_array(dtype, shape, more)
        case {"kind": "number", "type": str(kind), "value": number, **more}:
            return not more and _is_number(kind, number)
        case {"kind": "text", "value": str(), **more}:
            return not more
        case {"kind": "iterator", "states": [_, *_], **more}:
            return not more
    return False


def described(entry: Entry) -> str:
    """What was saved, in words."""
    match entry["kind"]:
        case "array":
            return array_type(entry["dtype"], entry["shape"])
        case "per_replica":
            shape = array_type(entry["dtype"], entry["shape"][1:])
            return f"a PerReplica of {shape} for {entry['shape'][0]} replicas"
        case "number":
            return f"a Python {entry['type']}"
        case "text":
            return "a string"
    return "the state of an iterator"


def _is_array(dtype: str, shape: Sequence[object], more: Entry) -> bool:
    if not all(type(size) is int and size >= 0 for size in shape):
        return False
    match more:
        case {"impl": str(), "words": list(words), **others}:
            are_words = all(type(each) is int for each in words)
            return dtype.startswith("key<") and not others and are_words
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return not more


def _is_mask(mask: object) -> bool:
    if not isinstance(mask, list):
        return False
    try:
        # Of lists of several lengths NumPy makes no array.
        return np.asarray(mask).dtype in (np.dtype(bool), np.dtype(float))
    except ValueError:
        return False


def _is_number(kind: str, number: object) -> bool:
    if kind == "complex":
        is_pair = isinstance(number, list) and len(number) == 2
        return is_pair and all(type(part) is float for part in cast(list, number))
    return kind in _NUMBERS and type(number) is _NUMBERS[kind]


# Arrays.


def _array_entry(value: Any, kind: str = "array") -> tuple[Entry, Array | None]:
    """An array, or a struct like one, and what is written of it."""
    entry = {"kind": kind, "dtype": str(value.dtype), "shape": list(value.shape)}
    if is_key(value.dtype):
        entry["impl"] = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
        entry["words"] = list(value.shape[len(entry["shape"]) :])
    if value.size == 0:
        return entry, None
    if not isinstance(value, jax.Array):
        return entry, np.array(value)  # a copy: it may be changed while it is written
    # Of several processes, Orbax refuses an array that only one of them has.
    is_own = jax.process_count() > 1 and value.is_fully_addressable
    return entry, np.asarray(value) if is_own else value


def _reading(entry: Entry, sharding: Sharding | None) -> Reading | None:
    """The reading of an entry's array; None if it has no elements."""
    if entry["kind"] not in ("array", "per_replica"):
        return None
    shape = (*entry["shape"], *entry.get("words", ()))
    if 0 in shape:
        return None
    is_own = sharding is not None and sharding.is_fully_addressable
    if is_own and jax.process_count() > 1:
        sharding = None  # Orbax reads for all processes, or for the host
    return Reading(shape, _dtype(entry), sharding)


def _dtype(entry: Entry) -> np.dtype:
    return jnp.dtype("uint32" if "impl" in entry else entry["dtype"])


def _read_array(entry: Entry, array: Array | None, dtype: DTypeLike | None) -> Array:
    """The array as it was before it was written; a number as a scalar of `dtype`."""
    if entry["kind"] == "number":
        return np.asarray(_number(entry), dtype)
    if array is None:  # nothing was written of an array without elements
        array = np.zeros((*entry["shape"], *entry.get("words", ())), _dtype(entry))
    if "impl" in entry:
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
    return array


def _described_array(value: Any) -> str:
    return array_type(value.dtype, value.shape)


def _array_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    value = leaf.value
    if entry["kind"] == "number" and value.shape == ():
        kinds = list(_ABSTRACT)
        may_be = [_ABSTRACT[k] for k in kinds[kinds.index(entry["type"]) :]]
        is_number = not is_key(value.dtype)
        fits = is_number and any(jnp.issubdtype(value.dtype, each) for each in may_be)
    else:
        fits = described(entry) == _described_array(value)
    return None if fits else _differs(leaf, entry)


def _check_alive(value: object, name: str) -> None:
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedValueError(
            f"`{name}` was donated to an earlier step, so it cannot be saved. Save the "
            "state that the step returned."
        )


def _save_array(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_alive(leaf.value, leaf.name)
    return _array_entry(leaf.value)


# Arrays of JAX, and `jax.ShapeDtypeStruct`s.


def is_device_array(value: object) -> bool:
    """Whether it is an array of JAX, or stands for one."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def _sharding(leaf: Leaf) -> Sharding | None:
    """The place of a restored array; None for JAX's default device, uncommitted."""
    own = leaf.value.sharding
    is_free = own is None or isinstance(own, SingleDeviceSharding)
    if is_free and leaf.home is not None:
        return leaf.home
    # Placed, an uncommitted array would be committed: JAX then refuses to compute with
    # it and arrays of other devices.
    return own if getattr(leaf.value, "committed", True) else None


def _restore_device_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found, sharding = _read_array(entry, array, leaf.value.dtype), _sharding(leaf)
    if isinstance(found, jax.Array) and sharding in (None, found.sharding):
        return found
    return jnp.asarray(found) if sharding is None else mesh.place(found, sharding)


def _place_device_array(leaf: Leaf) -> object:
    value = leaf.value
    if isinstance(value, jax.Array) and leaf.home is not None:
        if _sharding(leaf) != value.sharding:
            return building.replicate_leaf(value, leaf.home, f"`{leaf.name}`")
    return value


_DEVICE_ARRAY = Handler(
    takes=is_device_array,
    describe=_described_array,
    save=_save_array,
    mismatch=_array_mismatch,
    reading=lambda leaf, entry: _reading(entry, _sharding(leaf)),
    restore=_restore_device_array,
    place=_place_device_array,
)


# Arrays and scalars of NumPy.


def _save_host_array(leaf: Leaf) -> tuple[Entry, Array | None]:
    # Objects, bytes, text, times and differences of times: JAX has none of them.
    if leaf.value.dtype.kind in "OSUMm":
        raise TypeError(
            f"`{leaf.name}` is an array of {leaf.value.dtype}, which a checkpoint "
            "cannot hold. Save numbers, or what JSON can say in `extra`."
        )
    return _array_entry(leaf.value)


def _restore_host_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found = np.asarray(_read_array(entry, array, leaf.value.dtype))
    return found[()] if isinstance(leaf.value, np.generic) else found


_HOST_ARRAY = Handler(
    takes=lambda value: isinstance(value, np.ndarray | np.generic),
    describe=_described_array,
    save=_save_host_array,
    mismatch=_array_mismatch,
    reading=lambda leaf, entry: _reading(entry, None),
    restore=_restore_host_array,
)


# Variables, of which the value is saved: that of all copies together.


def _check_has_value(name: str, variable: Variable) -> None:
    if per_worker_kind_of(variable) is not None:
        raise ValueError(
            f"`{name}`, variable {variable.name!r}, has a copy on each worker, so it "
            "has no one value to save or restore. Leave it out of the state, or save "
            "the copies: `variable.read_all()`."
        )
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    has_copies = on_read and variable.strategy is not None
    if has_copies and variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"`{name}`, variable {variable.name!r}, has a copy per replica "
            "and aggregation NONE, so it has no one value to save or restore. Make "
            "it with `aggregation='sum'`, 'mean' or 'only_first_replica', or save "
            "the copies: `variable.distributed()`."
        )


def _save_variable(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_has_value(leaf.name, leaf.value)
    return _array_entry(leaf.value.value())


def _as_array(leaf: Leaf) -> Leaf:
    """A variable as an array that lies where its value does."""
    variable, where = leaf.value, leaf.value.sharding_of_value
    struct = jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=where)
    return Leaf(leaf.name, struct)


def _variable_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    _check_has_value(leaf.name, leaf.value)
    return _array_mismatch(leaf, entry)


def _assign(leaf: Leaf, restored: object) -> object:
    leaf.value.assign(restored)
    return leaf.value


_VARIABLE = Handler(
    takes=lambda value: isinstance(value, Variable),
    describe=_described_array,
    save=_save_variable,
    mismatch=_variable_mismatch,
    reading=lambda leaf, entry: _reading(entry, _sharding(_as_array(leaf))),
    restore=lambda leaf, *read: _restore_device_array(_as_array(leaf), *read),
    put=_assign,
)


# Variables in several shards, saved as one array: so they are restored into shards of
# any number, or into one variable or array. It goes over the host, on which it is cut:
# no device need have all of it.


def is_sharded_variable(value: object) -> bool:
    """Whether it is a `ShardedVariable` of variables, or of arrays in their place."""
    if not isinstance(value, ShardedVariable):
        return False
    # What JAX puts in the place of shards may be anything.
    return value.holds_variables or all(map(is_device_array, value.variables))


def _check_shards(leaf: Leaf) -> None:
    if leaf.value.holds_variables:
        for shard in leaf.value.variables:
            _check_has_value(leaf.name, shard)


def _save_sharded(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_shards(leaf)
    whole, shards = leaf.value, leaf.value.variables
    for shard in shards:
        _check_alive(shard, leaf.name)
    if any(isinstance(each, jax.ShapeDtypeStruct) for each in shards):
        return _array_entry(jax.ShapeDtypeStruct(whole.shape, whole.dtype))
    return _array_entry(whole.numpy())


def _sharded_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    _check_shards(leaf)
    return _array_mismatch(leaf, entry)


def _restore_sharded(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    whole = np.asarray(_read_array(entry, array, leaf.value.dtype))
    if leaf.value.holds_variables:
        return whole
    shards, structure = jax.tree.flatten(leaf.value)
    ends = itertools.accumulate((len(each) for each in shards), initial=0)
    parts = [
        _restore_device_array(
            leaf.like(shard), {**entry, "shape": list(shard.shape)}, whole[start:stop]
        )
        for shard, (start, stop) in zip(shards, itertools.pairwise(ends), strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


_SHARDED_VARIABLE = Handler(
    takes=is_sharded_variable,
    describe=_described_array,
    save=_save_sharded,
    mismatch=_sharded_mismatch,
    reading=lambda leaf, entry: _reading(entry, None),
    restore=_restore_sharded,
    put=lambda leaf, new: _assign(leaf, new) if leaf.value.holds_variables else new,
)


# `PerReplica`s, which are no logical value, but one for each replica.


def _described_versions(value: PerReplica) -> str:
    held = per_replica.contents(value)
    shape = array_type(held.dtype, held.shape[1:])
    return f"a PerReplica of {shape} for {held.shape[0]} replicas"


def _save_versions(leaf: Leaf) -> tuple[Entry, Array | None]:
    held = per_replica.contents(leaf.value)
    if not hasattr(held, "dtype"):
        raise TypeError(
            f"`{leaf.name}` is a PerReplica of a {type(held).__name__}; one of an "
            "array was wanted."
        )
    _check_alive(held, leaf.name)
    entry, array = _array_entry(held, "per_replica")
    if leaf.value.mask is not None:
        entry["mask"] = np.asarray(leaf.value.mask).tolist()
    return entry, array


def _versions_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    if described(entry) == _described_versions(leaf.value):
        return None
    text = _differs(leaf, entry)
    if entry["kind"] != "per_replica":
        return text
    return (
        f"{text}; versions of single replicas mean nothing to another number of "
        "them: reduce the value before saving (`strategy.reduce`)"
    )


def _sharding_of_versions(leaf: Leaf) -> Sharding | None:
    return getattr(per_replica.contents(leaf.value), "sharding", None)


def _restore_versions(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found, sharding = _read_array(entry, array, None), _sharding_of_versions(leaf)
    restored = PerReplica(found if sharding is None else mesh.place(found, sharding))
    if "mask" not in entry:
        return restored
    mask = np.asarray(entry["mask"], bool)
    if isinstance(leaf.value.mask, jax.Array):
        mask = mesh.place(mask, leaf.value.mask.sharding)
    return per_replica.with_mask(restored, mask)


_PER_REPLICA = Handler(
    takes=lambda value: isinstance(value, PerReplica),
    describe=_described_versions,
    save=_save_versions,
    mismatch=_versions_mismatch,
    reading=lambda leaf, entry: _reading(entry, _sharding_of_versions(leaf)),
    restore=_restore_versions,
)


# Numbers of Python and strings, which the record itself holds.

_NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}
# What a number may become; the first it is.
_ABSTRACT = {
    "bool": jnp.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


def _number(entry: Entry) -> complex:
    value = entry["value"]
    return complex(*value) if entry["type"] == "complex" else value


def _save_number(leaf: Leaf) -> tuple[Entry, Array | None]:
    value, kind = leaf.value, type(leaf.value).__name__
    written = [value.real, value.imag] if kind == "complex" else value
    return {"kind": "number", "type": kind, "value": written}, None


def _number_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    kind = type(leaf.value).__name__
    if entry["kind"] == "number":
        fits = entry["type"] == kind
    else:
        fits = entry["kind"] == "array" and entry["shape"] == []
        fits = fits and "impl" not in entry
        fits = fits and jnp.issubdtype(jnp.dtype(entry["dtype"]), _ABSTRACT[kind])
    return None if fits else _differs(leaf, entry)


def _restore_number(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    if entry["kind"] == "number":
        return _number(entry)
    assert array is not None, "it has an element"
    return type(leaf.value)(array.item())


_NUMBER = Handler(
    takes=lambda value: type(value) in _NUMBERS.values(),
    describe=lambda value: f"a Python {type(value).__name__}",
    save=_save_number,
    mismatch=_number_mismatch,
    reading=lambda leaf, entry: _reading(entry, None),
    restore=_restore_number,
)

_TEXT = Handler(
    takes=lambda value: isinstance(value, str),
    describe=lambda value: "a string",
    save=lambda leaf: ({"kind": "text", "value": leaf.value}, None),
    mismatch=lambda leaf, e: None if e["kind"] == "text" else _differs(leaf, e),
    restore=lambda leaf, entry, array: entry["value"],
)


# Positions of passes over datasets, one for each process in the record.


def _save_position(leaf: Leaf) -> tuple[Entry, Array | None]:
    try:
        state = leaf.value.get_state()
    except TypeError as error:
        raise TypeError(f"`{leaf.name}` cannot be saved: {error}") from error
    what = f"save the position of `{leaf.name}`"
    return {"kind": "iterator", "states": agreement.agree(what, state)}, None


def _position_mismatch(leaf: Leaf, entry: Entry) -> str | None:
    if entry["kind"] != "iterator":
        return _differs(leaf, entry)
    states = entry["states"]
    if len(states) == jax.process_count() or states.count(states[0]) == len(states):
        return None
    return (
        f"`{leaf.name}` was read by {len(states)} processes, each a part of its "
        f"own, and there are {jax.process_count()} now; use as many, or a source "
        "that all processes read alike (`jaxstrategy.batches`)"
    )


def _restore_position(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    states = entry["states"]
    is_own = len(states) == jax.process_count()
    return states[jax.process_index() if is_own else 0]


def _put_position(leaf: Leaf, state: object) -> object:
    try:
        leaf.value.set_state(state)
    except (TypeError, ValueError) as error:
        error.add_note(f"`{leaf.name}` was to be restored from a checkpoint.")
        raise
    return leaf.value


def _undo_position(leaf: Leaf) -> Callable[[], object]:
    try:
        state = leaf.value.get_state()
    except TypeError:  # cannot be resumed, so it cannot be set either
        return lambda: None
    return lambda: leaf.value.set_state(state)


_POSITION = Handler(
    takes=lambda value: isinstance(value, AbstractInputIterator),
    describe=lambda value: "an iterator",
    save=_save_position,
    mismatch=_position_mismatch,
    restore=_restore_position,
    put=_put_position,
    undo=_undo_position,
)

# The first that takes a value has it: NumPy's float64 is a float of Python, too.
_HANDLERS = (
    _VARIABLE,
    _SHARDED_VARIABLE,
    _PER_REPLICA,
    _DEVICE_ARRAY,
    _HOST_ARRAY,
    _NUMBER,
    _TEXT,
    _POSITION,
)
