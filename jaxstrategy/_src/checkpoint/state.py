"""A state as what is written of it, and back: its values by name."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import jax

from jaxstrategy._src.checkpoint import handlers
from jaxstrategy._src.checkpoint.handlers import Array, Entry, Leaf, Reading
from jaxstrategy._src.checkpoint.record import MismatchError
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values import building, trees
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.building import sharding_of


@final
@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A place in a state.

    Attributes:
      name: the way to it, `params/dense/kernel`; `.` of a state that is one value.
      value: what is there.
      path: the same as JAX says it, `.params['dense']['kernel']`.
      is_optimizer: whether it is known to be an optimizer's.
      store: puts another value there, if it is in an object that changes in place.
    """

    name: str
    value: object
    path: str
    is_optimizer: bool
    store: Callable[[object], None] | None = None


class Fit(NamedTuple):
    """Names that both have, that only the state has, and only the checkpoint."""

    common: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@final
class State:
    """The values of a state, by name."""

    def __init__(self, tree: PyTree, replicas: Replicas | None = None) -> None:
        self._tree = tree
        self._slots = slots(tree)
        self._leaves = {
            slot.name: Leaf(slot.name, slot.value, _home(slot, replicas))
            for slot in self._slots
        }
        self._handlers = {n: handlers.handler_of(v) for n, v in self._leaves.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in their order."""
        return tuple(self._leaves)

    @contextlib.contextmanager
    def snapshot(self, step: int) -> Iterator[None]:
        """A `with` block: what is read in it for checkpoint `step` is of one moment."""
        owners = [getattr(slot.value, "strategy", None) for slot in self._slots]
        strategies = [each for each in owners if isinstance(each, AbstractStrategy)]
        with contextlib.ExitStack() as stack:
            for strategy in {id(each): each for each in strategies}.values():
                stack.enter_context(strategy._variable_policy.snapshot(step))
            yield

    def saved(self) -> tuple[dict[str, Entry], dict[str, Array]]:
        """The entry of each value, and the arrays to write."""
        entries, arrays = {}, {}
        for name, leaf in self._leaves.items():
            entries[name], array = self._handlers[name].save(leaf)
            if array is not None:
                arrays[name] = array
        return entries, arrays

    def placed(self) -> PyTree:
        """The state as it is, where a restored one would be."""
        return self._with(
            {n: self._handlers[n].place(v) for n, v in self._leaves.items()}
        )

    def fit(self, entries: Mapping[str, Entry], where: str, partial: bool) -> Fit:
        """Compares with what a checkpoint has."""
        common = tuple(name for name in self._leaves if name in entries)
        missing = tuple(name for name in self._leaves if name not in entries)
        unexpected = tuple(name for name in entries if name not in self._leaves)
        found = [
            self._handlers[name].mismatch(self._leaves[name], entries[name])
            for name in common
        ]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing, partial)
        return Fit(common, missing, unexpected)

    def readings(
        self, entries: Mapping[str, Entry], names: tuple[str, ...]
    ) -> dict[str, Reading]:
        """What the arrays of these values are to be read as."""
        found = {
            n: self._handlers[n].reading(self._leaves[n], entries[n]) for n in names
        }
        return {name: reading for name, reading in found.items() if reading is not None}

    def restored(
        self,
        entries: Mapping[str, Entry],
        names: tuple[str, ...],
        arrays: Mapping[str, Array],
    ) -> PyTree:
        """The state with what was saved."""
        values = {
            name: self._handlers[name].restore(
                self._leaves[name], entries[name], arrays.get(name)
            )
            for name in names
        }
        taken_back: list[Callable[[], object]] = []
        for name in values:
            handler, leaf = self._handlers[name], self._leaves[name]
            if handler.undo is None:
                continue
            taken_back.append(handler.undo(leaf))
            try:
                values[name] = handler.put(leaf, values[name])
            except (TypeError, ValueError):
                for take_back in taken_back:
                    take_back()
                raise
        return self._with(values)

    def _with(self, values: dict[str, object]) -> PyTree:
        """The state with other values, in objects that change in place, too."""
        for slot in self._slots:
            name = slot.name
            if name not in values or values[name] is slot.value:
                continue
            values[name] = self._handlers[name].put(self._leaves[name], values[name])
            if slot.store is not None and values[name] is not slot.value:
                slot.store(values[name])
        leaves, structure = _flattened(self._tree)
        return jax.tree.unflatten(
            structure,
            [
                leaf if trees.is_object(leaf) else values.get(_name(path), leaf)
                for path, leaf in leaves
            ],
        )


def _home(slot: StateLeaf, replicas: Replicas | None) -> Any:
    """The place of an array that lies nowhere yet; None for JAX's default device."""
    if replicas is None or not handlers.is_device_array(slot.value):
        return None
    return sharding_of(slot.path, slot.value, slot.is_optimizer, replicas)


def _flattened(tree: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree.flatten_with_path(tree, is_leaf=_is_whole)


def _is_whole(node: object) -> bool:
    if trees.is_whole(node) or trees.is_object(node):
        return True
    return handlers.is_sharded_variable(node)


def slots(tree: PyTree) -> list[StateLeaf]:
    """All places of a state."""
    trees.object_kinds()  # those of Flax NNX, if it is imported
    leaves, _ = _flattened(tree)
    flags = building.optimizer_leaves(tree, _is_whole)
    found: dict[str, StateLeaf] = {}
    for (path, leaf), flag in zip(leaves, flags, strict=True):
        slot = StateLeaf(_name(path), leaf, jax.tree_util.keystr(path), flag)
        for each in _parts(slot) if trees.is_object(leaf) else [slot]:
            if each.name in found:
                raise ValueError(
                    f"Two values of the state are both called `{each.name}`. Give "
                    "their containers keys that differ when they are text."
                )
            found[each.name] = each
    return list(found.values())


def _parts(slot: StateLeaf) -> Iterator[StateLeaf]:
    """The places in an object of Flax NNX: each of its variables once."""
    # Flax need not be installed; but who has such an object has imported it.
    nnx = sys.modules["flax.nnx"]
    owner, name = slot.value, slot.name
    nodes = dict(nnx.iter_graph(owner))

    def is_variable(node: object) -> bool:
        return isinstance(node, nnx.Variable)

    found, _ = jax.tree.flatten_with_path(nnx.split(owner)[1], is_leaf=is_variable)
    # The path of each variable and array, as JAX says it, by identity.
    paths = {
        id(node): jax.tree_util.keystr(path) + (".value" if is_variable(node) else "")
        for path, node in jax.tree.leaves_with_path(owner, is_leaf=is_variable)
    }
    for keys, _ in found:
        path = tuple(key.key for key in keys)
        label = "/".join([name] * (name != ".") + [_escaped(key) for key in path])
        node = nodes[path]
        where = slot.path + paths.get(id(node), jax.tree_util.keystr(keys))
        if is_variable(node):
            value = node.get_raw_value()
            if value is not None:  # as little a value as elsewhere in a pytree
                is_optimizer = building.is_optimizer_variable(node)
                yield StateLeaf(label, value, where, is_optimizer, node.set_raw_value)
        else:
            put = _setter(nodes[path[:-1]], path[-1])
            yield StateLeaf(label, node, where, slot.is_optimizer, put)


def _setter(owner: Any, key: str | int) -> Callable[[object], None]:
    def put(value: object) -> None:
        if isinstance(key, str):
            setattr(owner, key, value)
        else:
            owner[key] = value

    return put


def _name(path: tuple[object, ...]) -> str:
    return "/".join(_escaped(_key(entry)) for entry in path) or "."


def _key(entry: object) -> object:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _escaped(key: object) -> str:
    # `~` first: the other way round, `/` and `~1` would become one name.
    return str(key).replace("~", "~0").replace("/", "~1")
