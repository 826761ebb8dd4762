"""The launcher: attempts until one ends well or none is left."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import final

from jaxstrategy._errors import ClusterError, MissingExtraError
from jaxstrategy.launch import (
    _kubernetes_manifest,
    _slurm_script,
)
from jaxstrategy.launch._attempt import Outcome, attempt
from jaxstrategy.launch._exit_meanings import (
    as_shell,
    described,
    signal_name,
)
from jaxstrategy.launch._guarded_process import Guard
from jaxstrategy.launch._job_summary import job_summary
from jaxstrategy.launch._kubernetes_roles import role_manifest
from jaxstrategy.launch._launch_options import (
    Options,
    parse,
)
from jaxstrategy.launch._machines import AbstractMachines, ThisMachine
from jaxstrategy.launch._output import Screen
from jaxstrategy.launch._ray_machines import RayMachines
from jaxstrategy.launch._role_job import RoleJob
from jaxstrategy.launch._slurm_roles import role_script
from jaxstrategy.launch._workers import Asked, Events
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import Secret
from jaxstrategy.text._units import plural, with_noun

_PRINTED = {"slurm": _slurm_script.script, "k8s": _kubernetes_manifest.manifest}
_PRINTED_OF_ROLES = {"slurm": role_script, "k8s": role_manifest}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job that the command line describes; its exit code."""
    options = parse(arguments)
    if options.print_for:
        return _print(options.print_for, options)
    events: Events = queue.SimpleQueue()
    if options.workers is not None:
        with _signals_to(events), contextlib.closing(Guard()) as guard:
            return RoleJob(options, events, guard).run()
    try:
        with (
            _signals_to(events),
            contextlib.closing(_machines(options, events)) as machines,
        ):
            return Job(options, events, machines).run()
    except (ClusterError, MissingExtraError) as error:
        return _not_started(error, events)


def _machines(options: Options, events: Events) -> AbstractMachines:
    if options.ray is None:
        return ThisMachine(events)
    return RayMachines(options, options.ray, events)


def _not_started(error: Exception, events: Events) -> int:
    """Say why no process runs; the exit code."""
    if events.empty():
        print(f"jaxstrategy.launch: error: {error}", file=sys.stderr)
        return 1
    event = events.get()
    assert isinstance(event, Asked)  # no worker was there that could have ended
    print(
        f"jaxstrategy.launch: stopped by {signal_name(event.signal)}", file=sys.stderr
    )
    return 128 + event.signal


def _print(kind: str, options: Options) -> int:
    """Print what a cluster needs; the exit code."""
    try:
        printed = _PRINTED if options.workers is None else _PRINTED_OF_ROLES
        text = printed[kind](options)
    except ValueError as error:
        print(f"jaxstrategy.launch: error: {error}.", file=sys.stderr)
        return 2
    # As bytes, since arguments need not be text: they come out as they came in.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()
    return 0


@contextlib.contextmanager
def _signals_to(events: Events) -> Iterator[None]:
    """Make events of SIGINT and SIGTERM; gives back the old handlers."""
    old = {
        number: signal.signal(number, lambda number, _: events.put(Asked(number)))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@final
class Job:
    """All attempts together: what is left of processes and of restarts."""

    def __init__(
        self, options: Options, events: Events, machines: AbstractMachines
    ) -> None:
        self._options = options
        self._events = events
        self._machines = machines
        self._processes = options.processes
        self._restarts = options.max_restarts
        self._secret = Secret.random()
        lock = threading.Lock()  # one for both: they are often the same terminal
        self._screens = Screen(sys.stdout, lock), Screen(sys.stderr, lock)

    def run(self) -> int:
        """The exit code of the last attempt."""
        outcomes = self._outcomes()
        code = exit_code(outcomes[-1])
        if self._options.summary is not None:
            self._write(job_summary(self._options.name, outcomes, code))
        return code

    def _write(self, summary: str) -> None:
        path = self._options.summary
        assert path is not None, "the caller has looked"
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(summary)
        except OSError as error:
            self._say(f"the summary was not written: {error}")

    def _outcomes(self) -> tuple[Outcome, ...]:
        """Of all attempts, made one after the other."""
        outcomes: list[Outcome] = []
        number = 0
        while True:
            outcome = attempt(
                self._options,
                self._processes,
                number,
                self._secret,
                self._screens,
                self._events,
                self._machines,
            )
            self._tell(outcome)
            outcomes.append(outcome)
            if not self._goes_on(outcome):
                return tuple(outcomes)
            number += 1
            started = with_noun(self._processes, "process")
            self._say(f"starting {started} again: attempt {number}")

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether there is another attempt; counts it."""
        if outcome.asked is not None or not self._events.empty():
            return False
        if outcome.preempted:
            return True
        cause = outcome.cause
        never = ExitCode.that_restart(Restart.NEVER)
        if cause is None or cause.code in never or not self._restarts:
            return False
        self._restarts -= 1
        least = self._options.min_processes
        if least is not None:
            self._processes = max(self._processes - 1, least)
        return True

    def _tell(self, outcome: Outcome) -> None:
        """Say how it ended, the cause last."""
        cause = outcome.cause
        for told in outcome.late:
            self._say(told)
        if cause is not None:
            self._show_tail(cause.rank, outcome.tails[cause.rank])
        for code, ranks in outcome.consequences.items():
            self._say(f"then {_ranks(ranks)} failed with {described(code)}")
        if outcome.killed and outcome.asked is None:
            self._say(
                f"{_ranks(outcome.killed)} did not end within "
                f"{self._options.grace:g} s and had to be killed"
            )
        if cause is not None:
            self._say(f"rank {cause.rank} failed with {described(cause.code)}")
        elif outcome.asked is not None:
            after = f", {_ranks(outcome.killed)} killed" if outcome.killed else ""
            self._say(f"stopped by {signal_name(outcome.asked)}{after}")
        elif outcome.preempted:
            self._say("preempted, the state is saved")

    def _show_tail(self, rank: int, tail: Sequence[bytes]) -> None:
        if not tail:
            self._say(f"rank {rank} printed nothing")
            return
        self._say(f"the last lines of rank {rank}:")
        for line in tail:
            self._screens[1].show(str(rank), rank, line)

    def _say(self, text: str) -> None:
        self._screens[1].say(text)


def exit_code(outcome: Outcome) -> int:
    """The launcher's exit code after its last attempt."""
    if outcome.cause is not None:
        return as_shell(outcome.cause.code)
    if outcome.restart_code is not None:
        return outcome.restart_code
    stopped = outcome.killed or any(end.code for end in outcome.ended)
    if outcome.asked is not None and stopped:
        return 128 + outcome.asked
    return 0


def _ranks(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"
