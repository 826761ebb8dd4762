"""Jobs and their processes: `Job`, `RoleJob`, and on this machine `ThisMachine`."""

from __future__ import annotations

import collections
import contextlib
import functools
import heapq
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, final

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.errors import ClusterError
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
    memory_folder,
    signal_name,
)
from jaxstrategy._src.launch.options import (
    GPUS,
    JobTask,
    Options,
    cores,
    job_tasks,
    place,
    share,
    tf_config,
)
from jaxstrategy._src.processes.exit_codes import GOOD, ExitCode
from jaxstrategy._src.processes.secret import Secret
from jaxstrategy._src.text import plural, with_noun, with_seconds

LOOPBACK = "127.0.0.1"

_DRAIN_SECONDS = 2.0
_ROOM_SECONDS = 2.0  # that a cluster gets to find room that is there


class Ended(NamedTuple):
    """A process is over, with a code as `subprocess` gives it."""

    rank: int
    code: int


Events = queue.SimpleQueue[Ended | int]
"""Ends of processes and signals to the launcher, whose handlers may call `put`."""


class NoRoomError(ClusterError):
    """There is no room for so many processes."""


# Where processes run.


class Machines(Protocol):
    """Where the processes of a `Job` run."""

    def start(
        self, processes: int, attempt: Mapping[str, str], room_seconds: float
    ) -> Mapping[int, StartedProcess]:
        """Start processes, by rank; or raise `NoRoomError` if there is none in time."""
        ...

    def release(self) -> None:
        """Give back what the processes of an attempt had, once all have ended."""


@final
class ThisMachine:
    """The machine of the launcher."""

    def __init__(self, options: Options, events: Events) -> None:
        self._options = options
        self._events = events
        self._memory, lock = memory_folder()
        self._guard = Guard(self._memory, lock=lock)
        self._ports: list[HeldPort] = []

    def start(
        self, processes: int, attempt: Mapping[str, str], room_seconds: float
    ) -> Mapping[int, StartedProcess]:
        coordinator = self._options.coordinator or self.address()
        first = (self._options.node_rank or 0) * processes

        def started(k: int) -> StartedProcess:
            own = place(self._options, attempt, coordinator, first + k, k)
            return self.run(first + k, JobTask("process", k), own)

        return {first + k: started(k) for k in range(processes)}

    def address(self) -> str:
        """An address that is held for the job."""
        self._ports.append(HeldPort(LOOPBACK))
        return f"{LOOPBACK}:{self._ports[-1].number}"

    def run(
        self, rank: int, task: JobTask, variables: Mapping[str, str]
    ) -> GuardedProcess:
        """Start one process, whose end is an event."""
        # Of what this process itself is in other jobs, nothing is handed on.
        others = {TF_CONFIG, _environment.MEMORY}
        if self._options.nodes == 1:
            others.update(_environment.OF_PROCESS)
        inherited = {k: v for k, v in os.environ.items() if k not in others}
        own = task.variables(self._options) | dict(variables)
        own[_environment.MEMORY] = self._memory
        if gpus := task.gpus(self._options):
            own[GPUS] = share(gpus, task.index)
        return GuardedProcess(
            [sys.executable, *task.program(self._options)],
            inherited | own,
            f"rank {rank}",
            self._guard,
            lambda code: self._events.put(Ended(rank, code)),
        )

    def release(self) -> None:
        for port in self._ports:
            port.close()
        self._ports.clear()

    def close(self) -> None:
        self.release()
        self._guard.close()


# Processes that run, and what they print.


@final
class Screens:
    """The launcher's own streams, shared by the readers of all processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams = sys.stdout, sys.stderr
        self._coloured = not os.environ.get("NO_COLOR")
        self._is_terminal = [each.isatty() for each in self._streams]

    def show(self, stream: Stream, name: str, colour: int, line: bytes) -> None:
        """Write one line behind `[name]`."""
        prefix = f"[{name}]"
        if self._coloured and self._is_terminal[stream]:
            prefix = f"\x1b[3{1 + colour % 6}m{prefix}\x1b[0m"
        self._write(stream, f"{prefix} ".encode() + line + b"\n")

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._write(1, f"jaxstrategy.launch: {text}\n".encode(errors="replace"))

    def _write(self, stream: Stream, data: bytes) -> None:
        out = self._streams[stream]
        with self._lock:
            try:
                out.buffer.write(data)
                out.flush()
            except BrokenPipeError:  # as in `... | head`: the processes go on unread
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, out.fileno())
                os.close(nowhere)


@final
class Worker:
    """One process of the job, and the threads that show what it prints."""

    def __init__(
        self,
        rank: int,
        task: JobTask,
        process: StartedProcess,
        screens: Screens,
        verbose: bool,
    ) -> None:
        self.task = task
        self.process = process
        streams: tuple[Stream, Stream] = (0, 1)
        self._readers = [
            OutputThread(
                f"rank {task.name}",
                functools.partial(process.read, stream),
                functools.partial(screens.show, stream, task.name, rank),
                verbose,
            )
            for stream in streams
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


class Processes:
    """Those that run, who are asked to end and at last made to."""

    def __init__(self, options: Options, events: Events, screens: Screens) -> None:
        self.workers: dict[int, Worker] = {}
        self.asked: int | None = None
        self._options = options
        self._events = events
        self._screens = screens
        self._deadline = math.inf

    def add(self, rank: int, task: JobTask, process: StartedProcess) -> None:
        verbose = self._options.verbose
        self.workers[rank] = Worker(rank, task, process, self._screens, verbose)

    def next(self, until: float = math.inf) -> Ended | None:
        """The next end of one; None where something else happens, or at that time."""
        at = min(self._deadline, until)
        try:
            wait = None if at == math.inf else max(0.0, at - time.monotonic())
            event = self._events.get(timeout=wait)
        except queue.Empty:
            event = None
        match event:
            case Ended():
                return event
            case None if time.monotonic() < self._deadline:
                return None
            case int() if self.asked is None:
                self.asked = event
                self.end_within(self._options.stop_grace)
                for worker in self.workers.values():
                    if worker.task.runs_script:
                        worker.process.send(event)
            case _:  # asked twice, or too late
                self._deadline = math.inf
                for worker in self.workers.values():
                    worker.process.kill()
        return None

    def end_within(self, seconds: float) -> None:
        """Kill those that are left after that time, or earlier if that was said."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def _left_after(code: int, left: int) -> int | None:
    """The restarts that are left after another start; None if there is to be none."""
    if code == ExitCode.PREEMPTED:
        return left
    return None if code == ExitCode.NO_RESTART or not left else left - 1


# Jobs of processes that take the same steps.


@final
class Attempt(Processes):
    """All processes of a job from their start to the last one's end."""

    def __init__(
        self,
        options: Options,
        events: Events,
        screens: Screens,
        is_small: bool,
        can_grow: Callable[[], bool],
    ) -> None:
        super().__init__(options, events, screens)
        self._can_grow = can_grow
        self.begun = time.monotonic()
        self._was_asked_to_grow = False
        self._grow_at = self.begun + options.grow_every if is_small else math.inf
        self.seconds: dict[int, float] = {}
        self.codes: dict[int, int] = {}  # in the order of their ends
        self.killed: list[int] = []

    def wait(self) -> None:
        """Watch them until the last has ended, and clear up after them."""
        while len(self.seconds) < len(self.workers):
            if (end := self.next(self._grow_at)) is None:
                if time.monotonic() >= self._grow_at and self.asked is None:
                    self._grow()
                continue
            self._grow_at = math.inf  # the end of the others, too, or they are too few
            self.seconds[end.rank] = time.monotonic() - self.begun
            if end.code == -signal.SIGKILL and self.workers[end.rank].process.killed:
                self.killed = sorted([*self.killed, end.rank])
            else:
                self.codes[end.rank] = end.code
            if end.code not in GOOD:
                self.end_within(self._options.grace)
        for worker in self.workers.values():
            worker.close()

    def _grow(self) -> None:
        if not self._can_grow():
            self._grow_at = time.monotonic() + self._options.grow_every
            return
        self._was_asked_to_grow, self._grow_at = True, math.inf
        self.end_within(self._options.stop_grace)
        for worker in self.workers.values():
            worker.process.send(signal.SIGTERM)

    @property
    def grows(self) -> bool:
        """Whether they ended for all to start again, and not because all was done."""
        is_done = not self.killed and not any(self.codes.values())
        return self._was_asked_to_grow and not is_done

    @property
    def failed(self) -> dict[int, int]:
        """The codes of those that failed; consequences of others are at the end."""
        failed = [end for end in self.codes.items() if end[1] not in GOOD]
        first = [end for end in failed if end[1] != ExitCode.PEER_DIED]
        asked = signal.SIGTERM if self._was_asked_to_grow else self.asked
        if asked is not None:  # to end without saving is no failure
            return {k: code for k, code in first if code not in (-asked, 128 + asked)}
        return dict(first) | dict(failed)

    @property
    def cause(self) -> int | None:
        """Who failed first; None if all returned 0, saved, or stopped as asked."""
        return next(iter(self.failed), None)

    @property
    def code(self) -> int:
        """That of the launcher, if this was its last attempt."""
        if self.failed:
            return as_shell(next(iter(self.failed.values())))
        if not self.killed and ExitCode.PREEMPTED in self.codes.values():
            return int(ExitCode.PREEMPTED)
        stopped = self.killed or any(self.codes.values())
        return 128 + self.asked if self.asked is not None and stopped else 0

    @property
    def late(self) -> list[str]:
        """Lines about processes that were late."""
        return [line for worker in self.workers.values() for line in worker.late]

    def tell(self) -> None:
        """Say how it ended, the cause last."""
        say, failed, cause = self._screens.say, self.failed, self.cause
        for line in self.late:
            say(line)
        if cause is not None:
            tail = self.workers[cause].tail
            said = f"the last lines of rank {cause}:"
            say(said if tail else f"rank {cause} printed nothing")
            for line in tail:
                self._screens.show(1, str(cause), cause, line)
        consequences = collections.defaultdict[int, list[int]](list)
        for rank, code in failed.items():
            if rank != cause:
                consequences[code].append(rank)
        for code, ranks in consequences.items():
            say(f"then {_ranks(ranks)} failed with {described(code)}")
        if self.killed and self.asked is None:
            say(
                f"{_ranks(self.killed)} did not end within "
                f"{self._options.grace:g} s and had to be killed"
            )
        if cause is not None:
            say(f"rank {cause} failed with {described(failed[cause])}")
        elif self.asked is not None:
            after = f", {_ranks(self.killed)} killed" if self.killed else ""
            say(f"stopped by {signal_name(self.asked)}{after}")
        elif self.grows:
            say("ended for more processes to take part")
        elif self.code == ExitCode.PREEMPTED:
            say("preempted, the state is saved")


def _ranks(ranks: Sequence[int]) -> str:
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"


@final
class Job:
    """Processes that take the same steps; all start again when one fails."""

    def __init__(self, options: Options, events: Events, machines: Machines) -> None:
        self._options = options
        self._events = events
        self._machines = machines
        self._restarts = options.max_restarts
        self._replaced_until = -math.inf  # else what replaced a lost process held
        self._secret = Secret.random()
        self._screens = Screens()
        self._most_nodes = options.nodes
        self._nodes = None
        if options.min_nodes is not None:
            # ZeroMQ, which other jobs of the launcher do not need.
            from jaxstrategy._src.launch.nodes import Nodes

            self._nodes = Nodes(options, lambda: not events.empty())

    def run(self) -> int:
        """The exit code of the last attempt."""
        with contextlib.ExitStack() as stack:
            if self._nodes is not None:
                stack.callback(self._nodes.close)
            processes = self._options.processes
            attempts = [self._attempt(0, processes)]
            while self._goes_on(attempts[-1]):
                processes = self._next_count(attempts[-1])
                number = len(attempts)
                started = with_noun(processes, "process")
                self._screens.say(f"starting {started} again: attempt {number}")
                attempts.append(self._attempt(number, processes))
        if self._options.summary is not None:
            try:
                with open(self._options.summary, "w", encoding="utf-8") as file:
                    file.write(job_summary(self._options.name, attempts))
            except OSError as error:
                self._screens.say(f"the summary was not written: {error}")
        return attempts[-1].code

    def _next_count(self, last: Attempt) -> int:
        """How many processes the next attempt is to have."""
        processes, least = len(last.workers), self._options.min_processes
        if last.grows:
            return self._options.processes
        if least is None or not last.failed:
            return processes
        now = time.monotonic()
        if now >= self._replaced_until and self._options.wait_for_replacement:
            self._replaced_until = now + self._options.wait_for_replacement
            return processes
        return max(processes - 1, least)

    def _attempt(self, number: int, processes: int) -> Attempt:
        """An attempt of so many processes, or of as many fewer as there is room for."""
        options, can_grow = self._options, lambda: True
        least = options.min_processes if number else None
        if (nodes := self._nodes) is not None:
            met = nodes.meet()
            options.nodes, options.node_rank, options.coordinator, number = met
            if number:
                there = f"{options.nodes} of {self._most_nodes} machines"
                self._screens.say(f"attempt {number} is on {there}")
            can_grow = lambda: bool(nodes.waiting())  # noqa: E731
        told = {_environment.ATTEMPT: str(number)}
        if options.nodes == 1:  # else it is the same one for all launchers
            told |= self._secret.variables()
        wait = max(options.wait_for_replacement, _ROOM_SECONDS)
        started = None
        try:
            while started is None:
                told[_environment.NUM_PROCESSES] = str(options.nodes * processes)
                is_least = least is None or processes <= least
                seconds = options.ray_wait if is_least else wait
                try:
                    started = self._machines.start(processes, told, seconds)
                except NoRoomError:
                    if is_least:
                        raise
                    there_is = f"there is no room for {with_noun(processes, 'process')}"
                    self._screens.say(f"{there_is}, starting one fewer")
                    processes, wait = processes - 1, _ROOM_SECONDS
            is_small = len(started) < options.processes
            is_small |= options.nodes < self._most_nodes and not options.node_rank
            attempt = Attempt(options, self._events, self._screens, is_small, can_grow)
            for rank, process in started.items():
                attempt.add(rank, JobTask("process", rank), process)
            attempt.wait()
        finally:
            self._machines.release()
        return attempt

    def _goes_on(self, attempt: Attempt) -> bool:
        left: int | None = None
        if attempt.asked is None and self._events.empty():
            if (cause := attempt.cause) is None:
                attempt.tell()
                return attempt.grows or attempt.code == ExitCode.PREEMPTED
            code = attempt.failed[cause]
            left = _left_after(code, self._restarts)
            if (
                left is None
                and code != ExitCode.NO_RESTART
                and self._options.max_restarts
            ):
                used = with_noun(self._options.max_restarts, "restart")
                self._screens.say(f"the {used} of --max-restarts have been made")
        self._restarts = left or 0
        attempt.tell()
        return left is not None


_MOST_ROWS = 64


def job_summary(name: str, attempts: Sequence[Attempt]) -> str:
    """The attempts of a job, why some failed, and how each process ended."""
    begun, code = attempts[0].begun, attempts[-1].code
    ends = [each.begun + s for each in attempts for s in each.seconds.values()]
    how = "ended well" if code == 0 else f"ended with exit code {code}"
    lasted = with_seconds(max(ends, default=begun) - begun)
    parts = [f"{name} {how} after {with_noun(len(attempts), 'attempt')}, {lasted}"]
    rows = ["attempt  rank  began after  ran for  end"]
    for number, each in enumerate(attempts):
        parts += _failure(number, each)
        began = with_seconds(each.begun - begun) if number else "0 s"
        for rank, seconds in sorted(each.seconds.items()):
            end = "killed by the launcher"
            if rank in each.codes:
                end = described(each.codes[rank])
            ran = with_seconds(seconds)
            rows.append(f"{number:<7}  {rank:<4}  {began:<11}  {ran:<7}  {end}")
    parts.append("\n".join(rows[: 1 + _MOST_ROWS]))
    if (more := len(rows) - 1 - _MOST_ROWS) > 0:
        parts.append(f"and {with_noun(more, 'other process')}")
    return "\n\n".join(parts) + "\n"


def _failure(number: int, attempt: Attempt) -> Iterator[str]:
    """Why an attempt failed, with the last lines of who failed first."""
    if attempt.asked is not None:
        yield f"Attempt {number} was stopped by {signal_name(attempt.asked)}."
    if (cause := attempt.cause) is not None:
        how = described(attempt.failed[cause])
        why = f"Attempt {number}: rank {cause} failed with {how}."
        tail = attempt.workers[cause].tail
        lines = [line.decode(errors="replace") for line in tail]
        yield "\n  ".join((why, *lines, *attempt.late))


# Jobs of a script with its workers and parameter servers.

_SOON = 5.0  # seconds: who lives shorter than that is started again later each time
_LONGEST_PAUSE = 30.0
_CHIEF = 0


@final
class RoleJob:
    """The script, which is the chief, and those that it calls."""

    def __init__(self, options: Options, events: Events, machine: ThisMachine) -> None:
        self._options = options
        self._machine = machine
        self._restarts = options.max_restarts
        self._tasks = [task for tasks in job_tasks(options).values() for task in tasks]
        self._addresses = {task: machine.address() for task in self._tasks}
        self._screens = Screens()
        self._running = Processes(options, events, self._screens)
        self._shared = Secret.random().variables()
        # Functions of modules beside the script are imported by workers.
        path = [os.environ.get("PYTHONPATH", "")]
        if not options.module:
            path.insert(0, os.path.dirname(os.path.abspath(options.command[0])))
        self._shared["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._waiting = [(0.0, rank) for rank in range(len(self._tasks))]  # by time

    def run(self) -> int:
        """The exit code of the script."""
        code: int | None = None
        while code is None:
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                self._start(heapq.heappop(self._waiting)[1])
            end = self._running.next(min(self._waiting, default=(math.inf, 0))[0])
            if end is not None:
                code = self._ended(end.rank, end.code)
            elif self._running.asked and _CHIEF not in self._running.workers:
                code = -self._running.asked  # it was to be started again
        self._end_others()
        return as_shell(code)

    def _start(self, rank: int) -> None:
        task = self._tasks[rank]
        self._started[rank] = time.monotonic()
        own = self._shared | {TF_CONFIG: tf_config(self._addresses, task)}
        if not task.runs_script:
            # A share of the cores: XLA's own choice for each process would be all.
            simulated = task.variables(self._options).get("JAX_NUM_CPU_DEVICES", 1)
            all_cores, is_worker = cores(), task.job == "worker"
            shares = (self._options.workers or 1) if is_worker else all_cores
            own["PJRT_NPROC"] = str(max(int(simulated), all_cores // shares, 1))
        self._running.add(rank, task, self._machine.run(rank, task, own))

    def _ended(self, rank: int, code: int) -> int | None:
        """What follows from an end; the code of the script, if the job is over."""
        self._running.workers.pop(rank).close()
        name, asked = self._tasks[rank].name, self._running.asked is not None
        if rank == _CHIEF:
            if asked or code == 0:
                return code
            left = _left_after(code, self._restarts)
            if left is None:
                self._screens.say(f"chief failed with {described(code)}")
                return code
            self._restarts = left
        elif asked or (name == "evaluator" and code in GOOD):
            return None
        self._screens.say(f"{name} ended with {described(code)} and is started again")
        pause = self._pauses.pop(rank, 0.0)
        if time.monotonic() - self._started[rank] > _SOON:
            pause = 0.0
        else:
            self._pauses[rank] = min(max(1.0, 2 * pause), _LONGEST_PAUSE)
        heapq.heappush(self._waiting, (time.monotonic() + pause, rank))
        return None

    def _end_others(self) -> None:
        """End who is left: asked to first, then made to."""
        left = dict(self._running.workers)
        for worker in left.values():
            worker.process.send(signal.SIGTERM)
        self._running.end_within(self._options.grace)
        while left:
            if (end := self._running.next()) is not None:
                left.pop(end.rank, None)
        for worker in self._running.workers.values():
            worker.close()
