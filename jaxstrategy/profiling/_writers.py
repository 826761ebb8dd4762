"""The writers of other libraries, as one function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.values._types import Function

# Takes the number of a step, and its scalars by name.
Writer: TypeAlias = Any
"""An object of a logging library, with one of the methods named below."""

Write: TypeAlias = Callable[[int, dict[str, float]], object]


def opened(writer: Writer) -> tuple[Writer, bool]:
    """The writer, and whether it was opened here; a path is a TensorBoard directory.

    Raises:
      MissingExtraError: it is a path, and tensorboardX is not installed.
    """
    if not isinstance(writer, (str, os.PathLike)):
        return writer, False
    try:
        import tensorboardX
    except ImportError as missing:
        raise MissingExtraError(
            "`MetricLogger` was given a directory, and writes there with tensorboardX, "
            "which is not installed. Install the extra: pip install "
            "'jaxstrategy[tensorboard]', or give it a writer."
        ) from missing
    return tensorboardX.SummaryWriter(os.fspath(writer)), True


def _one_by_one(add_scalar: Function) -> Write:
    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            add_scalar(name, value, step)

    return write


# By the method that a writer has: how it is shown in messages, and what `Write` it is.
_METHODS: dict[str, tuple[str, Callable[[Function], Write]]] = {
    "write_scalars": ("(step, scalars)", lambda method: method),
    "add_scalar": ("(name, value, step)", _one_by_one),
}


def check(writer: Writer) -> None:
    """Raise unless `writer` is one, or a path.

    Raises:
      TypeError: it is something else.
    """
    is_writer = callable(writer) or any(hasattr(writer, name) for name in _METHODS)
    if not (is_writer or isinstance(writer, (str, os.PathLike))):
        methods = (f"`{name}{arguments}`" for name, (arguments, _) in _METHODS.items())
        raise TypeError(
            f"`writer` was {writer!r}; a directory, an object with "
            f"{' or '.join(methods)}, or a function of a step and a dict of scalars "
            "was wanted."
        )


def function_of(writer: Writer) -> Write:
    """Writes the scalars of a step with `writer`."""
    for name, (_, as_write) in _METHODS.items():
        if hasattr(writer, name):
            return as_write(getattr(writer, name))
    return writer


def finish(writer: Writer, is_ours: bool) -> None:
    """Let everything be on disk; close a writer that was opened here."""
    method = getattr(writer, "close" if is_ours else "flush", None)
    if method is not None:
        method()
