"""The values that a function refers to without being given them."""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import types
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.step_outputs import Sender
from jaxstrategy._src.tracing.functions import code as _code
from jaxstrategy._src.tracing.functions.code import Reach, as_method
from jaxstrategy._src.tracing.functions.places import (
    GONE,
    Attribute,
    ClosureCell,
    Index,
    Key,
    Place,
    is_container,
    one_level,
)
from jaxstrategy._src.tracing.functions.weak_references import Identity
from jaxstrategy._src.tracing.nnx.object_form import is_changed_in_place
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.variables.abstract_variable import Reference

# Larger arrays of NumPy are not read at each look.
_DIGESTED_BYTES = 1 << 28
# What these do has no part in what a step computes.
_BESIDES = (
    "io",
    "_io",
    "logging",
    "threading",
    "_thread",
    "queue",
    "_queue",
    "weakref",
)
# Known by themselves, whatever they hold.
_WHOLE = (
    per_replica.Handle,
    per_replica.PerReplica,
    context.AbstractStrategy,
    types.MemberDescriptorType,  # of a slot
)
_COMPILED = ("jax", "jaxlib")
# The name by which an object has its class.
ITS_CLASS = "__class__"

# What stands for a value in the form of a function.
Token = Hashable
_DELETED: Token = ("deleted",)

_PLAIN = (
    type(None),
    bool,
    int,
    str,
    bytes,
    range,
    type(Ellipsis),
    type(NotImplemented),
)


class Referred(NamedTuple):
    """One value that a walk came to."""

    label: str
    place: Place | None
    value: Any
    parent: int


def are_plain(values: Iterable[object]) -> bool:
    """Whether each of `values` is known by its value alone."""
    return all(type(value) in _PLAIN for value in values)


def path_to(reached: Sequence[Referred], number: int) -> Iterator[int]:
    """The number of a value, of what refers to it, and so on up to the function."""
    while number >= 0:
        yield number
        number = reached[number].parent


def look_into(
    walk: References,
    label: str,
    value: Any,
    number: int,
) -> Token:
    """Goes on with what `value` refers to; returns what stands for it in the form."""
    kind = type(value)
    if walk.finds_objects and is_changed_in_place(value):
        walk.objects[walk.unused(label)] = value
        return ("object", len(walk.objects))
    if issubclass(kind, (jax.Array, Tracer)):
        return _array(walk, label, value)
    if issubclass(kind, (np.ndarray, np.generic)):
        return _host_array(walk, label, value)
    if issubclass(kind, _WHOLE):
        return Identity(value)
    if issubclass(kind, Sender):
        return kind
    for kinds, follow in _FOLLOWED:
        if issubclass(kind, kinds):
            return follow(walk, label, value, number)
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
    # One that is divided otherwise may be captured along with what the function does
    # use, and would be refused as an argument.
    is_argument = (
        isinstance(value, Tracer)
        or value.sharding.is_fully_replicated
        or arrays.is_mirrored(value)
        or arrays.is_sharded(value)
    )
    if walk.is_enclosed and is_argument:
        walk.arrays[walk.unused(label)] = value
        return ("array",)
    return Identity(value)


def _host_array(walk: References, label: str, value: np.ndarray | np.generic) -> Token:
    if not walk.with_form:
        return Identity(value)
    # The bytes of an array of objects are their addresses.
    if value.dtype.hasobject or value.nbytes > _DIGESTED_BYTES:
        return _unknown(walk, label, value)
    digest = hashlib.blake2b(np.ascontiguousarray(value), digest_size=16).digest()
    return (type(value), value.dtype.str, value.shape, digest)


# Functions.


def _function(
    walk: References, label: str, fn: types.FunctionType, number: int
) -> Token:
    code = fn.__code__
    about = _code.about(code)
    # What is only written is nothing that its program depends on.
    names = about.reads if walk.with_form else {*about.reads, *about.writes}
    if about.is_users:
        walk.reach = walk.reach.plus(_code.of(code))
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
    for name, cell in cells:
        place = ClosureCell(cell)
        known = name if about.is_users else None
        walk.visit(f"captured {name}", place, place.get(), number, known)
    _defaults(walk, label, fn, number)
    if names:
        _globals(walk, fn.__globals__, names, number)
    return ("function", Identity(code))


def _defaults(
    walk: References, label: str, fn: types.FunctionType, number: int
) -> None:
    if fn.__defaults__:
        parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        labels = parameters[len(parameters) - len(fn.__defaults__) :]
        place = Attribute(fn, "__defaults__")
        parent = walk.add(label, place, fn.__defaults__, number, len(labels))
        for name, value in zip(labels, fn.__defaults__, strict=True):
            walk.visit(f"captured {name}", None, value, parent)
    keyword_defaults = fn.__kwdefaults__ or {}
    for name in keyword_defaults:
        place = Key(keyword_defaults, name)
        walk.visit(f"captured {name}", place, place.get(), number)


def _globals(
    walk: References, scope: dict[str, object], names: Collection[str], number: int
) -> None:
    with walk.in_the_open():
        for name in names:
            value = scope.get(name, GONE)
            if value is not GONE:
                place = Key(scope, name)
                walk.visit(f"captured {name}", place, value, number, name)


def _method(
    walk: References, label: str, method: types.MethodType, number: int
) -> Token:
    label = "captured self" if label == "captured" else label
    name = _code.first_name(method.__func__)
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


def _list(walk: References, label: str, items: list[object], number: int) -> Token:
    for i, item in enumerate(items):
        walk.visit(f"{label}[{i}]", Index(items, i), item, number)
    return (type(items), len(items))


def _tuple(
    walk: References, label: str, items: tuple[object, ...], number: int
) -> Token:
    names = getattr(type(items), "_fields", None)
    for i, item in enumerate(items):
        where = f".{names[i]}" if names else f"[{i}]"
        walk.visit(label + where, None, item, number)
    return (type(items), len(items))


def _dict(
    walk: References, label: str, items: dict[Hashable, object], number: int
) -> Token:
    for key, item in list(items.items()):
        walk.visit(label, None, key, number)
        walk.visit(f"{label}[{_named(key)}]", Key(items, key), item, number)
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
    if are_plain(items):
        return (type(items), frozenset((type(item), item) for item in items))
    return _unknown(walk, label, items)


def _tree(walk: References, label: str, value: PyTree, number: int) -> Token:
    """A container that somebody has registered with JAX."""
    try:
        children, structure = one_level(value)
        hash(structure)
    except Exception:  # anybody's code flattens it, and compares what it is made of
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
        names = sorted(walk.reach.used & scope.keys())
        with walk.in_the_open():
            for name in names:
                place = Key(scope, name)
                walk.visit(f"{label}.{name}", place, scope[name], number, name)
    return Identity(module)


def _class(walk: References, label: str, kind: type, number: int) -> Token:
    if _code.is_users_class(kind) and not issubclass(kind, enum.Enum):
        with walk.in_the_open():
            for base in filter(_code.is_users_class, kind.__mro__):
                for name in walk.named(kind, vars(base)):
                    if not _code.is_bookkeeping(name):
                        place = Attribute(base, name)
                        walk.member(kind, f"{label}.{name}", place, number, name)
    return Identity(kind)


def _descriptor(walk: References, label: str, value: object, number: int) -> Token:
    for name in ("__func__", "fget", "func"):
        if (function := getattr(value, name, None)) is not None:
            walk.visit(label, None, function, number)
    return type(value)


def _enumerated(walk: References, label: str, value: enum.Enum, number: int) -> Token:
    return (Identity(type(value)), value.name)


def _other(
    walk: References, label: str, value: object, kind: type, number: int
) -> Token:
    package = kind.__module__.partition(".")[0]
    is_ours = package == "jaxstrategy" and not _code.is_layer(kind)
    if package in _BESIDES or is_ours:
        return Identity(value)
    if _code.consists_of_attributes(kind):
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
    in_part = walk.is_in_part(value)
    walk.visit(label, None, kind, number, ITS_CLASS if in_part else None)
    attributes = _code.attributes_of(value)
    compared = _code.compared(kind) if walk.with_form else None
    names = walk.named(value, attributes)
    with walk.in_the_open():
        for name in names:
            if compared is None or name in compared:
                place = Key(attributes, name)
                walk.member(value, f"{label}.{name}", place, number, name)
        for name in walk.named(value, _code.slots_of(kind)):
            place = Attribute(value, name)
            walk.member(value, f"{label}.{name}", place, number, name)
    if in_part:
        return ("attributes", *names)
    return ("attributes", len(names) if compared is None else compared)


# `Any`: each function takes values of its own kinds alone. The first that fits counts.
_FOLLOWED: list[
    tuple[type | tuple[type, ...], Callable[[References, str, Any, int], Token]]
] = [
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.BuiltinFunctionType, _builtin),
    (functools.partial, _partial),
    (types.ModuleType, _module),
    (enum.Enum, _enumerated),
    (type, _class),
    ((staticmethod, classmethod, property, functools.cached_property), _descriptor),
    (types.MappingProxyType, _view),
    (list, _list),
    (dict, _dict),
    ((set, frozenset), _set),
    (tuple, _tuple),
]


def is_alike(form: Sequence[Token], before: Sequence[Token]) -> bool:
    """Whether what a function refers to is the same, but for arrays donated since."""
    return len(form) == len(before) and all(
        new == old or new == _DELETED for new, old in zip(form, before, strict=True)
    )


# As many values are looked at; with more, a function is known by itself alone.
_LIMIT = 5000


class References:
    """All that a function refers to, in an order that is always the same."""

    def __init__(
        self,
        fn: Function,
        *,
        finds_objects: bool = True,
        limit: int = _LIMIT,
        with_form: bool = True,
        more: Sequence[tuple[str, object]] = (),
    ) -> None:
        self.root = as_method(fn)
        self.finds_objects = finds_objects
        self.with_form = with_form
        self._limit = limit
        self.is_enclosed = True
        self.reach = Reach()
        self.whole: set[int] = set()
        # What code can ask for decides where a walk goes, and a walk comes to more
        # code: until nothing is added.
        known = None
        while known != (found := (self.reach, frozenset(self.whole))):
            known = found
            # By identity; `reached` keeps the values, so that no `id` is used again.
            self._seen: dict[int, int] = {}
            self._in_part: set[int] = set()
            self.reached: list[Referred] = []
            self._tokens: list[Token] = []
            self.objects: dict[str, object] = {}
            self.arrays: dict[str, jax.Array | Tracer] = {}
            self.opaque: str | None = None
            self.visit("captured", None, self.root, -1)
            for label, value in more:
                self.visit(label, None, value, -1)

    def visit(
        self,
        label: str,
        place: Place | None,
        value: object,
        parent: int,
        name: str | None = None,
    ) -> None:
        """Looks into a value; `name` is what the user's code calls it, if it does."""
        kind = type(value)
        if kind in _PLAIN:  # with its class: True is equal to 1
            self.add(label, place, value, parent, (kind, value))
        elif kind in (float, complex):  # -0.0 is not 0.0, and nan is nan
            self.add(label, place, value, parent, (kind, repr(value)))
        elif id(value) in self._seen:
            again = self._seen[id(value)]
            if id(value) in self._in_part and not self._is_part(value, name):
                self.whole.add(id(value))
            self.add(label, place, value, parent, ("again", again))
        elif len(self.reached) >= self._limit:
            self.opaque = self.opaque or label
        else:
            self._seen[id(value)] = len(self.reached)
            number = self.add(label, place, value, parent, None)
            if self._is_part(value, name):
                self._in_part.add(id(value))
            self._tokens[number] = look_into(self, label, value, number)

    def add(
        self, label: str, place: Place | None, value: object, parent: int, token: Token
    ) -> int:
        """Takes note of a value; returns its number."""
        self.reached.append(Referred(label, place, value, parent))
        self._tokens.append(token)
        return len(self.reached) - 1

    def member(
        self, owner: object, label: str, place: Place, number: int, name: str
    ) -> None:
        """Looks into the attribute `name` of `owner`."""
        # Who is handed the owner as a whole may hand on what it has.
        own = name if self.is_in_part(owner) else None
        self.visit(label, place, place.get(), number, own)

    def named(self, value: object, names: Iterable[str]) -> list[str]:
        """The names of attributes that count, of all these names."""
        if not self.is_in_part(value):
            return list(names)
        return [name for name in names if name in self.reach.used]

    def is_in_part(self, value: object) -> bool:
        """Whether of `value` only what the code names counts."""
        return id(value) in self._in_part

    def _is_part(self, value: object, name: str | None) -> bool:
        """Whether of `value`, come by as `name`, only what the code names counts."""
        if not self.with_form or name is None or id(value) in self.whole:
            return False
        if isinstance(value, type):
            return name == ITS_CLASS
        return self.reach.only_asks(value, name)

    def unused(self, label: str) -> str:
        """`label`, or one like it that no object and no array has."""
        number, free = 2, label
        while free in self.objects or free in self.arrays:
            free, number = f"{label} ({number})", number + 1
        return free

    @contextlib.contextmanager
    def in_the_open(self) -> Iterator[None]:
        """A `with` block for values that other code of the user's can come to, too."""
        was, self.is_enclosed = self.is_enclosed, False
        try:
            yield
        finally:
            self.is_enclosed = was

    @property
    def form(self) -> tuple[Token, ...]:
        """Equal for functions that do the same with the same objects and arrays."""
        return tuple(self._tokens)

    def changed_since(self, before: References) -> tuple[int, ...]:
        """The numbers of values that hold others than at another look."""
        was = {id(value): held for value, held in before._contents().values()}
        return tuple(
            number
            for number, (value, held) in self._contents().items()
            if was.get(id(value), held) != held
        )

    def _contents(self) -> dict[int, tuple[object, list[Hashable]]]:
        """By its number each value that holds others, and what stands for those."""
        found: dict[int, tuple[object, list[Hashable]]] = {}
        for number, each in enumerate(self.reached):
            found[number] = each.value, []
            if each.parent >= 0:
                is_plain = are_plain([each.value])
                token = self._tokens[number] if is_plain else id(each.value)
                found[each.parent][1].append(token)
        return found

    def holders(self, values: Collection[int]) -> list[Referred]:
        """The places that hold values, or a tuple with one in it, in their order."""
        carriers = set(values)
        for number, each in enumerate(self.reached):
            if id(each.value) in values:
                for step in path_to(self.reached, number):
                    carriers.add(id(self.reached[step].value))
                    if self.reached[step].place is not None:
                        break
        return [
            each for each in self.reached if each.place and id(each.value) in carriers
        ]

    def watched(self) -> list[tuple[Place, object]]:
        """The places that must hold what they hold for the same objects to be found."""
        slots = {id(v) for v in (*self.objects.values(), *self.arrays.values())}
        wanted: set[int] = set()
        for number, each in enumerate(self.reached):
            if id(each.value) in slots:
                for step in path_to(self.reached, number):
                    if step in wanted:
                        break
                    wanted.add(step)
        found = (self.reached[number] for number in sorted(wanted))
        return [(each.place, each.value) for each in found if each.place is not None]
