"""Jobs of a script with its workers and parameter servers: `RoleJob`."""

from __future__ import annotations

import dataclasses
import heapq
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import final

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.launch.child_process import (
    Guard,
    GuardedProcess,
    HeldPort,
    as_shell,
    described,
)
from jaxstrategy._src.launch.local import (
    ALWAYS_AGAIN,
    LOOPBACK,
    NEVER_AGAIN,
    Asked,
    Ended,
    Events,
    Worker,
    next_event,
    of_cache,
    screens,
    share,
)
from jaxstrategy._src.launch.options import GPUS, Options
from jaxstrategy._src.processes.exit_codes import is_good
from jaxstrategy._src.processes.secret import Secret

SERVE = ("-m", "jaxstrategy.parameter_servers")
"""What workers and servers run, as arguments of `python`; it is above this layer."""

_SOON = 5.0  # seconds: who lives shorter than that is started again later each time
_LONGEST_PAUSE = 30.0
_CHIEF = 0


@final
@dataclasses.dataclass(frozen=True)
class JobTask:
    """One process of a `RoleJob`: a chief, worker, ps or evaluator, and its number."""

    job: str
    index: int

    @property
    def name(self) -> str:
        """It in words."""
        return self.job if self.runs_script else f"{self.job} {self.index}"

    @property
    def runs_script(self) -> bool:
        """Whether it is the user's script that decides what it does."""
        return self.job in ("chief", "evaluator")

    def program(self, options: Options) -> tuple[str, ...]:
        """The arguments of `python`."""
        return options.program if self.runs_script else SERVE


def job_tasks(options: Options) -> list[JobTask]:
    """All processes of a `RoleJob`; the chief, which is the script, is the first."""
    counts = {
        "chief": 1,
        "worker": options.workers or 0,
        "ps": options.parameter_servers or 1,
        "evaluator": int(options.evaluator),
    }
    return [JobTask(job, k) for job, count in counts.items() for k in range(count)]


def tf_config(addresses: Mapping[JobTask, str], task: JobTask) -> str:
    """What tells a process the cluster and its place in it."""
    cluster: dict[str, list[str]] = {}
    for each, address in addresses.items():
        cluster.setdefault(each.job, []).append(address)
    own = {"type": task.job, "index": task.index}
    return json.dumps({"cluster": cluster, "task": own})


def simulated(options: Options, task: JobTask) -> dict[str, str]:
    """Variables of a process with simulated CPU devices; none of one without."""
    count = options.devices_per_process or options.gpus_per_process
    if count is None or (task.job == "worker" and options.gpus_per_process):
        return {}
    # The chief traces functions of workers, with as many devices as one has.
    devices = 1 if task.job == "ps" else count
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def of_devices(
    options: Options, task: JobTask, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that say which devices and threads a process uses."""
    variables = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    if task.job == "worker" and options.gpus_per_process:
        own = share(options.gpus_per_process, task.index, inherited)
        return variables | {GPUS: own}
    own = simulated(options, task)
    if not task.runs_script:
        # A share of the cores: XLA's own choice for each process would be all.
        shares = (options.workers or 1) if task.job == "worker" else _cores()
        devices = int(own.get("JAX_NUM_CPU_DEVICES", 1))
        own["PJRT_NPROC"] = str(max(devices, _cores() // shares, 1))
    return variables | own


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@final
class RoleJob:
    """The script, which is the chief, and those that it calls."""

    def __init__(self, options: Options, events: Events, guard: Guard) -> None:
        self._options = options
        self._events = events
        self._guard = guard
        self._restarts = options.max_restarts
        self._tasks = job_tasks(options)
        self._ports = [HeldPort(LOOPBACK) for _ in self._tasks]
        places = [f"{LOOPBACK}:{port.number}" for port in self._ports]
        self._addresses = dict(zip(self._tasks, places, strict=True))
        self._secret = Secret.random()
        self._screens = screens()
        self._workers: dict[int, Worker] = {}
        self._started: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._waiting: list[tuple[float, int]] = []
        self._asked: int | None = None
        self._deadline: float | None = None

    def run(self) -> int:
        """The exit code of the script."""
        for rank in range(len(self._tasks)):
            self._start(rank)
        code: int | None = None
        while code is None:
            times = [at for at, _ in self._waiting[:1]]
            times += [] if self._deadline is None else [self._deadline]
            match next_event(self._events, min(times, default=None)):
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
        task = self._tasks[rank]
        self._started[rank] = time.monotonic()
        process = GuardedProcess(
            [sys.executable, *task.program(self._options)],
            environment(self._options, task, os.environ, self._secret)
            | {TF_CONFIG: tf_config(self._addresses, task)},
            task.name,
            self._guard,
            lambda code: self._events.put(Ended(rank, code)),
        )
        self._workers[rank] = Worker(
            rank, task.name, process, self._screens, self._options.verbose
        )

    def _end(self, rank: int, code: int) -> int | None:
        """What follows from an end; the code of the script, if the job is over."""
        if rank in self._workers:
            self._workers.pop(rank).close()
        name = self._tasks[rank].name
        if rank == _CHIEF:
            if not self._starts_script_again(code):
                return code
        elif self._asked is not None or (name == "evaluator" and is_good(code)):
            return None
        self._say(f"{name} ended with {described(code)} and is started again")
        last = self._pauses.get(rank, 0.0)  # seconds that it waited before
        if time.monotonic() - self._started[rank] > _SOON:
            self._pauses[rank] = last = 0.0
        else:
            self._pauses[rank] = min(max(1.0, 2 * last), _LONGEST_PAUSE)
        heapq.heappush(self._waiting, (time.monotonic() + last, rank))
        return None

    def _starts_script_again(self, code: int) -> bool:
        """Whether the script is started again; counts that."""
        if self._asked is not None or code == 0:
            return False
        if code in ALWAYS_AGAIN:
            return True
        if code in NEVER_AGAIN or not self._restarts:
            self._say(f"chief failed with {described(code)}")
            return False
        self._restarts -= 1
        return True

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
            if self._tasks[rank].runs_script:
                worker.process.send(number)
        if _CHIEF not in self._workers:  # it was to be started again
            self._events.put(Ended(_CHIEF, -number))

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()

    def _end_others(self) -> None:
        """End who is left: asked to first, then made to."""
        for worker in self._workers.values():
            worker.process.send(signal.SIGTERM)
        end = time.monotonic() + self._options.grace
        left = set(self._workers)
        while left and (event := next_event(self._events, end)) is not None:
            if isinstance(event, Ended):
                left.discard(event.rank)
        self._kill()
        for worker in self._workers.values():
            worker.close()

    def _say(self, text: str) -> None:
        self._screens[1].say(text)


def environment(
    options: Options, task: JobTask, inherited: Mapping[str, str], secret: Secret
) -> dict[str, str]:
    """The environment of a process of a `RoleJob`, but for its TF_CONFIG."""
    variables = {k: v for k, v in inherited.items() if k not in _environment.OF_PROCESS}
    # Functions of modules beside the script are imported by workers.
    path = [inherited.get("PYTHONPATH", "")]
    if not options.module:
        path.insert(0, os.path.dirname(os.path.abspath(options.command[0])))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return variables | of_devices(options, task, inherited) | secret.variables()
