"""A state as what is written of it, and back: its values by name, and their handlers.

A handler is how one kind of value is written to a checkpoint and read from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.record import (
    NUMBERS,
    Entry,
    MismatchError,
    described,
    versions,
)
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.inputs.iterator import AbstractInputIterator
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import array_type
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables.remote_kinds import per_worker_kind_of
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable

Array: TypeAlias = jax.Array | np.ndarray


class Reading(NamedTuple):
    """What an array is read as; `sharding` is None for one of NumPy."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A value of a state."""

    name: str  # the path to it, `params/dense/kernel`; `.` of a state that is one value
    value: Any
    # Puts another value there, if it is in an object that changes in place.
    store: Callable[[object], None] | None = None
    # Where it goes if it lies nowhere yet; None for JAX's default device.
    default_sharding: NamedSharding | None = None


@final
class State:
    def __init__(self, tree: PyTree, replicas: Replicas | None = None) -> None:
        self._tree = tree
        self.leaves = leaves_of(tree, replicas)
        self._handlers = {n: handler_of(v) for n, v in self.leaves.items()}

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """A `with` block: what is read in it for checkpoint `step` is of one moment."""
        owners = [getattr(x.value, "strategy", None) for x in self.leaves.values()]
        strategies = [each for each in owners if isinstance(each, AbstractStrategy)]
        with contextlib.ExitStack() as stack:
            for strategy in {id(each): each for each in strategies}.values():
                stack.enter_context(strategy._variable_policy.snapshot(step))
            yield

    def saved(self) -> tuple[dict[str, Entry], dict[str, Array]]:
        entries, arrays = {}, {}
        for name, leaf in self.leaves.items():
            entries[name], array = self._handlers[name].save(leaf)
            if array is not None:
                arrays[name] = array
        return entries, arrays

    def placed(self) -> PyTree:
        """The state as it is, where a restored one would be."""
        values: dict[str, object] = {}
        for name, leaf in self.leaves.items():
            value, home = leaf.value, leaf.default_sharding
            if isinstance(value, jax.Array) and home is not None:
                if placement(leaf) != value.sharding:
                    value = building.replicate_leaf(value, home, f"`{name}`")
            values[name] = value
        return self._with(values)

    def check_fits(
        self, entries: Mapping[str, Entry], where: str, partial: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Compares with a checkpoint; the names that only one of the two has.

        Raises:
          MismatchError: there are some, which is not `partial`; or a value differs.
        """
        missing = tuple([name for name in self.leaves if name not in entries])
        unexpected = tuple([name for name in entries if name not in self.leaves])
        found = [
            mismatch(leaf, entries[name])
            for name, leaf in self.leaves.items()
            if name in entries
        ]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing, partial)
        return missing, unexpected

    def readings(self, entries: Mapping[str, Entry]) -> dict[str, Reading]:
        found = {
            name: reading(leaf, entries[name])
            for name, leaf in self.leaves.items()
            if name in entries
        }
        return {name: reading for name, reading in found.items() if reading is not None}

    def restored(
        self, entries: Mapping[str, Entry], arrays: Mapping[str, Array]
    ) -> PyTree:
        values = {
            name: self._handlers[name].restore(leaf, entries[name], arrays.get(name))
            for name, leaf in self.leaves.items()
            if name in entries
        }
        # Iterators may refuse: then those that have not are taken back.
        take_back: list[Callable[[], object]] = []
        for name in values:
            iterator = self.leaves[name].value
            if not isinstance(iterator, AbstractInputIterator):
                continue
            # One that cannot be resumed cannot be set either.
            with contextlib.suppress(TypeError):
                before = iterator.get_state()
                take_back.append(functools.partial(iterator.set_state, before))
            try:
                values[name] = self._handlers[name].put(self.leaves[name], values[name])
            except (TypeError, ValueError):
                for undo in take_back:
                    undo()
                raise
        return self._with(values)

    def _with(self, values: dict[str, object]) -> PyTree:
        """The state with other values, in objects that change in place, too."""
        for name, leaf in self.leaves.items():
            if name not in values or values[name] is leaf.value:
                continue
            values[name] = self._handlers[name].put(leaf, values[name])
            if leaf.store is not None and values[name] is not leaf.value:
                leaf.store(values[name])
        found, structure = jax.tree.flatten_with_path(self._tree, is_leaf=_is_whole)
        return jax.tree.unflatten(
            structure,
            [
                leaf if trees.is_object(leaf) else values.get(_name(path), leaf)
                for path, leaf in found
            ],
        )


def _is_whole(node: object) -> bool:
    if trees.is_whole(node) or trees.is_object(node):
        return True
    return is_sharded_variable(node)


def leaves_of(tree: PyTree, replicas: Replicas | None = None) -> dict[str, Leaf]:
    """The values of a state by name; those that lie nowhere yet are for `replicas`."""
    trees.object_kinds()  # those of Flax NNX, if it is imported
    found: dict[str, Leaf] = {}
    nodes = jax.tree.leaves_with_path(tree, is_leaf=_is_whole)
    flags = [False] * len(nodes)
    if replicas is not None:
        flags = building.optimizer_leaves(tree, _is_whole)
    for (path, node), flag in zip(nodes, flags, strict=True):
        name, where = _name(path), jax.tree_util.keystr(path)
        parts = [(Leaf(name, node), where, flag)]
        if trees.is_object(node):
            parts = _parts(node, name, where, flag)
        for leaf, where, is_optimizer in parts:
            if leaf.name in found:
                raise ValueError(
                    f"Two values of the state are both called `{leaf.name}`. Give "
                    "their containers keys that differ when they are text."
                )
            if replicas is not None and is_device_array(leaf.value):
                home = building.sharding_of(where, leaf.value, is_optimizer, replicas)
                leaf = dataclasses.replace(leaf, default_sharding=home)
            found[leaf.name] = leaf
    return found


def _parts(
    owner: Any, name: str, where: str, is_optimizer: bool
) -> Iterator[tuple[Leaf, str, bool]]:
    """The values in an object of Flax NNX, of each variable once.

    With each its path, as JAX says it, and whether it is known to be an optimizer's.
    """
    # Flax need not be installed; but who has such an object has imported it.
    nnx = sys.modules["flax.nnx"]
    nodes = dict(nnx.iter_graph(owner))

    def is_variable(node: object) -> bool:
        return isinstance(node, nnx.Variable)

    found, _ = jax.tree.flatten_with_path(nnx.split(owner)[1], is_leaf=is_variable)
    # The path of each variable and array, by identity.
    paths = {
        id(node): jax.tree_util.keystr(path) + (".value" if is_variable(node) else "")
        for path, node in jax.tree.leaves_with_path(owner, is_leaf=is_variable)
    }
    for keys, _ in found:
        path = tuple(key.key for key in keys)
        label = "/".join([name] * (name != ".") + [_escaped(key) for key in path])
        node = nodes[path]
        at = where + paths.get(id(node), jax.tree_util.keystr(keys))
        if not is_variable(node):
            store = functools.partial(_store, nodes[path[:-1]], path[-1])
            yield Leaf(label, node, store), at, is_optimizer
        elif (value := node.get_raw_value()) is not None:  # None is no leaf elsewhere
            is_state = building.is_optimizer_variable(node)
            yield Leaf(label, value, node.set_raw_value), at, is_state


def _store(owner: Any, key: str | int, value: object) -> None:
    if isinstance(key, str):
        setattr(owner, key, value)
    else:
        owner[key] = value


def _name(path: tuple[Any, ...]) -> str:
    keys = []
    for entry in path:
        key = getattr(entry, "name", entry)
        keys.append(_escaped(getattr(entry, "key", getattr(entry, "idx", key))))
    return "/".join(keys) or "."


def _escaped(key: object) -> str:
    # `~` first: the other way round, `/` and `~1` would become one name.
    return str(key).replace("~", "~0").replace("/", "~1")


# Handlers.


@final
@dataclasses.dataclass(frozen=True)
class Handler:
    """How one kind of value is written to a checkpoint and read from it."""

    accepts: Callable[[object], bool]
    describe: Callable[[Any], str]
    save: Callable[[Leaf], tuple[Entry, Array | None]]  # an entry, and what to write
    restore: Callable[[Leaf, Entry, Array | None], object]
    # The sharding with which an array is read; None for NumPy.
    where: Callable[[Leaf], Sharding | None] = lambda leaf: None
    # Changes the value in place, if it is an object; what then stands there.
    put: Callable[[Leaf, Any], object] = lambda leaf, restored: restored


def handler_of(leaf: Leaf) -> Handler:
    for handler in _HANDLERS:
        if handler.accepts(leaf.value):
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
    if kind == "array" and type(value) in NUMBERS.values():
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
    if entry["kind"] not in ("array", "per_replica"):
        return None
    shape = (*entry["shape"], *entry.get("words", ()))
    sharding = handler_of(leaf).where(leaf)
    is_own = sharding is not None and sharding.is_fully_addressable
    if is_own and jax.process_count() > 1:
        sharding = None  # Orbax reads for all processes, or for the host
    return None if 0 in shape else Reading(shape, _dtype(entry), sharding)


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
    """An array; of a variable the value."""
    if isinstance(leaf.value, Variable):
        _check_has_value(leaf)
        return _array_entry(leaf.value.value())
    _check_alive(leaf.value, leaf.name)
    # Objects, bytes, text, times and differences of times: JAX has none of them.
    if getattr(leaf.value.dtype, "kind", "") in ("O", "S", "U", "M", "m"):
        raise TypeError(
            f"`{leaf.name}` is an array of {leaf.value.dtype}, which a checkpoint "
            "cannot hold. Save numbers, or what JSON can say in `extra`."
        )
    return _array_entry(leaf.value)


def is_device_array(value: object) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def placement(leaf: Leaf) -> Sharding | None:
    """The place of a restored array; None for JAX's default device, uncommitted."""
    own = leaf.value.sharding
    is_free = own is None or isinstance(own, SingleDeviceSharding)
    if is_free and leaf.default_sharding is not None:
        return leaf.default_sharding
    # Placed, an uncommitted array would be committed: JAX then refuses to compute with
    # it and arrays of other devices.
    return own if getattr(leaf.value, "committed", True) else None


def _restore_device_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    found, sharding = _read_array(leaf, entry, array), placement(leaf)
    if isinstance(found, jax.Array) and sharding in (None, found.sharding):
        return found
    return jnp.asarray(found) if sharding is None else mesh.place(found, sharding)


# Variables: the value of all copies together is saved.


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
        accepts=lambda value: isinstance(value, Variable),
        describe=_described_array,
        save=_save_array,
        restore=lambda leaf, *read: _restore_device_array(_as_array(leaf), *read),
        where=lambda leaf: placement(_as_array(leaf)),
        put=_assign,
    ),
    Handler(
        accepts=is_sharded_variable,
        describe=_described_array,
        save=_save_sharded,
        restore=_restore_sharded,
        put=lambda leaf, new: _assign(leaf, new) if leaf.value.holds_variables else new,
    ),
    Handler(
        accepts=lambda value: isinstance(value, PerReplica),
        describe=lambda value: versions(
            per_replica.contents(value).dtype, per_replica.contents(value).shape
        ),
        save=_save_versions,
        restore=_restore_versions,
        where=_sharding_of_versions,
    ),
    Handler(
        accepts=is_device_array,
        describe=_described_array,
        save=_save_array,
        restore=_restore_device_array,
        where=placement,
    ),
    Handler(
        accepts=lambda value: isinstance(value, np.ndarray | np.generic),
        describe=_described_array,
        save=_save_array,
        restore=lambda leaf, *read: np.asarray(_read_array(leaf, *read))[
            () if isinstance(leaf.value, np.generic) else ...
        ],
    ),
    Handler(
        accepts=lambda value: type(value) in NUMBERS.values(),
        describe=lambda value: f"a Python {type(value).__name__}",
        save=_save_number,
        restore=_restore_number,
    ),
    Handler(
        accepts=lambda value: isinstance(value, str),
        describe=lambda value: "a string",
        save=lambda leaf: ({"kind": "text", "value": leaf.value}, None),
        restore=lambda leaf, entry, array: entry["value"],
    ),
    Handler(
        accepts=lambda value: isinstance(value, AbstractInputIterator),
        describe=lambda value: "an iterator",
        save=_save_position,
        restore=_restore_position,
        put=_put_position,
    ),
)
