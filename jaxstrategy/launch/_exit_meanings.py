"""What exit codes mean between workers and the launcher."""

from __future__ import annotations

import signal

from jaxstrategy.cluster.liveness._exit_codes import PEER_DIED as PEER_DIED
from jaxstrategy.cluster.liveness._exit_codes import PREEMPTED as PREEMPTED
from jaxstrategy.cluster.liveness._exit_codes import WATCHDOG as WATCHDOG

NO_RESTART = 78
"""Something is wrong that starting again would not mend."""

MEANINGS = {
    WATCHDOG: "the watchdog ended it: no step made progress for the time allowed",
    PEER_DIED: "another process of the job died",
    PREEMPTED: "preempted, its state is saved",
    NO_RESTART: "a failure that starting again would not mend",
}


def described(code: int) -> str:
    """A return code of `subprocess` in words.

    >>> described(3), described(-9)
    ('exit code 3', 'signal SIGKILL')
    >>> described(77)
    'exit code 77 (preempted, its state is saved)'
    """
    if code < 0:
        return f"signal {signal_name(-code)}"
    meaning = f" ({MEANINGS[code]})" if code in MEANINGS else ""
    return f"exit code {code}{meaning}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number where the system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def as_shell(code: int) -> int:
    """A return code of `subprocess` as a shell shows it: 128 + the signal's number.

    >>> as_shell(3), as_shell(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code
