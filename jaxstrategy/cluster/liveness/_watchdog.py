"""Ends a process whose step makes no progress, with a report of what all wait for.

A step that waits for a process that will not come cannot be interrupted: the devices
wait inside a compiled program. On CPU, when a process dies, its neighbours in Gloo's
ring get an error at best, and the others hang (measured with JAX 0.10 and 0.12). So a
thread looks on, says where each process is, and ends this one; a launcher starts the
job again.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.board._board import (
    AbstractBoard,
    Departure,
    ProcessState,
)
from jaxstrategy.cluster.board._board_messages import Status
from jaxstrategy.cluster.liveness._activity import (
    Activity,
    Noted,
)
from jaxstrategy.cluster.liveness._arrivals import Arrivals
from jaxstrategy.cluster.liveness._exit_codes import ExitCode
from jaxstrategy.cluster.liveness._finish import finish
from jaxstrategy.cluster.liveness._stall_report import Pending, stall_report

_TICK_SECONDS = 1.0
# A thread that should run each second and did not for so long was stopped itself.
_STOPPED_SECONDS = 5.0
# How long a step may be out that another process, which has finished, never began.
_LEFT_SECONDS = 3.0
# Of the steps that were waited for at once: enough to see progress in a long queue.
_WATCHED = 32
_KEPT = 4096


COMPILES = "compiles"
"""The own work of a process in the first call of a step."""


@final
class Watchdog:
    """Looks on while steps are pending; a process that does nothing is left alone.

    The methods that are called at each step only write attributes.

    Args:
      board: where processes say how far they are.
      timeout_seconds: how long a step may go without progress.
      busy_seconds: how long one process may do something by itself, such as compile a
        step; by default an hour, or ten times the other if that is longer. The others
        wait for it as long.
      end: called with an exit code, the report, and what to do before.

    Attributes:
      writes: what is being written in the background, None if nothing.
      arrivals: when this process has come to its last steps.
    """

    def __init__(
        self,
        board: AbstractBoard,
        timeout_seconds: float,
        busy_seconds: float | None = None,
        end: Callable[[int, str, Callable[[], None]], None] = finish,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._busy_seconds = busy_seconds or max(3600, 10 * timeout_seconds)
        self._board = board
        self._end = end
        self._step = 0
        self._what: object = None
        self._where: object = None
        self._is_open = False
        self._busy: str | None = None
        self._opened = 0.0
        self._activities: dict[int, Activity] = {}
        self._reads: dict[int, Activity] = {}
        self.writes: str | None = None
        self.arrivals = Arrivals()
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
        # Two of them: who waits for arrays hangs with the step, and the other reports.
        for name, loop in (("watchdog", self._look), ("tokens", self._wait)):
            threading.Thread(
                target=loop, args=(tick,), name=f"jaxstrategy-{name}", daemon=True
            ).start()

    def stop(self) -> None:
        """Stop looking on; steps may go on."""
        self._is_on = False
        self._off.set()
        self._tokens.clear()

    def step_started(
        self, what: object, where: object = None, busy: str | None = None
    ) -> None:
        """Note that the call of a step of all processes begins.

        The steps are counted, so all processes must call this for the same steps.

        Args:
          what: the step, by its name; `str` is taken when it is needed.
          where: its source line, likewise.
          busy: as for `step_busy`.
        """
        self._step += 1
        self._what = what
        self._where = where
        self._busy = busy
        self._opened = now = time.monotonic()
        self._is_open = True
        self.arrivals.arrived((self._step, now))

    def step_busy(self, busy: str | None) -> None:
        """Note what this process does by itself in the step; None: it waits again."""
        self._opened = time.monotonic()
        self._busy = busy

    def step_dispatched(self, token: jax.Array | None = None) -> None:
        """Note that the call of the step has returned, with or without an error.

        Args:
          token: as for `watch`.
        """
        self._is_open = False
        self._busy = None
        if token is not None and self._is_on:
            self._tokens.append((self._step, token))

    def waiting(
        self, what: str, busy: str | None = None
    ) -> AbstractContextManager[Activity]:
        """A block, outside of steps, that cannot go on without the other processes.

        Args:
          what: is waited for, in words.
          busy: what this process does by itself meanwhile, if it does not wait.
        """
        return Noted(self._activities, what, busy)

    def reading(self, what: str) -> AbstractContextManager[Activity]:
        """A block in which the input pipeline of this process delivers `what`.

        It is reported when somebody waits for it, and no wait by itself: it may be
        read ahead.
        """
        return Noted(self._reads, what, None)

    def watch(self, array: jax.Array) -> None:
        """Count the last step as pending until this array of it has been computed.

        Args:
          array: a small result that no later step is given the memory of.
        """
        if self._is_on:
            self._tokens.append((self._step, array))

    def step_progress(self) -> None:
        """Note progress: give the step the whole time again."""
        now = time.monotonic()
        self._opened = now
        # A copy, because other threads begin and end theirs at any moment.
        for activity in list(self._activities.values()):
            activity.progress()
        if waiting := self._waiting:
            self._waiting = waiting[0], now

    @property
    def pending(self) -> Pending | None:
        """The oldest wait, steps first; None if all are done."""
        # Read once: the thread that waits for tokens makes it None at any moment.
        now, waiting, steps = time.monotonic(), self._waiting, []
        if waiting is not None:
            steps.append(_step(waiting[0], now - waiting[1]))
        if self._is_open:
            steps.append(_step(self._step, now - self._opened, self._busy))
        if steps:
            return min(steps, key=lambda pending: pending.step or 0)
        others = [
            Pending(each.what, each.seconds, each.busy)
            for each in list(self._activities.values())
        ]
        return max(others, key=lambda pending: pending.seconds, default=None)

    def status(self) -> Status:
        """The status that the other processes are told each second."""
        pending = self.pending
        return {
            "step": self._step,
            "what": self.told(),
            "pending": pending and pending.what,
            "seconds": pending and round(pending.seconds, 1),
            "busy": pending and pending.busy,
            "writes": self.writes,
            "arrivals": self.arrivals.told(),
            "reads": [
                (read.what, round(read.seconds, 1))
                for read in list(self._reads.values())
            ],
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
                # The error of a failed step is raised where its results are read.
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
            self._board.look_at_process_0()
            if pending := self.pending:
                self._check(pending)

    def _was_stopped(self) -> None:
        self.step_progress()
        self._board.forgive_silence()

    def _check(self, pending: Pending) -> None:
        leaver = self._leaver_before(pending)
        if leaver is not None and pending.seconds > _LEFT_SECONDS:
            self._report(pending, self._left(leaver))
        elif pending.seconds > self._limit(pending):
            self._report(pending)

    def _leaver_before(self, pending: Pending) -> Departure | None:
        """A process that has finished without ever beginning this step."""
        if pending.step is None:
            return None  # the board refuses who waits there for one that has left
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
        if pending.busy is not None:
            return self._busy_seconds
        if pending.seconds <= self.timeout_seconds:
            return self.timeout_seconds
        busy = [state for state in self._others() if state.busy is not None]
        if not busy:
            return self.timeout_seconds
        if not self._has_noted:
            self._has_noted = True
            print(
                f"jaxstrategy: process {self._board.index} has waited "
                f"{pending.seconds:.0f} s in {pending.what} for {busy[0].member}, "
                f"which {busy[0].busy}; it goes on waiting, {self._busy_seconds:g} s.",
                file=sys.stderr,
                flush=True,
            )
        return self._busy_seconds

    def _others(self) -> list[ProcessState]:
        try:
            states = self._board.states()
        except ClusterError:  # the report says that process 0 does not answer
            return []
        return [s for s in states if s.member.index != self._board.index]

    def _report(self, pending: Pending, cause: str | None = None) -> None:
        """End this process with a report, and tell the others why."""
        board = self._board
        text, cause = stall_report(board, pending, self.told(), cause)
        waited = f"it waited {pending.seconds:.1f} s in {pending.what}: {cause}"
        self._end(ExitCode.WATCHDOG, text, lambda: board.fail(waited))


def _step(number: int, seconds: float, busy: str | None = None) -> Pending:
    return Pending(f"step {number}", seconds, busy, number)
