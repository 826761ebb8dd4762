"""The places in a state where values are, by name: `Slot`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import jax

from jaxstrategy.values import _trees
from jaxstrategy.values._types import PyTree


@final
@dataclasses.dataclass(frozen=True)
class Slot:
    """One place.

    Attributes:
      name: the way to it, `params/dense/kernel`; `.` of a state that is one value.
      value: what is there.
      store: puts another value there, if it is in an object that changes in place.
    """

    name: str
    value: object
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
        self.all = [
            slot
            for name, leaf in zip(self._names, self._leaves, strict=True)
            for slot in _slots(name, leaf)
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
    return _trees.is_whole(node) or _trees.is_object(node)


def _slots(name: str, leaf: object) -> Iterator[Slot]:
    if _trees.is_object(leaf):
        yield from _parts(name, leaf)
    else:
        yield Slot(name, leaf)


def _parts(name: str, owner: object) -> Iterator[Slot]:
    """The places in an object of Flax NNX: each of its variables once."""
    # Flax need not be installed; but who has such an object has imported it.
    nnx = sys.modules["flax.nnx"]
    nodes = dict(nnx.iter_graph(owner))
    _, state = nnx.split(owner)
    found, _ = jax.tree.flatten_with_path(
        state, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    for keys, _ in found:
        path = tuple(key.key for key in keys)
        label = "/".join([name] * (name != ".") + [_escaped(key) for key in path])
        node = nodes[path]
        if isinstance(node, nnx.Variable):
            value = node.get_raw_value()
            if value is not None:  # as little a value as elsewhere in a pytree
                yield Slot(label, value, node.set_raw_value)
        else:
            yield Slot(label, node, _setter(nodes[path[:-1]], path[-1]))


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
