"""Checks of the fields of messages; which messages there are, others say.

A message comes from another process, so nothing of it is taken on trust, not even that
it is an object: `has` looks at all that its reader uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

Json: TypeAlias = Any
"""A value of JSON. Its reader checks its form with `has`."""
Message: TypeAlias = dict[str, Json]
"""An object of JSON whose fields were checked."""
IsRight: TypeAlias = Callable[[object], bool]
"""Whether the value of a field may be that."""
Fields: TypeAlias = Mapping[str, IsRight]
"""The fields that a message must have; it may have others."""

_LONGEST_NAME = 1000  # of a host or a job


def has(message: object, fields: Fields) -> TypeGuard[Message]:
    """Whether a message has these fields, with values as they may be."""
    return isinstance(message, dict) and all(
        name in message and is_right(message[name]) for name, is_right in fields.items()
    )


def is_one_of(message: object, known: Mapping[str, Fields]) -> TypeGuard[Message]:
    """Whether a message has the fields of the operation that it names as `op`."""
    op = message.get("op") if isinstance(message, dict) else None
    fields = known.get(op) if isinstance(op, str) else None
    return fields is not None and has(message, fields)


def is_text(value: object) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def is_name(value: object) -> bool:
    """Whether it is a string of a sensible length."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME


def is_whole(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    # JSON has numbers of any length, sockets and clocks have not.
    return type(value) is int and 0 <= value < 1 << 63


def is_seconds(value: object) -> bool:
    """Whether it is a time that clocks and locks can wait for."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (0 <= value < 1e9)
    )


def is_anything(value: object) -> bool:
    """Always: users say it to each other."""
    return True


def or_none(is_right: IsRight) -> IsRight:
    """Whether it is right or null."""
    return lambda value: value is None or is_right(value)


def row(*kinds: IsRight) -> IsRight:
    """Whether it is a list of values of these kinds."""

    def is_row(value: object) -> bool:
        return (
            isinstance(value, list)
            and len(value) == len(kinds)
            and all(is_right(each) for is_right, each in zip(kinds, value, strict=True))
        )

    return is_row


def rows(is_right: IsRight) -> IsRight:
    """Whether it is a list, each entry of which is right."""
    return lambda value: isinstance(value, list) and all(map(is_right, value))
