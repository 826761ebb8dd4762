"""What resolvers share that ask the server of a cloud."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable
from typing import TypeVar

from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    ClusterResolver,
    Place,
    Process,
)
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.text import shown

BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses of HTTP that may be others the next time."""

_LONGEST_PAUSE = 2.0  # seconds between two attempts

T = TypeVar("T")


class NotYetError(ClusterError):
    """What may come true when it is tried again."""


class CloudResolver(ClusterResolver):
    """Asks anew at each call; a process stays the task as which it joined a job."""

    _packages: tuple[str, ...]  # whose errors mean that the server gave no answer
    _timeout_seconds: float
    _joined: Place | None = None

    def process(self) -> Process:
        # A lone task may be another: those of a job do not start at one moment.
        spec, task_type, task_id = self._now()
        process = self._placed(spec, task_type, task_id)
        self._joined = task_type, task_id
        return process

    def _found_task(self) -> Place:
        return self._now()[1:] if self._joined is None else self._joined

    @abc.abstractmethod
    def _explanation(self, error: Exception) -> ClusterError:
        """What an error of the client means, a `NotYetError` if it may pass."""

    def _answered(self, attempt: Callable[[float], T]) -> T:
        """The first result of `attempt(deadline)` that is no `NotYetError`."""
        deadline = time.monotonic() + self._timeout_seconds
        pause = 0.05
        while True:
            try:
                try:
                    return attempt(deadline)
                except Exception as error:
                    if isinstance(error, OSError) or is_of(error, *self._packages):
                        raise self._explanation(error) from error
                    raise
            except NotYetError as missing:
                if time.monotonic() + pause > deadline:
                    raise ClusterError(
                        f"{missing} That was so for {self._timeout_seconds:g} s, which "
                        "is `timeout_seconds`."
                    ) from missing
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def request_seconds(left: float) -> float:
    """How long one request may take, of the seconds that are left."""
    return min(max(left, 1.0), 10.0)


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


def is_of(thing: object, *packages: str) -> bool:
    """Whether one of these packages made its class, or a base of that."""
    kinds = {kind.__module__.partition(".")[0] for kind in type(thing).__mro__}
    return not kinds.isdisjoint(packages)
