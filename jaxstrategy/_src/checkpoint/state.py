"""A state as what is written of it, and back: its values by name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax

from jaxstrategy._src.checkpoint import handlers
from jaxstrategy._src.checkpoint.handlers import Array, Entry, Leaf, Reading
from jaxstrategy._src.checkpoint.record import MismatchError
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.inputs.iterator import AbstractInputIterator
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values import building, trees
from jaxstrategy._src.values.arrays import PyTree


@final
class State:
    """A state, and its values by name."""

    def __init__(self, tree: PyTree, replicas: Replicas | None = None) -> None:
        self._tree = tree
        self.leaves = leaves_of(tree, replicas)
        self._handlers = {n: handlers.handler_of(v) for n, v in self.leaves.items()}

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
        """The entry of each value, and the arrays to write."""
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
            value, home = leaf.value, leaf.home
            if isinstance(value, jax.Array) and home is not None:
                if handlers.placement(leaf) != value.sharding:
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
        missing = tuple(name for name in self.leaves if name not in entries)
        unexpected = tuple(name for name in entries if name not in self.leaves)
        found = [
            handlers.mismatch(leaf, entries[name])
            for name, leaf in self.leaves.items()
            if name in entries
        ]
        differing = [text for text in found if text is not None]
        if differing or (not partial and (missing or unexpected)):
            raise MismatchError(where, missing, unexpected, differing, partial)
        return missing, unexpected

    def readings(self, entries: Mapping[str, Entry]) -> dict[str, Reading]:
        """What the arrays of a checkpoint are to be read as."""
        found = {
            name: handlers.reading(leaf, entries[name])
            for name, leaf in self.leaves.items()
            if name in entries
        }
        return {name: reading for name, reading in found.items() if reading is not None}

    def restored(
        self, entries: Mapping[str, Entry], arrays: Mapping[str, Array]
    ) -> PyTree:
        """The state with what was saved."""
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
    return handlers.is_sharded_variable(node)


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
            if replicas is not None and handlers.is_device_array(leaf.value):
                home = building.sharding_of(where, leaf.value, is_optimizer, replicas)
                leaf = dataclasses.replace(leaf, home=home)
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
        attributes = (a for a in ("key", "idx", "name") if hasattr(entry, a))
        attribute = next(attributes, None)
        keys.append(entry if attribute is None else getattr(entry, attribute))
    return "/".join(map(_escaped, keys)) or "."


def _escaped(key: object) -> str:
    # `~` first: the other way round, `/` and `~1` would become one name.
    return str(key).replace("~", "~0").replace("/", "~1")
