"""The writers of other libraries, as one function."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jaxstrategy._errors import MissingExtraError

# Takes the number of a step, and its scalars by name.
Write = Callable[[int, dict[str, float]], Any]


def opened(writer: Any) -> tuple[Any, bool]:
    """What writes, and whether it was opened here; a path is a TensorBoard directory.

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


def check(writer: Any) -> None:
    """Raise unless `writer` is one, or a path.

    Raises:
      TypeError: it is something else.
    """
    if not (isinstance(writer, (str, os.PathLike)) or _is_writer(writer)):
        raise TypeError(
            f"`writer` was {writer!r}; a directory, an object with "
            "`write_scalars(step, scalars)` or `add_scalar(name, value, step)`, or a "
            "function of a step and a dict of scalars was wanted."
        )


def _is_writer(writer: Any) -> bool:
    has_method = hasattr(writer, "write_scalars") or hasattr(writer, "add_scalar")
    return has_method or callable(writer)


def function_of(writer: Any) -> Write:
    """Writes the scalars of a step with `writer`."""
    if hasattr(writer, "write_scalars"):
        return writer.write_scalars
    if not hasattr(writer, "add_scalar"):
        return writer

    def write(step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return write


def finish(writer: Any, is_ours: bool) -> None:
    """Let everything be on disk; close a writer that was opened here."""
    method = getattr(writer, "close" if is_ours else "flush", None)
    if method is not None:
        method()
