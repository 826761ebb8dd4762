"""Objects that a function uses without being given them: by closure, or global."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any


def objects_of(fn: Any, is_object: Callable[[Any], bool]) -> dict[str, Any]:
    """Those that `fn`, or a function of the same module that it uses, refers to.

    Args:
      fn: any callable; of one that is not a plain function nothing is known.
      is_object: which are looked for.

    Returns:
      The objects by their names.
    """
    found: dict[str, Any] = {}
    for function in _functions(fn, set()):
        for name, value in _references(function):
            if is_object(value):
                found.setdefault(name, value)
    return found


def with_objects(fn: Any, replaced: dict[str, Any]) -> Any:
    """`fn` with other objects under these names, also in functions that it uses."""
    if not replaced:
        return fn
    return _rebound(fn, replaced, {})


def _functions(fn: Any, seen: set[int]) -> Iterator[types.FunctionType]:
    """`fn` and the functions of the same module that it refers to."""
    if not isinstance(fn, types.FunctionType) or id(fn) in seen:
        return
    seen.add(id(fn))
    yield fn
    for _, value in _references(fn):
        if _is_near(value, fn):
            yield from _functions(value, seen)


def _is_near(value: Any, fn: types.FunctionType) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__


def _references(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What `fn` refers to, by name: closure and globals."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            yield name, fn.__globals__[name]


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


def _rebound(
    fn: types.FunctionType, replaced: dict[str, Any], done: dict[int, Any]
) -> types.FunctionType:
    """A function with the code of `fn` that refers to other objects."""
    if id(fn) in done:
        return done[id(fn)]
    scope = dict(fn.__globals__)
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    new = types.FunctionType(
        fn.__code__, scope, fn.__name__, fn.__defaults__, tuple(cells.values()) or None
    )
    done[id(fn)] = new
    for name, value in list(_references(fn)):
        if _is_near(value, fn):
            other = _rebound(value, replaced, done)
        elif name in replaced:
            other = replaced[name]
        else:
            continue
        if name in cells:
            cells[name] = types.CellType(other)
        else:
            scope[name] = other
    new = types.FunctionType(
        fn.__code__, scope, fn.__name__, fn.__defaults__, tuple(cells.values()) or None
    )
    new.__kwdefaults__ = fn.__kwdefaults__
    new.__dict__.update(fn.__dict__)
    done[id(fn)] = new
    return new
