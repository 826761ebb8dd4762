"""Ends a process whose step makes no progress, with a report of what all wait for.

A step that waits for a process that will not come cannot be interrupted: the devices
wait inside a compiled program. So a thread looks on, says who is where, and ends the
process; a launcher starts the job again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _codes
from jaxstrategy.cluster._board import LATE_SECONDS, AbstractBoard, Departure, State
from jaxstrategy.cluster._finish import finish, stacks
from jaxstrategy.cluster._shared_board import Board

_TICK_SECONDS = 1.0
# A thread that should run each second and did not for so long was stopped itself.
_STOPPED_SECONDS = 5.0
# How long a step may be out that another process, which has finished, never began.
_LEFT_SECONDS = 3.0
# Of the steps that were waited for at once: enough to see progress in a long queue.
_WATCHED = 32
_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step that has not finished.

    Attributes:
      seconds: since it, or the program before it, began or made progress.
      is_compiling: whether the call itself is still out, and compiles.
    """

    step: int
    seconds: float
    is_compiling: bool = False


@final
class Watchdog:
    """Looks on while steps are pending; a process that does nothing is left alone.

    The methods that are called at each step only write attributes.

    Args:
      board: where processes say how far they are.
      timeout_seconds: how long a step may go without progress.
      compile_seconds: how long a first call may, which compiles; by default an hour,
        or ten times the other if that is longer. While one process compiles, the
        others wait for it as long.
      end: called with an exit code, the report, and what to do before.
    """

    def __init__(
        self,
        board: AbstractBoard,
        timeout_seconds: float,
        compile_seconds: float | None = None,
        end: Callable[[int, str, Callable[[], None]], None] = finish,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._compile_seconds = compile_seconds or max(3600, 10 * timeout_seconds)
        self._board = board
        self._end = end
        self._step = 0
        self._what: Any = None
        self._where: Any = None
        self._is_open = False
        self._is_compiling = False
        self._opened = 0.0
        self._tokens: collections.deque[tuple[int, jax.Array]] = collections.deque(
            maxlen=_KEPT
        )
        self._waiting: tuple[int, float] | None = None
        self._is_on = False
        self._off = threading.Event()
        self._has_noted = False

    def start(self) -> None:
        """Begin to look on."""
        self._is_on = True
        tick = min(_TICK_SECONDS, self.timeout_seconds / 8)
        for name, loop in (("watchdog", self._look), ("tokens", self._wait)):
            threading.Thread(
                target=loop, args=(tick,), name=f"jaxstrategy-{name}", daemon=True
            ).start()

    def stop(self) -> None:
        """Look away; steps may go on."""
        self._is_on = False
        self._off.set()
        self._tokens.clear()

    def step_started(
        self, what: Any, where: Any = None, is_compiling: bool = False
    ) -> None:
        """Note that the call of a step of all processes begins.

        The steps are counted, so all processes must call this for the same steps.

        Args:
          what: the step, by its name; `str` is taken when it is needed.
          where: its source line, likewise.
          is_compiling: whether this call compiles, which may take long.
        """
        self._step += 1
        self._what = what
        self._where = where
        self._is_compiling = is_compiling
        self._opened = time.monotonic()
        self._is_open = True

    def step_dispatched(self, token: jax.Array | None = None) -> None:
        """Note that the call of the step has returned, with or without an error.

        Args:
          token: as for `watch`.
        """
        self._is_open = False
        self._is_compiling = False
        if token is not None and self._is_on:
            self._tokens.append((self._step, token))

    def watch(self, array: jax.Array) -> None:
        """Count the last step as pending until this array of it has been computed.

        Args:
          array: a small result that no later step is given the memory of.
        """
        if self._is_on:
            self._tokens.append((self._step, array))

    def step_progress(self) -> None:
        """Note that something goes on: give the step the whole time again."""
        now = time.monotonic()
        self._opened = now
        if waiting := self._waiting:
            self._waiting = waiting[0], now

    @property
    def pending(self) -> Pending | None:
        """The step that has been out longest, None if all are done."""
        now, waiting, found = time.monotonic(), self._waiting, []
        if waiting is not None:
            found.append(Pending(waiting[0], now - waiting[1]))
        if self._is_open:
            found.append(Pending(self._step, now - self._opened, self._is_compiling))
        return min(found, key=lambda pending: pending.step, default=None)

    def status(self) -> dict[str, Any]:
        """What the other processes are told each second."""
        pending = self.pending
        return {
            "step": self._step,
            "what": self.told(),
            "pending": pending and pending.step,
            "seconds": pending and round(pending.seconds, 1),
            "compiles": self._is_compiling,
        }

    def told(self) -> str:
        """The last step in words: its number, function and line."""
        if self._step == 0:
            return "no step yet"
        where = "" if self._where is None else f" at {self._where}"
        return f"step {self._step}, {self._what}{where}"

    def _wait(self, tick: float) -> None:
        """Follow the tokens: not each one at once, so that steps are not disturbed."""
        while not self._off.wait(tick):
            for step, token in self._taken():
                self._waiting = step, time.monotonic()
                # A failed step says so to whoever reads its results.
                with contextlib.suppress(RuntimeError, ValueError):
                    token.block_until_ready()
            self._waiting = None

    def _taken(self) -> list[tuple[int, jax.Array]]:
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._tokens.popleft())
        every = -(-len(taken) // _WATCHED) or 1
        return taken[::-1][::every][::-1]  # the last one is among them

    def _look(self, tick: float) -> None:
        ticked = time.monotonic()
        while not self._off.wait(tick):
            now = time.monotonic()
            if now - ticked > tick + _STOPPED_SECONDS:
                self._was_stopped()
            ticked = now
            self._check_process_0()
            if pending := self.pending:
                self._check(pending)

    def _was_stopped(self) -> None:
        self.step_progress()
        if isinstance(self._board, Board):
            self._board.forgive_silence()

    def _check_process_0(self) -> None:
        board = self._board
        if isinstance(board, Board) and board.process_0_is_silent:
            silent = f"{board.silent_seconds:.0f}"
            board.departed(Departure(board.members[0], "silent", silent))

    def _check(self, pending: Pending) -> None:
        leaver = self._leaver_before(pending)
        if leaver is not None and pending.seconds > _LEFT_SECONDS:
            self._report(pending, self._left(leaver))
        elif pending.seconds > self._limit(pending):
            self._report(pending)

    def _leaver_before(self, pending: Pending) -> Departure | None:
        """A process that has finished without ever beginning this step."""
        if not isinstance(self._board, Board):
            return None
        for departure in list(self._board.departures.values()):
            steps = (departure.status or {}).get("step")
            if departure.end == "left" and steps is not None and steps < pending.step:
                return departure
        return None

    def _left(self, departure: Departure) -> str:
        steps = (departure.status or {}).get("step")
        after = f"after step {steps}" if steps else "without a step"
        return f"{departure}, {after}. All processes must run the same steps."

    def _limit(self, pending: Pending) -> float:
        if pending.is_compiling:
            return self._compile_seconds
        if pending.seconds <= self.timeout_seconds:
            return self.timeout_seconds
        compiling = [state.member for state in self._others() if state.is_compiling]
        if not compiling:
            return self.timeout_seconds
        if not self._has_noted:
            self._has_noted = True
            print(
                f"jaxstrategy: process {self._board.index} has waited "
                f"{pending.seconds:.0f} s in step {pending.step} for {compiling[0]}, "
                f"which compiles; it goes on waiting, {self._compile_seconds:g} s.",
                file=sys.stderr,
                flush=True,
            )
        return self._compile_seconds

    def _others(self) -> list[State]:
        try:
            states = self._board.states()
        except ClusterError:
            return []
        return [s for s in states if s.member.index != self._board.index]

    def _report(self, pending: Pending, cause: str | None = None) -> None:
        board, own = self._board, self._board.members[self._board.index]
        try:
            states, cause_of_states = board.states(), ""
        except ClusterError as error:
            states, cause_of_states = [], str(error)
        if cause is None:
            cause = cause_of_states or suspicion(states, board.index, pending)
        head = (
            f"{own} has made no progress for {pending.seconds:.1f} s in step "
            f"{pending.step} (last begun: {self.told()})"
        )
        waited = f"it waited {pending.seconds:.1f} s in step {pending.step}"
        table = "\n".join(f"  {described(state)}" for state in states)
        text = (
            f"\njaxstrategy: {head}.\n"
            f"Python stacks of {own}:\n{stacks()}\n"
            f"Where the processes are:\n{table or '  unknown'}\n"
            f"jaxstrategy: process {own.index} waited {pending.seconds:.1f} s in step "
            f"{pending.step} and ends with exit code {_codes.WATCHDOG}: {cause}\n"
        )

        def tell() -> None:
            if isinstance(board, Board):
                board.fail(f"{waited}: {cause}")

        self._end(_codes.WATCHDOG, text, tell)


def described(state: State) -> str:
    """A process and what it does, as a line of the report."""
    if state.end is not None:
        return str(Departure(state.member, state.end, state.text))
    if state.silent_seconds > LATE_SECONDS:
        return (
            f"{state.member} has not answered for {state.silent_seconds} s; before, it "
            f"{_doing(state.status)}"
        )
    return f"{state.member} {_doing(state.status)}"


def _doing(status: dict[str, Any] | None) -> str:
    if status is None:
        return "had not said how far it is"
    if status["pending"] is None:
        return f"waited for nothing; last: {status['what']}"
    if status["compiles"]:
        return f"compiled {status['what']}"
    return (
        f"had been in step {status['pending']} for {status['seconds']} s; last begun: "
        f"{status['what']}"
    )


def suspicion(states: Sequence[State], index: int, pending: Pending) -> str:
    """Who is most likely waited for, in a sentence.

    Args:
      states: of all processes.
      index: of the one that waits.
      pending: the step it waits in.
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
    steps = {k: s.status["step"] for k, s in enumerate(others) if s.status}
    behind = [k for k, step in steps.items() if step < pending.step]
    if behind:
        last = others[min(behind, key=steps.__getitem__)]
        return (
            f"{last.member} has not begun this step. {described(last)}. All processes "
            "must run the same steps."
        )
    return (
        "all processes answer and have begun this step. They may have called different "
        "functions, or in a different order."
    )
