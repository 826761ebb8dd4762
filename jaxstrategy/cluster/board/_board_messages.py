"""Messages between processes and the board, which process 0 keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, TypeGuard

from jaxstrategy.cluster.connections._fields import (
    Fields,
    Message,
    has,
    is_anything,
    is_one_of,
    is_seconds,
    is_text,
    is_whole,
    or_none,
    row,
    rows,
)


class Status(TypedDict):
    """The progress of a process, as its watchdog reports it each second.

    Attributes:
      step: the number of steps it has begun.
      what: the last of them in words.
      pending: the step or event it waits for, None if it waits for nothing.
      seconds: how long it has waited, or since there was progress.
      busy: its own work meanwhile, such as compiling; None if it has none.
      writes: the checkpoint it writes in the background, None if it writes none.
      reads: batches that its input pipeline has not delivered, each with the seconds
        that it has taken so far.
      arrivals: its last steps; of each its number, the number of comparisons before it,
        and the seconds since the last of them.
    """

    step: int
    what: str
    pending: str | None
    seconds: float | None
    busy: str | None
    writes: str | None
    reads: list[tuple[str, float]]
    arrivals: list[tuple[int, int, float]]


_STATUS: Fields = {
    "step": is_whole,
    "what": is_text,
    "pending": or_none(is_text),
    "seconds": or_none(is_seconds),
    "busy": or_none(is_text),
    "writes": or_none(is_text),
    "reads": rows(row(is_text, is_seconds)),
    "arrivals": rows(row(is_whole, is_whole, is_seconds)),
}


def _is_status(value: object) -> bool:
    return value is None or has(value, _STATUS)


def _is_end(value: object) -> bool:
    return value in ("left", "failed", "died", "silent")


_REQUESTS: Mapping[str, Fields] = {
    "alive": {"status": _is_status},
    "put": {"key": is_text, "value": is_anything},
    "get": {"id": is_whole, "key": is_text},
    "gather": {"id": is_whole, "key": is_text, "value": is_anything},
    "cancel": {"id": is_whole, "cancelled": is_whole},
    "states": {"id": is_whole},
    "failed": {"text": is_text},
    "left": {"status": _is_status},
}
_NEWS: Mapping[str, Fields] = {
    "ping": {},
    "ended": {
        "process": is_whole,
        "end": _is_end,
        "text": is_text,
        "status": _is_status,
    },
    "all left": {},
}
_GONE: Fields = {"id": is_whole, "gone": rows(row(is_whole, _is_end, is_text))}
_ANSWERS: tuple[Fields, ...] = (
    {"id": is_whole, "value": is_anything},
    {"id": is_whole, "refused": is_text},
)


def is_request(message: object) -> TypeGuard[Message]:
    """Whether a process says so something to process 0."""
    return is_one_of(message, _REQUESTS)


def is_reply(message: object, count: int) -> TypeGuard[Message]:
    """Whether process 0 says so something to a process.

    Args:
      count: how many processes there are.
    """
    if is_one_of(message, _NEWS):
        process = message.get("process", 0)
        return is_whole(process) and process < count
    if has(message, _GONE):
        return all(index < count for index, *_ in message["gone"])
    return any(has(message, answer) for answer in _ANSWERS)
