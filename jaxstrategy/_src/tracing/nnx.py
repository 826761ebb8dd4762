"""Flax NNX objects in steps: arrays on the way in, changed in place on the way out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.text import listed, users_line
from jaxstrategy._src.tracing import rebinding, signature as _signature
from jaxstrategy._src.tracing.references import CapturedName, are_identical, weak_method
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.trees import (
    FlaxVariable,
    is_nnx_node,
    is_object,
    is_variable,
)

NodePath: TypeAlias = tuple[Hashable, ...]
"""The index of an object in a list, then the names of attributes and items."""


def structure_of(node: object) -> tuple[Hashable, list[int]]:
    """Equal as long as an object has the same variables and static attributes."""
    variables, structure = jax.tree.flatten(node, is_leaf=is_variable)
    # By `id`: `==` of two variables compares their arrays, and returns an array.
    return structure, list(map(id, variables))


def is_call_leaf(node: object) -> bool:
    """Whether `node` is a leaf of arguments or results of a call."""
    if is_nnx_node(node) or trees.is_whole(node):
        return True
    # A state is passed and returned as a pytree: its variables are copies.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def has_objects(tree: PyTree) -> bool:
    """Whether objects or variables of Flax NNX are among the leaves."""
    if not trees.object_kinds():
        return False
    return any(map(is_nnx_node, jax.tree.leaves(tree, is_leaf=is_call_leaf)))


# `eq=False`: JAX hashes it within a structure, and `value` may have no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class AttributeChange:
    """A change of a static attribute of an object by a step."""

    path: NodePath
    name: str
    value: object


DELETED = object()

# The static part of `ObjectArrays`.
_Static: TypeAlias = (
    "tuple[tuple[str, ...], tuple[AttributeChange, ...], ObjectStructure | None]"
)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class ObjectArrays:
    """The arrays of an object, which replace it in the call of a program.

    As an argument it has the structure of all objects of the call.
    """

    arrays: Sequence[Leaf]
    names: tuple[str, ...]
    changes: tuple[AttributeChange, ...] = ()
    structure: ObjectStructure | None = None

    def tree_flatten(self) -> tuple[Sequence[Leaf], _Static]:
        return self.arrays, (self.names, self.changes, self.structure)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Hashable, Leaf]], _Static]:
        keys = map(jax.tree_util.GetAttrKey, self.names)
        arrays, static = self.tree_flatten()
        return list(zip(keys, arrays, strict=True)), static

    @classmethod
    def tree_unflatten(cls, aux: _Static, arrays: Sequence[Leaf]) -> ObjectArrays:
        return cls(arrays, *aux)


# Static: a compiled step returns only arrays, and marks in their structure.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ReturnedObject:
    """Marks one of the caller's objects, or a part of one, in a step's results."""

    path: NodePath


def apply(
    changes: Sequence[AttributeChange], by_path: Mapping[NodePath, object]
) -> None:
    for change in changes:
        if change.value is DELETED:
            delattr(by_path[change.path], change.name)
        else:
            setattr(by_path[change.path], change.name, change.value)


def dotted(path: Sequence[object]) -> str:
    """The path as text: `layers[0].kernel`."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path[1:])
    return text.removeprefix(".") or "value"


def is_object_arrays(node: object) -> bool:
    return isinstance(node, ObjectArrays)


def is_whole_or_arrays(node: object) -> bool:
    return is_object_arrays(node) or trees.is_whole(node)


def has_arrays(tree: PyTree) -> bool:
    """Whether arrays of objects are in a tree; reads no variables."""
    return any(map(is_object_arrays, jax.tree.leaves(tree, is_leaf=is_whole_or_arrays)))


# Part of the structure of arguments; `RecentObjects` keeps one for each `key`.
@dataclasses.dataclass(eq=False, repr=False)
class ObjectStructure:
    """The static part of a list of objects, to merge them from arrays."""

    graph: Hashable  # `nnx.GraphDef`
    state_structure: Hashable  # of the `nnx.State`
    owners: tuple[tuple[int, ...], ...]  # for each object the indices of its variables
    names: tuple[tuple[str, ...], ...]  # the same, their names
    templates: list[FlaxVariable | None]
    returns_objects: bool = False

    def __repr__(self) -> str:  # in the structure of arguments, which messages show
        return "..."

    @property
    def key(self) -> Hashable:
        """The cache key: equal for objects of the same structure and metadata."""
        variables = jax.tree.structure(self.templates)
        return self.graph, self.state_structure, self.owners, variables

    def merge(self, parts: Sequence[ObjectArrays]) -> list[object]:
        """Creates objects with these arrays."""
        values = self._in_order(parts)
        state = jax.tree.unflatten(
            self.state_structure,
            [
                value if like is None else like.replace(value)
                for like, value in zip(self.templates, values, strict=True)
            ],
        )
        return sys.modules["flax.nnx"].merge(self.graph, state)

    def _in_order(self, parts: Sequence[ObjectArrays]) -> list[Leaf]:
        values: list[Leaf] = [None] * len(self.templates)
        for indices, part in zip(self.owners, parts, strict=True):
            for i, array in zip(indices, part.arrays, strict=True):
                values[i] = array
        return values

    def split(
        self, objects: Sequence[object], before: Sequence[ObjectArrays]
    ) -> list[ObjectArrays]:
        """The arrays of merged objects after the step."""
        graph, state = sys.modules["flax.nnx"].split(objects)
        leaves, structure = jax.tree.flatten(state, is_leaf=is_variable)
        if structure != self.state_structure:
            raise ObjectError(
                "The step changed which variables its objects have: "
                f"{_difference(sum(self.names, ()), _paths(state))}. A compiled step "
                "gives back new arrays for the same variables: do this outside `run`, "
                "or take away (`nnx.pop`) what the step has added."
            )
        old = self._in_order(before)
        values = [self._new_value(i, leaf, old[i]) for i, leaf in enumerate(leaves)]
        changes = () if graph == self.graph else self._changes(objects, graph, state)
        return [
            ObjectArrays([values[i] for i in indices], names, changes)
            for indices, names in zip(self.owners, self.names, strict=True)
        ]

    def _new_value(self, index: int, new: Leaf, old: Leaf) -> Leaf:
        """The value of a variable after the step; None of an array in no variable."""
        template = self.templates[index]
        if template is not None:
            if template.get_metadata() != new.get_metadata():
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
        """The changes of static attributes by a step."""
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
        # Flax's own attributes, by their new and old prefix.
        if name.startswith(("_pytree__", "_object__")):
            continue
        was, now = old.get(name, DELETED), new.get(name, DELETED)
        if _is_plain(was) and _is_plain(now) and (was is DELETED or was != now):
            yield AttributeChange(path, name, now)


def _is_plain(value: PyTree) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=is_nnx_node)
    return not any(is_nnx_node(leaf) or isinstance(leaf, jax.Array) for leaf in leaves)


def _paths(state: PyTree) -> set[str]:
    found, _ = jax.tree.flatten_with_path(state, is_leaf=is_variable)
    return {dotted([key.key for key in path]) for path, _ in found}


def _difference(before: Sequence[str], after: set[str]) -> str:
    added, removed = sorted(after - set(before)), sorted(set(before) - after)
    text = [f"added {listed(added, 3, '`')}"] * bool(added)
    text += [f"removed {listed(removed, 3, '`')}"] * bool(removed)
    return ", ".join(text) or "two names share one now, or do not any more"


def _fast_getter(node: object) -> Callable[[], Leaf]:
    """Returns the raw value of a variable, in C if possible; or an array itself."""
    if not is_variable(node):
        return lambda: node
    slot = _slot_of(type(node))
    if slot is None:
        return node.get_raw_value
    return functools.partial(slot.__get__, node)


def _fast_setter(variable: FlaxVariable) -> Callable[[Leaf], object] | None:
    """`variable.set_raw_value` without checks, in C; None if that is not possible."""
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
    """The slot with the value of a variable, whatever Flax calls it."""
    value, other = object(), object()
    variable = base(value, hijax=False, ref=False)
    for slot in vars(base).values():
        is_slot = isinstance(slot, types.MemberDescriptorType)
        if is_slot and slot.__get__(variable, base) is value:
            slot.__set__(variable, other)
            return slot if variable.get_raw_value() is other else None
    return None


_Setter: TypeAlias = Callable[[Leaf], object]


class CallerObjects:
    """Some of the caller's objects with their structure, not kept alive."""

    def __init__(self, objects: Sequence[object]) -> None:
        nnx = sys.modules["flax.nnx"]  # imported by the user
        objects = list(objects)
        _alive.add(self)
        clear = weak_method(self, CallerObjects._clear)
        self.is_cacheable = all(map(is_object, objects))
        self._objects = [
            # A variable allows no weak reference.
            weakref.ref(each, clear) if is_object(each) else lambda each=each: each
            for each in objects
        ]
        self._nodes, self._treedef = jax.tree.flatten(objects, is_leaf=is_variable)
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
            [i for i, path in enumerate(paths) if path[0] == number]
            for number in range(len(objects))
        ]
        # Raw values, by object: without hooks of variables, which the step may call.
        self._getters = [
            [_fast_getter(self._variables[i]) for i in indices] for indices in owners
        ]
        self._setters: list[list[_Setter]] = []
        self.structure = ObjectStructure(
            graph,
            structure,
            tuple(map(tuple, owners)),
            tuple(tuple(dotted(paths[i]) for i in indices) for indices in owners),
            # Without arrays, which would be kept alive.
            [leaf.replace(0) if is_variable(leaf) else None for _, leaf in found],
        )

    def matches(self, objects: Sequence[object]) -> bool:
        """Whether these are the same objects, with the same structure."""
        if not self._has_roots(objects):
            return False
        nodes, structure = jax.tree.flatten(list(objects), is_leaf=is_variable)
        return structure == self._treedef and are_identical(nodes, self._nodes)

    def variables_with(
        self, arrays: Collection[int]
    ) -> list[tuple[FlaxVariable, object]]:
        """The variables with these arrays, by `id`, and their objects."""
        roots = [each() for each in self._objects]
        return [
            (variable, roots[number])
            for number, indices in enumerate(self.structure.owners)
            # Without variables once an object died.
            for variable in (self._variables[i] for i in indices if self._variables)
            if is_variable(variable) and id(variable.get_raw_value()) in arrays
        ]

    def _has_roots(self, objects: Sequence[object]) -> bool:
        return are_identical([each() for each in self._objects], objects)

    def is_outdated_by(self, other: CallerObjects) -> bool:
        """Whether `other` has the same objects, with other variables."""
        roots = [each() for each in other._objects]
        return self._has_roots(roots) and not are_identical(self._nodes, other._nodes)

    def parts(self) -> list[ObjectArrays]:
        """The arrays of each object."""
        return [
            ObjectArrays([get() for get in getters], names, (), self.structure)
            for getters, names in zip(self._getters, self.structure.names, strict=True)
        ]

    def finish(self, returned: tuple[PyTree, list[ObjectArrays]]) -> PyTree:
        """Stores new arrays; returns results with the caller's objects."""
        results, parts = returned
        self.store(parts)
        if not self.structure.returns_objects:
            return results
        by_path = self._by_path()

        def original(leaf: Leaf) -> Leaf:
            return by_path[leaf.path] if isinstance(leaf, ReturnedObject) else leaf

        return jax.tree.map(
            original, results, is_leaf=lambda x: isinstance(x, ReturnedObject)
        )

    def store(self, parts: Sequence[ObjectArrays]) -> None:
        """Stores new arrays and static attributes in the objects."""
        # Outside of traces, Flax always allows or always forbids to set a variable.
        is_known = bool(self._setters) and not _arrays.is_traced()
        setters = self._setters if is_known else self._checked_setters()
        try:
            for own, part in zip(setters, parts, strict=True):
                for set_array, array in zip(own, part.arrays, strict=True):
                    if array is not None:
                        set_array(array)
        except Exception as error:
            # By name, as Flax is not imported.
            if type(error).__name__ != "TraceContextError":
                raise
            raise ObjectError(
                "A step changed an object inside a function that JAX transforms, which "
                "the object was made outside of. Give it to that function as an "
                "argument, and use `nnx.jit` or its kin instead of `jax.jit`."
            ) from error
        if not is_known and not _arrays.is_traced():
            self._setters = self._fast_setters(parts)
        for part in parts:
            if part.changes:
                apply(part.changes, self._by_path())
                return

    def _checked_setters(self) -> list[list[_Setter]]:
        """Setters by object; Flax raises if a variable may not be changed."""
        return [
            [
                getattr(self._variables[i], "set_raw_value", _no_variable)
                for i in indices
            ]
            for indices in self.structure.owners
        ]

    def _fast_setters(self, parts: Sequence[ObjectArrays]) -> list[list[_Setter]]:
        """The same, without checks for variables that were just set."""
        setters = self._checked_setters()
        for own, part, indices in zip(
            setters, parts, self.structure.owners, strict=True
        ):
            for number, index in enumerate(indices):
                if part.arrays[number] is not None:
                    fast = _fast_setter(self._variables[index])
                    own[number] = fast or own[number]
        return setters

    def _clear(self, _: object) -> None:
        # These hold arrays, and nothing in a variable refers to the object it is of.
        self._variables, self._nodes = [], []
        self._getters, self._setters = [], []

    def _by_path(self) -> dict[NodePath, object]:
        roots = [each() for each in self._objects]
        by_path: dict[NodePath, object] = dict(
            sys.modules["flax.nnx"].iter_graph(roots)
        )
        # Flax has only the first path of an object that is passed twice.
        return by_path | {(number,): root for number, root in enumerate(roots)}


def _no_variable(value: Leaf) -> None:
    raise AssertionError("a step has no value for what is no variable")


# Of all steps: one step may read the objects of another.
_alive: weakref.WeakSet[CallerObjects] = weakref.WeakSet()


def variables_with(arrays: Collection[int]) -> list[tuple[FlaxVariable, object]]:
    """The variables with these arrays, by `id`, and their objects."""
    return [pair for objects in list(_alive) for pair in objects.variables_with(arrays)]


# Models, optimizers and metrics of a few trainings at once.
_MAX_OBJECTS = 8


class RecentObjects:
    """The objects of recent calls; those of equal structure share their `structure`."""

    def __init__(self) -> None:
        self._recent: list[CallerObjects] = []
        self._structures: dict[Hashable, ObjectStructure] = {}

    def of(self, nodes: Sequence[object]) -> CallerObjects:
        for objects in self._recent:
            if objects.matches(nodes):
                return objects
        objects = CallerObjects(nodes)
        objects.structure = self._structures.setdefault(
            objects.structure.key, objects.structure
        )
        if objects.is_cacheable:
            others = [o for o in self._recent if not o.is_outdated_by(objects)]
            self._recent = [objects, *others][:_MAX_OBJECTS]
        return objects


# Calls.


def as_arrays(
    arguments: Arguments,
    captured: Mapping[str, object],
    recent: RecentObjects | None = None,
) -> tuple[CallerObjects | None, Arguments]:
    """A call with arrays for objects, and captured values as keyword arguments."""
    if not trees.object_kinds() and not captured:
        return None, arguments
    args, kwargs = arguments
    arguments = args, {**kwargs, **captured}
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_call_leaf)
    nodes = [leaf for leaf in leaves if is_nnx_node(leaf)]
    if not nodes:
        return None, arguments
    objects = (recent or RecentObjects()).of(nodes)
    parts = iter(objects.parts())
    leaves = [next(parts) if is_nnx_node(leaf) else leaf for leaf in leaves]
    return objects, structure.unflatten(leaves)


def call(
    fn: Function,
    name: str,
    statics: Sequence[tuple[str, object]],
    /,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """Calls a step with what `as_arrays` has made; returns also new arrays of objects.

    Raises `Leak` if it leaves a tracer in what it captures or in `statics`.
    """
    arguments = args, kwargs
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_whole_or_arrays)
    parts = [leaf for leaf in leaves if is_object_arrays(leaf)]
    known = parts[0].structure if parts else None
    objects = [] if known is None else known.merge(parts)
    keys = _fold_in_replica(objects)
    if parts:
        following = iter(objects)
        args, kwargs = structure.unflatten(
            [next(following) if is_object_arrays(leaf) else leaf for leaf in leaves]
        )
    names = [each for each in kwargs if isinstance(each, CapturedName)]
    replaced: dict[str, object] = {each: kwargs.pop(each) for each in names}
    with rebinding.rebound(fn, replaced) as rebound:
        with rebinding.checking_leaks(rebound, name, statics):
            returned = rebound(*args, **kwargs)
    if known is None:
        return returned
    returned = _with_marks(returned, objects, known)
    # A key that the step did not use is equal on all replicas again.
    for variable, folded, key in keys:
        if variable.get_raw_value() is folded:
            variable.set_raw_value(key)
    numbered = structure.unflatten(range(len(leaves)))
    pairs = zip(_signature.labels(fn, numbered), leaves, strict=True)
    labels = [label.strip("`") for label, leaf in pairs if is_object_arrays(leaf)]
    return returned, [
        dataclasses.replace(part, names=tuple(f"{label}.{n}" for n in part.names))
        for part, label in zip(known.split(objects, parts), labels, strict=True)
    ]


def came_from_step(error: BaseException | None) -> bool:
    """Whether an error was raised inside of a step."""
    while error is not None:
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_code is call.__code__ for frame, _ in frames):
            return True
        error = error.__cause__
    return False


def _fold_in_replica(
    objects: Sequence[object],
) -> list[tuple[FlaxVariable, jax.Array, jax.Array]]:
    """Folds the replica's id into random keys, so that dropout differs.

    Returns each variable with its new and its old key.
    """
    context = _context.current()
    strategy, replica = context.strategy, context.replica
    if not objects or strategy is None or strategy.num_replicas_in_sync == 1:
        return []
    assert isinstance(replica, ReplicaContext)
    nnx = sys.modules["flax.nnx"]
    keys = []
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            key = node.get_raw_value()
            folded = replica.fold_in(key)
            node.set_raw_value(folded)
            keys.append((node, folded, key))
    return keys


def _with_marks(
    returned: PyTree, objects: Sequence[object], passed_as: ObjectStructure
) -> PyTree:
    """Replaces the caller's objects among results by marks."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=is_call_leaf)
    if not any(map(is_nnx_node, leaves)):
        return returned
    graph = list(nnx.iter_graph(objects))
    paths = {id(node): path for path, node in graph if is_nnx_node(node)}
    passed = {id(node) for _, node in graph}
    for i, leaf in enumerate(leaves):
        if not is_nnx_node(leaf):
            continue
        if id(leaf) in paths:
            leaves[i] = ReturnedObject(paths[id(leaf)])
            passed_as.returns_objects = True
        elif any(id(n) in passed for _, n in nnx.iter_graph(leaf) if is_variable(n)):
            raise ObjectError(
                f"The step returned a new {type(leaf).__name__} that shares variables "
                "with an object that it was given; they would not be shared any more. "
                "Return the object itself, or nothing: it is changed in place."
            )
    return jax.tree.unflatten(structure, leaves)


def require_objects(objects: CallerObjects | None) -> CallerObjects:
    """The objects to `bind`; raises without any."""
    if objects is None:
        raise TypeError(
            "`bind` was given no module, optimizer or metric of Flax NNX. Other "
            "arguments are looked up fast as they are: call the step with them."
        )
    return objects


def captured_by(fn: Function) -> dict[str, object]:
    """The objects that a function captures, by label."""
    if not trees.object_kinds():
        return {}
    return rebinding.references(fn).objects


def translated(error: Exception, name: str) -> ObjectError | None:
    """The error to raise instead of Flax's about a captured object."""
    said = str(error)
    is_ours = type(error).__name__ == "TraceContextError" or (
        isinstance(error, ValueError)
        and (
            "different trace level" in said
            # Raised by JAX for indices into an array on the mesh.
            or ("Context mesh" in said and _went_through_flax(error))
        )
    )
    if not is_ours:
        return None
    line = users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes, or indexes, an object of Flax NNX that it was not given, "
        f"or inside a function that JAX transforms:{where}Pass it as an argument, and "
        "it is changed in place; to such a function too, with `nnx.grad` or `nnx.scan` "
        "instead of JAX's. Objects that a step refers to by name, attribute or "
        "container are found as well, but not those of a generator, a cached function "
        "or a context variable."
    )


def _went_through_flax(error: Exception) -> bool:
    return any(
        frame.f_globals.get("__name__", "").startswith("flax.nnx")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


@contextlib.contextmanager
def unchanged(tree: PyTree, name: str) -> Iterator[None]:
    """A `with` block that raises if it has changed objects in `tree`."""
    # Objects merged from an `nnx.State` may share its variables.
    leaves = jax.tree.leaves(tree, is_leaf=is_call_leaf)
    objects = [node for node in leaves if is_nnx_node(node)]
    before = [jax.tree.flatten(node) for node in objects]
    yield
    for node, (leaves, structure) in zip(objects, before, strict=True):
        now, structure_now = jax.tree.flatten(node)
        same = all(a is b for a, b in zip(leaves, now, strict=False))
        if not same or structure != structure_now:
            raise ObjectError(
                f"`{name}` runs for parameter servers, and changes a "
                f"{type(node).__name__} of Flax NNX that it was given: the caller's "
                "object would stay as it was. Pass the state of `nnx.split` instead, "
                "make the object of it with `nnx.merge`, and return its `nnx.state`, "
                "for `nnx.update` where the result is fetched; or keep what changes in "
                "variables made in `strategy.scope()`."
            )
