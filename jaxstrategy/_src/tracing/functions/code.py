"""Inspects code objects and classes without running user code."""

from __future__ import annotations

import abc
import dataclasses
import dis
import functools
import inspect
import sys
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from jaxstrategy._src import text
from jaxstrategy._src.values.arrays import Function

Result = TypeVar("Result")


def _cached(
    inspect: Callable[[types.CodeType], Result],
) -> Callable[[types.CodeType], Result]:
    """Caches by identity: equal code of two files differs in `co_filename`."""
    cache: dict[int, Result] = {}

    def cached(code: types.CodeType) -> Result:
        if id(code) not in cache:
            cache[id(code)] = inspect(code)
            weakref.finalize(code, cache.pop, id(code), None)
        return cache[id(code)]

    return cached


class GlobalNames(NamedTuple):
    """The global names of the user's own code; of a library's, none."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_users: bool


@_cached
def global_names(code: types.CodeType) -> GlobalNames:
    """The global names of code and of functions defined in it."""
    line = (code.co_filename, code.co_firstlineno)
    if text.innermost([line], libraries=False) is None:
        return GlobalNames((), (), False)
    reads = _names_in(code, ("LOAD_GLOBAL", "LOAD_NAME"))
    writes = _names_in(code, ("STORE_GLOBAL",))
    return GlobalNames(tuple(sorted(reads)), tuple(sorted(writes)), True)


def _names_in(code: types.CodeType, operations: tuple[str, ...]) -> set[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in operations
    }
    return names.union(*(_names_in(inner, operations) for inner in _inner_codes(code)))


def _inner_codes(code: types.CodeType) -> list[types.CodeType]:
    return [each for each in code.co_consts if isinstance(each, types.CodeType)]


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
    return bool(file) and text.innermost([(file, 1)], libraries=False) is not None


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


class NameUses(NamedTuple):
    """The names in some code, and those whose values it uses as a whole."""

    names: frozenset[str] = frozenset()
    escaping: frozenset[str] = frozenset()

    def plus(self, other: NameUses) -> NameUses:
        return NameUses(self.names | other.names, self.escaping | other.escaping)

    def reads_named_attributes_only(self, value: object, name: str) -> bool:
        """Whether code can access only those attributes of `value` that it names."""
        kind = type(value)
        if not self.names.isdisjoint(_DYNAMIC) or not _is_plain_class(kind):
            return False
        return self.escaping.isdisjoint({name, *self._self_parameters(kind)})

    def _self_parameters(self, kind: type) -> Iterator[str]:
        """The names of `self` in the methods of a class that the code names."""
        for base in kind.__mro__:
            for name in self.names & vars(base).keys():
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


@_cached
def name_uses(code: types.CodeType) -> NameUses:
    """The uses of names in code and in functions defined in it."""
    uses = NameUses(frozenset(code.co_names), frozenset(_escaping_names(code)))
    return functools.reduce(NameUses.plus, map(name_uses, _inner_codes(code)), uses)


def _escaping_names(code: types.CodeType) -> Iterator[str]:
    """The variables that are loaded for something else than an attribute."""
    cells = {*code.co_cellvars, *code.co_freevars}
    instructions = [i for i in dis.get_instructions(code) if i.opname != "NOP"]
    for index, each in enumerate(instructions):
        if "LOAD_" not in each.opname or each.opname in ("LOAD_CONST", "LOAD_CLOSURE"):
            continue
        following = instructions[index + 1 : index + 3]
        if following and following[0].opname == "COPY":  # of `x.a += 1`
            following = following[1:]
        is_attribute = following and following[0].opname in _ATTRIBUTE_OPERATIONS
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if "FAST" in each.opname:  # loads the cell
            names = [name for name in names if name not in cells]
        for index, name in enumerate(names):
            if isinstance(name, str) and not (is_attribute and index == len(names) - 1):
                yield name


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
    if code is None or not global_names(code).is_users:
        return None
    return next(iter(code.co_varnames), None)


def as_method(fn: Function) -> Function:
    """`fn`, or `fn.__call__` of a callable object."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)
