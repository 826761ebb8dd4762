"""Which messages processes tell each other: their fields, and what those may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_Fields: TypeAlias = Mapping[str, Callable[[Any], bool]]

_LONGEST_NAME = 1000  # of a host or a job


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def _is_whole(value: Any) -> bool:
    # JSON has numbers of any length, sockets and clocks have not.
    return type(value) is int and 0 <= value < 1 << 63


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9


def _is_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_name, value.values()))


def _is_status(value: Any) -> bool:
    return value is None or _has(value, _STATUS)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_member(row: Any) -> bool:
    kinds = _is_whole, _is_text, _is_whole
    return isinstance(row, list) and _are(row, kinds)


def _is_read(row: Any) -> bool:
    return isinstance(row, list) and _are(row, (_is_text, _is_seconds))


def _is_arrival(row: Any) -> bool:
    return isinstance(row, list) and _are(row, (_is_whole, _is_whole, _is_seconds))


def _is_gone(row: Any) -> bool:
    kinds = _is_whole, _is_end, _is_text
    return isinstance(row, list) and _are(row, kinds)


def _is_end(value: Any) -> bool:
    return value in ("left", "failed", "died", "silent")


def _are(row: list[Any], kinds: tuple[Callable[[Any], bool], ...]) -> bool:
    return len(row) == len(kinds) and all(
        is_right(value) for is_right, value in zip(kinds, row, strict=True)
    )


def _rows(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda rows: isinstance(rows, list) and all(map(is_right, rows))


def _anything(value: Any) -> bool:
    return True


_STATUS: _Fields = {
    "step": _is_whole,
    "what": _is_text,
    "pending": _or_none(_is_text),
    "seconds": _or_none(_is_seconds),
    "busy": _or_none(_is_text),
    "writes": _or_none(_is_text),
    "reads": _rows(_is_read),
    "arrivals": _rows(_is_arrival),
}
_HELLO: _Fields = {"index": _is_whole, "count": _is_whole}
_SAID_OF_ITSELF: _Fields = {
    "host": _is_name,
    "pid": _is_whole,
    "job": _is_name,
    "versions": _is_versions,
}
_VERDICT: _Fields = {"verdict": _is_text}
_MET: _Fields = {**_VERDICT, "members": _rows(_is_member)}
_REQUESTS: Mapping[str, _Fields] = {
    "alive": {"status": _is_status},
    "put": {"key": _is_text, "value": _anything},
    "get": {"id": _is_whole, "key": _is_text},
    "gather": {"id": _is_whole, "key": _is_text, "value": _anything},
    "cancel": {"id": _is_whole, "cancelled": _is_whole},
    "states": {"id": _is_whole},
    "failed": {"text": _is_text},
    "left": {"status": _is_status},
}
_NEWS: Mapping[str, _Fields] = {
    "ping": {},
    "ended": {
        "process": _is_whole,
        "end": _is_end,
        "text": _is_text,
        "status": _is_status,
    },
    "all left": {},
}
_GONE: _Fields = {"id": _is_whole, "gone": _rows(_is_gone)}
_ANSWERS: tuple[_Fields, ...] = (
    {"id": _is_whole, "value": _anything},
    {"id": _is_whole, "refused": _is_text},
)


def is_hello(message: Any) -> bool:
    """Whether a process says so who it is."""
    return _has(message, _HELLO) and all(
        name not in message or is_right(message[name])
        for name, is_right in _SAID_OF_ITSELF.items()
    )


def is_word(message: Any, count: int) -> bool:
    """Whether process 0 says so how long to wait, or how the meeting ended.

    Args:
      count: how many processes there are.
    """
    if not _has(message, _VERDICT):
        return _has(message, {"seconds": _is_seconds})
    if message["verdict"]:
        return True
    return _has(message, _MET) and [row[0] for row in message["members"]] == list(
        range(count)
    )


def is_request(message: Any) -> bool:
    """Whether a process says so something to process 0."""
    return _is_one_of(message, _REQUESTS)


def is_reply(message: Any, count: int) -> bool:
    """Whether process 0 says so something to a process.

    Args:
      count: how many processes there are.
    """
    if _is_one_of(message, _NEWS):
        return message.get("process", 0) < count
    if _has(message, _GONE):
        return all(index < count for index, *_ in message["gone"])
    return any(_has(message, answer) for answer in _ANSWERS)


def _is_one_of(message: Any, known: Mapping[str, _Fields]) -> bool:
    op = message.get("op") if isinstance(message, dict) else None
    fields = known.get(op) if isinstance(op, str) else None
    return fields is not None and _has(message, fields)


def _has(message: Any, fields: _Fields) -> bool:
    return isinstance(message, dict) and all(
        name in message and is_right(message[name]) for name, is_right in fields.items()
    )
