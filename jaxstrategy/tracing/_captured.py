"""Objects that a function uses without being given them: by closure, or global.

A function refers to values by name: in its closure, its globals, the defaults of its
parameters. So do a method, by the object that it is of, and a partial function. Those
that it refers to are looked into as well, if they are the user's own.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jaxstrategy import _source

_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)

# The global names that code reads, and whether it is the user's, by its identity.
_known: dict[int, tuple[tuple[str, ...], bool]] = {}


def objects_of(fn: Any, is_object: Callable[[Any], bool]) -> dict[str, Any]:
    """Those that `fn`, or a function that it uses, refers to.

    Args:
      fn: any callable; of what is written in C nothing is known.
      is_object: which are looked for.

    Returns:
      Each object once, by a name for messages that is no name of a parameter.
    """
    found: dict[str, Any] = {}
    for function in _functions(_as_method(fn), set()):
        for name, value in _references(function):
            if is_object(value) and all(value is not o for o in found.values()):
                found[_unused(f"captured {name}", found)] = value
    return found


def with_objects(
    fn: Any, replaced: dict[str, Any], is_object: Callable[[Any], bool]
) -> Any:
    """`fn` with other objects under these names, also in functions that it uses."""
    if not replaced:
        return fn
    fn, originals = _as_method(fn), objects_of(fn, is_object)
    others = {id(originals[name]): other for name, other in replaced.items()}
    return _Rebinding(fn, others).of(fn)


def _as_method(fn: Any) -> Any:
    """`fn`, or of an object that can be called the method that is called."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, _CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)


def _unused(name: str, names: dict[str, Any]) -> str:
    number, free = 2, name
    while free in names:
        free, number = f"{name} ({number})", number + 1
    return free


def _functions(fn: Any, seen: set[int]) -> Iterator[Any]:
    """`fn` and the functions that it refers to."""
    if not isinstance(fn, _CALLABLE) or id(fn) in seen:
        return
    seen.add(id(fn))
    yield fn
    for _, value in _references(fn):
        yield from _functions(value, seen)


def _references(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function refers to, by name."""
    if isinstance(fn, types.MethodType):
        yield "self", fn.__self__
        yield "", fn.__func__
    elif isinstance(fn, functools.partial):
        yield "", fn.func
        for i, value in enumerate(fn.args):
            yield f"args[{i}]", value
        yield from fn.keywords.items()
    elif isinstance(fn, types.FunctionType):
        yield from _defaults(fn)
        yield from _in_closure(fn)
        yield from _global(fn)


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if fn.__defaults__:
        code = fn.__code__
        parameters = code.co_varnames[: code.co_argcount]
        yield from zip(parameters[::-1], fn.__defaults__[::-1], strict=False)
    if fn.__kwdefaults__:
        yield from fn.__kwdefaults__.items()


def _in_closure(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue


def _global(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    scope, (names, is_users) = fn.__globals__, _about(fn.__code__)
    if not is_users:
        return
    for name in names:
        value = scope.get(name)
        if not isinstance(value, types.FunctionType) or _about(value.__code__)[1]:
            yield name, value


def _about(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    known = _known.get(id(code))
    if known is None:
        place = (code.co_filename, code.co_firstlineno)
        is_users = _source.innermost([place], libraries=False) is not None
        names = tuple(sorted(_global_names(code))) if is_users else ()
        known = _known[id(code)] = names, is_users
        weakref.finalize(code, _known.pop, id(code), None)
    return known


def _global_names(code: types.CodeType) -> set[str]:
    """The global names that code reads, that of functions defined in it included."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


class _Rebinding:
    """Functions with the same code, that refer to other objects.

    Args:
      fn: what is called.
      others: the objects that take the place of others, by the identity of those.
    """

    def __init__(self, fn: Any, others: dict[int, Any]) -> None:
        self._done = dict(others)
        self._functions = list(_functions(fn, set()))  # keeps identities
        self._changed = self._that_refer_to(set(others))

    def _that_refer_to(self, wanted: set[int]) -> set[int]:
        refers = {
            id(fn): {id(value) for _, value in _references(fn)}
            for fn in self._functions
        }
        before: set[int] = set()
        while wanted != before:
            before = wanted
            wanted = wanted | {fn for fn, ids in refers.items() if ids & wanted}
        return wanted

    def of(self, value: Any) -> Any:
        """What takes the place of `value`."""
        if id(value) not in self._changed:
            return value
        if id(value) not in self._done:
            if isinstance(value, types.MethodType):
                new = types.MethodType(self.of(value.__func__), self.of(value.__self__))
                self._done[id(value)] = new
            elif isinstance(value, functools.partial):
                keywords = {name: self.of(v) for name, v in value.keywords.items()}
                self._done[id(value)] = functools.partial(
                    self.of(value.func), *map(self.of, value.args), **keywords
                )
            else:
                self._rebind(value)
        return self._done[id(value)]

    def _rebind(self, fn: types.FunctionType) -> None:
        closure = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        inner = {n: v for n, v in _in_closure(fn) if id(v) in self._changed}
        outer = {n: v for n, v in _global(fn) if id(v) in self._changed}
        # A name that keeps its value is shared with the functions that may set it.
        cells = {**closure, **{name: types.CellType() for name in inner}}
        scope = {**fn.__globals__} if outer else fn.__globals__
        new = types.FunctionType(
            fn.__code__, scope, fn.__name__, None, tuple(cells.values()) or None
        )
        self._done[id(fn)] = new  # for functions that call each other
        for name, value in inner.items():
            cells[name].cell_contents = self.of(value)
        scope |= {name: self.of(value) for name, value in outer.items()}
        if fn.__defaults__:
            new.__defaults__ = tuple(map(self.of, fn.__defaults__))
        if fn.__kwdefaults__:
            new.__kwdefaults__ = {n: self.of(v) for n, v in fn.__kwdefaults__.items()}
        new.__dict__.update(fn.__dict__)
