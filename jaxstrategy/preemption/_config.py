"""Options about the end of a preempted job: `TerminationConfig`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import final

from jaxstrategy.processes._exit_codes import ExitCode


def end_preempted() -> None:
    """End this process with the exit code that says: preempted, the state is saved."""
    sys.exit(ExitCode.PREEMPTED)


@final
@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """Options of a job whose machine may be wanted back: the notice, and the end.

    Attributes:
      termination_watcher_fn: returns whether it is; asked each second or so in a
        thread. By default the signal SIGTERM says it.
      exit_fn: ends the process when the state is saved, by default with exit code 77,
        which tells `python -m jaxstrategy.launch` to start the job again. If it
        returns, training goes on.
      grace_period: seconds of training that are left after the notice. The state is
        saved at once, and again at their end. By default none.
      save_fn: saves, in place of the checkpoint manager.

    Raises:
      TypeError: a function cannot be called.
      ValueError: a negative time.

    >>> import jaxstrategy as js
    >>> js.experimental.TerminationConfig(grace_period=30).grace_period
    30
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TypeError(f"`{name}` was {given!r}, which cannot be called.")
        if self.grace_period is not None and not self.grace_period >= 0:
            raise ValueError(
                f"`grace_period` was {self.grace_period!r}; a number of seconds, at "
                "least 0, was wanted."
            )
