"""Flax NNX objects as arrays and structure: `ObjectForm`, `CallersObjects`."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import jax

from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.text.shown import listed
from jaxstrategy._src.tracing.functions import weak_references
from jaxstrategy._src.tracing.functions.bindings import are_identical
from jaxstrategy._src.values import arrays as _arrays, trees
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


def quick_getter(variable: FlaxVariable) -> Callable[[], Leaf]:
    """`variable.get_raw_value`, without a call of Python where that is possible."""
    slot = _slot_of(type(variable))
    if slot is None:
        return variable.get_raw_value
    return functools.partial(slot.__get__, variable)


def quick_setter(variable: FlaxVariable) -> Callable[[Leaf], object] | None:
    """`variable.set_raw_value` that asks nothing; None if it may do more than that."""
    slot = _slot_of(type(variable))
    return None if slot is None else functools.partial(slot.__set__, variable)


@functools.lru_cache(maxsize=1024)
def _slot_of(kind: type) -> types.MemberDescriptorType | None:
    base = sys.modules["flax.nnx"].Variable
    used = ("__setattr__", "get_raw_value", "set_raw_value")
    if any(getattr(kind, name) is not getattr(base, name) for name in used):
        return None
    return _slot_of_values(base)


@functools.cache
def _slot_of_values(base: type) -> types.MemberDescriptorType | None:
    """The slot of the class whose content is the value, whatever Flax calls it."""
    value, other = object(), object()
    variable = base(value, hijax=False, ref=False)
    for slot in vars(base).values():
        is_slot = isinstance(slot, types.MemberDescriptorType)
        if is_slot and slot.__get__(variable, base) is value:
            slot.__set__(variable, other)
            return slot if variable.get_raw_value() is other else None
    return None


_Setter: TypeAlias = Callable[[Leaf], object]


class CallersObjects:
    """Some of the caller's objects, as they are put together now.

    It keeps no object alive.
    """

    def __init__(self, objects: Sequence[object]) -> None:
        # Whoever has such an object has imported Flax, which is optional.
        nnx = sys.modules["flax.nnx"]
        objects = list(objects)
        _alive.add(self)
        clear = weak_references.weak_method(self, CallersObjects._clear)
        # `Any`: the programs of `ObjectCalls`, whose type is a parameter there.
        self.known: tuple[tuple[str, ...], Any] | None = None
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
                    f"`{dotted(path)}` of a {type(objects[path[0]]).__name__} holds a "
                    "`jax.Ref`, which a step on several devices cannot be given. Make "
                    "the variable without `ref=True`."
                )
        owners = [
            [i for i, path in enumerate(paths) if path[0] == place]
            for place in range(len(objects))
        ]
        # Of each object. Raw values: for others Flax calls the hooks of a variable,
        # which is for the code of the step to cause.
        self._getters = [
            [_getter_of(self._variables[i]) for i in own] for own in owners
        ]
        self._setters: list[list[_Setter]] = []
        self.form = ObjectForm(
            graph,
            structure,
            tuple(map(tuple, owners)),
            tuple(tuple(dotted(paths[i]) for i in own) for own in owners),
            # Without the arrays, which it would keep.
            [leaf.replace(0) if is_variable(leaf) else None for _, leaf in found],
        )

    def is_of(self, objects: Sequence[object]) -> bool:
        """Whether `objects` are these, put together as they were."""
        if not self.has_roots(objects):
            return False
        nodes, structure = jax.tree.flatten(list(objects), is_leaf=is_variable)
        return structure == self._structure and are_identical(nodes, self._nodes)

    def holders_of(self, arrays: Collection[int]) -> list[tuple[FlaxVariable, object]]:
        """The variables with an array among these, by identity, and whose they are."""
        roots = [each() for each in self._objects]
        return [
            (variable, roots[place])
            for place, own in enumerate(self.form.owners)
            # There are none any more once an object is gone.
            for variable in (self._variables[i] for i in own if self._variables)
            if is_variable(variable) and id(variable.get_raw_value()) in arrays
        ]

    def has_roots(self, objects: Sequence[object]) -> bool:
        """Whether `objects` are these, however they are put together now."""
        return are_identical([each() for each in self._objects], objects)

    def is_outdated_by(self, other: CallersObjects) -> bool:
        """Whether `other` is of the same objects, with other variables."""
        roots = [each() for each in other._objects]
        return self.has_roots(roots) and not are_identical(self._nodes, other._nodes)

    def parts(self) -> list[Parts]:
        """The arrays of each object."""
        return [
            Parts([get() for get in own], names)
            for own, names in zip(self._getters, self.form.names, strict=True)
        ]

    def finish(self, returned: tuple[PyTree, list[Parts]]) -> PyTree:
        """The results of a call; the objects then hold their new arrays."""
        results, parts = returned
        self.store(parts)
        return self.with_callers_objects(results)

    def store(self, parts: Sequence[Parts]) -> None:
        """Put new arrays into the objects, and change what else the step changed."""
        # Which variables may be changed where nothing is traced does not change.
        is_known = bool(self._setters) and not _arrays.is_traced()
        setters = self._setters if is_known else self._setters_that_ask()
        try:
            for own, part in zip(setters, parts, strict=True):
                for set_array, array in zip(own, part.arrays, strict=True):
                    if array is not None:
                        set_array(array)
        except Exception as error:
            # By name: the class is in Flax, which is not imported from here.
            if type(error).__name__ != "TraceContextError":
                raise
            raise ObjectError(
                "A step changed an object inside a function that JAX transforms, which "
                "the object was made outside of. Give it to that function as an "
                "argument, and use `nnx.jit` or its kin instead of `jax.jit`."
            ) from error
        if not is_known and not _arrays.is_traced():
            self._setters = self._setters_after(parts)
        for part in parts:
            if part.changes:
                apply(part.changes, self._by_path())
                return

    def _setters_that_ask(self) -> list[list[_Setter]]:
        """What gives the variables of each object a value, if they may be changed."""
        return [
            [getattr(self._variables[i], "set_raw_value", _refuse) for i in own]
            for own in self.form.owners
        ]

    def _setters_after(self, parts: Sequence[Parts]) -> list[list[_Setter]]:
        """The same, without asking of those that `parts` had a value for."""
        return [
            [
                set_array if array is None else quick_setter(variable) or set_array
                for set_array, array, variable in zip(
                    setters, part.arrays, [self._variables[i] for i in own], strict=True
                )
            ]
            for setters, part, own in zip(
                self._setters_that_ask(), parts, self.form.owners, strict=True
            )
        ]

    def with_callers_objects(self, returned: PyTree) -> PyTree:
        """The results of a step, with the caller's objects where it had them."""
        if not self.form.returns_objects:
            return returned
        by_path = self._by_path()

        def original(leaf: Leaf) -> Leaf:
            return by_path[leaf.path] if isinstance(leaf, Same) else leaf

        return jax.tree.map(original, returned, is_leaf=lambda x: isinstance(x, Same))

    def _clear(self, _: object) -> None:
        # These hold arrays, and nothing in a variable refers to the object it is of.
        self._variables, self._nodes = [], []
        self._getters, self._setters = [], []

    def _by_path(self) -> dict[NodePath, object]:
        roots = [each() for each in self._objects]
        by_path: dict[NodePath, object] = dict(
            sys.modules["flax.nnx"].iter_graph(roots)
        )
        # Of an object that is given twice, Flax names the first place only.
        return by_path | {(place,): root for place, root in enumerate(roots)}


def _getter_of(node: object) -> Callable[[], Leaf]:
    return quick_getter(node) if is_variable(node) else lambda: node


def _refuse(value: Leaf) -> None:
    raise AssertionError("a step has no value for what is no variable")


# A set of those that there are: objects of which one step knows, others may read.
_alive: weakref.WeakSet[CallersObjects] = weakref.WeakSet()


def holders_of(arrays: Collection[int]) -> list[tuple[FlaxVariable, object]]:
    """The variables that hold arrays, and the objects whose they are."""
    return [pair for objects in list(_alive) for pair in objects.holders_of(arrays)]
