"""The names that code refers to, and whose code it is."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
import weakref
from typing import NamedTuple

from jaxstrategy.text import _user_code

_READING = ("LOAD_GLOBAL", "LOAD_NAME")
_WRITING = ("STORE_GLOBAL",)


class About(NamedTuple):
    """The global names of code.

    Attributes:
      reads: those that it reads.
      writes: those that it assigns.
      is_users: whether it is the user's own code. Of other code no names are given: a
        library is what its version says.
    """

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
        is_users = _user_code.innermost([place], libraries=False) is not None
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
    """The attributes of its object that a method reads, by methods it calls, too.

    Of `self` written as a name; what is read in another way is not found.
    """
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
    return bool(file) and _user_code.innermost([(file, 1)], libraries=False) is not None


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
