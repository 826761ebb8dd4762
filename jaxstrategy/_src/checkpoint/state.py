"""A state as what is written of it, and back: handlers of its values by name."""

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
from jaxstrategy._src.checkpoint.folder import (
    NUMBERS,
    Entry,
    MismatchError,
    described,
)
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.inputs.iterator import AbstractInputIterator
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.processes.rendezvous import Json
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import PerReplica
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
        self._entries = {name: entry_of(leaf) for name, leaf in self.leaves.items()}

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """A `with` block: what is read in it for checkpoint `step` is of one moment."""
        owners = [getattr(x.value, "strategy", None) for x in self.leaves.values()]
        strategies = [each for each in owners if isinstance(each, AbstractStrategy)]
        with contextlib.ExitStack() as stack:
            for strategy in {id(each): each for each in strategies}.values():
                if (pause := strategy._variable_policy.pause) is not None:
                    stack.enter_context(pause(step))
            yield

    def saved(
        self, what: str, said: Json = None
    ) -> tuple[dict[str, Entry], dict[str, Array], list[Json]]:
        """Entries, arrays to be written, and what each process says besides."""
        entries, arrays = {}, {}
        for name, leaf in self.leaves.items():
            handler = HANDLERS[self._entries[name]["kind"]]
            entries[name], array = handler.save(leaf, dict(self._entries[name]))
            if array is not None:
                arrays[name] = array
        told = [f"`{name}` ({described(each)})" for name, each in entries.items()]
        return entries, arrays, agreement.compare_leaves(what, told, said)

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

    def restored(
        self,
        entries: Mapping[str, Entry],
        where: str,
        partial: bool,
        read: Callable[[Mapping[str, Reading]], dict[str, Array]],
    ) -> tuple[PyTree, tuple[str, ...], tuple[str, ...]]:
        """The state with the saved values, and the names that only one of both has.

        Raises:
          MismatchError: there are some, which is not `partial`; or a value differs.
        """
        missing = tuple([name for name in self.leaves if name not in entries])
        unexpected = tuple([name for name in entries if name not in self.leaves])
        both = {n: (v, entries[n]) for n, v in self.leaves.items() if n in entries}
        found = [mismatch(*each, self._entries[name]) for name, each in both.items()]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing, partial)
        readings = {name: reading(*each) for name, each in both.items()}
        arrays = read({name: each for name, each in readings.items() if each})
        values = {
            name: HANDLERS[self._entries[name]["kind"]].restore(*each, arrays.get(name))
            for name, each in both.items()
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
                values[name] = _put(self.leaves[name], values[name])
            except (TypeError, ValueError):
                for undo in take_back:
                    undo()
                raise
        return self._with(values), missing, unexpected

    def _with(self, values: dict[str, object]) -> PyTree:
        """The state with other values, in objects that change in place, too."""
        for name, leaf in self.leaves.items():
            if name not in values or values[name] is leaf.value:
                continue
            values[name] = _put(leaf, values[name])
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
            if replicas is not None and _is_of_devices(leaf.value):
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


# Handlers. Variables, tables in several shards, `PerReplica`s and arrays are all saved
# as one array; so they are restored into each other.


def array_like(value: Any) -> Any:
    """The array that is saved of a value, or its type; None of other values."""
    if isinstance(value, Variable):
        sharding = value.sharding_of_value
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if is_sharded_variable(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    if isinstance(value, PerReplica):
        return per_replica.contents(value)
    is_array = isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray)
    return value if is_array or isinstance(value, np.generic) else None


def entry_of(leaf: Leaf) -> Entry:
    """What a record says of a value, but for its contents."""
    value, like = leaf.value, array_like(leaf.value)
    if like is not None:  # NumPy's float64 is a float of Python, too
        if not hasattr(like, "dtype"):
            raise TypeError(
                f"`{leaf.name}` is a PerReplica of a {type(like).__name__}; one of an "
                "array was wanted."
            )
        kind = "per_replica" if isinstance(value, PerReplica) else "array"
        return {"kind": kind, "dtype": str(like.dtype), "shape": list(like.shape)}
    if type(value) in NUMBERS.values():
        return {"kind": "number", "type": type(value).__name__}
    if isinstance(value, str):
        return {"kind": "text"}
    if isinstance(value, AbstractInputIterator):
        return {"kind": "iterator"}
    raise TypeError(
        f"`{leaf.name}` is a {type(value).__name__}, which a checkpoint cannot "
        "hold. It holds arrays, numbers, strings, variables, PerReplicas, objects of "
        "Flax NNX and iterators of distributed datasets. Keep functions and other "
        "objects out of the state, or put what JSON can say into `extra`."
    )


def mismatch(leaf: Leaf, entry: Entry, own: Entry) -> str | None:
    """Why an entry cannot be restored into a value; None if it can."""
    _check_has_value(leaf)
    kind, saved = entry["kind"], described(entry)
    if kind == own["kind"] == "iterator":
        states, now = entry["states"], jax.process_count()
        if len(states) == now or states.count(states[0]) == len(states):
            return None
        return (
            f"`{leaf.name}` was read by {len(states)} processes, each a part of its "
            f"own, and there are {now} now; use as many, or a source that all "
            "processes read alike (`jaxstrategy.batches`)"
        )
    wanted = "an iterator" if own["kind"] == "iterator" else described(own)
    if saved == wanted:
        return None
    if kind == "number" and own["kind"] == "array" and own["shape"] == []:
        kinds = list(_ABSTRACT)
        may_be = [_ABSTRACT[k] for k in kinds[kinds.index(entry["type"]) :]]
        if any(jnp.issubdtype(leaf.value.dtype, each) for each in may_be):
            return None
    if kind == "array" and own["kind"] == "number":
        is_scalar = entry["shape"] == [] and "impl" not in entry
        abstract = _ABSTRACT[own["type"]]
        if is_scalar and jnp.issubdtype(jnp.dtype(entry["dtype"]), abstract):
            return None
    text = f"`{leaf.name}` is {saved} in the checkpoint, and {wanted} was wanted"
    if kind == own["kind"] == "per_replica":
        text += (
            "; versions of single replicas mean nothing to another number of them: "
            "reduce the value before saving (`strategy.reduce`)"
        )
    return text


# What a number of Python may become; the first it is.
_ABSTRACT = {
    "bool": jnp.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


def reading(leaf: Leaf, entry: Entry) -> Reading | None:
    """How the array of an entry is read; None if nothing was written of it."""
    if entry["kind"] not in ("array", "per_replica"):
        return None
    shape, sharding = (*entry["shape"], *entry.get("words", ())), placement(leaf)
    is_own = sharding is not None and sharding.is_fully_addressable
    if is_own and jax.process_count() > 1:
        sharding = None  # Orbax reads for all processes, or for the host
    dtype = jnp.dtype("uint32" if "impl" in entry else entry["dtype"])
    return None if 0 in shape else Reading(shape, dtype, sharding)


def _check_numbers(value: object, name: str) -> None:
    """Raise if an array has none."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"`{name}` is the type of an array, a ShapeDtypeStruct, and has no numbers "
            "that a checkpoint could hold. Save the array itself."
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise DonatedValueError(
            f"`{name}` was donated to an earlier step, so it cannot be saved. Save the "
            "state that the step returned."
        )


def _check_has_value(leaf: Leaf) -> None:
    """Raise ValueError if the value is a variable that has no one value."""
    variables = [leaf.value]
    if isinstance(leaf.value, ShardedVariable):
        variables = leaf.value.variables
    for each in variables:
        if not isinstance(each, Variable):
            continue
        if not each._kind.is_readable:
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


def is_sharded_variable(value: object) -> bool:
    """Whether it is a `ShardedVariable` of variables, or of arrays in their place."""
    if not isinstance(value, ShardedVariable):
        return False
    # What JAX puts in the place of shards may be anything.
    arrays = (jax.Array, jax.ShapeDtypeStruct)
    return value.holds_variables or all(isinstance(x, arrays) for x in value.variables)


def placement(leaf: Leaf) -> Sharding | None:
    """Where an array is read to; None for one of NumPy, or JAX's default device."""
    value, like = leaf.value, array_like(leaf.value)
    own = getattr(like, "sharding", None)
    if isinstance(value, Variable | PerReplica) or not _is_of_devices(like):
        return own
    is_free = own is None or isinstance(own, SingleDeviceSharding)
    if is_free and leaf.default_sharding is not None:
        return leaf.default_sharding
    # Placed, an uncommitted array would be committed: JAX then refuses to compute with
    # it and arrays of other devices.
    return own if getattr(like, "committed", True) else None


def _is_of_devices(value: object) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


def _save_array(leaf: Leaf, entry: Entry) -> tuple[Entry, Array | None]:
    _check_has_value(leaf)
    value = leaf.value
    if isinstance(value, Variable):
        value = value.value()
    elif isinstance(value, PerReplica):
        value = per_replica.contents(value)
    elif isinstance(value, ShardedVariable):
        for shard in value.variables:
            _check_numbers(shard, leaf.name)
        value = value.numpy()  # over the host: no device need have all of it
    _check_numbers(value, leaf.name)
    # Objects, bytes, text, times and differences of times: JAX has none of them.
    if getattr(value.dtype, "kind", "") in ("O", "S", "U", "M", "m"):
        raise TypeError(
            f"`{leaf.name}` is an array of {value.dtype}, which a checkpoint "
            "cannot hold. Save numbers, or what JSON can say in `extra`."
        )
    mask = leaf.value.mask if isinstance(leaf.value, PerReplica) else None
    if mask is not None:
        entry["mask"] = np.asarray(mask).tolist()
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


def _restore_array(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    value, like = leaf.value, array_like(leaf.value)
    if entry["kind"] == "number":
        array = np.asarray(_number(entry), like.dtype)
    elif array is None:  # nothing was written of an array without elements
        words = entry.get("words", ())
        array = np.zeros((*entry["shape"], *words), "uint32" if words else like.dtype)
    if "impl" in entry:
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=entry["impl"])
    if isinstance(value, ShardedVariable):
        return _cut(leaf, np.asarray(array))
    sharding = placement(leaf)
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(array)[() if isinstance(like, np.generic) else ...]
    elif not isinstance(array, jax.Array) or sharding not in (None, array.sharding):
        array = jnp.asarray(array) if sharding is None else mesh.place(array, sharding)
    if not isinstance(value, PerReplica):
        return array
    if "mask" not in entry:
        return PerReplica(array)
    mask = np.asarray(entry["mask"], bool)
    if isinstance(value.mask, jax.Array):
        mask = mesh.place(mask, value.mask.sharding)
    return per_replica.with_mask(PerReplica(array), mask)


def _cut(leaf: Leaf, whole: np.ndarray) -> object:
    """An array for a table in several shards."""
    if leaf.value.holds_variables:
        return whole
    shards, structure = jax.tree.flatten(leaf.value)
    ends = itertools.accumulate((len(each) for each in shards), initial=0)
    parts = [
        _restore_array(dataclasses.replace(leaf, value=shard), {"kind": "array"}, part)
        for shard, part in zip(
            shards, (whole[a:b] for a, b in itertools.pairwise(ends)), strict=True
        )
    ]
    return jax.tree.unflatten(structure, parts)


# Numbers of Python, which the record itself holds.


def _number(entry: Entry) -> complex:
    value = entry["value"]
    return complex(*value) if entry["type"] == "complex" else value


def _save_number(leaf: Leaf, entry: Entry) -> tuple[Entry, None]:
    value = leaf.value
    is_complex = isinstance(value, complex)
    return {**entry, "value": [value.real, value.imag] if is_complex else value}, None


def _restore_number(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    if entry["kind"] == "number":
        return _number(entry)
    assert array is not None, "it has an element"
    return type(leaf.value)(array.item())


# Positions of passes over datasets, one for each process in the record.


def _save_position(leaf: Leaf, entry: Entry) -> tuple[Entry, None]:
    try:
        state = leaf.value.get_state()
    except TypeError as error:
        raise TypeError(f"`{leaf.name}` cannot be saved: {error}") from error
    what = f"save the position of `{leaf.name}`"
    return {**entry, "states": agreement.agree(what, state)}, None


def _restore_position(leaf: Leaf, entry: Entry, array: Array | None) -> object:
    states = entry["states"]
    is_own = len(states) == jax.process_count()
    return states[jax.process_index() if is_own else 0]


def _put(leaf: Leaf, restored: Any) -> object:
    """Changes a value in place if it is an object; what then stands there."""
    value = leaf.value
    if isinstance(value, AbstractInputIterator):
        try:
            value.set_state(restored)
        except (TypeError, ValueError) as error:
            error.add_note(f"`{leaf.name}` was to be restored from a checkpoint.")
            raise
        return value
    is_table = isinstance(value, ShardedVariable) and value.holds_variables
    if not is_table and not isinstance(value, Variable):
        return restored
    value.assign(restored)
    return value


class Handler(NamedTuple):
    """How values of one kind are written to a checkpoint and read from it."""

    # What is known of the value, completed, and what is to be written.
    save: Callable[[Leaf, Entry], tuple[Entry, Array | None]]
    restore: Callable[[Leaf, Entry, Array | None], object]


_ARRAYS = Handler(_save_array, _restore_array)
HANDLERS = {
    "array": _ARRAYS,
    "per_replica": _ARRAYS,
    "number": Handler(_save_number, _restore_number),
    "text": Handler(
        lambda leaf, entry: ({**entry, "value": leaf.value}, None),
        lambda leaf, entry, array: entry["value"],
    ),
    "iterator": Handler(_save_position, _restore_position),
}
