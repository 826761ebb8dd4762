"""Code of functions: what it names, and attributes read without running user code."""

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
from collections.abc import Iterator
from typing import NamedTuple

from jaxstrategy._src.text import user_code
from jaxstrategy._src.values.arrays import Function

_READING = ("LOAD_GLOBAL", "LOAD_NAME")
_WRITING = ("STORE_GLOBAL",)


class About(NamedTuple):
    """The global names of code."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_users: bool


# By identity: code of two files may be equal, as `co_filename` is not compared.
_known: dict[int, About] = {}


def about(code: types.CodeType) -> About:
    """The global names of code, those of functions defined in it included."""
    known = _known.get(id(code))
    if known is None:
        place = (code.co_filename, code.co_firstlineno)
        is_users = user_code.innermost([place], libraries=False) is not None
        reads, writes = (
            tuple(sorted(_names_in(code, ops))) if is_users else ()
            for ops in (_READING, _WRITING)
        )
        known = _known[id(code)] = About(reads, writes, is_users)
        weakref.finalize(code, _known.pop, id(code), None)
    return known


def _names_in(code: types.CodeType, operations: tuple[str, ...]) -> set[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in operations
    }
    for constant in _codes_in(code):
        names |= _names_in(constant, operations)
    return names


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    return [each for each in code.co_consts if isinstance(each, types.CodeType)]


def attributes_read(method: types.MethodType) -> set[str]:
    """The attributes of its object that a method reads, by methods it calls, too."""
    kind, found = type(method.__self__), set[str]()
    left: list[object] = [method.__func__]
    while left:
        function = left.pop()
        function = function.fget if isinstance(function, property) else function
        if not isinstance(function, types.FunctionType):
            continue
        code = function.__code__
        new = _read_of(code, code.co_varnames[0]) if code.co_argcount else set[str]()
        left += (inspect.getattr_static(kind, name, None) for name in new - found)
        found |= new
    return found


def _read_of(code: types.CodeType, name: str) -> set[str]:
    """The attributes that code reads of what a variable of it refers to."""
    found, loaded = set[str](), False
    for instruction in dis.get_instructions(code):
        of, operation = instruction.argval, instruction.opname
        if loaded and operation in ("LOAD_ATTR", "LOAD_METHOD"):
            found.add(of)
        # Python 3.13 loads two variables at once.
        last = of[-1] if isinstance(of, tuple) and of else of
        loaded = operation.startswith(("LOAD_FAST", "LOAD_DEREF")) and last == name
    return found.union(*(_read_of(each, name) for each in _codes_in(code)))


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
    return bool(file) and user_code.innermost([(file, 1)], libraries=False) is not None


def code_of(fn: object) -> types.CodeType | None:
    """The code of a function, of a method, of what a partial function calls."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not hasattr(fn, "__code__"):  # of an object that can be called
        fn = inspect.getattr_static(type(fn), "__call__", None)
    return getattr(fn, "__code__", None)


def place_of(fn: object) -> tuple[str, int] | None:
    """The file and line where the user has defined `fn`."""
    if (place := getattr(fn, _PLACE, None)) is not None:
        return place
    code = code_of(fn)
    return code and (code.co_filename, code.co_firstlineno)


def define_at(fn: object, place: tuple[str, int] | None) -> None:
    """Let `fn`, which is ours, stand for what the user has defined there."""
    fn.__dict__[_PLACE] = place


_PLACE = "_jaxstrategy_place"


# With these, code reaches attributes that it does not name, without the object.
_DYNAMIC = frozenset(
    "__dict__ __class__ __dir__ __getattr__ __getattribute__ __getstate__ __reduce__ "
    "__reduce_ex__ __slots__ __weakref__ __closure__ __self__ __wrapped__ locals "
    "globals vars eval exec _getframe currentframe get_objects get_referents "
    "get_referrers".split()
)
_ASKS = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR")
# Of their own, these read no attributes.
_BASES = (object, abc.ABC, typing.Generic, typing.Protocol)
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")


class Reach(NamedTuple):
    """The uses that some code makes of names."""

    used: frozenset[str] = frozenset()
    passed_on: frozenset[str] = frozenset()

    def plus(self, other: Reach) -> Reach:
        """The uses of both."""
        return Reach(self.used | other.used, self.passed_on | other.passed_on)

    @property
    def is_dynamic(self) -> bool:
        """Whether it may use attributes that it does not name."""
        return not self.used.isdisjoint(_DYNAMIC)

    def only_asks(self, value: object, name: str) -> bool:
        """Whether what it has as `name` is only asked for attributes that it names."""
        kind = type(value)
        if self.is_dynamic or not _is_plain_class(kind):
            return False
        return self.passed_on.isdisjoint({name, *self._first_parameters(kind)})

    def _first_parameters(self, kind: type) -> Iterator[str]:
        """The names by which the methods that it uses call the object."""
        for base in kind.__mro__:
            for name in self.used & vars(base).keys():
                member = vars(base)[name]
                for part in ("", "__func__", "fget", "fset", "fdel", "func"):
                    function = getattr(member, part, None) if part else member
                    if isinstance(function, types.FunctionType):
                        yield from function.__code__.co_varnames[:1]


def _is_plain_class(kind: type) -> bool:
    """Whether only the user's own code reads the attributes of objects of a class."""
    if type(kind) not in (type, abc.ABCMeta) or hasattr(kind, "__getattr__"):
        return False
    if hasattr(kind, "__dataclass_fields__"):  # compared, shown and copied as a whole
        return False
    if any(getattr(kind, name) is not getattr(object, name) for name in _HOOKS):
        return False
    return all(base in _BASES or is_users_class(base) for base in kind.__mro__)


# By the identity of code.
_known_reaches: dict[int, Reach] = {}


def of(code: types.CodeType) -> Reach:
    """The uses that code makes of names, and functions defined in it."""
    known = _known_reaches.get(id(code))
    if known is None:
        known = Reach(frozenset(code.co_names), frozenset(_passed_on(code)))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                known = known.plus(of(inner))
        _known_reaches[id(code)] = known
        # Another code may get the same `id` when this one is gone.
        weakref.finalize(code, _known_reaches.pop, id(code), None)
    return known


def _passed_on(code: types.CodeType) -> Iterator[str]:
    enclosed = {*code.co_cellvars, *code.co_freevars}
    instructions = [i for i in dis.get_instructions(code) if i.opname != "NOP"]
    for index, each in enumerate(instructions):
        if "LOAD_" not in each.opname or each.opname in ("LOAD_CONST", "LOAD_CLOSURE"):
            continue
        following = instructions[index + 1 : index + 3]
        if following and following[0].opname == "COPY":  # of `x.a += 1`
            following = following[1:]
        asks = bool(following) and following[0].opname in _ASKS
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if "FAST" in each.opname:  # of such a variable it loads the cell
            names = [name for name in names if name not in enclosed]
        for place, name in enumerate(names):
            if isinstance(name, str) and not (asks and place == len(names) - 1):
                yield name


CALLABLE = (types.FunctionType, types.MethodType, functools.partial)
_HEAP_TYPE = 1 << 9  # of `type.__flags__`: defined by a `class` statement


def attributes_of(value: object) -> dict[str, object]:
    """The attributes of an object, without asking its class."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def slots_of(kind: type) -> Iterator[str]:
    """The attributes that objects of a class have in slots, not in a dict."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


def consists_of_attributes(kind: type) -> bool:
    """Whether objects of a class are what their attributes are, and nothing in C."""
    return all(
        base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__
    ) and _is_open(kind)


def _is_open(kind: type) -> bool:
    # A class that C code made on the heap has a layout of its own. One of Python's has
    # a pointer for each slot, and one each for `__dict__` and `__weakref__`.
    return kind.__basicsize__ <= object.__basicsize__ + 8 * (
        2 + sum(1 for _ in slots_of(kind))
    )


def is_layer(kind: type) -> bool:
    """Whether a class is one of ours for Flax, whose objects are a model's."""
    return kind.__module__.startswith("jaxstrategy._src.flax")


def is_bookkeeping(name: str) -> bool:
    """Whether Python made an attribute of a class, and not its author."""
    return name in _BOOKKEEPING


_BOOKKEEPING = frozenset(
    "__module__ __dict__ __weakref__ __doc__ __annotations__ __qualname__ __slots__ "
    "__firstlineno__ __static_attributes__ __annotate__ __annotate_func__ "
    "__annotations_cache__ __dataclass_fields__ __dataclass_params__ __match_args__ "
    "__abstractmethods__ _abc_impl __parameters__ __orig_bases__ __type_params__ "
    "__classdictcell__".split()
)


def compared(kind: type) -> tuple[str, ...] | None:
    """The fields by which objects of a class are equal, if it says so; else None."""
    parameters = getattr(kind, "__dataclass_params__", None)
    is_value = parameters is not None and parameters.eq and kind.__hash__ is not None
    if not is_value or "__dataclass_params__" not in vars(kind):
        return None
    return tuple(f.name for f in dataclasses.fields(kind) if f.compare)


def first_name(function: object) -> str | None:
    """The name by which a method of the user's calls its object."""
    code = getattr(function, "__code__", None)
    if code is None or not about(code).is_users:
        return None
    return next(iter(code.co_varnames), None)


def as_method(fn: Function) -> Function:
    """`fn`, or of an object that can be called the method that is called."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)
