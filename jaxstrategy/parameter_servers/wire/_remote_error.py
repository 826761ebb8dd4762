"""Exceptions that travel: an exception as a frame, and the frame as an exception."""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from jaxstrategy import _errors
from jaxstrategy._errors import MissingExtraError
from jaxstrategy.parameter_servers.wire import _pickled
from jaxstrategy.parameter_servers.wire._frame import WireFrame
from jaxstrategy.parameter_servers.wire._kinds import Kind

_LONGEST = 1 << 16  # characters of a message or a traceback


def failed(error: BaseException, may_pickle: bool) -> WireFrame:
    """The answer that a request failed.

    Args:
      error: why.
      may_pickle: whether the other end may get the exception itself; otherwise it gets
        name and message.
    """
    fields = {
        "type": type(error).__name__,
        "message": _shown(error)[:_LONGEST],
        "args": _plain(error.args),
        "traceback": "".join(traceback.format_exception(error))[-_LONGEST:],
    }
    blob = b""
    if may_pickle and isinstance(error, Exception):
        blob = _faithful(error)
    return WireFrame(Kind.FAILED, fields, blob)


def raised_by(frame: WireFrame, where: str, may_unpickle: bool) -> Exception:
    """The exception that an answer carries, with the traceback of the other process.

    Args:
      frame: of the kind `FAILED`.
      where: whose answer it is, such as "worker 3".
      may_unpickle: whether the other end is of the job.
    """
    fields = frame.fields if isinstance(frame.fields, dict) else {}
    error = _loaded(frame.blob) if frame.blob and may_unpickle else None
    if error is None:
        name, message = str(fields.get("type")), str(fields.get("message"))
        error = _by_name(name, message, fields.get("args"))
    error.add_note(f"Traceback of {where}:\n{fields.get('traceback')}")
    return error


def _faithful(error: Exception) -> bytes:
    """The exception pickled such that it comes out the same; nothing if it cannot."""
    for form in (error, _Parts(error)):
        try:
            blob = _blob(form)
            again = _pickled.loaded(blob, ())
        except Exception:  # of the user's class, whatever it raises
            continue
        if type(again) is type(error) and _shown(again) == _shown(error):
            return blob
    return b""


def _blob(form: object) -> bytes:
    try:
        return _pickled.dumped(form)[0]
    except MissingExtraError:
        return _pickled.dumped_plainly(form)[0]


class _Parts:
    """An exception whose `__init__` takes other arguments than it has as `args`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        error = self._error
        return _of_parts, (type(error), error.args, vars(error))


def _of_parts(
    cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]
) -> Exception:
    # `__init__` is left out, and with it what it would make of these arguments.
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


def _loaded(blob: bytes) -> Exception | None:
    try:
        error = _pickled.loaded(blob, ())
    except Exception:  # such as a module that only the other process can import
        return None
    return error if isinstance(error, Exception) else None


def _by_name(name: str, message: str, args: object) -> Exception:
    """An exception of Python or of ours with that message."""
    cls = getattr(builtins, name, None) or getattr(_errors, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception) and isinstance(args, list):
        try:
            error = cls(*args)
        except Exception:  # such as a class of the same name with other arguments
            pass
        else:
            if _shown(error) == message:
                return error
    return RuntimeError(f"{name}: {message}" if message else name)


def _plain(args: tuple[object, ...]) -> list[object] | None:
    """Arguments, if they are such as JSON has."""
    kinds = str | int | float | None
    if all(isinstance(each, kinds) and len(str(each)) <= _LONGEST for each in args):
        return list(args)
    return None


def _shown(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # of the user's `__str__`
        return f"(its `__str__` raised {type(why).__name__})"
