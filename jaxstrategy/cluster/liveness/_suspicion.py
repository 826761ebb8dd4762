"""The watchdog's diagnosis: the process that is waited for, and what each does."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.cluster.board._board import (
    LATE_SECONDS,
    Departure,
    ProcessState,
)
from jaxstrategy.cluster.board._board_messages import Status

# The report names a batch that has been read for so long.
_READING_SECONDS = 1.0


def described(state: ProcessState) -> str:
    """A process and what it does, as a line of the report."""
    if state.end is not None:
        return str(Departure(state.member, state.end, state.text))
    if state.silent_seconds > LATE_SECONDS:
        return (
            f"{state.member} has not answered for {state.silent_seconds} s; before, it "
            f"{_doing(state.status)}"
        )
    return f"{state.member} {_doing(state.status)}"


def _doing(status: Status | None) -> str:
    if status is None:
        return "had not said how far it is"
    reads = "".join(
        f"; its input pipeline has not delivered {what} for {seconds} s"
        for what, seconds in status["reads"]
        if seconds >= _READING_SECONDS
    )
    if status["pending"] is None:
        return f"waited for nothing; last: {status['what']}{reads}"
    if status["busy"]:
        return f"{status['busy']}, for {status['seconds']} s; last: {status['what']}"
    return (
        f"had been in {status['pending']} for {status['seconds']} s; last begun: "
        f"{status['what']}{reads}"
    )


def suspicion(
    states: Sequence[ProcessState],
    index: int,
    what: str,
    seconds: float,
    step: int | None,
) -> str:
    """Name the process that is most likely waited for, in a sentence.

    Args:
      states: of all processes.
      index: of the one that waits.
      what: it waits in, in words.
      seconds: how long it has waited.
      step: the number of the step it waits in, None if it is another wait.
    """
    others = [state for state in states if state.member.index != index]
    for state in others:
        if state.end is not None:
            return f"{Departure(state.member, state.end, state.text)}."
    silent = [s for s in others if s.silent_seconds > LATE_SECONDS]
    if silent:
        worst = max(silent, key=lambda state: state.silent_seconds)
        return (
            f"{worst.member} has not answered for {worst.silent_seconds} s. It is "
            "stopped, or its host is."
        )
    if late := _late_readers(states, seconds):
        return late
    if step is None:
        return _not_there([s for s in others if s.status], what)
    return _behind([s for s in others if s.status], step)


def _late_readers(states: Sequence[ProcessState], waited: float) -> str:
    """Name the input pipelines that others wait for; empty if none is late."""
    least = max(_READING_SECONDS, waited / 2)
    told = [
        f"the input pipeline of {state.member} has not delivered {what} for {seconds} s"
        for state in states
        for what, seconds in (state.status["reads"] if state.status else ())
        if seconds >= least
    ]
    return f"{' and '.join(told)}. Its source is slow or stuck." if told else ""


def _not_there(others: Sequence[ProcessState], what: str) -> str:
    """Name the process that has not come to a wait that is no step."""
    elsewhere = [s for s in others if s.status and s.status["pending"] != what]
    if elsewhere:
        return (
            f"{elsewhere[0].member} has not come to {what}. {described(elsewhere[0])}. "
            "All processes must do the same, in the same order."
        )
    return f"all processes answer and have come to {what}, which does not end."


def _behind(others: Sequence[ProcessState], step: int) -> str:
    """Name the process that has not come to a step."""
    behind = [s for s in others if s.status and s.status["step"] < step]
    if behind:
        last = min(behind, key=lambda state: (state.status or {})["step"])
        return (
            f"{last.member} has not begun this step. {described(last)}. All processes "
            "must run the same steps."
        )
    return (
        "all processes answer and have begun this step. They may have called different "
        "functions, or in a different order."
    )
