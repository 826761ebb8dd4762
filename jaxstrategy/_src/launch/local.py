"""Jobs of processes that take the same steps, on this machine or others: `Job`."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TextIO, final

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.launch.child_process import (
    TAIL,
    Guard,
    GuardedProcess,
    HeldPort,
    OutputThread,
    StartedProcess,
    Stream,
    as_shell,
    described,
    signal_name,
)
from jaxstrategy._src.launch.options import GPUS, Options, visible_gpus
from jaxstrategy._src.processes.exit_codes import ExitCode, Restart, is_good
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text.shown import plural, with_noun, with_seconds

LOOPBACK = "127.0.0.1"
NEVER_AGAIN = ExitCode.that_restart(Restart.NEVER)
ALWAYS_AGAIN = ExitCode.that_restart(Restart.UNCOUNTED)

_DRAIN_SECONDS = 2.0


@final
@dataclasses.dataclass(frozen=True)
class Ended:
    """A process is over, with a code as `subprocess` gives it."""

    rank: int
    code: int


@final
@dataclasses.dataclass(frozen=True)
class Asked:
    """The launcher was sent a signal."""

    signal: int


Events = queue.SimpleQueue[Ended | Asked]  # its `put` may be called by signal handlers


# What processes are told.


def common(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are the same in every process and every attempt."""
    variables = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    if options.devices_per_process:
        variables["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_process)
        variables["JAX_PLATFORMS"] = environment.get("JAX_PLATFORMS") or "cpu"
    return variables


def of_cache(options: Options) -> dict[str, str]:
    """The folder in which all processes, and those of a restart, keep programs."""
    cache = options.compilation_cache
    return {} if cache is None else {_environment.COMPILATION_CACHE: cache}


def place(
    options: Options,
    rank: int,
    local_rank: int,
    processes: int,
    coordinator: str,
    attempt: int,
    secret: Secret,
) -> dict[str, str]:
    """Variables of one process of a `Job`, by which it finds the others."""
    own = {
        _environment.COORDINATOR: coordinator,
        _environment.PROCESS_ID: str(rank),
        _environment.NUM_PROCESSES: str(options.nodes * processes),
        _environment.LOCAL_RANK: str(local_rank),
        _environment.ATTEMPT: str(attempt),
    }
    if options.nodes == 1:
        # What is left of another attempt is refused by name. Launchers of several nodes
        # do not count alike.
        own[_environment.JOB] = f"{coordinator}, attempt {attempt}"
        own |= secret.variables()
    return own


def share(per_process: int, local_rank: int, environment: Mapping[str, str]) -> str:
    """The GPUs of one process, out of those that the launcher may use."""
    names = visible_gpus(environment)
    first = per_process * local_rank
    wanted = range(first, first + per_process)
    return ",".join(names[i] if names else str(i) for i in wanted)


# Workers of a job, and what they print.


@final
class Screen:
    """One of the launcher's own streams, shared by the readers of all workers."""

    def __init__(self, stream: TextIO, lock: threading.Lock) -> None:
        self._stream = stream
        self._lock = lock
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    def show(self, name: str, colour: int, line: bytes) -> None:
        """Write one line behind `[name]`."""
        prefix = f"[{name}]"
        if self._coloured:
            prefix = f"\x1b[3{1 + colour % 6}m{prefix}\x1b[0m"
        self._write(f"{prefix} ".encode() + line + b"\n")

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._write(f"jaxstrategy.launch: {text}\n".encode(errors="replace"))

    def _write(self, data: bytes) -> None:
        with self._lock:
            try:
                self._stream.buffer.write(data)
                self._stream.flush()
            except BrokenPipeError:  # as in `... | head`: the workers go on unread
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


def screens() -> tuple[Screen, Screen]:
    """Those for output and for errors, which are often the same terminal."""
    lock = threading.Lock()
    return Screen(sys.stdout, lock), Screen(sys.stderr, lock)


@final
class Worker:
    """One process of the job, and the threads that show what it prints."""

    def __init__(
        self,
        rank: int,
        name: str,
        process: StartedProcess,
        shown: tuple[Screen, Screen],
        verbose: bool,
    ) -> None:
        self.process = process
        streams: tuple[Stream, Stream] = (0, 1)
        self._readers = [
            OutputThread(
                f"rank {name}",
                functools.partial(process.read, stream),
                functools.partial(screen.show, name, rank),
                verbose,
            )
            for stream, screen in zip(streams, shown, strict=True)
        ]

    @property
    def tail(self) -> tuple[bytes, ...]:
        """The last lines that it printed, those of its errors at the end."""
        return tuple(line for reader in self._readers for line in reader.tail)[-TAIL:]

    @property
    def late(self) -> list[str]:
        """The line that it printed about late processes, if it did."""
        told = [each.late for each in self._readers if each.late is not None]
        return [line.decode(errors="replace") for line in told[-1:]]

    def close(self) -> None:
        """End what it left behind and show the rest of its output."""
        self.process.close()
        for reader in self._readers:
            reader.finish(_DRAIN_SECONDS)


def next_event(events: Events, deadline: float | None) -> Ended | Asked | None:
    """The next event; None once it is so late."""
    wait = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        return events.get(timeout=wait)
    except queue.Empty:
        return None


# Jobs of processes that take the same steps.


class Machines(Protocol):
    """Where the processes of a `Job` run."""

    def start(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> Mapping[int, StartedProcess]:
        """Start processes, whose ends are events; by rank."""
        ...

    def release(self) -> None:
        """Give back what the processes of an attempt had, once all have ended."""
        ...

    def close(self) -> None:
        """End whatever is left."""
        ...


@final
class ThisMachine:
    """The machine of the launcher."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._guard = Guard()
        self._port: HeldPort | None = None

    def start(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> Mapping[int, StartedProcess]:
        coordinator = options.coordinator
        if not coordinator:
            self._port = HeldPort(LOOPBACK)
            coordinator = f"{LOOPBACK}:{self._port.number}"
        # It would name one process, and there are several.
        inherited = {k: v for k, v in os.environ.items() if k != TF_CONFIG}
        inherited |= common(options, os.environ)

        def started(local_rank: int, rank: int) -> GuardedProcess:
            own = place(
                options, rank, local_rank, processes, coordinator, attempt, secret
            )
            if options.gpus_per_process:
                own[GPUS] = share(options.gpus_per_process, local_rank, os.environ)
            return GuardedProcess(
                [sys.executable, *options.program],
                inherited | own,
                f"rank {rank}",
                self._guard,
                lambda code: self._events.put(Ended(rank, code)),
            )

        first = options.node_rank * processes
        return {first + k: started(k, first + k) for k in range(processes)}

    def release(self) -> None:
        if self._port is not None:
            self._port.close()

    def close(self) -> None:
        self._guard.close()


@final
@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of an attempt."""

    ended: tuple[Ended, ...]
    killed: tuple[int, ...]
    tails: dict[int, tuple[bytes, ...]]
    asked: int | None
    late: tuple[str, ...]
    begun: float
    seconds: Mapping[int, float]

    @functools.cached_property
    def failed(self) -> list[Ended]:
        """The failures; those that are consequences of others are at the end."""
        failed = [end for end in self.ended if _is_failure(end.code, self.asked)]
        return sorted(failed, key=lambda end: _is_consequence(end.code))

    @property
    def cause(self) -> Ended | None:
        """The first failure; None if all returned 0, saved, or stopped as asked."""
        return next(iter(self.failed), None)

    @property
    def restart_code(self) -> ExitCode | None:
        """The code by which a worker asks to be started again, if none has failed."""
        if self.failed or self.killed:
            return None
        codes = (ExitCode.of(end.code) for end in self.ended)
        return next((code for code in codes if code in ALWAYS_AGAIN), None)

    @property
    def exit_code(self) -> int:
        """That of the launcher, if this was its last attempt."""
        if self.cause is not None:
            return as_shell(self.cause.code)
        if self.restart_code is not None:
            return self.restart_code
        stopped = self.killed or any(end.code for end in self.ended)
        return 128 + self.asked if self.asked is not None and stopped else 0


def _is_failure(code: int, asked: int | None) -> bool:
    """Whether a worker that ends with `code` should end the others too."""
    return not is_good(code) and not _is_stopped(code, asked)


def _is_stopped(code: int, asked: int | None) -> bool:
    """Whether a worker ended, without saving, by the signal that all were sent."""
    if asked is None:
        return False
    return code in (-asked, 128 + asked) or _is_consequence(code)


def _is_consequence(code: int) -> bool:
    row = ExitCode.of(code)
    return row is not None and row.is_consequence


def _attempt(options: Options, workers: dict[int, Worker], events: Events) -> Outcome:
    """Watch the workers until the last has ended, and clear up after them."""
    begun = time.monotonic()
    ended: list[Ended] = []
    seconds: dict[int, float] = {}
    asked: int | None = None
    deadline: float | None = None
    while len(ended) < len(workers):
        match next_event(events, deadline):
            case Ended(rank, code) as end:
                ended.append(end)
                seconds[rank] = time.monotonic() - begun
                if _is_failure(code, asked) or _is_stopped(code, asked):
                    grace = time.monotonic() + options.grace
                    deadline = min(grace, deadline or grace)
            case Asked(number) if asked is None:
                asked = number
                if deadline is None:
                    deadline = time.monotonic() + options.stop_grace
                for worker in workers.values():
                    worker.process.send(number)
            case _:  # asked twice, or too late
                deadline = None
                for worker in workers.values():
                    worker.process.kill()
    for worker in workers.values():
        worker.close()

    def was_killed(end: Ended) -> bool:
        return workers[end.rank].process.killed and end.code == -signal.SIGKILL

    return Outcome(
        tuple(end for end in ended if not was_killed(end)),
        tuple(sorted(end.rank for end in ended if was_killed(end))),
        {rank: worker.tail for rank, worker in workers.items()},
        asked,
        tuple(line for worker in workers.values() for line in worker.late),
        begun,
        seconds,
    )


@final
class Job:
    """Processes that take the same steps; all start again when one fails."""

    def __init__(self, options: Options, events: Events, machines: Machines) -> None:
        self._options = options
        self._events = events
        self._machines = machines
        self._processes = options.processes
        self._restarts = options.max_restarts
        self._secret = Secret.random()
        self._screens = screens()

    def run(self) -> int:
        """The exit code of the last attempt."""
        outcomes = [self._attempt(0)]
        while self._goes_on(outcomes[-1]):
            number = len(outcomes)
            started = with_noun(self._processes, "process")
            self._say(f"starting {started} again: attempt {number}")
            outcomes.append(self._attempt(number))
        if self._options.summary is not None:
            try:
                with open(self._options.summary, "w", encoding="utf-8") as file:
                    file.write(job_summary(self._options.name, outcomes))
            except OSError as error:
                self._say(f"the summary was not written: {error}")
        return outcomes[-1].exit_code

    def _attempt(self, number: int) -> Outcome:
        machines, verbose = self._machines, self._options.verbose
        try:
            started = machines.start(
                self._options, self._processes, number, self._secret
            )
            workers = {
                rank: Worker(rank, str(rank), process, self._screens, verbose)
                for rank, process in started.items()
            }
            outcome = _attempt(self._options, workers, self._events)
        finally:
            machines.release()
        self._tell(outcome)
        return outcome

    def _goes_on(self, outcome: Outcome) -> bool:
        """Whether there is another attempt; counts it."""
        if outcome.asked is not None or not self._events.empty():
            return False
        if outcome.restart_code is not None:
            return True
        cause = outcome.cause
        if cause is None or cause.code in NEVER_AGAIN or not self._restarts:
            return False
        self._restarts -= 1
        if self._options.min_processes is not None:
            self._processes = max(self._processes - 1, self._options.min_processes)
        return True

    def _tell(self, outcome: Outcome) -> None:
        """Say how it ended, the cause last."""
        for told in outcome.late:
            self._say(told)
        cause, *others = outcome.failed or [None]
        if cause is not None:
            self._show_tail(cause.rank, outcome.tails[cause.rank])
        consequences = collections.defaultdict[int, list[int]](list)
        for end in filter(None, others):
            consequences[end.code].append(end.rank)
        for code, ranks in consequences.items():
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
        elif outcome.restart_code is not None:
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


def _ranks(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


_HEADER = ("attempt", "rank", "began after", "ran for", "end")
_MOST_ROWS = 64


def job_summary(name: str, outcomes: Sequence[Outcome]) -> str:
    """The attempts of a job, why some failed, and how each process ended."""
    begun, code = outcomes[0].begun, outcomes[-1].exit_code
    ends = [each.begun + s for each in outcomes for s in each.seconds.values()]
    how = "ended well" if code == 0 else f"ended with exit code {code}"
    attempts = with_noun(len(outcomes), "attempt")
    lasted = with_seconds(max(ends, default=begun) - begun)
    failures = [text for i, each in enumerate(outcomes) for text in _failure(i, each)]
    rows = [row for i, each in enumerate(outcomes) for row in _rows(i, each, begun)]
    shown = [_HEADER, *rows[:_MOST_ROWS]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    table = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in shown)
    parts = [f"{name} {how} after {attempts}, {lasted}", *failures, "\n".join(table)]
    if (more := len(rows) - _MOST_ROWS) > 0:
        parts.append(f"and {with_noun(more, 'other process')}")
    return "\n\n".join(parts) + "\n"


def _rows(number: int, outcome: Outcome, begun: float) -> Iterator[tuple[str, ...]]:
    began = with_seconds(outcome.begun - begun) if number else "0 s"
    for rank in sorted(outcome.seconds):
        end = "killed by the launcher"
        if rank not in outcome.killed:
            end = next(described(e.code) for e in outcome.ended if e.rank == rank)
        yield str(number), str(rank), began, with_seconds(outcome.seconds[rank]), end


def _failure(number: int, outcome: Outcome) -> Iterator[str]:
    """Why an attempt failed, with the last lines of who failed first."""
    if outcome.asked is not None:
        yield f"Attempt {number} was stopped by {signal_name(outcome.asked)}."
    if (cause := outcome.cause) is None:
        return
    why = f"Attempt {number}: rank {cause.rank} failed with {described(cause.code)}."
    tail = [line.decode(errors="replace") for line in outcome.tails[cause.rank]]
    yield "\n  ".join((why, *tail, *outcome.late))
