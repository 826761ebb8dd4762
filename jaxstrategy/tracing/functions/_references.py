"""What a function refers to without being given it, as far as Python tells.

A function refers to values by name: in its closure, its globals, the defaults of its
parameters; a method by its object, a partial function by its arguments. Those refer to
others: functions in turn, containers by their entries, objects by their attributes.

A walk along all of these gives a *form*, which two functions share whose calls do the
same: the code is the same, and so is what the code refers to. What the program of a
step is given instead, objects of Flax NNX and arrays in closures, is only counted.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy.contexts import _context
from jaxstrategy.tracing.functions import (
    _code,
    _reach,
)
from jaxstrategy.tracing.functions._places import (
    GONE,
    Attribute,
    Cell,
    Index,
    Key,
    Place,
)
from jaxstrategy.values import _per_replica

# As many values are looked at; with more, a function is known by itself alone.
_LIMIT = 5000
_DIGESTED_BYTES = 1 << 28

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
_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)
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
    _per_replica.Handle,
    _per_replica.PerReplica,
    _context.AbstractStrategy,
    types.MemberDescriptorType,  # of a slot
)
_COMPILED = ("jax", "jaxlib")
# The name by which an object has its class.
_ITS_CLASS = "__class__"
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: defined by a `class` statement


class Identity:
    """Equal for the same object, as long as it lives; keeps it alive if need be."""

    __slots__ = ("_id", "_get")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._get = weakref.ref(value)
        except TypeError:  # its type allows no weak references
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        mine = self._get()
        return mine is not None and mine is other._get()

    def __hash__(self) -> int:
        return self._id

    def watched(self, gone: Callable[[Any], object]) -> Any:
        """A reference that calls `gone` when the object is, as long as it is kept."""
        value = self._get()
        try:
            return None if value is None else weakref.ref(value, gone)
        except TypeError:
            return None

    @property
    def is_gone(self) -> bool:
        """Whether nothing can be equal any more."""
        return self._get() is None

    def __repr__(self) -> str:
        value = self._get()
        return (
            "an object that is gone" if value is None else f"a {type(value).__name__}"
        )


class Step(NamedTuple):
    """One value that was come by.

    Attributes:
      label: how messages call it, `captured self.rate`.
      place: what refers to it; None if that cannot be changed.
      value: what it is.
      parent: the number of the step that led here.
    """

    label: str
    place: Place | None
    value: Any
    parent: int


class References:
    """All that a function refers to.

    Args:
      fn: any callable; of what is written in C nothing is known.
      is_object: which objects the program of a step is given.
      limit: how many values are looked at.
      with_form: whether the form is asked for. For that NumPy's arrays are read, and of
        objects only those attributes count that the function can name. Else all do.
      more: values that are looked at as well, by label.

    Attributes:
      steps: all values, in the order in which they were come by.
      form: equal for functions that do the same with the same objects and arrays.
      objects: those that `is_object` says, by label.
      arrays: arrays in closures, defaults and partial functions, by label.
      opaque: the label of something of which Python does not say what it is now.
    """

    def __init__(
        self,
        fn: Any,
        is_object: Callable[[Any], bool],
        limit: int = _LIMIT,
        with_form: bool = True,
        more: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._is_object = is_object
        self._limit = limit
        self._with_form = with_form
        self.root = as_method(fn)
        # What the functions do that it refers to, as far as that is known.
        self._reach = _reach.Reach()
        # Objects that one name does not lead to alone, and count as a whole.
        self._whole: set[int] = set()
        known = None
        while known != (self._reach, len(self._whole)):
            known = self._reach, len(self._whole)
            self._walk(more)

    def _walk(self, more: Sequence[tuple[str, Any]]) -> None:
        self._seen: dict[int, int] = {}
        self._in_part: set[int] = set()
        # Arrays are the program's arguments where no other thread comes across them.
        self._is_enclosed = True
        self.steps: list[Step] = []
        self.tokens: list[Any] = []
        self.objects: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.opaque: str | None = None
        self._visit("captured", None, self.root, -1)
        for label, value in more:
            self._visit(label, None, value, -1)

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for functions that do the same; may not be hashed if `opaque`."""
        return tuple(self.tokens)

    def _visit(
        self,
        label: str,
        place: Place | None,
        value: Any,
        parent: int,
        name: str | None = None,
    ) -> None:
        """Looks into a value; `name` is what the user's code calls it, if it does."""
        kind = type(value)
        if kind in _PLAIN:
            self._add(label, place, value, parent, (kind, value))
        elif kind in (float, complex):  # -0.0 is not 0.0, and nan is nan
            self._add(label, place, value, parent, (kind, repr(value)))
        elif id(value) in self._seen:
            again = self._seen[id(value)]
            if id(value) in self._in_part and not self._is_part(value, name):
                self._whole.add(id(value))
            self._add(label, place, value, parent, ("again", again))
        elif len(self.steps) >= self._limit:
            self.opaque = self.opaque or label
        else:
            self._seen[id(value)] = len(self.steps)
            index = self._add(label, place, value, parent, None)
            if self._is_part(value, name):
                self._in_part.add(id(value))
            self.tokens[index] = self._look_into(label, value, kind, index)

    def _is_part(self, value: Any, name: str | None) -> bool:
        """Whether of `value`, come by as `name`, only what the code names counts."""
        if not self._with_form or name is None or id(value) in self._whole:
            return False
        if isinstance(value, type):
            return name == _ITS_CLASS
        return self._reach.only_asks(value, name)

    def _named(self, value: Any, names: Iterable[str]) -> list[str]:
        """Those of the names of attributes that count."""
        if id(value) not in self._in_part:
            return list(names)
        return [name for name in names if name in self._reach.used]

    def _add(
        self, label: str, place: Place | None, value: Any, parent: int, token: Any
    ) -> int:
        self.steps.append(Step(label, place, value, parent))
        self.tokens.append(token)
        return len(self.steps) - 1

    def _look_into(self, label: str, value: Any, kind: type, index: int) -> Any:
        """What stands for `value` in the form."""
        if self._is_object(value):
            self.objects[self._unused(label)] = value
            return ("object", len(self.objects))
        if issubclass(kind, (jax.Array, Tracer)):
            return self._array(label, value)
        if issubclass(kind, (np.ndarray, np.generic)):
            return self._host_array(label, value)
        if issubclass(kind, _WHOLE):
            return Identity(value)
        for kinds, follow in _FOLLOWED:
            if issubclass(kind, kinds):
                return follow(self, label, value, index)
        if _is_container(value):
            return self._tree(label, value, index)
        return self._other(label, value, kind, index)

    def _array(self, label: str, value: Any) -> Any:
        if not isinstance(value, Tracer) and value.is_deleted():
            return ("deleted",)
        # One that is split may be captured along with what the function does use, and
        # would be refused as an argument.
        is_whole = isinstance(value, Tracer) or value.sharding.is_fully_replicated
        if self._is_enclosed and is_whole:
            self.arrays[self._unused(label)] = value
            return ("array",)
        return Identity(value)

    def _host_array(self, label: str, value: Any) -> Any:
        if not self._with_form:
            return Identity(value)
        if value.dtype.hasobject or value.nbytes > _DIGESTED_BYTES:
            return self._unknown(label, value)
        digest = hashlib.blake2b(np.ascontiguousarray(value), digest_size=16).digest()
        return (type(value), value.dtype.str, value.shape, digest)

    def _unknown(self, label: str, value: Any) -> Any:
        self.opaque = self.opaque or label
        return Identity(value)

    def _unused(self, label: str) -> str:
        number, free = 2, label
        while free in self.objects or free in self.arrays:
            free, number = f"{label} ({number})", number + 1
        return free

    def holders(self, values: Collection[int]) -> list[Step]:
        """The steps to the places that hold values, by themselves or in a tuple.

        Args:
          values: the identities of the values.
        """
        carriers = set(values)
        for number, step in enumerate(self.steps):
            if id(step.value) not in values:
                continue
            while self.steps[number].place is None:
                carriers.add(id(self.steps[number].value))
                if self.steps[number].parent < 0:
                    break
                number = self.steps[number].parent
            carriers.add(id(self.steps[number].value))
        return [s for s in self.steps if s.place and id(s.value) in carriers]

    def watched(self) -> list[tuple[Place, Any]]:
        """The places that must hold what they hold for the same objects to be found."""
        slots = {id(v) for v in (*self.objects.values(), *self.arrays.values())}
        wanted: set[int] = set()
        for number, step in enumerate(self.steps):
            if id(step.value) in slots:
                while number >= 0 and number not in wanted:
                    wanted.add(number)
                    number = self.steps[number].parent
        steps = (self.steps[number] for number in sorted(wanted))
        return [(s.place, s.value) for s in steps if s.place is not None]

    # What each kind of value refers to.

    def _function(self, label: str, fn: types.FunctionType, index: int) -> Any:
        code = fn.__code__
        about = _code.about(code)
        # What is only written is nothing that its program depends on.
        names = about.reads if self._with_form else {*about.reads, *about.writes}
        if about.is_users:
            self._reach = self._reach.plus(_reach.of(code))
        own = about.is_users
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        for name, cell in cells:
            place = Cell(cell)
            known = name if own else None
            self._visit(f"captured {name}", place, place.get(), index, known)
        if fn.__defaults__:
            parameters = code.co_varnames[: code.co_argcount]
            labels = parameters[len(parameters) - len(fn.__defaults__) :]
            place = Attribute(fn, "__defaults__")
            parent = self._add(label, place, fn.__defaults__, index, len(labels))
            for name, value in zip(labels, fn.__defaults__, strict=True):
                self._visit(f"captured {name}", None, value, parent)
        defaults = fn.__kwdefaults__ or {}
        for name in defaults:
            place = Key(defaults, name)
            self._visit(f"captured {name}", place, place.get(), index)
        if names:
            self._globals(fn.__globals__, names, index)
        return ("function", Identity(code))

    def _globals(
        self, scope: dict[str, Any], names: Collection[str], index: int
    ) -> None:
        was, self._is_enclosed = self._is_enclosed, False
        for name in names:
            value = scope.get(name, GONE)
            if value is not GONE:
                self._visit(f"captured {name}", Key(scope, name), value, index, name)
        self._is_enclosed = was

    def _method(self, label: str, method: types.MethodType, index: int) -> Any:
        label = "captured self" if label == "captured" else label
        self._visit(label, None, method.__self__, index, _first_name(method.__func__))
        self._visit("captured", None, method.__func__, index)
        return "method"

    def _builtin(self, label: str, function: Any, index: int) -> Any:
        owner = function.__self__
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return Identity(function)
        self._visit(label, None, owner, index)
        return ("builtin", function.__name__)

    def _partial(self, label: str, fn: Any, index: int) -> Any:
        self._visit("captured", None, fn.func, index)
        for number, value in enumerate(fn.args):
            self._visit(f"captured args[{number}]", None, value, index)
        for name, value in fn.keywords.items():
            self._visit(f"captured {name}", None, value, index)
        return ("partial", type(fn), len(fn.args), tuple(fn.keywords))

    def _list(self, label: str, items: list[Any], index: int) -> Any:
        for i, item in enumerate(items):
            self._visit(f"{label}[{i}]", Index(items, i), item, index)
        return (type(items), len(items))

    def _tuple(self, label: str, items: tuple[Any, ...], index: int) -> Any:
        names = getattr(type(items), "_fields", None)
        for i, item in enumerate(items):
            where = f".{names[i]}" if names else f"[{i}]"
            self._visit(label + where, None, item, index)
        return (type(items), len(items))

    def _dict(self, label: str, items: dict[Any, Any], index: int) -> Any:
        for key, item in list(items.items()):
            self._visit(label, None, key, index)
            self._visit(f"{label}[{key!r}]", Key(items, key), item, index)
        return (type(items), len(items))

    def _view(self, label: str, items: Any, index: int) -> Any:
        for key, item in list(items.items()):
            self._visit(f"{label}[{key!r}]", None, item, index)
        return (types.MappingProxyType, tuple(map(str, items)))

    def _set(self, label: str, items: Any, index: int) -> Any:
        if all(type(item) in _PLAIN for item in items):
            return (type(items), frozenset((type(item), item) for item in items))
        return self._unknown(label, items)

    def _module(self, label: str, module: types.ModuleType, index: int) -> Any:
        if _code.is_users_module(module):
            scope = vars(module)
            names = sorted(self._reach.used & scope.keys())
            was, self._is_enclosed = self._is_enclosed, False
            for name in names:
                place = Key(scope, name)
                self._visit(f"{label}.{name}", place, scope[name], index, name)
            self._is_enclosed = was
        return Identity(module)

    def _class(self, label: str, kind: type, index: int) -> Any:
        if _code.is_users_class(kind) and not issubclass(kind, enum.Enum):
            was, self._is_enclosed = self._is_enclosed, False
            for base in kind.__mro__:
                if _code.is_users_class(base):
                    for name in self._named(kind, vars(base)):
                        if not _is_bookkeeping(name):
                            place = Attribute(base, name)
                            self._member(kind, f"{label}.{name}", place, index, name)
            self._is_enclosed = was
        return Identity(kind)

    def _descriptor(self, label: str, value: Any, index: int) -> Any:
        for name in ("__func__", "fget", "func"):
            if (function := getattr(value, name, None)) is not None:
                self._visit(label, None, function, index)
        return type(value)

    def _enumerated(self, label: str, value: enum.Enum, index: int) -> Any:
        return (Identity(type(value)), value.name)

    def _tree(self, label: str, value: Any, index: int) -> Any:
        """A container that somebody has registered with JAX."""
        try:
            children, structure = _one_level(value)
            hash(structure)
        except Exception:
            return self._unknown(label, value)
        for path, child in children:
            self._visit(label + jax.tree_util.keystr(path), None, child, index)
        return (type(value), structure)

    def _other(self, label: str, value: Any, kind: type, index: int) -> Any:
        package = kind.__module__.partition(".")[0]
        if package in _BESIDES or (package == "jaxstrategy" and not _is_layer(kind)):
            return Identity(value)
        if _consists_of_attributes(kind):
            return self._object(label, value, kind, index)
        if package in _COMPILED or callable(value):  # written in C
            return Identity(value)
        if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None:
            try:
                hash(value)
            except TypeError:
                return self._unknown(label, value)
            return (kind, value)
        return self._unknown(label, value)

    def _object(self, label: str, value: Any, kind: type, index: int) -> Any:
        in_part = id(value) in self._in_part
        self._visit(label, None, kind, index, _ITS_CLASS if in_part else None)
        was, self._is_enclosed = self._is_enclosed, False
        attributes = attributes_of(value)
        compared = _compared(kind) if self._with_form else None
        names = self._named(value, attributes)
        for name in names:
            if compared is None or name in compared:
                place = Key(attributes, name)
                self._member(value, f"{label}.{name}", place, index, name)
        for name in self._named(value, _slots_of(kind)):
            place = Attribute(value, name)
            self._member(value, f"{label}.{name}", place, index, name)
        self._is_enclosed = was
        if in_part:
            return ("attributes", *names)
        return ("attributes", len(names) if compared is None else compared)

    def _member(
        self, owner: Any, label: str, place: Place, index: int, name: str
    ) -> None:
        # Who is handed the owner as a whole may hand on what it has.
        own = name if id(owner) in self._in_part else None
        self._visit(label, place, place.get(), index, own)


_FOLLOWED: list[tuple[Any, Callable[..., Any]]] = [
    (types.FunctionType, References._function),
    (types.MethodType, References._method),
    (types.BuiltinFunctionType, References._builtin),
    (functools.partial, References._partial),
    (types.ModuleType, References._module),
    (enum.Enum, References._enumerated),
    (type, References._class),
    (
        (staticmethod, classmethod, property, functools.cached_property),
        References._descriptor,
    ),
    (types.MappingProxyType, References._view),
    (list, References._list),
    (dict, References._dict),
    ((set, frozenset), References._set),
    (tuple, References._tuple),
]


def _compared(kind: type) -> tuple[str, ...] | None:
    """The fields by which objects of a class are equal, if it says so; else None."""
    parameters = getattr(kind, "__dataclass_params__", None)
    is_value = parameters is not None and parameters.eq and kind.__hash__ is not None
    if not is_value or "__dataclass_params__" not in vars(kind):
        return None
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


def _first_name(function: Any) -> str | None:
    """What a method of the user's calls its object."""
    code = getattr(function, "__code__", None)
    if code is None or not _code.about(code).is_users:
        return None
    return next(iter(code.co_varnames), None)


def as_method(fn: Any) -> Any:
    """`fn`, or of an object that can be called the method that is called."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, _CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)


def _is_container(value: Any) -> bool:
    return not jax.tree_util.all_leaves([value])


def _one_level(value: Any) -> tuple[list[Any], Any]:
    """What a registered container holds, and its structure."""
    return jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )


def rebuilt(value: Any, others: dict[int, Any]) -> Any:
    """`value`, or if it holds one of `others` and cannot be changed, one like it.

    Args:
      value: anything.
      others: what takes the place of an object, by the identity of that.
    """
    if id(value) in others:
        return others[id(value)]
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [rebuilt(part, others) for part in parts]
        return value if _are_same(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [rebuilt(part, others) for part in parts]
        if _are_same(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [rebuilt(part, others) for part in value]
        if _are_same(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *_CALLABLE)) or _per_replica.is_whole(value):
        return value
    if _is_container(value):
        children, structure = _one_level(value)
        parts = [child for _, child in children]
        new = [rebuilt(part, others) for part in parts]
        return value if _are_same(new, parts) else structure.unflatten(new)
    return value


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, without asking its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _slots_of(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


def _consists_of_attributes(kind: type) -> bool:
    """Whether objects of a class are what their attributes are, and nothing in C."""
    return all(
        base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__
    ) and (_is_open(kind))


def _is_open(kind: type) -> bool:
    # A class that C code made on the heap has a layout of its own.
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (
        2 + sum(1 for _ in _slots_of(kind))
    )


def _is_layer(kind: type) -> bool:
    return kind.__module__.startswith("jaxstrategy.flax")


def _is_bookkeeping(name: str) -> bool:
    """Whether Python made an attribute of a class, and not its author."""
    return name in _BOOKKEEPING


_BOOKKEEPING = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __qualname__ __slots__ "
    "__firstlineno__ __static_attributes__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __dataclass_fields__ __dataclass_params__ __match_args__ "
    "__abstractmethods__ _abc_impl __parameters__ __orig_bases__ __type_params__ "
    "__classdictcell__".split()
)
