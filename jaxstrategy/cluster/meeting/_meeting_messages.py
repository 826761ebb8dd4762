"""Messages of processes until all have met."""

from __future__ import annotations

from typing import TypeGuard

from jaxstrategy.cluster.connections._fields import (
    Fields,
    Message,
    has,
    is_name,
    is_seconds,
    is_text,
    is_whole,
    row,
    rows,
)


def _is_versions(value: object) -> bool:
    return isinstance(value, dict) and all(map(is_name, value.values()))


_HELLO: Fields = {"index": is_whole, "count": is_whole}
_SAID_OF_ITSELF: Fields = {
    "host": is_name,
    "pid": is_whole,
    "job": is_name,
    "versions": _is_versions,
}
_VERDICT: Fields = {"verdict": is_text}
_MET: Fields = {**_VERDICT, "members": rows(row(is_whole, is_text, is_whole))}


def is_hello(message: object) -> TypeGuard[Message]:
    """Whether a process says so who it is."""
    return has(message, _HELLO) and all(
        name not in message or is_right(message[name])
        for name, is_right in _SAID_OF_ITSELF.items()
    )


def is_word(message: object, count: int) -> TypeGuard[Message]:
    """Whether process 0 says so how long to wait, or how the meeting ended.

    Args:
      count: how many processes there are.
    """
    if not has(message, _VERDICT):
        return has(message, {"seconds": is_seconds})
    if message["verdict"]:
        return True
    ids = list(range(count))
    return has(message, _MET) and [each[0] for each in message["members"]] == ids
