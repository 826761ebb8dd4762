"""Waits and reads of a process, each with its duration."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import final


@final
class Activity:
    """A wait or a read, with its beginning.

    Args:
      what: in words.
      busy: what this process does by itself meanwhile, None if it waits for others.
    """

    def __init__(self, what: str, busy: str | None = None) -> None:
        self.what = what
        self.busy = busy
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began or made progress."""
        return time.monotonic() - self._since

    def progress(self) -> None:
        """Give it the whole time again."""
        self._since = time.monotonic()


@final
class Noted(AbstractContextManager[Activity]):
    """A block during which an activity is known; cheap, there is one for each batch."""

    def __init__(self, among: dict[int, Activity], what: str, busy: str | None) -> None:
        self._among = among
        self._activity = Activity(what, busy)

    def __enter__(self) -> Activity:
        self._among[id(self)] = self._activity
        return self._activity

    def __exit__(self, *error: object) -> None:
        del self._among[id(self)]
