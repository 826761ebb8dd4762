"""Values of users, as messages show them."""

from __future__ import annotations

_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """A value for a message: on one line, not long, whatever it is.

    Python writes no integer of more than 4,300 digits, and no deep nest.
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # anybody's `__repr__`; the message matters more
        kind = type(value).__name__
        if isinstance(value, int):
            sign = "a negative" if value < 0 else "an"
            return f"{sign} {kind} of {value.bit_length()} bits"
        return f"a {kind} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
