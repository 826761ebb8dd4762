"""The caller's objects of Flax NNX as arrays, and objects put together from arrays."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from jaxstrategy._errors import ObjectError
from jaxstrategy.text._lists import listed
from jaxstrategy.tracing.functions import _callbacks
from jaxstrategy.values._per_replica import (
    PyTree,
    is_object,
    object_kinds,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Change:
    """What a step changes of an object besides arrays.

    Attributes:
      path: of the object, from the list of all.
      name: of its attribute.
      value: what that is now; `_GONE` if there is none any more.
    """

    path: tuple[Any, ...]
    name: str
    value: Any


_GONE = object()


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arrays that stand for an object.

    Attributes:
      arrays: they, or what else its variables hold.
      names: how messages call them.
      changes: what a step changes besides, of all objects.
    """

    arrays: Sequence[Any]
    names: tuple[str, ...]
    changes: tuple[_Change, ...] = ()

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        """For JAX."""
        return self.arrays, (self.names, self.changes)

    def tree_flatten_with_keys(self) -> tuple[list[Any], Any]:
        """For JAX."""
        keys = map(jax.tree_util.GetAttrKey, self.names)
        return list(zip(keys, self.arrays, strict=True)), (self.names, self.changes)

    @classmethod
    def tree_unflatten(cls, aux: Any, arrays: Sequence[Any]) -> Parts:
        """For JAX."""
        return cls(arrays, *aux)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Same:
    """In what a step returns: one of the caller's objects, or a part of one."""

    path: tuple[Any, ...]


class Binding:
    """Some of the caller's objects, as they are put together now.

    It keeps no object alive.

    Args:
      objects: they.

    Attributes:
      form: how objects like them are put together again.
      may_be_kept: whether it forgets the arrays of an object that is gone.
      known: what the caller keeps here.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        nnx = sys.modules["flax.nnx"]
        objects = list(objects)
        _alive.add(self)
        clear = _callbacks.of(self, Binding._clear)
        self.known: Any = None
        self.may_be_kept = all(map(is_object, objects))
        self._objects = [
            # A variable by itself allows no weak reference.
            weakref.ref(each, clear) if is_object(each) else lambda each=each: each
            for each in objects
        ]
        self._nodes, self._structure = jax.tree.flatten(objects, is_leaf=is_variable)
        graph, state = nnx.split(objects)
        by_path = dict(nnx.iter_graph(objects))
        found, structure = jax.tree.flatten_with_path(state, is_leaf=is_variable)
        paths = [tuple(key.key for key in path) for path, _ in found]
        self._variables = [by_path[path] for path in paths]
        for path, node in zip(paths, self._variables, strict=True):
            if is_variable(node) and node.ref:
                raise ObjectError(
                    f"`{_dotted(path)}` of a {type(objects[path[0]]).__name__} holds a "
                    "`jax.Ref`, which a step on several devices cannot be given. Make "
                    "the variable without `ref=True`."
                )
        self._getters = [
            node.get_raw_value if is_variable(node) else lambda node=node: node
            for node in self._variables
        ]
        owners = [
            [i for i, path in enumerate(paths) if path[0] == place]
            for place in range(len(objects))
        ]
        self.form = Form(
            graph,
            structure,
            tuple(map(tuple, owners)),
            tuple(tuple(_dotted(paths[i]) for i in own) for own in owners),
            # Without the arrays, which it would keep.
            [leaf.replace(0) if is_variable(leaf) else None for _, leaf in found],
        )

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether `objects` are these, put together as they were."""
        if not self.has_roots(objects):
            return False
        nodes, structure = jax.tree.flatten(list(objects), is_leaf=is_variable)
        return structure == self._structure and _are_same(nodes, self._nodes)

    def holders_of(self, arrays: Collection[int]) -> list[tuple[Any, Any]]:
        """Its variables with an array among these, by identity, and whose they are."""
        roots = [each() for each in self._objects]
        return [
            (variable, roots[place])
            for place, own in enumerate(self.form.owners)
            for variable in (self._variables[i] for i in own if self._variables)
            if is_variable(variable) and id(variable.get_raw_value()) in arrays
        ]

    def has_roots(self, objects: Sequence[Any]) -> bool:
        """Whether `objects` are these, however they are put together now."""
        return _are_same([each() for each in self._objects], objects)

    def is_outdated_by(self, other: Binding) -> bool:
        """Whether `other` is of the same objects, with other variables."""
        roots = [each() for each in other._objects]
        return self.has_roots(roots) and not _are_same(self._nodes, other._nodes)

    def parts(self) -> list[Parts]:
        """The arrays of each object."""
        values = [get() for get in self._getters]
        return [
            Parts([values[i] for i in own], names)
            for own, names in zip(self.form.owners, self.form.names, strict=True)
        ]

    def store(self, parts: Sequence[Parts]) -> None:
        """Put new arrays into the objects, and change what else the step changed.

        Raises:
          ObjectError: JAX traces the code that called the step, and Flax allows no
            array of its there.
        """
        variables = self._variables
        try:
            for own, part in zip(self.form.owners, parts, strict=True):
                for i, array in zip(own, part.arrays, strict=True):
                    if array is not None:
                        variables[i].set_raw_value(array)
        except Exception as error:
            if type(error).__name__ != "TraceContextError":
                raise
            raise ObjectError(
                "A step changed an object inside a function that JAX transforms, which "
                "the object was made outside of. Give it to that function as an "
                "argument, and use `nnx.jit` or its kin instead of `jax.jit`."
            ) from error
        for part in parts:
            if part.changes:
                _apply(part.changes, self._by_path())
                return

    def with_callers_objects(self, returned: PyTree) -> PyTree:
        """What the step returned, with the caller's objects where it had them."""
        if not self.form.returns_objects:
            return returned
        by_path = self._by_path()

        def original(leaf: Any) -> Any:
            return by_path[leaf.path] if isinstance(leaf, Same) else leaf

        return jax.tree.map(original, returned, is_leaf=lambda x: isinstance(x, Same))

    def _clear(self, _: Any) -> None:
        self._variables, self._getters, self._nodes = [], [], []

    def _by_path(self) -> dict[Any, Any]:
        roots = [each() for each in self._objects]
        by_path = dict(sys.modules["flax.nnx"].iter_graph(roots))
        # Of an object that is given twice, Flax names the first place only.
        return by_path | {(place,): root for place, root in enumerate(roots)}


# A set of those that there are: objects of which one step knows, others may read.
_alive: weakref.WeakSet[Binding] = weakref.WeakSet()


def all_bindings() -> list[Binding]:
    """Those of all objects that steps were given, or have captured."""
    return list(_alive)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        a is b for a, b in zip(some, others, strict=True)
    )


def _apply(changes: Sequence[_Change], by_path: dict[Any, Any]) -> None:
    for change in changes:
        if change.value is _GONE:
            delattr(by_path[change.path], change.name)
        else:
            setattr(by_path[change.path], change.name, change.value)


@dataclasses.dataclass
class Form:
    """How objects are put together from arrays; equal for objects that are alike.

    Attributes:
      graph: Flax's description.
      structure: of their state.
      owners: for each object the variables that it has and none before it.
      names: of these.
      templates: variables like them; None for an array that is in no variable.
      returns_objects: whether a step returns some of them.
    """

    graph: Any
    structure: Any
    owners: tuple[tuple[int, ...], ...]
    names: tuple[tuple[str, ...], ...]
    templates: list[Any] = dataclasses.field(repr=False)
    returns_objects: bool = False

    @property
    def key(self) -> Any:
        """Equal for objects that are alike."""
        # The structure of variables has their metadata: what Flax does with them.
        variables = jax.tree.structure(self.templates)
        return self.graph, self.structure, self.owners, variables

    def put_together(self, parts: Sequence[Parts]) -> list[Any]:
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

    def _in_order(self, parts: Sequence[Parts]) -> list[Any]:
        values: list[Any] = [None] * len(self.templates)
        for own, part in zip(self.owners, parts, strict=True):
            for i, array in zip(own, part.arrays, strict=True):
                values[i] = array
        return values

    def take_apart(self, objects: list[Any], given: Sequence[Parts]) -> list[Parts]:
        """The arrays of objects that were put together so, after the step.

        Args:
          objects: they.
          given: what they were put together from.

        Raises:
          ObjectError: the step changed what only Python can change.
        """
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

    def _new_value(self, index: int, new: Any, old: Any) -> Any:
        """What a variable holds after the step; None of an array that is in none.

        Raises:
          ObjectError: such an array has changed, or the metadata of a variable.
        """
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

    def _changes(self, objects: list[Any], graph: Any, state: Any) -> Any:
        """What a step changed besides arrays."""
        nnx = sys.modules["flax.nnx"]
        copies = nnx.merge(self.graph, state)
        before = dict(nnx.iter_graph(copies))
        changes = []
        for path, node in nnx.iter_graph(objects):
            old = before.get(path)
            if is_object(node) and type(node) is type(old):
                changes += _changed_attributes(path, vars(old), vars(node))
        _apply(changes, before)
        if nnx.split(copies)[0] != graph:
            raise ObjectError(
                "The step changed which objects the attributes of its objects refer "
                "to, which a compiled step cannot give back. Do this outside `run`."
            )
        return tuple(changes)


def _changed_attributes(
    path: tuple[Any, ...], old: dict[str, Any], new: dict[str, Any]
) -> Iterator[_Change]:
    for name in [*new, *(name for name in old if name not in new)]:
        if name.startswith(("_pytree__", "_object__")):
            continue
        was, now = old.get(name, _GONE), new.get(name, _GONE)
        if _is_plain(was) and _is_plain(now) and (was is _GONE or was != now):
            yield _Change(path, name, now)


def _is_plain(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_changed_in_place)
    return not any(
        is_changed_in_place(leaf) or isinstance(leaf, jax.Array) for leaf in leaves
    )


def is_changed_in_place(node: Any) -> bool:
    """Whether a step may change `node` in place: an object, or a variable alone."""
    return bool(object_kinds()) and (is_object(node) or is_variable(node))


def is_variable(node: Any) -> bool:
    """Whether `node` holds an array of an object."""
    return _holds(type(node))


@functools.lru_cache(maxsize=1024)
def _holds(kind: type) -> bool:
    # Flax's own `isinstance` takes ten times as long.
    return issubclass(kind, sys.modules["flax.nnx"].Variable)


def structure_of(node: Any) -> Any:
    """Equal as long as an object has the same variables and static attributes."""
    variables, structure = jax.tree.flatten(node, is_leaf=is_variable)
    return structure, list(map(id, variables))


def _dotted(path: Sequence[Any]) -> str:
    """`layers[0].kernel`, without the object's own place."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path[1:])
    return text.removeprefix(".") or "value"


def _paths(state: Any) -> set[str]:
    found, _ = jax.tree.flatten_with_path(state, is_leaf=is_variable)
    return {_dotted([key.key for key in path]) for path, _ in found}


def _difference(before: Sequence[str], after: set[str]) -> str:
    added, removed = sorted(after - set(before)), sorted(set(before) - after)
    told = [f"added {listed(added, 3, '`')}"] * bool(added)
    told += [f"removed {listed(removed, 3, '`')}"] * bool(removed)
    return ", ".join(told) or "two names share one now, or do not any more"
