"""A description by which objects are put together from arrays: `ObjectForm`."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypeGuard

import jax

from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.text.shown import listed
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.trees import is_object, object_kinds

NodePath: TypeAlias = tuple[Hashable, ...]
"""An object's index in a list of objects, then the names that lead to a part of it."""


class FlaxVariable(Protocol):
    """The methods of `nnx.Variable` that this folder calls.

    The class itself cannot be named: Flax is optional, and not imported from here.
    """

    @property
    def ref(self) -> bool:
        """Whether it holds a `jax.Ref`."""
        ...

    def get_raw_value(self) -> Leaf:
        """What it holds."""
        ...

    def set_raw_value(self, value: Leaf) -> None:
        """Lets it hold another value."""
        ...

    def get_metadata(self) -> Mapping[str, object]:
        """What Flax is told to do with it."""
        ...

    def replace(self, value: Leaf) -> FlaxVariable:
        """One like it that holds another value."""
        ...


def is_changed_in_place(node: object) -> bool:
    """Whether a step may change `node` in place: an object, or a variable alone."""
    return bool(object_kinds()) and (is_object(node) or is_variable(node))


def is_variable(node: object) -> TypeGuard[FlaxVariable]:
    """Whether `node` holds an array of an object."""
    return _holds(type(node))


@functools.lru_cache(maxsize=1024)
def _holds(kind: type) -> bool:
    # Flax's own `isinstance` takes ten times as long.
    return issubclass(kind, sys.modules["flax.nnx"].Variable)


def structure_of(node: object) -> tuple[Hashable, list[int]]:
    """Equal as long as an object has the same variables and static attributes."""
    variables, structure = jax.tree.flatten(node, is_leaf=is_variable)
    # By identity: `==` of two variables compares their arrays, and returns an array.
    return structure, list(map(id, variables))


def is_whole_object(node: object) -> bool:
    if is_changed_in_place(node) or trees.is_whole(node):
        return True
    # The variables of a state are copies: it is passed, and returned, as a pytree.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


# By identity: JAX hashes it within a structure, and a list as `value` has no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class AttributeChange:
    """A change that a step makes to an object, besides those of its arrays."""

    path: NodePath
    name: str
    value: object


GONE = object()

# Of `Parts`, what JAX compares and no program is given.
_Static: TypeAlias = "tuple[tuple[str, ...], tuple[AttributeChange, ...]]"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arrays that stand for an object."""

    arrays: Sequence[Leaf]
    names: tuple[str, ...]
    changes: tuple[AttributeChange, ...] = ()

    def tree_flatten(self) -> tuple[Sequence[Leaf], _Static]:
        """For JAX."""
        return self.arrays, (self.names, self.changes)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Hashable, Leaf]], _Static]:
        """For JAX."""
        keys = map(jax.tree_util.GetAttrKey, self.names)
        return list(zip(keys, self.arrays, strict=True)), (self.names, self.changes)

    @classmethod
    def tree_unflatten(cls, aux: _Static, arrays: Sequence[Leaf]) -> Parts:
        """For JAX."""
        return cls(arrays, *aux)


# Static: a compiled step returns arrays alone, and marks in the structure around them.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """In what a step returns: one of the caller's objects, or a part of one."""

    path: NodePath


def apply(
    changes: Sequence[AttributeChange], by_path: Mapping[NodePath, object]
) -> None:
    for change in changes:
        if change.value is GONE:
            delattr(by_path[change.path], change.name)
        else:
            setattr(by_path[change.path], change.name, change.value)


def dotted(path: Sequence[object]) -> str:
    """`layers[0].kernel`, without the object's own place."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path[1:])
    return text.removeprefix(".") or "value"


def is_parts(node: object) -> bool:
    """Whether `node` stands for an object."""
    return isinstance(node, Parts)


def is_whole_or_parts(node: object) -> bool:
    """Whether `node` stands for an object, or is looked at as a whole."""
    return is_parts(node) or trees.is_whole(node)


@dataclasses.dataclass
class ObjectForm:
    """A description by which objects are put together from arrays, and taken apart."""

    graph: Hashable
    structure: Hashable
    owners: tuple[tuple[int, ...], ...]
    names: tuple[tuple[str, ...], ...]
    templates: list[FlaxVariable | None] = dataclasses.field(repr=False)
    returns_objects: bool = False

    @property
    def key(self) -> Hashable:
        """Equal for objects that are alike."""
        # The structure of variables has their metadata: what Flax does with them.
        variables = jax.tree.structure(self.templates)
        return self.graph, self.structure, self.owners, variables

    def put_together(self, parts: Sequence[Parts]) -> list[object]:
        """New objects with these arrays."""
        values = self._in_order(parts)
        state = jax.tree.unflatten(
            self.structure,
            [
                value if like is None else like.replace(value)
                for like, value in zip(self.templates, values, strict=True)
            ],
        )
        return sys.modules["flax.nnx"].merge(self.graph, state)

    def _in_order(self, parts: Sequence[Parts]) -> list[Leaf]:
        values: list[Leaf] = [None] * len(self.templates)
        for own, part in zip(self.owners, parts, strict=True):
            for i, array in zip(own, part.arrays, strict=True):
                values[i] = array
        return values

    def take_apart(
        self, objects: Sequence[object], given: Sequence[Parts]
    ) -> list[Parts]:
        """The arrays of objects that were put together so, after the step."""
        graph, state = sys.modules["flax.nnx"].split(objects)
        leaves, structure = jax.tree.flatten(state, is_leaf=is_variable)
        if structure != self.structure:
            raise ObjectError(
                "The step changed which variables its objects have: "
                f"{_difference(sum(self.names, ()), _paths(state))}. A compiled step "
                "gives back new arrays for the same variables: do this outside `run`, "
                "or take away (`nnx.pop`) what the step has added."
            )
        old = self._in_order(given)
        values = [self._new_value(i, leaf, old[i]) for i, leaf in enumerate(leaves)]
        changes = () if graph == self.graph else self._changes(objects, graph, state)
        return [
            Parts([values[i] for i in own], names, changes)
            for own, names in zip(self.owners, self.names, strict=True)
        ]

    def _new_value(self, index: int, new: Leaf, old: Leaf) -> Leaf:
        """The value of a variable after the step; None of an array that is in none."""
        like = self.templates[index]
        if like is not None:
            if like.get_metadata() != new.get_metadata():
                raise ObjectError(
                    f"The step changed the metadata of `{self._name(index)}`, which a "
                    "compiled step cannot give back. Do this outside `run`."
                )
            return new.get_raw_value()
        if new is not old:
            raise ObjectError(
                f"The step changed `{self._name(index)}`, an array that is in no "
                "variable, so that it cannot be given back. Write "
                "`nnx.Variable(array)` where it is made."
            )

    def _name(self, index: int) -> str:
        places = zip(sum(self.owners, ()), sum(self.names, ()), strict=True)
        return dict(places)[index]

    def _changes(
        self, objects: Sequence[object], graph: Hashable, state: PyTree
    ) -> tuple[AttributeChange, ...]:
        """The changes that a step made besides those of arrays."""
        nnx = sys.modules["flax.nnx"]
        copies = nnx.merge(self.graph, state)
        before = dict(nnx.iter_graph(copies))
        changes = []
        for path, node in nnx.iter_graph(objects):
            old = before.get(path)
            if is_object(node) and type(node) is type(old):
                changes += _changed_attributes(path, vars(old), vars(node))
        apply(changes, before)
        if nnx.split(copies)[0] != graph:
            raise ObjectError(
                "The step changed which objects the attributes of its objects refer "
                "to, which a compiled step cannot give back. Do this outside `run`."
            )
        return tuple(changes)


def _changed_attributes(
    path: NodePath, old: dict[str, object], new: dict[str, object]
) -> Iterator[AttributeChange]:
    for name in [*new, *(name for name in old if name not in new)]:
        # Flax's own state of an object, by its name today and the one before.
        if name.startswith(("_pytree__", "_object__")):
            continue
        was, now = old.get(name, GONE), new.get(name, GONE)
        if _is_plain(was) and _is_plain(now) and (was is GONE or was != now):
            yield AttributeChange(path, name, now)


def _is_plain(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_changed_in_place)
    return not any(
        is_changed_in_place(leaf) or isinstance(leaf, jax.Array) for leaf in leaves
    )


def _paths(state: PyTree) -> set[str]:
    found, _ = jax.tree.flatten_with_path(state, is_leaf=is_variable)
    return {dotted([key.key for key in path]) for path, _ in found}


def _difference(before: Sequence[str], after: set[str]) -> str:
    added, removed = sorted(after - set(before)), sorted(set(before) - after)
    told = [f"added {listed(added, 3, '`')}"] * bool(added)
    told += [f"removed {listed(removed, 3, '`')}"] * bool(removed)
    return ", ".join(told) or "two names share one now, or do not any more"
