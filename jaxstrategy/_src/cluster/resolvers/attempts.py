"""Questions to somebody's server, asked again until there is an answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.text.shown import shown

BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses of HTTP that may be others the next time."""

_SHORTEST, _LONGEST = 1.0, 10.0  # seconds for one request
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between two attempts

T = TypeVar("T")


class NotYetError(ClusterError):
    """What may come true when it is tried again."""


def answered(attempt: Callable[[float], T], timeout_seconds: float) -> T:
    """The first result of `attempt(deadline)` that is no `NotYetError`."""
    deadline = time.monotonic() + timeout_seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            return attempt(deadline)
        except NotYetError as missing:
            if time.monotonic() + pause > deadline:
                raise ClusterError(
                    f"{missing} That was so for {timeout_seconds:g} s, which is "
                    "`timeout_seconds`."
                ) from missing
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def request_seconds(left: float) -> float:
    """How long one request may take, of the seconds that are left."""
    return min(max(left, _SHORTEST), _LONGEST)


def checked_seconds(given: object) -> float:
    """`timeout_seconds` as it was given."""
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not 0 <= given < math.inf
    ):
        raise ValueError(
            f"`timeout_seconds` was {shown(given)}; a number of seconds was wanted."
        )
    return float(given)


def is_of(error: Exception, *packages: str) -> bool:
    """Whether it is an error of one of these packages, or of the system beneath."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, OSError) or not kinds.isdisjoint(packages)
