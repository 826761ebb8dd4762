"""Return codes of workers in words, and as shells have them."""

from __future__ import annotations

import signal

from jaxstrategy.processes._exit_codes import ExitCode


def described(code: int) -> str:
    """A return code of `subprocess` in words.

    >>> described(3), described(-9)
    ('exit code 3', 'signal SIGKILL')
    >>> described(77)
    'exit code 77 (preempted, its state is saved)'
    """
    if code < 0:
        return f"signal {signal_name(-code)}"
    row = ExitCode.of(code)
    return f"exit code {code}" if row is None else f"exit code {code} ({row.meaning})"


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
