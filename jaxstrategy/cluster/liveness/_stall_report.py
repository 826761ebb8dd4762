"""The report of a process whose step makes no progress."""

from __future__ import annotations

import dataclasses

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.board._board import AbstractBoard, ProcessState
from jaxstrategy.cluster.liveness import _arrivals
from jaxstrategy.cluster.liveness._exit_codes import ExitCode
from jaxstrategy.cluster.liveness._finish import stacks
from jaxstrategy.cluster.liveness._suspicion import described, suspicion


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step, or another wait for all processes, that has not finished.

    Attributes:
      what: in words, such as `step 3`.
      seconds: since it, or the program before it, began or made progress.
      busy: what this process does by itself meanwhile, None if it waits.
      step: the number of the step, None for another wait.
    """

    what: str
    seconds: float
    busy: str | None = None
    step: int | None = None


def stall_report(
    board: AbstractBoard, pending: Pending, told: str, cause: str | None
) -> tuple[str, str]:
    """Write the report, and the cause in a sentence.

    Args:
      board: knows the states of the others.
      pending: the wait that does not end.
      told: the last step of this process in words.
      cause: the reason, if it is known; else the states on the board tell it.
    """
    own = board.members[board.index]
    states, unknown = _states(board)
    if cause is None:
        cause = unknown or suspicion(
            states, board.index, pending.what, pending.seconds, pending.step
        )
    seconds = f"{pending.seconds:.1f} s in {pending.what}"
    table = "\n".join(f"  {described(state)}" for state in states)
    text = (
        f"\njaxstrategy: {own} has made no progress for {seconds} (last begun: {told})."
        f"\nPython stacks of {own}:\n{stacks()}\n"
        f"Where the processes are:\n{table or '  unknown'}\n"
        f"{_arrivals.at_the_end(board.known_states())}"
        f"jaxstrategy: process {own.index} waited {seconds} and ends with exit code "
        f"{ExitCode.WATCHDOG}: {cause}\n"
    )
    return text, cause


def _states(board: AbstractBoard) -> tuple[list[ProcessState], str]:
    """The states of all processes; or none, and the reason why they are unknown."""
    try:
        return board.states(), ""
    except ClusterError as error:
        return [], str(error)
