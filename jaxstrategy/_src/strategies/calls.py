"""The arguments of `run` and its kin, looked at before anything is done with them."""

from __future__ import annotations

import functools
import inspect
import types

from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.values.types import Function


def needs_arguments(fn: Function) -> bool:
    """Whether `fn` cannot be called without arguments.

    Raises:
      TypeError: it takes some and needs none.
    """
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return False
    if isinstance(fn, functools.partial):  # those are given
        parameters = [p for p in parameters if p.name not in fn.keywords]
    empty = inspect.Parameter.empty
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is empty and p.kind not in variadic for p in parameters):
        return True
    if parameters:
        name = getattr(fn, "__name__", "step")
        raise TypeError(
            f"`run` was given `{name}` without arguments, which takes "
            f"`{', '.join(map(str, parameters))}` and needs none: it is not clear "
            "whether it is to run now. Decorate it with `@strategy.step`, or run it: "
            f"`strategy.run({name}, args=())`."
        )
    return False


def check_function(fn: object, method: str) -> None:
    """Raise unless this is a function, given to a method.

    Raises:
      TypeError: it cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            f"`{method}` was given {fn!r}, which cannot be called. Give the function "
            "itself, and its arguments as `args`."
        )


def check_options(options: object) -> None:
    """Raise unless this is a `RunOptions` or None.

    Raises:
      TypeError: it is not.
    """
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            f"`options` was {options!r}; a `RunOptions` was wanted, for example "
            "`RunOptions(donate_argnums=0)`."
        )


def name_methods_after(cls: type) -> None:
    """Let Python's own errors about the methods of `cls` name it.

    Which class a method is written in is nobody's business: a missing argument of
    `MirroredStrategy.reduce()` is told under that name.
    """
    for base in reversed(cls.__mro__[1:]):
        for name, method in vars(base).items():
            if (
                isinstance(method, types.FunctionType)
                and not name.startswith("_")
                and getattr(cls, name) is method
            ):
                setattr(cls, name, _renamed(method, f"{cls.__qualname__}.{name}"))


def _renamed(method: types.FunctionType, name: str) -> types.FunctionType:
    new = types.FunctionType(
        method.__code__,
        method.__globals__,
        method.__name__,
        method.__defaults__,
        method.__closure__,
    )
    new.__kwdefaults__ = method.__kwdefaults__
    functools.update_wrapper(new, method)
    del vars(new)["__wrapped__"]  # it is the method, not something around it
    new.__qualname__ = name
    return new
