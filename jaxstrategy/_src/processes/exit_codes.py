"""Exit codes of the processes of a job, for processes and launcher."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Codes with a meaning of ours.

    All lie outside of what shells and signals use (126 and more), so that a launcher
    can tell them apart.
    """

    WATCHDOG = 75  # counts as a failure: started again as `--max-restarts` allows
    PEER_DIED = 76  # the same, and no cause if another process has failed, too
    PREEMPTED = 77  # is no failure, and does not count: always started again
    NO_RESTART = 78  # never started again


MEANINGS: dict[int, str] = {
    ExitCode.WATCHDOG: "the watchdog ended it: no step made progress for the time "
    "allowed",
    ExitCode.PEER_DIED: "another process of the job died",
    ExitCode.PREEMPTED: "preempted, its state is saved",
    ExitCode.NO_RESTART: "a failure that starting again would not mend",
}
"""What has happened, as clauses about the process."""

GOOD = (0, ExitCode.PREEMPTED)
"""How a process ends that has done what it should."""
