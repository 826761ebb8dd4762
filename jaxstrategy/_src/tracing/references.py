"""The values that a function captures, and the cache key that they make."""

from __future__ import annotations

import abc
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import operator
import sys
import types
import typing
import weakref
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Concatenate, NamedTuple, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import Sender
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.values import arrays, per_replica, trees
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.values.trees import is_nnx_node, object_kinds
from jaxstrategy._src.variables.changes import Reference


@functools.lru_cache(maxsize=4096)
def is_users_class(kind: type) -> bool:
    """Whether a class was defined in the user's own code."""
    return is_users_module(sys.modules.get(kind.__module__))


def is_users_module(module: types.ModuleType | None) -> bool:
    """Whether a module is the user's own code; a notebook's is."""
    if module is None or module.__name__ in sys.builtin_module_names:
        return False
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return bool(file) and _is_users_file(file)


@functools.lru_cache(maxsize=4096)
def _is_users_file(file: str) -> bool:
    return text.innermost([(file, 1)], libraries=False) is not None


def code_of(fn: object) -> types.CodeType | None:
    """The code of a function, method, `functools.partial` or callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not hasattr(fn, "__code__"):
        fn = inspect.getattr_static(type(fn), "__call__", None)
    return getattr(fn, "__code__", None)


_LOCATION = "_jaxstrategy_source_location"


def source_location(fn: object) -> tuple[str, int] | None:
    """The file and line where the user has defined `fn`."""
    if (location := getattr(fn, _LOCATION, None)) is not None:
        return location
    code = code_of(fn)
    return code and (code.co_filename, code.co_firstlineno)


def copy_source_location(wrapper: object, fn: object) -> None:
    """Gives `wrapper`, which is ours, the location of the user's function."""
    wrapper.__dict__[_LOCATION] = source_location(fn)


# With these names, code can access attributes that it does not name.
_DYNAMIC = frozenset(
    "__dict__ __class__ __dir__ __getattr__ __getattribute__ __getstate__ __reduce__ "
    "__reduce_ex__ __slots__ __weakref__ __closure__ __self__ __wrapped__ locals "
    "globals vars eval exec _getframe currentframe get_objects get_referents "
    "get_referrers".split()
)
_ATTRIBUTE_OPERATIONS = (
    "LOAD_ATTR LOAD_METHOD STORE_ATTR DELETE_ATTR LOAD_SUPER_ATTR".split()
)
# Base classes that read no attributes of their own.
_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")


class Names(NamedTuple):
    """The names in some code and in the functions defined in it."""

    all: frozenset[str] = frozenset()
    # Variables whose values it uses as a whole, and not for an attribute.
    escaping: frozenset[str] = frozenset()
    # Global ones.
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()

    def plus(self, other: Names) -> Names:
        return Names(*map(frozenset.union, self, other))

    def reads_named_attributes_only(self, value: object, name: str) -> bool:
        """Whether code can access only those attributes of `value` that it names."""
        kind = type(value)
        if not self.all.isdisjoint(_DYNAMIC) or not _is_plain_class(kind):
            return False
        return self.escaping.isdisjoint({name, *self._self_parameters(kind)})

    def _self_parameters(self, kind: type) -> Iterator[str]:
        """The names of `self` in the methods of a class that the code names."""
        for base in kind.__mro__:
            for name in self.all & vars(base).keys():
                member = vars(base)[name]
                for part in ("", "__func__", "fget", "fset", "fdel", "func"):
                    function = getattr(member, part, None) if part else member
                    if isinstance(function, types.FunctionType):
                        yield from function.__code__.co_varnames[:1]


def _is_plain_class(kind: type) -> bool:
    """Whether only the user's own code reads attributes of its objects."""
    if type(kind) not in (type, abc.ABCMeta) or hasattr(kind, "__getattr__"):
        return False
    if hasattr(kind, "__dataclass_fields__"):  # generated methods read all fields
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in _HOOKS):
        return False
    return all(base in _BASES or is_users_class(base) for base in kind.__mro__)


# By `id`: equal code of two files differs in `co_filename`.
_names: dict[int, Names] = {}


def names_of(code: types.CodeType) -> Names:
    if id(code) not in _names:
        names = _names_in(code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                names = names.plus(names_of(inner))
        _names[id(code)] = names
        weakref.finalize(code, _names.pop, id(code), None)
    return _names[id(code)]


def is_users(code: types.CodeType) -> bool:
    """Whether code is the user's own, and not a library's."""
    return _is_users_file(code.co_filename)


def _names_in(code: types.CodeType) -> Names:
    cells = {*code.co_cellvars, *code.co_freevars}
    escaping, reads, writes = set[str](), set[str](), set[str]()
    instructions = [i for i in dis.get_instructions(code) if i.opname != "NOP"]
    for index, each in enumerate(instructions):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads.add(each.argval)
        elif each.opname == "STORE_GLOBAL":
            writes.add(each.argval)
        if "LOAD_" not in each.opname or each.opname in ("LOAD_CONST", "LOAD_CLOSURE"):
            continue
        following = instructions[index + 1 : index + 3]
        if following and following[0].opname == "COPY":  # of `x.a += 1`
            following = following[1:]
        loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if following and following[0].opname in _ATTRIBUTE_OPERATIONS:
            loaded = loaded[:-1]
        for name in loaded:
            # `LOAD_FAST` of a cell loads the cell.
            if isinstance(name, str) and not ("FAST" in each.opname and name in cells):
                escaping.add(name)
    parts = (code.co_names, escaping, reads, writes)
    return Names(*map(frozenset, parts))


CALLABLE = (types.FunctionType, types.MethodType, functools.partial)
_HEAP_TYPE = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`: defined by a `class` statement


def attributes_of(value: object) -> dict[str, object]:
    """The `__dict__` of an object, without calling methods of its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def slots_of(kind: type) -> Iterator[str]:
    """The names of the slots of a class and its bases."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


def has_no_c_state(kind: type) -> bool:
    """Whether attributes and slots are all the state of objects of a class."""
    bases = [base for base in kind.__mro__ if base is not object]
    if not all(base.__flags__ & _HEAP_TYPE for base in bases):
        return False
    # A class that C code made on the heap has a layout of its own. One of Python's has
    # a pointer for each slot, and one each for `__dict__` and `__weakref__`.
    pointers = 2 + sum(1 for _ in slots_of(kind))
    return kind.__basicsize__ <= object.__basicsize__ + 8 * pointers


# Attributes of a class that Python makes.
IMPLICIT_ATTRIBUTES = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __qualname__ __slots__ "
    "__firstlineno__ __static_attributes__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __dataclass_fields__ __dataclass_params__ __match_args__ "
    "__abstractmethods__ _abc_impl __parameters__ __orig_bases__ __type_params__ "
    "__classdictcell__".split()
)


def compared_fields(kind: type) -> tuple[str, ...] | None:
    """The fields that a hashable dataclass compares; None for other classes."""
    parameters = getattr(kind, "__dataclass_params__", None)
    is_value = parameters is not None and parameters.eq and kind.__hash__ is not None
    if not is_value or "__dataclass_params__" not in vars(kind):
        return None
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


def self_name(function: object) -> str | None:
    """What a method of the user's calls `self`."""
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code):
        return None
    return next(iter(code.co_varnames), None)


def as_method(fn: Function) -> Function:
    """`fn`, or `fn.__call__` of a callable object."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)


Owner = TypeVar("Owner")
Answer = TypeVar("Answer")


def weak_method(
    owner: Owner, method: Callable[Concatenate[Owner, ...], Answer], *args: object
) -> Callable[..., Answer | None]:
    """`method(owner, *args, ...)` without keeping `owner` alive; None once it is gone.

    For callbacks of finalizers, too.
    """
    # When the interpreter exits, the names of a module are None before the last objects
    # are gone. So the callback has all that it uses with it.
    get, is_finalizing = weakref.ref(owner), sys.is_finalizing

    def call(*more: object) -> Answer | None:
        if is_finalizing():
            return None
        alive = get()
        return None if alive is None else method(alive, *args, *more)

    return call


def weak_function(
    fn: Function, on_death: Callable[[object], object] | None = None
) -> Callable[[], Function | None]:
    """Returns `fn` while it lives; `on_death` is called when it dies."""
    try:
        if isinstance(fn, types.MethodType):
            # A method is made at each access: a plain reference would be dead at once.
            return weakref.WeakMethod(fn, on_death)
        return weakref.ref(fn, on_death)
    except TypeError:  # its type allows no weak references
        return lambda: fn


class Identity:
    """Hashable identity of an object, kept alive only if it allows no weak reference.

    After the object died it equals nothing, though another may get the same `id`.
    """

    __slots__ = ("_id", "get")

    def __init__(self, value: object) -> None:
        self._id = id(value)
        try:
            self.get = weakref.ref(value)
        except TypeError:
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        value = self.get()
        if value is None and (self.is_gone or other.is_gone):
            return False
        return other.get() is value

    def __hash__(self) -> int:
        return self._id

    def watch(self, on_death: Callable[[object], object]) -> object:
        """A reference that calls `on_death` as long as it is kept, if it may die."""
        if not isinstance(self.get, weakref.ref) or (value := self.get()) is None:
            return None
        return weakref.ref(value, on_death)

    @property
    def is_gone(self) -> bool:
        """Whether the object died."""
        return self.get() is None and isinstance(self.get, weakref.ref)

    def is_of(self, value: object) -> bool:
        """Whether it is that of `value`: of None only if it always was."""
        return self.get() is value and not (value is None and self.is_gone)


class _Unbound:
    """The class of `UNBOUND`."""


# The value of a binding that has none.
UNBOUND = _Unbound()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Binding:
    """A reference to a value that can be replaced.

    Attributes:
      owner: a dict or list that has it as `key`; or an object, a class or a closure
        cell of which it is the attribute `key`.
    """

    owner: Any
    key: Any = "cell_contents"

    @property
    def identity(self) -> Hashable:
        """Equal for the same binding, as long as its owner lives."""
        return id(self.owner), self.key

    def get(self) -> object:
        """The value, or `UNBOUND`."""
        kind = type(self.owner)
        if issubclass(kind, dict):
            return self.owner.get(self.key, UNBOUND)
        if issubclass(kind, list):
            return self.owner[self.key] if self.key < len(self.owner) else UNBOUND
        if issubclass(kind, type):  # without calling descriptors
            return vars(self.owner).get(self.key, UNBOUND)
        try:
            return getattr(self.owner, self.key, UNBOUND)
        except ValueError:  # a variable that is not assigned yet
            return UNBOUND

    def set(self, value: object) -> None:
        """Binds another value, or with `UNBOUND` none."""
        is_item = issubclass(type(self.owner), (dict, list))
        if value is not UNBOUND:
            assign = operator.setitem if is_item else setattr
            assign(self.owner, self.key, value)
        elif self.get() is not UNBOUND:
            remove = operator.delitem if is_item else delattr
            remove(self.owner, self.key)


def is_container(value: object) -> bool:
    """Whether `value` is an inner node of a pytree; None is one."""
    return not jax.tree_util.all_leaves([value])


def flatten_one_level(value: PyTree) -> tuple[list[tuple[KeyPath, PyTree]], Any]:
    """The children of a pytree node with their paths, and its structure."""
    # `Any`: to type checkers JAX's `PyTreeDef` is a variable, and no type.
    return jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda node: node is not value
    )


def substituted(value: Any, substitutes: Mapping[int, object]) -> Any:
    """`value`, or a copy of an immutable container, with values replaced by `id`."""
    if id(value) in substitutes:
        return substitutes[id(value)]
    # `Any`, and the class: `isinstance` calls code of some libraries' objects.
    kind = type(value)
    if issubclass(kind, types.MethodType):
        parts = [value.__func__, value.__self__]
        new = [substituted(part, substitutes) for part in parts]
        return value if are_identical(new, parts) else types.MethodType(*new)
    if issubclass(kind, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        func, *rest = new = [substituted(part, substitutes) for part in parts]
        if are_identical(new, parts):
            return value
        n = len(value.args)
        keywords = dict(zip(value.keywords, rest[n:], strict=True))
        return kind(func, *rest[:n], **keywords)
    if issubclass(kind, tuple):
        new = [substituted(part, substitutes) for part in value]
        if are_identical(new, value):
            return value
        return kind(*new) if hasattr(kind, "_fields") else kind(new)
    if issubclass(kind, (list, dict, type, *CALLABLE)) or trees.is_whole(value):
        return value
    if is_container(value):
        children, structure = flatten_one_level(value)
        parts = [child for _, child in children]
        new = [substituted(part, substitutes) for part in parts]
        return value if are_identical(new, parts) else structure.unflatten(new)
    return value


def are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


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
_DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
_CONTAINERS = (types.MappingProxyType, list, tuple, dict, set, frozenset)
_CLASS = "__class__"


class CapturedName(str):
    """The name of a captured value that a program takes as a keyword argument."""


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


def _named(key: Hashable) -> str:
    # The `repr` of a variable reads it: it waits for the devices, and in a trace refers
    # to an array of another.
    if isinstance(key, Reference):
        return f"{_named(key.deref())}.ref()"
    if isinstance(key, tuple):
        return f"({', '.join(map(_named, key))})"
    return key.name if isinstance(key, per_replica.Handle) else repr(key)


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
        self._finds_objects = finds_objects and bool(object_kinds())
        self._with_key = with_key
        self._limit = limit
        # Not what other code shares, globals and attributes.
        self._captures_arrays = True
        # The names in all code visited so far decide which attributes are visited, and
        # these lead to more code: repeat until nothing is added.
        self.uses = Names()
        # By `id`, objects any of whose attributes may be used.
        self._whole: set[int] = set()
        before = None
        while before != (uses := (self.uses, frozenset(self._whole))):
            before = uses
            # By `id`; `nodes` keeps the values alive, so that no `id` is used again.
            self._seen: dict[int, int] = {}
            # Objects whose attributes count only where code names them.
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
        # Equal for functions that do the same with the same objects and arrays.
        self.key = tuple(self._tokens)

    def visit(
        self,
        label: str,
        binding: Binding | None,
        value: object,
        parent: int,
        name: str | None = None,
    ) -> None:
        """Adds a value and what it refers to; user's code has it as `name`, or None."""
        kind, number, token = type(value), len(self.nodes), None
        if kind in _PLAIN:  # with its class: True is equal to 1
            token = (kind, value)
        elif kind in (float, complex):  # -0.0 is not 0.0, and nan is nan
            token = (kind, repr(value))
        elif id(value) in self._seen:
            if id(value) in self._partial and not (
                name and self._may_be_partial(value, name)
            ):
                self._whole.add(id(value))
            token = ("again", self._seen[id(value)])
        elif number >= self._limit:
            self.opaque = self.opaque or label
            return
        else:
            self._seen[id(value)] = number
            if name and self._may_be_partial(value, name):
                self._partial.add(id(value))
        self.nodes.append(Node(label, binding, value, parent))
        self._tokens.append(token)
        if token is None:
            self._tokens[number] = self._token(label, value, number)

    # What values refer to, and their part of the cache key.

    def _token(self, label: str, value: Any, number: int) -> Token:
        """Visits what `value` refers to, and returns its part of the cache key."""
        kind = type(value)
        if self._finds_objects and is_nnx_node(value):
            self.objects[self._unused_label(label)] = value
            return ("object", len(self.objects))
        if issubclass(kind, (jax.Array, Tracer)):
            return self._array(label, value)
        if issubclass(kind, (np.ndarray, np.generic)):
            return self._host_array(label, value)
        if issubclass(kind, _BY_IDENTITY):
            return Identity(value)
        if issubclass(kind, Sender):
            return kind
        if issubclass(kind, types.FunctionType):
            return self._function(label, value, number)
        if issubclass(kind, types.MethodType):
            label = "captured self" if label == "captured" else label
            name = self_name(value.__func__)
            self.visit(label, None, value.__self__, number, name)
            self.visit("captured", None, value.__func__, number)
            return "method"
        if issubclass(kind, types.BuiltinFunctionType):
            owner = value.__self__
            if owner is None or isinstance(owner, (types.ModuleType, type)):
                return Identity(value)
            self.visit(label, None, owner, number)
            return ("builtin", value.__name__)
        if issubclass(kind, functools.partial):
            self.visit("captured", None, value.func, number)
            named = {f"args[{i}]": each for i, each in enumerate(value.args)}
            for name, each in {**named, **value.keywords}.items():
                self.visit(f"captured {name}", None, each, number)
            return ("partial", kind, len(value.args), tuple(value.keywords))
        if issubclass(kind, types.ModuleType):
            if is_users_module(value):
                names = sorted(self.uses.all & vars(value).keys())
                self._globals(vars(value), names, number, f"{label}.")
            return Identity(value)
        if issubclass(kind, enum.Enum):
            return (Identity(kind), value.name)
        if issubclass(kind, type):
            return self._class(label, value, number)
        if issubclass(kind, _DESCRIPTORS):
            for name in ("__func__", "fget", "func"):
                if (function := getattr(value, name, None)) is not None:
                    self.visit(label, None, function, number)
            return kind
        if issubclass(kind, _CONTAINERS):
            return self._container(label, value, kind, number)
        if is_container(value):
            return self._pytree(label, value, number)
        return self._object(label, value, kind, number)

    def _unknown(self, label: str, value: object) -> Token:
        self.opaque = self.opaque or label
        return Identity(value)

    def _array(self, label: str, value: jax.Array | Tracer) -> Token:
        if not isinstance(value, Tracer) and value.is_deleted():
            return _DELETED
        # Another sharding would be refused as an argument, though the function may not
        # use this array at all.
        is_argument = (
            isinstance(value, Tracer)
            or value.sharding.is_fully_replicated
            or arrays.is_mirrored(value)
            or arrays.is_sharded(value)
        )
        if self._captures_arrays and is_argument:
            self.arrays[self._unused_label(label)] = value
            return ("array",)
        return Identity(value)

    def _host_array(self, label: str, value: np.ndarray | np.generic) -> Token:
        if not self._with_key:
            return Identity(value)
        # The bytes of an array of objects are their addresses.
        if value.dtype.hasobject or value.nbytes > _MAX_HASHED_BYTES:
            return self._unknown(label, value)
        digest = hashlib.blake2b(np.ascontiguousarray(value), digest_size=16).digest()
        return (type(value), value.dtype.str, value.shape, digest)

    def _function(self, label: str, fn: types.FunctionType, number: int) -> Token:
        code = fn.__code__
        is_own, names = is_users(code), names_of(code)
        if is_own:
            self.uses = self.uses.plus(names)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            binding = Binding(cell)
            used_as = name if is_own else None
            self.visit(f"captured {name}", binding, binding.get(), number, used_as)
        if defaults := fn.__defaults__:
            parameters = code.co_varnames[
                code.co_argcount - len(defaults) : code.co_argcount
            ]
            binding = Binding(fn, "__defaults__")
            parent = len(self.nodes)
            self.nodes.append(Node(label, binding, defaults, number))
            self._tokens.append(len(defaults))
            for name, value in zip(parameters, defaults, strict=True):
                self.visit(f"captured {name}", None, value, parent)
        keyword_defaults = fn.__kwdefaults__ or {}
        for name in keyword_defaults:
            binding = Binding(keyword_defaults, name)
            self.visit(f"captured {name}", binding, binding.get(), number)
        if is_own:
            # A program does not depend on what the function only writes.
            writes = () if self._with_key else names.writes - names.reads
            self._globals(fn.__globals__, [*sorted(names.reads), *writes], number)
        return ("function", Identity(code))

    def _globals(
        self,
        scope: dict[str, object],
        names: Collection[str],
        number: int,
        prefix: str = "captured ",
    ) -> None:
        before, self._captures_arrays = self._captures_arrays, False
        for name in names:
            if name in scope:
                binding = Binding(scope, name)
                self.visit(f"{prefix}{name}", binding, scope[name], number, name)
        self._captures_arrays = before

    def _container(self, label: str, items: Any, kind: type, number: int) -> Token:
        if issubclass(kind, (set, frozenset)):
            if not all(type(item) in _PLAIN for item in items):
                return self._unknown(label, items)
            return (kind, frozenset((type(item), item) for item in items))
        if issubclass(kind, (list, tuple)):
            names = getattr(kind, "_fields", None)
            for i, item in enumerate(items):
                path = f".{names[i]}" if names else f"[{i}]"
                binding = Binding(items, i) if isinstance(items, list) else None
                self.visit(label + path, binding, item, number)
            return (kind, len(items))
        is_view = issubclass(kind, types.MappingProxyType)
        for key, item in list(items.items()):
            binding = None
            if not is_view:
                binding = Binding(items, key)
                self.visit(label, None, key, number)
            self.visit(f"{label}[{_named(key)}]", binding, item, number)
        return (kind, tuple(map(_named, items)) if is_view else len(items))

    def _pytree(self, label: str, value: PyTree, number: int) -> Token:
        """A container registered with JAX."""
        try:
            children, structure = flatten_one_level(value)
            hash(structure)
        except Exception:  # raised by the user's code
            return self._unknown(label, value)
        for path, child in children:
            self.visit(label + jax.tree_util.keystr(path), None, child, number)
        return (type(value), structure)

    def _class(self, label: str, kind: type, number: int) -> Token:
        if is_users_class(kind) and not issubclass(kind, enum.Enum):
            for base in filter(is_users_class, kind.__mro__):
                for name in self._used_attributes(kind, vars(base)):
                    if name not in IMPLICIT_ATTRIBUTES:
                        self._visit_attribute(kind, label, Binding(base, name), number)
        return Identity(kind)

    def _object(self, label: str, value: Any, kind: type, number: int) -> Token:
        package = kind.__module__.partition(".")[0]
        # Objects of our classes for Flax are a model's.
        is_model = kind.__module__.startswith("jaxstrategy._src.flax")
        is_ours = package == "jaxstrategy" and not is_model
        if package in _IGNORED_PACKAGES or is_ours:
            return Identity(value)
        if has_no_c_state(kind):
            return self._attributes(label, value, kind, number)
        if package in _COMPILED or callable(value):  # written in C
            return Identity(value)
        if kind.__eq__ is object.__eq__ or kind.__hash__ is None:
            return self._unknown(label, value)
        try:
            hash(value)
        except TypeError:
            return self._unknown(label, value)
        return (kind, value)

    def _attributes(self, label: str, value: Any, kind: type, number: int) -> Token:
        is_partial = id(value) in self._partial
        self.visit(label, None, kind, number, _CLASS if is_partial else None)
        attributes = attributes_of(value)
        compared = compared_fields(kind) if self._with_key else None
        names = self._used_attributes(value, attributes)
        for name in names:
            if compared is None or name in compared:
                binding = Binding(attributes, name)
                self._visit_attribute(value, label, binding, number)
        for name in self._used_attributes(value, slots_of(kind)):
            self._visit_attribute(value, label, Binding(value, name), number)
        if is_partial:
            return ("attributes", *names)
        return ("attributes", len(names) if compared is None else compared)

    def _visit_attribute(
        self, owner: object, label: str, binding: Binding, parent: int
    ) -> None:
        # Code that is handed the owner as a whole may hand on its attributes.
        name = binding.key if id(owner) in self._partial else None
        label = f"{label}.{binding.key}"
        before, self._captures_arrays = self._captures_arrays, False
        self.visit(label, binding, binding.get(), parent, name)
        self._captures_arrays = before

    def _used_attributes(self, value: object, names: Iterable[str]) -> list[str]:
        """The names of attributes that the function may use."""
        is_partial = id(value) in self._partial
        return [each for each in names if not is_partial or each in self.uses.all]

    def _may_be_partial(self, value: object, name: str) -> bool:
        """Whether only those attributes count that the code names."""
        if not self._with_key or id(value) in self._whole:
            return False
        if isinstance(value, type):
            return name == _CLASS
        return self.uses.reads_named_attributes_only(value, name)

    def _unused_label(self, label: str) -> str:
        number, free = 2, label
        while free in self.objects or free in self.arrays:
            free, number = f"{label} ({number})", number + 1
        return CapturedName(free)

    # What was found.

    def named_attributes(self, method: types.MethodType) -> list[str]:
        """The attributes of a method's object that code names."""
        owner, kind = method.__self__, type(method.__self__)
        known = {*attributes_of(owner), *dir(kind)}
        # Also in the code of a library: that of the method, and of others it names.
        found = self.uses.all & known
        pending: list[object] = [method.__func__]
        pending += (inspect.getattr_static(kind, name, None) for name in found)
        while pending:
            member = pending.pop()
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, types.FunctionType):
                new = (names_of(function.__code__).all & known) - found
                found |= new
                pending += (inspect.getattr_static(kind, name, None) for name in new)
        return sorted(found)

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
