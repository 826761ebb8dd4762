"""What a `MetricLogger` may be given, as something that writes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxstrategy.profiling._run_writers import (
    OpenedWriter,
    RunWriter,
    TensorBoardWriter,
    Write,
    one_by_one,
    with_step_argument,
    with_step_metric,
)
from jaxstrategy.values._types import Function

Writer: TypeAlias = Any
"""An object of a logging library, with one of the methods named below."""


# By the method that a writer has: how it is shown in messages, and what `Write` it is.
_METHODS: dict[str, tuple[str, Callable[[Function], Write]]] = {
    "write_scalars": ("(step, scalars)", lambda method: method),
    "add_scalar": ("(name, value, step)", one_by_one),
    "define_metric": ("(name, step_metric=)", with_step_metric),
    "log_metrics": ("(scalars, step=)", with_step_argument),
    "log": ("(scalars, step=)", with_step_argument),
}

_Row: TypeAlias = tuple[str, Callable[[Function], Write]]


def check(writer: Writer) -> None:
    """Raise unless `writer` is one, or a path.

    Raises:
      TypeError: it is something else, or a class in place of an object of it.
    """
    if isinstance(writer, (str, os.PathLike, RunWriter)):
        return
    is_class = isinstance(writer, type)
    if is_class or not (callable(writer) or _row_of(writer)):
        *methods, last = (f"`{name}{shown}`" for name, (shown, _) in _METHODS.items())
        instead = " Give it an object of that class." if is_class else ""
        raise TypeError(
            f"`writer` was {writer!r}; a directory, a `RunWriter`, an object with "
            f"{', '.join(methods)} or {last}, or a function of a step and a dict of "
            f"scalars was wanted.{instead}"
        )


def opened(writer: Writer) -> OpenedWriter:
    """What writes with `writer`; a path is a directory for TensorBoard.

    What was given open is not closed: `close` only flushes it.

    Raises:
      MissingExtraError: it needs a library that is not installed.
    """
    if isinstance(writer, (str, os.PathLike)):
        writer = TensorBoardWriter(writer)
    if isinstance(writer, RunWriter):
        return writer.open()
    flush = getattr(writer, "flush", lambda: None)
    write = _function_of(writer)
    return OpenedWriter(write, flush, lambda failed: flush(), is_opened_here=False)


def _function_of(writer: Writer) -> Write:
    found = _row_of(writer)
    if found is None:
        return writer
    name, (_, as_write) = found
    return as_write(getattr(writer, name))


def _row_of(writer: Writer) -> tuple[str, _Row] | None:
    for name, row in _METHODS.items():
        shown, _ = row
        if hasattr(writer, name) and _takes_step(getattr(writer, name), shown):
            return name, row
    return None


def _takes_step(method: Function, shown: str) -> bool:
    """Whether a method that is to take a step by name does.

    `logging.Logger` and `math` have a `log`, too.
    """
    if "step=" not in shown:
        return True
    try:
        return "step" in inspect.signature(method).parameters
    except (TypeError, ValueError):  # some built-in functions have none
        return False
