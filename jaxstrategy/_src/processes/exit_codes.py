"""Exit codes of the processes of a job: one row each, for processes and launcher."""

from __future__ import annotations

import enum
from typing import Self


class Restart(enum.Enum):
    """The launcher's response to a code."""

    COUNTED = "after a failure, as long as `--max-restarts` allows"
    UNCOUNTED = "always: it is no failure, and does not count"
    NEVER = "never: it would fail again"


class ExitCode(enum.IntEnum):
    """Table of the codes with a meaning of ours; a new code needs a new row only.

    All lie outside of what shells and signals use (126 and more), so that a launcher
    can tell them apart.

    Attributes:
      meaning: what has happened, as a clause about the process.
      restart: what the launcher does.
      is_consequence: whether another process is to blame, if it has failed, too.
    """

    # name = code, meaning, restart, is_consequence
    WATCHDOG = (
        75,
        "the watchdog ended it: no step made progress for the time allowed",
        Restart.COUNTED,
        False,
    )
    PEER_DIED = 76, "another process of the job died", Restart.COUNTED, True
    PREEMPTED = 77, "preempted, its state is saved", Restart.UNCOUNTED, False
    NO_RESTART = (
        78,
        "a failure that starting again would not mend",
        Restart.NEVER,
        False,
    )

    meaning: str
    restart: Restart
    is_consequence: bool

    def __new__(
        cls, code: int, meaning: str, restart: Restart, is_consequence: bool
    ) -> Self:
        """A row whose value is the code."""
        row = int.__new__(cls, code)
        row._value_ = code
        row.meaning, row.restart, row.is_consequence = meaning, restart, is_consequence
        return row

    @classmethod
    def of(cls, code: int) -> Self | None:
        """The row of a code, None if it is none of ours."""
        return next((row for row in cls if row == code), None)

    @classmethod
    def that_restart(cls, restart: Restart) -> list[Self]:
        """The rows after which the launcher does this."""
        return [row for row in cls if row.restart is restart]


def is_good(code: object) -> bool:
    """Whether a process that ends with this has done what it should."""
    if code is None or code == 0:
        return True
    row = ExitCode.of(code) if isinstance(code, int) else None
    return row is not None and row.restart is Restart.UNCOUNTED
