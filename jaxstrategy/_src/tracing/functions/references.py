"""The values that a function captures, and the cache key that they make."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.step_outputs import Sender
from jaxstrategy._src.tracing.functions import code as _code
from jaxstrategy._src.tracing.functions.bindings import (
    Binding,
    flatten_one_level,
    is_container,
)
from jaxstrategy._src.tracing.functions.code import NameUses, as_method
from jaxstrategy._src.tracing.functions.weak_references import Identity
from jaxstrategy._src.tracing.nnx.objects import is_nnx_node
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.variables.changes import Reference

# Larger NumPy arrays are not hashed.
_MAX_HASHED_BYTES = 1 << 28
# Objects of these packages do not change what a step computes.
_IGNORED_PACKAGES = "io _io logging threading _thread queue _queue weakref".split()
# In the cache key by identity, whatever they hold.
_BY_IDENTITY = (
    per_replica.Handle,
    per_replica.PerReplica,
    context.AbstractStrategy,
    types.MemberDescriptorType,  # of a slot
)
_COMPILED = ("jax", "jaxlib")
_CLASS = "__class__"

# What stands for a value in the cache key of a function.
Token = Hashable
_DELETED: Token = ("deleted",)

_NoneType, _Ellipsis, _NotImplemented = map(type, (None, ..., NotImplemented))
_PLAIN = (_NoneType, bool, int, str, bytes, range, _Ellipsis, _NotImplemented)


class Node(NamedTuple):
    """A value that a function refers to; `parent` is the index of its holder."""

    label: str
    binding: Binding | None
    value: Any
    parent: int


def _token_of(walk: References, label: str, value: Any, number: int) -> Token:
    """Visits what `value` refers to, and returns its part of the cache key."""
    kind = type(value)
    if walk.finds_objects and is_nnx_node(value):
        walk.objects[walk.unused_label(label)] = value
        return ("object", len(walk.objects))
    if issubclass(kind, (jax.Array, Tracer)):
        return _array(walk, label, value)
    if issubclass(kind, (np.ndarray, np.generic)):
        return _host_array(walk, label, value)
    if issubclass(kind, _BY_IDENTITY):
        return Identity(value)
    if issubclass(kind, Sender):
        return kind
    for kinds, visit in _VISITORS:
        if issubclass(kind, kinds):
            return visit(walk, label, value, number)
    if is_container(value):
        return _tree(walk, label, value, number)
    return _other(walk, label, value, kind, number)


def _unknown(walk: References, label: str, value: object) -> Token:
    walk.opaque = walk.opaque or label
    return Identity(value)


# Arrays.


def _array(walk: References, label: str, value: jax.Array | Tracer) -> Token:
    if not isinstance(value, Tracer) and value.is_deleted():
        return _DELETED
    # Another sharding would be refused as an argument, though the function may not use
    # this array at all.
    is_argument = (
        isinstance(value, Tracer)
        or value.sharding.is_fully_replicated
        or arrays.is_mirrored(value)
        or arrays.is_sharded(value)
    )
    if walk.captures_arrays and is_argument:
        walk.arrays[walk.unused_label(label)] = value
        return ("array",)
    return Identity(value)


def _host_array(walk: References, label: str, value: np.ndarray | np.generic) -> Token:
    if not walk.with_key:
        return Identity(value)
    # The bytes of an array of objects are their addresses.
    if value.dtype.hasobject or value.nbytes > _MAX_HASHED_BYTES:
        return _unknown(walk, label, value)
    digest = hashlib.blake2b(np.ascontiguousarray(value), digest_size=16).digest()
    return (type(value), value.dtype.str, value.shape, digest)


# Functions.


def _function(
    walk: References, label: str, fn: types.FunctionType, number: int
) -> Token:
    code = fn.__code__
    reads, writes, is_users = _code.global_names(code)
    if is_users:
        walk.uses = walk.uses.plus(_code.name_uses(code))
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        binding = Binding(cell)
        used_as = name if is_users else None
        walk.visit(f"captured {name}", binding, binding.get(), number, used_as)
    _defaults(walk, label, fn, number)
    # A program does not depend on what the function only writes.
    names = reads if walk.with_key else {*reads, *writes}
    _globals(walk, fn.__globals__, names, number)
    return ("function", Identity(code))


def _defaults(
    walk: References, label: str, fn: types.FunctionType, number: int
) -> None:
    if fn.__defaults__:
        parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        labels = parameters[len(parameters) - len(fn.__defaults__) :]
        binding = Binding(fn, "__defaults__")
        parent = walk.add(label, binding, fn.__defaults__, number, len(labels))
        for name, value in zip(labels, fn.__defaults__, strict=True):
            walk.visit(f"captured {name}", None, value, parent)
    keyword_defaults = fn.__kwdefaults__ or {}
    for name in keyword_defaults:
        binding = Binding(keyword_defaults, name)
        walk.visit(f"captured {name}", binding, binding.get(), number)


def _globals(
    walk: References, scope: dict[str, object], names: Collection[str], number: int
) -> None:
    with walk.shared():
        for name in names:
            if name in scope:
                binding = Binding(scope, name)
                walk.visit(f"captured {name}", binding, scope[name], number, name)


def _method(
    walk: References, label: str, method: types.MethodType, number: int
) -> Token:
    label = "captured self" if label == "captured" else label
    name = _code.self_name(method.__func__)
    walk.visit(label, None, method.__self__, number, name)
    walk.visit("captured", None, method.__func__, number)
    return "method"


def _builtin(
    walk: References, label: str, function: types.BuiltinFunctionType, number: int
) -> Token:
    owner = function.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return Identity(function)
    walk.visit(label, None, owner, number)
    return ("builtin", function.__name__)


def _partial(
    walk: References, label: str, fn: functools.partial[object], number: int
) -> Token:
    walk.visit("captured", None, fn.func, number)
    for index, value in enumerate(fn.args):
        walk.visit(f"captured args[{index}]", None, value, number)
    for name, value in fn.keywords.items():
        walk.visit(f"captured {name}", None, value, number)
    return ("partial", type(fn), len(fn.args), tuple(fn.keywords))


# Containers.


def _sequence(
    walk: References, label: str, items: list[object] | tuple[object, ...], number: int
) -> Token:
    names = getattr(type(items), "_fields", None)
    for i, item in enumerate(items):
        path = f".{names[i]}" if names else f"[{i}]"
        binding = Binding(items, i) if isinstance(items, list) else None
        walk.visit(label + path, binding, item, number)
    return (type(items), len(items))


def _dict(
    walk: References, label: str, items: dict[Hashable, object], number: int
) -> Token:
    for key, item in list(items.items()):
        walk.visit(label, None, key, number)
        walk.visit(f"{label}[{_named(key)}]", Binding(items, key), item, number)
    return (type(items), len(items))


def _named(key: Hashable) -> str:
    # The `repr` of a variable reads it: it waits for the devices, and in a trace refers
    # to an array of another.
    if isinstance(key, Reference):
        return f"{_named(key.deref())}.ref()"
    if isinstance(key, tuple):
        return f"({', '.join(map(_named, key))})"
    return key.name if isinstance(key, per_replica.Handle) else repr(key)


def _view(
    walk: References,
    label: str,
    items: types.MappingProxyType[Hashable, object],
    number: int,
) -> Token:
    for key, item in list(items.items()):
        walk.visit(f"{label}[{_named(key)}]", None, item, number)
    return (types.MappingProxyType, tuple(map(_named, items)))


def _set(
    walk: References,
    label: str,
    items: set[Hashable] | frozenset[Hashable],
    number: int,
) -> Token:
    if all(type(item) in _PLAIN for item in items):
        return (type(items), frozenset((type(item), item) for item in items))
    return _unknown(walk, label, items)


def _tree(walk: References, label: str, value: PyTree, number: int) -> Token:
    """A container registered with JAX."""
    try:
        children, structure = flatten_one_level(value)
        hash(structure)
    except Exception:  # raised by the user's code
        return _unknown(walk, label, value)
    for path, child in children:
        walk.visit(label + jax.tree_util.keystr(path), None, child, number)
    return (type(value), structure)


# Modules, classes and objects.


def _module(
    walk: References, label: str, module: types.ModuleType, number: int
) -> Token:
    if _code.is_users_module(module):
        scope = vars(module)
        names = sorted(walk.uses.names & scope.keys())
        with walk.shared():
            for name in names:
                binding = Binding(scope, name)
                walk.visit(f"{label}.{name}", binding, scope[name], number, name)
    return Identity(module)


def _class(walk: References, label: str, kind: type, number: int) -> Token:
    if _code.is_users_class(kind) and not issubclass(kind, enum.Enum):
        with walk.shared():
            for base in filter(_code.is_users_class, kind.__mro__):
                for name in walk.used_attributes(kind, vars(base)):
                    if name not in _code.IMPLICIT_ATTRIBUTES:
                        walk.visit_attribute(kind, label, Binding(base, name), number)
    return Identity(kind)


def _descriptor(walk: References, label: str, value: object, number: int) -> Token:
    for name in ("__func__", "fget", "func"):
        if (function := getattr(value, name, None)) is not None:
            walk.visit(label, None, function, number)
    return type(value)


def _other(
    walk: References, label: str, value: object, kind: type, number: int
) -> Token:
    package = kind.__module__.partition(".")[0]
    # Objects of our classes for Flax are a model's.
    is_model = kind.__module__.startswith("jaxstrategy._src.flax")
    is_ours = package == "jaxstrategy" and not is_model
    if package in _IGNORED_PACKAGES or is_ours:
        return Identity(value)
    if _code.has_no_c_state(kind):
        return _object(walk, label, value, kind, number)
    if package in _COMPILED or callable(value):  # written in C
        return Identity(value)
    if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None:
        try:
            hash(value)
        except TypeError:
            return _unknown(walk, label, value)
        return (kind, value)
    return _unknown(walk, label, value)


def _object(
    walk: References, label: str, value: object, kind: type, number: int
) -> Token:
    is_partial = walk.is_partial(value)
    walk.visit(label, None, kind, number, _CLASS if is_partial else None)
    attributes = _code.attributes_of(value)
    compared = _code.compared_fields(kind) if walk.with_key else None
    names = walk.used_attributes(value, attributes)
    with walk.shared():
        for name in names:
            if compared is None or name in compared:
                walk.visit_attribute(value, label, Binding(attributes, name), number)
        for name in walk.used_attributes(value, _code.slots_of(kind)):
            walk.visit_attribute(value, label, Binding(value, name), number)
    if is_partial:
        return ("attributes", *names)
    return ("attributes", len(names) if compared is None else compared)


# `Any`: each function takes values of its own types. The first type that fits counts.
_VISITORS: list[
    tuple[type | tuple[type, ...], Callable[[References, str, Any, int], Token]]
] = [
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (functools.partial, _partial),
    (types.ModuleType, _module),
    (enum.Enum, lambda walk, label, value, _: (Identity(type(value)), value.name)),
    (type, _class),
    ((staticmethod, classmethod, property, functools.cached_property), _descriptor),
    (types.MappingProxyType, _view),
    ((list, tuple), _sequence),
    (dict, _dict),
    ((set, frozenset), _set),
]


def keys_match(key: Sequence[Token], before: Sequence[Token]) -> bool:
    """Whether cache keys are equal, except for arrays donated since `before`."""
    return len(key) == len(before) and all(
        new == old or new == _DELETED for new, old in zip(key, before, strict=True)
    )


# A function that refers to more values is in the cache by its identity.
_MAX_NODES = 5000


class References:
    """All values that a function refers to, in an order that is always the same.

    Without `with_key` everything is visited, whether the program depends on it or not.
    """

    def __init__(
        self,
        fn: Function,
        *,
        finds_objects: bool = True,
        limit: int = _MAX_NODES,
        with_key: bool = True,
        more: Sequence[tuple[str, object]] = (),
    ) -> None:
        self.root = as_method(fn)
        self.finds_objects = finds_objects
        self.with_key = with_key
        self._limit = limit
        self.captures_arrays = True
        # The names in all code visited so far decide which attributes are visited, and
        # these lead to more code: repeat until nothing is added.
        self.uses = NameUses()
        # By `id`, objects of which any attribute may be used.
        self._whole: set[int] = set()
        before = None
        while before != (uses := (self.uses, frozenset(self._whole))):
            before = uses
            # By `id`; `nodes` keeps the values alive, so that no `id` is used again.
            self._seen: dict[int, int] = {}
            # Objects of which only the attributes count that code names.
            self._partial: set[int] = set()
            self.nodes: list[Node] = []
            self._tokens: list[Token] = []
            # Flax NNX objects and arrays that become arguments, by label.
            self.objects: dict[str, object] = {}
            self.arrays: dict[str, jax.Array | Tracer] = {}
            # The label of the first value whose changes cannot be noticed.
            self.opaque: str | None = None
            self.visit("captured", None, self.root, -1)
            for label, value in more:
                self.visit(label, None, value, -1)

    def visit(
        self,
        label: str,
        binding: Binding | None,
        value: object,
        parent: int,
        name: str | None = None,
    ) -> None:
        """Adds a value and what it refers to; user's code has it as `name`, or None."""
        kind = type(value)
        if kind in _PLAIN:  # with its class: True is equal to 1
            self.add(label, binding, value, parent, (kind, value))
        elif kind in (float, complex):  # -0.0 is not 0.0, and nan is nan
            self.add(label, binding, value, parent, (kind, repr(value)))
        elif id(value) in self._seen:
            index = self._seen[id(value)]
            if id(value) in self._partial and not self._may_be_partial(value, name):
                self._whole.add(id(value))
            self.add(label, binding, value, parent, ("again", index))
        elif len(self.nodes) >= self._limit:
            self.opaque = self.opaque or label
        else:
            self._seen[id(value)] = len(self.nodes)
            index = self.add(label, binding, value, parent, None)
            if self._may_be_partial(value, name):
                self._partial.add(id(value))
            self._tokens[index] = _token_of(self, label, value, index)

    def add(
        self,
        label: str,
        binding: Binding | None,
        value: object,
        parent: int,
        token: Token,
    ) -> int:
        """Adds a node; returns its index."""
        self.nodes.append(Node(label, binding, value, parent))
        self._tokens.append(token)
        return len(self.nodes) - 1

    def visit_attribute(
        self, owner: object, label: str, binding: Binding, parent: int
    ) -> None:
        # Code that is handed the owner as a whole may hand on its attributes.
        name = binding.key if self.is_partial(owner) else None
        label = f"{label}.{binding.key}"
        self.visit(label, binding, binding.get(), parent, name)

    def used_attributes(self, value: object, names: Iterable[str]) -> list[str]:
        """The names of attributes that the function may use."""
        if not self.is_partial(value):
            return list(names)
        return [name for name in names if name in self.uses.names]

    def is_partial(self, value: object) -> bool:
        """Whether only the attributes count that the code names."""
        return id(value) in self._partial

    def _may_be_partial(self, value: object, name: str | None) -> bool:
        if not self.with_key or name is None or id(value) in self._whole:
            return False
        if isinstance(value, type):
            return name == _CLASS
        return self.uses.reads_named_attributes_only(value, name)

    def unused_label(self, label: str) -> str:
        number, free = 2, label
        while free in self.objects or free in self.arrays:
            free, number = f"{label} ({number})", number + 1
        return free

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A `with` block for values that other code shares: no arrays are captured."""
        before, self.captures_arrays = self.captures_arrays, False
        try:
            yield
        finally:
            self.captures_arrays = before

    def named_attributes(self) -> list[str]:
        """The attributes of a method's object, or a callable one, that code names."""
        if not isinstance(self.root, types.MethodType):
            return []
        owner = self.root.__self__
        known = {*_code.attributes_of(owner), *dir(type(owner))}
        return sorted(self.uses.names & known)

    @property
    def key(self) -> tuple[Token, ...]:
        """Equal for functions that do the same with the same objects and arrays."""
        return tuple(self._tokens)

    def ancestors(self, index: int) -> Iterator[int]:
        """The index of a node, of its parent, and so on up to the function."""
        while index >= 0:
            yield index
            index = self.nodes[index].parent

    def mutated_since(self, before: References) -> tuple[int, ...]:
        """The indices of values that hold others than `before`."""
        was = {id(value): children for value, children in before._children()}
        return tuple(
            index
            for index, (value, children) in enumerate(self._children())
            if was.get(id(value), children) != children
        )

    def _children(self) -> list[tuple[object, list[Hashable]]]:
        """For each node its value, and tokens or `id`s of what that holds."""
        found: list[tuple[object, list[Hashable]]] = []
        for node, token in zip(self.nodes, self._tokens, strict=True):
            found.append((node.value, []))
            if node.parent >= 0:
                is_plain = type(node.value) in _PLAIN
                found[node.parent][1].append(token if is_plain else id(node.value))
        return found

    def nodes_with(self, values: Collection[int]) -> list[Node]:
        """The nodes bound to values, by `id`, or to a tuple that holds one."""
        holders = set(values)
        for index, node in enumerate(self.nodes):
            if id(node.value) in values:
                for above in self.ancestors(index):
                    holders.add(id(self.nodes[above].value))
                    if self.nodes[above].binding is not None:
                        break
        return [
            node for node in self.nodes if node.binding and id(node.value) in holders
        ]

    def captured_bindings(self) -> list[tuple[Binding, object]]:
        """The bindings that lead to captured objects and arrays, and their values."""
        captured = {id(v) for v in (*self.objects.values(), *self.arrays.values())}
        indices: set[int] = set()
        for index, node in enumerate(self.nodes):
            if id(node.value) in captured:
                indices.update(self.ancestors(index))
        nodes = (self.nodes[index] for index in sorted(indices))
        return [
            (node.binding, node.value) for node in nodes if node.binding is not None
        ]
