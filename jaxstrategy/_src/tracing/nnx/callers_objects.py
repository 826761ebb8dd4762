"""The caller's objects of Flax NNX, as they are put together now."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax

from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.tracing.functions import weak_references
from jaxstrategy._src.tracing.nnx.object_form import (
    FlaxVariable,
    NodePath,
    ObjectForm,
    Parts,
    Same,
    apply,
    dotted,
    is_variable,
)
from jaxstrategy._src.values import arrays as _arrays
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.values.trees import is_object


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
        clear = weak_references.of(self, CallersObjects._clear)
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
        return structure == self._structure and _are_same(nodes, self._nodes)

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
        return _are_same([each() for each in self._objects], objects)

    def is_outdated_by(self, other: CallersObjects) -> bool:
        """Whether `other` is of the same objects, with other variables."""
        roots = [each() for each in other._objects]
        return self.has_roots(roots) and not _are_same(self._nodes, other._nodes)

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


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(
        a is b for a, b in zip(some, others, strict=True)
    )
