"""Arrays of a step inside objects that it returns, where JAX does not see them."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterator

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.values._handle import Handle

_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = (type, types.ModuleType, jax.Array, np.ndarray, AbstractStrategy, Handle)

# Beyond these a graph of objects is a library's, and no result of a step.
_MOST = 100_000


def traced_within(value: object) -> str | None:
    """The way from `value` to an array that is being traced; None without any.

    Args:
      value: any object, which is not asked for anything but what it holds.
    """
    waiting: deque[tuple[str, object]] = deque([("", value)])
    seen: dict[int, object] = {}
    while waiting and len(seen) < _MOST:
        path, each = waiting.popleft()
        if isinstance(each, Tracer):
            return path
        if id(each) not in seen:
            seen[id(each)] = each  # kept, so that no other object gets its id
            waiting.extend((path + step, held) for step, held in _held(each))
    return None


def _held(value: object) -> Iterator[tuple[str, object]]:
    """The values that `value` holds, each with how to write it."""
    if isinstance(value, _CLOSED):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f".{name}", held) for name, held in parts.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        # Not `__globals__`, one of its slots: its whole module, half a second of it.
        yield from _captured(value)
        yield from ((f".{name}", held) for name, held in vars(value).items())
        return
    yield from _attributes(value)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f" (captured as {name!r})", cell.cell_contents
        except ValueError:  # it has no value yet
            pass
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    yield from ((f".{name}", held) for name, held in own.items())
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(value, type(value))
                except AttributeError:  # it has no value yet
                    pass
