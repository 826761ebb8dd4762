"""How each kind of value is written to a checkpoint and read from it: the handlers.

A value has an entry in the record: its kind, and what that kind needs. Arrays are
written beside it, by Orbax.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

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
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.remote_kinds import per_worker_kind_of
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

Entry = dict[str, Any]
Array: TypeAlias = jax.Array | np.ndarray


class Reading(NamedTuple):
    """What an array is read as; `sharding` is None for one of NumPy."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value of a state.

    Attributes:
      name: the way to it, `params/dense/kernel`; `.` of a state that is one value.
      value: what is there.
      store: puts another value there, if it is in an object that changes in place.
      home: where it goes if it lies nowhere yet, None for JAX's default device.
    """

    name: str
    value: Any
    store: Callable[[object], None] | None = None
    home: NamedSharding | None = None


@final
@dataclasses.dataclass(frozen=True)
class Handler:
    """One kind of value.

    Attributes:
      takes: whether a value is of this kind.
      describe: a value in words.
      save: its entry, and the array to write, if there is one.
      restore: the new value, from the entry and the array that was read.
      where: the sharding with which an array is read; None for NumPy.
      put: changes the value in place, if it is an object; what then stands there.
    """

    takes: Callable[[object], bool]
    describe: Callable[[Any], str]
    save: Callable[[Leaf], tuple[Entry, Array | None]]
    restore: Callable[[Leaf, Entry, Array | None], object]
    where: Callable[[Leaf], Sharding | None] = lambda leaf: None
    put: Callable[[Leaf, Any], object] = lambda leaf, restored: restored


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


def mismatch(leaf: Leaf, entry: Entry) -> str | None:
    """Why an entry cannot be restored into a value; None if it can."""
    value, kind, saved = leaf.value, entry["kind"], described(entry)
    _check_has_value(leaf)
    if isinstance(value, AbstractInputIterator) and kind == "iterator":
        states, now = entry["states"], jax.process_count()
        if len(states) == now or states.count(states[0]) == len(states):
            return None
        return (
            f"`{leaf.name}` was read by {len(states)} processes, each a part of its "
            f"own, and there are {now} now; use as many, or a source that all "
            "processes read alike (`jaxstrategy.batches`)"
        )
    wanted = handler_of(leaf).describe(value)
    if saved == wanted:
        return None
    is_scalar = not isinstance(value, PerReplica) and getattr(value, "shape", 0) == ()
    if kind == "number" and is_scalar:
        kinds = list(_ABSTRACT)
        may_be = [_ABSTRACT[k] for k in kinds[kinds.index(entry["type"]) :]]
        if any(jnp.issubdtype(leaf.value.dtype, each) for each in may_be):
            return None
    if kind == "array" and type(value) in _NUMBERS.values():
        is_scalar = entry["shape"] == [] and "impl" not in entry
        abstract = _ABSTRACT[type(value).__name__]
        if is_scalar and jnp.issubdtype(jnp.dtype(entry["dtype"]), abstract):
            return None
    text = f"`{leaf.name}` is {saved} in the checkpoint, and {wanted} was wanted"
    if kind == "per_replica" and isinstance(value, PerReplica):
        text += (
            "; versions of single replicas mean nothing to another number of them: "
            "reduce the value before saving (`strategy.reduce`)"
        )
    return text


def reading(leaf: Leaf, entry: Entry) -> Reading | None:
    """What an entry's array is read as; None if it has none, or no elements."""
    if entry["kind"] not in ("array", "per_replica"):
        return None
    shape = (*entry["shape"], *entry.get("words", ()))
    sharding = handler_of(leaf).where(leaf)
    is_own = sharding is not None and sharding.is_fully_addressable
    if is_own and jax.process_count() > 1:
        sharding = None  # Orbax reads for all processes, or for the host
    return None if 0 in shape else Reading(shape, _dtype(entry), sharding)


# Entries of the record.


def is_entry(value: Any) -> bool:
    """Whether a handler can have written this of a value."""
    match value:
        case {"kind": "array" | "per_replica" as kind, "dtype": str(dtype),
              "shape": list(shape), **more}:  # fmt: skip
            if not all(type(size) is int and size >= 0 for size in shape):
                return False
            if kind == "per_replica":
                mask = more.pop("mask", [])
                try:  # of lists of several lengths NumPy makes no array
                    is_mask = np.asarray(mask).dtype in (bool, float)
                except ValueError:
                    return False
                if not (shape and isinstance(mask, list) and is_mask):
                    return False
            match more:
                case {"impl": str(), "words": [*words]}:
                    are_words = all(type(each) is int for each in words)
                    return dtype.startswith("key<") and are_words and len(more) == 2
            try:
                jnp.dtype(dtype)
            except TypeError:
                return False
            return not more
        case {"kind": "number", "type": "complex", "value": [float(), float()]}:
            return len(value) == 3
        case {"kind": "number", "type": "bool" | "int" | "float" as kind,
              "value": number}:  # fmt: skip
            return len(value) == 3 and type(number) is _NUMBERS[kind]
        case {"kind": "text", "value": str()} | {"kind": "iterator", "states": [_, *_]}:
            return len(value) == 2
    return False


def described(entry: Entry) -> str:
    """What was saved, in words."""
    match entry["kind"]:
        case "array":
            return array_type(entry["dtype"], entry["shape"])
        case "per_replica":
            return _versions(entry["dtype"], entry["shape"])
        case "number":
            return f"a Python {entry['type']}"
        case "text":
            return "a string"
    return "the state of an iterator"


def _versions(dtype: object, shape: Any) -> str:
    return f"a PerReplica of {array_type(dtype, shape[1:])} for {shape[0]} replicas"


# Arrays.


def _described_array(value: Any) -> str:
    return array_type(value.dtype, value.shape)


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


def _dtype(entry: Entry) -> np.dtype:
    return jnp.dtype("uint32" if "impl" in entry else entry["dtype"])


def _read_array(leaf: Leaf, entry: Entry, array: Array | None) -> Array:
    """The array as it was before it was written; a number as a scalar."""
    if entry["kind"] == "number":
        return np.asarray(_number(entry), leaf.value.dtype)
    if array is None:  # nothing was written of an array without elements
        array = np.zeros((*entry["shape"], *entry.get("words", ())), _dtype(entry))
    if "impl" in entry:
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
    return array


def _check_alive(value: object, name: str) -> None:
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedValueError(
            f"`{name}` was donated to an earlier step, so it cannot be saved. Save the "
            "state that the step returned."
        )


def _save_array(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_alive(leaf.value, leaf.name)
    # Objects, bytes, text, times and differences of times: JAX has none of them.
    if getattr(leaf.value.dtype, "kind", "") in ("O", "S", "U", "M", "m"):
        raise TypeError(
            f"`{leaf.name}` is an array of {leaf.value.dtype}, which a checkpoint "
            "cannot hold. Save numbers, or what JSON can say in `extra`."
        )
    return _array_entry(leaf.value)


def is_device_array(value: object) -> bool:
    """Whether it is an array of JAX, or stands for one."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def placement(leaf: Leaf) -> Sharding | None:
    """The place of a restored array; None for JAX's default device, uncommitted."""
    own = leaf.value.sharding
    is_free = own is None or isinstance(own, SingleDeviceSharding)
    if is_free and leaf.home is not None:
        return leaf.home
    # Placed, an uncommitted array would be committed: JAX then refuses to compute with
    # it and arrays of other devices.
    return own if getattr(leaf.value, "committed", True) else None


def _restore_device_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found, sharding = _read_array(leaf, entry, array), placement(leaf)
    if isinstance(found, jax.Array) and sharding in (None, found.sharding):
        return found
    return jnp.asarray(found) if sharding is None else mesh.place(found, sharding)


def _restore_host_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found = np.asarray(_read_array(leaf, entry, array))
    return found[()] if isinstance(leaf.value, np.generic) else found


# Variables, of which the value is saved: that of all copies together.


def _check_has_value(leaf: Leaf) -> None:
    """Raise ValueError if the value is a variable that has no one value."""
    variables = [leaf.value]
    if isinstance(leaf.value, ShardedVariable):
        variables = leaf.value.variables if leaf.value.holds_variables else []
    for each in variables:
        if not isinstance(each, Variable):
            continue
        if per_worker_kind_of(each) is not None:
            raise ValueError(
                f"`{leaf.name}`, variable {each.name!r}, has a copy on each worker, so "
                "it has no one value to save or restore. Leave it out of the state, or "
                "save the copies: `variable.read_all()`."
            )
        on_read = each.synchronization is VariableSynchronization.ON_READ
        has_copies = on_read and each.strategy is not None
        if has_copies and each.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"`{leaf.name}`, variable {each.name!r}, has a copy per replica "
                "and aggregation NONE, so it has no one value to save or restore. Make "
                "it with `aggregation='sum'`, 'mean' or 'only_first_replica', or save "
                "the copies: `variable.distributed()`."
            )


def _save_variable(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_has_value(leaf)
    return _array_entry(leaf.value.value())


def _as_array(leaf: Leaf) -> Leaf:
    """A variable as an array that lies where its value does."""
    variable, where = leaf.value, leaf.value.sharding_of_value
    struct = jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=where)
    return Leaf(leaf.name, struct)


def _assign(leaf: Leaf, restored: object) -> object:
    leaf.value.assign(restored)
    return leaf.value


# Variables in several shards, saved as one array: so they are restored into shards of
# any number, or into one variable or array. It goes over the host, on which it is cut:
# no device need have all of it.


def is_sharded_variable(value: object) -> bool:
    """Whether it is a `ShardedVariable` of variables, or of arrays in their place."""
    if not isinstance(value, ShardedVariable):
        return False
    # What JAX puts in the place of shards may be anything.
    return value.holds_variables or all(map(is_device_array, value.variables))


def _save_sharded(leaf: Leaf) -> tuple[Entry, Array | None]:
    _check_has_value(leaf)
    whole, shards = leaf.value, leaf.value.variables
    for shard in shards:
        _check_alive(shard, leaf.name)
    if any(isinstance(each, jax.ShapeDtypeStruct) for each in shards):
        return _array_entry(jax.ShapeDtypeStruct(whole.shape, whole.dtype))
    return _array_entry(whole.numpy())


def _restore_sharded(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    whole = np.asarray(_read_array(leaf, entry, array))
    if leaf.value.holds_variables:
        return whole
    shards, structure = jax.tree.flatten(leaf.value)
    ends = itertools.accumulate((len(each) for each in shards), initial=0)
    parts = [
        _restore_device_array(
            dataclasses.replace(leaf, value=shard),
            {**entry, "shape": list(shard.shape)},
            whole[start:stop],
        )
        for shard, (start, stop) in zip(shards, itertools.pairwise(ends), strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


# `PerReplica`s, which are no logical value, but one for each replica.


def _described_versions(value: PerReplica) -> str:
    held = per_replica.contents(value)
    return _versions(held.dtype, held.shape)


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


def _sharding_of_versions(leaf: Leaf) -> Sharding | None:
    return getattr(per_replica.contents(leaf.value), "sharding", None)


def _restore_versions(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found, sharding = _read_array(leaf, entry, array), _sharding_of_versions(leaf)
    restored = PerReplica(found if sharding is None else mesh.place(found, sharding))
    if "mask" not in entry:
        return restored
    mask = np.asarray(entry["mask"], bool)
    if isinstance(leaf.value.mask, jax.Array):
        mask = mesh.place(mask, leaf.value.mask.sharding)
    return per_replica.with_mask(restored, mask)


# Numbers of Python, which the record itself holds.

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


def _restore_number(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    if entry["kind"] == "number":
        return _number(entry)
    assert array is not None, "it has an element"
    return type(leaf.value)(array.item())


# Positions of passes over datasets, one for each process in the record.


def _save_position(leaf: Leaf) -> tuple[Entry, Array | None]:
    try:
        state = leaf.value.get_state()
    except TypeError as error:
        raise TypeError(f"`{leaf.name}` cannot be saved: {error}") from error
    what = f"save the position of `{leaf.name}`"
    return {"kind": "iterator", "states": agreement.agree(what, state)}, None


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


# The first that takes a value has it: NumPy's float64 is a float of Python, too.
_HANDLERS = (
    Handler(
        takes=lambda value: isinstance(value, Variable),
        describe=_described_array,
        save=_save_variable,
        restore=lambda leaf, *read: _restore_device_array(_as_array(leaf), *read),
        where=lambda leaf: placement(_as_array(leaf)),
        put=_assign,
    ),
    Handler(
        takes=is_sharded_variable,
        describe=_described_array,
        save=_save_sharded,
        restore=_restore_sharded,
        put=lambda leaf, new: _assign(leaf, new) if leaf.value.holds_variables else new,
    ),
    Handler(
        takes=lambda value: isinstance(value, PerReplica),
        describe=_described_versions,
        save=_save_versions,
        restore=_restore_versions,
        where=_sharding_of_versions,
    ),
    Handler(
        takes=is_device_array,
        describe=_described_array,
        save=_save_array,
        restore=_restore_device_array,
        where=placement,
    ),
    Handler(
        takes=lambda value: isinstance(value, np.ndarray | np.generic),
        describe=_described_array,
        save=_save_array,
        restore=_restore_host_array,
    ),
    Handler(
        takes=lambda value: type(value) in _NUMBERS.values(),
        describe=lambda value: f"a Python {type(value).__name__}",
        save=_save_number,
        restore=_restore_number,
    ),
    Handler(
        takes=lambda value: isinstance(value, str),
        describe=lambda value: "a string",
        save=lambda leaf: ({"kind": "text", "value": leaf.value}, None),
        restore=lambda leaf, entry, array: entry["value"],
    ),
    Handler(
        takes=lambda value: isinstance(value, AbstractInputIterator),
        describe=lambda value: "an iterator",
        save=_save_position,
        restore=_restore_position,
        put=_put_position,
    ),
)
