"""Ends a process whose step makes no progress, with a report of what all wait for."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Self, final

import jax

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import stragglers
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.store import (
    LATE_SECONDS,
    ProcessState,
    Status,
    Store,
)
from jaxstrategy._src.processes.stragglers import Arrivals

_OWN_THREADS = "jaxstrategy-"
_once = threading.Lock()
# Held while an exception is printed, which then comes first.
speaking = threading.Lock()
_SPEAKING_SECONDS = 5.0


def finish(
    code: int,
    text: str,
    before: Callable[[], None] | None = None,
    pause_seconds: float | None = 0.3,
) -> None:
    """Print `text` after all that was printed so far, and end the process with `code`.

    Nothing runs after it: no `finally`, no `atexit`, where JAX would wait for the
    others. The first caller wins; any other thread that comes here stays here.
    """
    _once.acquire()
    try:
        if before is not None:
            before()
        if pause_seconds is not None:
            time.sleep(pause_seconds)
            speaking.acquire(timeout=_SPEAKING_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        pass  # a closed pipe or stream; the text still has a way
    try:
        text = text if text.endswith("\n") else f"{text}\n"
        os.write(2, text.encode(errors="replace"))
    finally:
        os._exit(code)


def stacks() -> str:
    """The stacks of this process's Python threads, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    told = []
    for ident, frame in sorted(
        sys._current_frames().items(), key=lambda item: item[0] != main
    ):
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(_OWN_THREADS):
            lines = "".join(traceback.format_stack(frame)).rstrip()
            told.append(f"{name}, the innermost call last:\n{lines}")
    return "\n".join(told)


@final
class Activity(AbstractContextManager["Activity"]):
    """A wait or a read, known in its block; cheap, as there is one for each batch."""

    def __init__(
        self, among: dict[int, Activity], what: str, busy: str | None = None
    ) -> None:
        self.what = what
        self.busy = busy
        self._among = among
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        self._among[id(self)] = self
        return self

    def __exit__(self, *error: object) -> None:
        del self._among[id(self)]

    @property
    def seconds(self) -> float:
        """Since it began or made progress."""
        return time.monotonic() - self._since

    def progress(self) -> None:
        """Give it the whole time again."""
        self._since = time.monotonic()


# The report names a batch that has been read for so long.
_READING_SECONDS = 1.0


def described(state: ProcessState) -> str:
    """A process and what it does, as a line of the report."""
    if state.end is not None:
        return str(state)
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


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step, or another wait for all processes, that has not finished."""

    what: str  # in words, such as `step 3`
    seconds: float  # since it, or the program before it, began or made progress
    busy: str | None = None  # what this process does by itself meanwhile
    step: int | None = None  # its number; None for another wait


def suspicion(
    states: Sequence[ProcessState],
    index: int,
    what: str,
    seconds: float,
    step: int | None,
) -> str:
    """Name the process that is most likely waited for, in a sentence."""
    others = [state for state in states if state.member.index != index]
    for state in others:
        if state.end is not None:
            return f"{state}."
    silent = [s for s in others if s.silent_seconds > LATE_SECONDS]
    if silent:
        worst = max(silent, key=lambda state: state.silent_seconds)
        return (
            f"{worst.member} has not answered for {worst.silent_seconds} s. It is "
            "stopped, or its host is."
        )
    least = max(_READING_SECONDS, seconds / 2)
    late = [
        f"the input pipeline of {state.member} has not delivered {batch} for {since} s"
        for state in states
        for batch, since in (state.status["reads"] if state.status else ())
        if since >= least
    ]
    if late:
        return f"{' and '.join(late)}. Its source is slow or stuck."
    known = [(state, state.status) for state in others if state.status]
    if step is None:
        for state, status in known:
            if status["pending"] != what:
                return (
                    f"{state.member} has not come to {what}. {described(state)}. All "
                    "processes must do the same, in the same order."
                )
        return f"all processes answer and have come to {what}, which does not end."
    last, at = min(
        ((state, status["step"]) for state, status in known),
        key=lambda pair: pair[1],
        default=(None, step),
    )
    if last is not None and at < step:
        return (
            f"{last.member} has not begun this step. {described(last)}. All processes "
            "must run the same steps."
        )
    return (
        "all processes answer and have begun this step. They may have called different "
        "functions, or in a different order."
    )


def stall_report(
    store: Store, pending: Pending, told: str, cause: str | None
) -> tuple[str, str]:
    """Write the report, and the cause in a sentence."""
    own, states = store.members[store.index], []
    try:
        states = store.states()
    except ClusterError as error:
        cause = cause or str(error)
    cause = cause or suspicion(
        states, store.index, pending.what, pending.seconds, pending.step
    )
    seconds = f"{pending.seconds:.1f} s in {pending.what}"
    table = "\n".join(f"  {described(state)}" for state in states)
    text = (
        f"\njaxstrategy: {own} has made no progress for {seconds} (last begun: {told})."
        f"\nPython stacks of {own}:\n{stacks()}\n"
        f"Where the processes are:\n{table or '  unknown'}\n"
        f"{stragglers.at_the_end(store.known_states())}"
        f"jaxstrategy: process {own.index} waited {seconds} and ends with exit code "
        f"{ExitCode.WATCHDOG}: {cause}\n"
    )
    return text, cause


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
    """

    def __init__(
        self,
        store: Store,
        timeout_seconds: float,  # of a step without progress
        # Of what one process does by itself, such as compile; the others wait as long.
        busy_seconds: float | None = None,
        # Given an exit code, the report, and what to do before.
        end: Callable[[int, str, Callable[[], None]], None] = finish,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._busy_seconds = busy_seconds or max(3600, 10 * timeout_seconds)
        self._store = store
        self._end = end
        self._step = 0
        self._what: object = None
        self._where: object = None
        self._is_open = False
        self._busy: str | None = None
        self._opened = 0.0
        self._activities: dict[int, Activity] = {}
        self._reads: dict[int, Activity] = {}
        self.writes: str | None = None  # what is being written in the background
        self.arrivals = Arrivals()  # of this process at its last steps
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
        """Note that the call of the step has returned, with or without an error."""
        self._is_open = False
        self._busy = None
        if token is not None and self._is_on:
            self._tokens.append((self._step, token))

    def waiting(
        self, what: str, busy: str | None = None
    ) -> AbstractContextManager[Activity]:
        """A block, outside of steps, that cannot go on without the other processes."""
        return Activity(self._activities, what, busy)

    def reading(self, what: str) -> AbstractContextManager[Activity]:
        """A block in which the input pipeline of this process delivers `what`.

        It is reported when somebody waits for it, and no wait by itself: it may be
        read ahead.
        """
        return Activity(self._reads, what)

    def watch(self, array: jax.Array) -> None:
        """Count the last step as pending until this array of it has been computed."""
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
                self.step_progress()
                self._store.forgive_silence()
            ticked = now
            self._store.look_at_process_0()
            if pending := self.pending:
                self._check(pending)

    def _check(self, pending: Pending) -> None:
        if pending.step is not None and pending.seconds > _LEFT_SECONDS:
            # The store refuses who waits elsewhere for one that has left.
            for departure in list(self._store.departures.values()):
                steps = (departure.status or {}).get("step")
                if departure.end != "left" or steps is None:
                    continue
                if steps < pending.step:
                    after = f"after step {steps}" if steps else "without a step"
                    self._report(
                        pending,
                        f"{departure}, {after}. All processes must run the same steps.",
                    )
                    return
        if pending.seconds > self._limit(pending):
            self._report(pending)

    def _limit(self, pending: Pending) -> float:
        if pending.busy is not None:
            return self._busy_seconds
        if pending.seconds <= self.timeout_seconds:
            return self.timeout_seconds
        own = self._store.index
        try:
            states = self._store.states()
        except ClusterError:  # the report says that process 0 does not answer
            states = []
        busy = [s for s in states if s.busy is not None and s.member.index != own]
        if not busy:
            return self.timeout_seconds
        if not self._has_noted:
            self._has_noted = True
            print(
                f"jaxstrategy: process {self._store.index} has waited "
                f"{pending.seconds:.0f} s in {pending.what} for {busy[0].member}, "
                f"which {busy[0].busy}; it goes on waiting, {self._busy_seconds:g} s.",
                file=sys.stderr,
                flush=True,
            )
        return self._busy_seconds

    def _report(self, pending: Pending, cause: str | None = None) -> None:
        """End this process with a report, and tell the others why."""
        text, cause = stall_report(self._store, pending, self.told(), cause)
        waited = f"it waited {pending.seconds:.1f} s in {pending.what}: {cause}"
        self._end(ExitCode.WATCHDOG, text, lambda: self._store.fail(waited))


def _step(number: int, seconds: float, busy: str | None = None) -> Pending:
    return Pending(f"step {number}", seconds, busy, number)
