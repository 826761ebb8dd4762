"""The places in a state where values are, by name: `Slot`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax

from jaxstrategy.checkpoint.sorts._sharded_variable_sort import ShardedVariableSort
from jaxstrategy.values import _optimizer_state, _trees
from jaxstrategy.values._types import PyTree


@final
@dataclasses.dataclass(frozen=True)
class Slot:
    """One place.

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


@final
class Slots:
    """All places of a state.

    Args:
      state: any pytree.

    Raises:
      ValueError: two places have the same name.
    """

    def __init__(self, state: PyTree) -> None:
        _trees.object_kinds()  # those of Flax NNX, if it is imported
        leaves, self._structure = jax.tree.flatten_with_path(state, is_leaf=_is_whole)
        self._leaves = [leaf for _, leaf in leaves]
        self._names = [_name(path) for path, _ in leaves]
        flags = _optimizer_state.optimizer_leaves(state, _is_whole)
        self.all = [
            slot
            for (path, leaf), name, flag in zip(leaves, self._names, flags, strict=True)
            for slot in _slots(Slot(name, leaf, jax.tree_util.keystr(path), flag))
        ]
        seen = set()
        for slot in self.all:
            if slot.name in seen:
                raise ValueError(
                    f"Two values of the state are both called `{slot.name}`. Give "
                    "their containers keys that differ when they are text."
                )
            seen.add(slot.name)

    def filled(self, values: Mapping[str, object]) -> PyTree:
        """The state with other values.

        Objects are not changed by this.

        Args:
          values: by name; where there is none, the state's own stays.
        """
        leaves = [
            leaf if _trees.is_object(leaf) else values.get(name, leaf)
            for name, leaf in zip(self._names, self._leaves, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _is_whole(node: object) -> bool:
    if _trees.is_whole(node) or _trees.is_object(node):
        return True
    return ShardedVariableSort.takes(node)


def _slots(slot: Slot) -> Iterator[Slot]:
    if _trees.is_object(slot.value):
        yield from _parts(slot)
    else:
        yield slot


def _parts(slot: Slot) -> Iterator[Slot]:
    """The places in an object of Flax NNX: each of its variables once."""
    # Flax need not be installed; but who has such an object has imported it.
    nnx = sys.modules["flax.nnx"]
    owner, name = slot.value, slot.name
    nodes = dict(nnx.iter_graph(owner))
    _, state = nnx.split(owner)
    found, _ = jax.tree.flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    paths = _paths(owner)
    for keys, _ in found:
        path = tuple(key.key for key in keys)
        label = "/".join([name] * (name != ".") + [_escaped(key) for key in path])
        node = nodes[path]
        where = slot.path + paths.get(id(node), jax.tree_util.keystr(keys))
        if isinstance(node, nnx.Variable):
            value = node.get_raw_value()
            if value is not None:  # as little a value as elsewhere in a pytree
                is_optimizer = _optimizer_state.is_optimizer_variable(node)
                yield Slot(label, value, where, is_optimizer, node.set_raw_value)
        else:
            put = _setter(nodes[path[:-1]], path[-1])
            yield Slot(label, node, where, slot.is_optimizer, put)


def _paths(owner: object) -> dict[int, str]:
    """The path of each variable and array of an object, as JAX says it, by identity."""
    nnx = sys.modules["flax.nnx"]

    def is_variable(node: object) -> bool:
        return isinstance(node, nnx.Variable)

    return {
        id(node): jax.tree_util.keystr(path) + (".value" if is_variable(node) else "")
        for path, node in jax.tree.leaves_with_path(owner, is_leaf=is_variable)
    }


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
