"""The attributes of an object, as its class has them, without asking the class."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator

from jaxstrategy.tracing.functions import _code
from jaxstrategy.values._types import Function

_CALLABLE = (types.FunctionType, types.MethodType, functools.partial)
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
    return kind.__module__.startswith("jaxstrategy.flax")


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
    if code is None or not _code.about(code).is_users:
        return None
    return next(iter(code.co_varnames), None)


def as_method(fn: Function) -> Function:
    """`fn`, or of an object that can be called the method that is called."""
    call = inspect.getattr_static(type(fn), "__call__", None)
    if isinstance(fn, _CALLABLE) or not isinstance(call, types.FunctionType):
        return fn
    return types.MethodType(call, fn)
