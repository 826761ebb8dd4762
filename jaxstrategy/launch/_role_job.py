"""A script with its workers and parameter servers: `RoleJob`."""

from __future__ import annotations

import heapq
import os
import queue
import signal
import sys
import threading
import time
from typing import final

from jaxstrategy.cluster.resolvers._tf_config import VARIABLE as TF_CONFIG
from jaxstrategy.launch import _job_tasks
from jaxstrategy.launch._exit_meanings import as_shell, described
from jaxstrategy.launch._guarded_process import Guard, GuardedProcess, HeldPort
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._machines import LOOPBACK
from jaxstrategy.launch._output import Screen
from jaxstrategy.launch._workers import Asked, Ended, Events, Worker
from jaxstrategy.processes._exit_codes import ExitCode, Restart, is_good
from jaxstrategy.processes._secret import Secret

_CHIEF = 0
_SOON = 5.0  # seconds: who lives shorter than that is started again later each time
_LONGEST_PAUSE = 30.0


@final
class RoleJob:
    """The script, which is the chief, and those that it calls.

    The job is over when the script is. Whoever else ends is started again: a worker
    works on by itself, and a parameter server has nothing of what it held, which the
    script is told, and of which it loads a checkpoint.

    Args:
      options: of the command line.
      events: ends of processes, and signals to this one.
      guard: ends them when this process is gone.
    """

    def __init__(self, options: Options, events: Events, guard: Guard) -> None:
        self._options = options
        self._events = events
        self._guard = guard
        self._restarts = options.max_restarts
        self._job_tasks = _job_tasks.job_tasks(options)
        self._ports = [HeldPort(LOOPBACK) for _ in self._job_tasks]
        addresses = [f"{LOOPBACK}:{port.number}" for port in self._ports]
        self._addresses = _job_tasks.placed(self._job_tasks, addresses)
        self._secret = Secret.random()
        lock = threading.Lock()  # one for both: they are often the same terminal
        self._screens = Screen(sys.stdout, lock), Screen(sys.stderr, lock)
        self._workers: dict[int, Worker] = {}
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._waiting: list[tuple[float, int]] = []
        self._asked: int | None = None
        self._deadline: float | None = None

    def run(self) -> int:
        """The exit code of the script."""
        for rank in range(len(self._job_tasks)):
            self._start(rank)
        code: int | None = None
        while code is None:
            match self._next():
                case Ended(rank, ended):
                    code = self._end(rank, ended)
                case Asked(number):
                    self._ask(number)
                case None:
                    self._start_waiting()
        self._end_others()
        for port in self._ports:
            port.close()
        return as_shell(code)

    def _start(self, rank: int) -> None:
        role = self._job_tasks[rank]
        variables = _job_tasks.environment(
            self._options, role, os.environ, self._secret
        )
        self._started[rank] = time.monotonic()
        process = GuardedProcess(
            role.command(self._options),
            variables | {TF_CONFIG: _job_tasks.tf_config(self._addresses, role)},
            role.name,
            self._guard,
            lambda code: self._events.put(Ended(rank, code)),
        )
        self._workers[rank] = Worker(
            rank, process, self._screens, self._options.verbose, role.name
        )

    def _next(self) -> Ended | Asked | None:
        """The next event; None when it is time to start somebody, or to kill."""
        times = [at for at, _ in self._waiting[:1]]
        times += [] if self._deadline is None else [self._deadline]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        try:
            return self._events.get(timeout=wait)
        except queue.Empty:
            return None

    def _end(self, rank: int, code: int) -> int | None:
        """What follows from an end; the code of the script, if the job is over."""
        if rank in self._workers:
            self._workers.pop(rank).close()
        name = self._job_tasks[rank].name
        if rank == _CHIEF:
            if not self._starts_script_again(code):
                return code
        elif self._asked is not None or (name == "evaluator" and is_good(code)):
            return None
        self._say(f"{name} ended with {described(code)} and is started again")
        heapq.heappush(self._waiting, (time.monotonic() + self._pause(rank), rank))
        return None

    def _starts_script_again(self, code: int) -> bool:
        """Whether the script is started again; counts that."""
        if self._asked is not None or code == 0:
            return False
        if code in ExitCode.that_restart(Restart.UNCOUNTED):
            return True
        if code in ExitCode.that_restart(Restart.NEVER) or not self._restarts:
            self._say(f"chief failed with {described(code)}")
            return False
        self._restarts -= 1
        return True

    def _pause(self, rank: int) -> float:
        """Seconds until a process that has ended is started again."""
        if time.monotonic() - self._started[rank] > _SOON:
            self._pauses[rank] = 0.0
            return 0.0
        last = self._pauses.get(rank, 0.0)
        self._pauses[rank] = min(max(1.0, 2 * last), _LONGEST_PAUSE)
        return last

    def _start_waiting(self) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._kill()
        while self._waiting and self._waiting[0][0] <= now:
            self._start(heapq.heappop(self._waiting)[1])

    def _ask(self, number: int) -> None:
        """Hand a signal on to the script, at the second time end it."""
        if self._asked is not None:
            self._kill()
            return
        self._asked = number
        self._deadline = time.monotonic() + self._options.stop_grace
        for rank, worker in self._workers.items():
            if self._job_tasks[rank].runs_script:
                worker.send(number)
        if _CHIEF not in self._workers:  # it was to be started again
            self._events.put(Ended(_CHIEF, -number))

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _end_others(self) -> None:
        """End who is left: asked to first, then made to."""
        for worker in self._workers.values():
            worker.send(signal.SIGTERM)
        end = time.monotonic() + self._options.grace
        left = set(self._workers)
        while left and (wait := end - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=wait)
            except queue.Empty:
                break
            if isinstance(event, Ended):
                left.discard(event.rank)
        self._kill()
        for worker in self._workers.values():
            worker.close()

    def _say(self, text: str) -> None:
        self._screens[1].say(text)
