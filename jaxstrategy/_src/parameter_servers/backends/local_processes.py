"""`LocalProcesses`: workers and servers as child processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
from jax import export

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.environment import VARIABLE as TF_CONFIG
from jaxstrategy._src.errors import ClusterError, ParameterServerLost
from jaxstrategy._src.launch.child_process import Guard, GuardedProcess
from jaxstrategy._src.launch.options import GPUS, cores, visible_gpus
from jaxstrategy._src.parameter_servers.backends import child as _child
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    ALL_ENDED,
    NAMES,
    Job,
    Place,
    StartedProcesses,
    Task,
)
from jaxstrategy._src.parameter_servers.peer import PATIENCE
from jaxstrategy._src.processes.secret import VARIABLE as SECRET
from jaxstrategy._src.text import positive, with_noun

# What names one process of a job, and children are none of its processes.
_OF_ONE_PROCESS = (
    TF_CONFIG,
    SECRET,
    _environment.COORDINATOR,
    _environment.PROCESS_ID,
    _environment.NUM_PROCESSES,
    _environment.LOCAL_RANK,
    _environment.ATTEMPT,
    _environment.JOB,
)

# Options of JAX by which programs and dataset functions mean something else.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_compilation_cache_dir",
)

_COMPILED = "JAX_COMPILATION_CACHE_DIR"

# XLA refuses to be told by two who disagree, and users set this one for their script.
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=\S*")


def of_child(
    inherited: Mapping[str, str], cpu_devices: int | None, threads: int
) -> dict[str, str]:
    """The environment of a child that uses so many CPU devices; or GPUs."""
    variables = {k: v for k, v in inherited.items() if k not in _OF_ONE_PROCESS}
    # This process's options of JAX, in the form in which a new process reads them.
    found = {name: getattr(jax.config, name, None) for name in _OPTIONS}
    variables |= {k.upper(): str(v) for k, v in found.items() if v is not None}
    variables["XLA_FLAGS"] = _SIMULATED.sub("", variables.get("XLA_FLAGS", "")).strip()
    if cpu_devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
    return variables | {
        "PYTHONUNBUFFERED": "1",
        "JAX_NUM_CPU_DEVICES": str(cpu_devices or 1),
        # XLA takes all cores for each process otherwise: two workers on two cores
        # took 1.5 times as long for each step (3 x 256 MLP, JAX 0.12).
        "PJRT_NPROC": str(max(cpu_devices or 1, threads)),
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_WHOLE = 0.75  # of a GPU's memory: JAX's own default


def devices_of_workers(
    workers: int, count: int | None
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What workers would say of their devices, and the environment of each.

    They have the GPUs that JAX has here, or else CPU devices that are simulated.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise ValueError(
            f"The devices here are of the platform {backend!r}, which processes "
            "cannot divide. Set JAX_PLATFORMS=cpu, or choose backend='threads'."
        )
    inherited = dict(os.environ)
    platform, each, sharing = "cpu", count or 1, 1
    gpus: Sequence[Sequence[str]] = ()
    if backend == "gpu":
        names = visible_gpus(inherited) or [*map(str, range(jax.local_device_count()))]
        each, gpus, sharing = divided(names, workers, count)
        platform = export.default_export_platform()
    found = []
    for worker in range(workers):
        own = of_child(inherited, None if gpus else each, max(1, cores() // workers))
        if directory := own.get(_COMPILED):
            # JAX reads entries while another process writes them: "Error reading
            # persistent compilation cache entry", and compiles anyway (0.10 to 0.12).
            own[_COMPILED] = f"{directory}/worker-{worker}"
        if gpus:
            own[GPUS] = ",".join(gpus[worker])
            if sharing > 1:
                own.setdefault(_MEMORY, f"{_WHOLE / sharing:.3f}")
        found.append(own)
    return {"devices": each, "platform": platform}, found


def divided(
    gpus: Sequence[str], workers: int, count: int | None
) -> tuple[int, tuple[tuple[str, ...], ...], int]:
    """How many GPUs each worker has, which, and how many workers share one.

    >>> divided("0123", 2, None)
    (2, (('0', '1'), ('2', '3')), 1)
    >>> divided("0", 2, 1)
    (1, (('0',), ('0',)), 2)
    """
    each = count or max(1, len(gpus) // workers)
    if each * workers <= len(gpus):
        parts = (gpus[each * k : each * (k + 1)] for k in range(workers))
        return each, tuple(map(tuple, parts)), 1
    if each == 1:
        shared = tuple((gpus[k % len(gpus)],) for k in range(workers))
        return 1, shared, -(-workers // len(gpus))
    raise ValueError(
        f"{with_noun(workers, 'worker')} with {each} devices each need "
        f"{each * workers} GPUs, and there are {len(gpus)}. Ask for fewer workers or "
        "devices_per_worker, or set JAX_PLATFORMS=cpu to simulate devices."
    )


START_SECONDS = 60.0
"""An import of JAX takes one, on a busy host many."""

_POLITE_SECONDS = 2.0


@final
class _ThisHost(Place):
    """Processes of this host, which listen in a folder that only this user enters."""

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        super().__init__(None)
        # A path of a socket has at most 107 characters.
        where = tempfile.gettempdir()
        self._folder = tempfile.mkdtemp(
            prefix="jaxstrategy-", dir=where if len(where) < 70 else "/tmp"
        )
        self._guard = Guard(self._folder)
        self._numbers = itertools.count()
        self._starting = threading.Lock()
        self._living: list[Task] = []
        # The children see the environment as it is now, whatever becomes of it.
        self._of_server = of_child(dict(os.environ), 1, 1)
        self._of_worker = environments
        _all.add(self)

    def task(self, job: Job, number: int) -> Task:
        name = f"{NAMES[job]} {number}"
        address = f"{self._folder}/{next(self._numbers)}"
        path = [os.path.abspath(entry) for entry in sys.path]
        task = json.dumps({"job": job, "address": address, "path": path})
        # -P: the folder of the program is none to import from.
        command = [sys.executable, "-P", _child.__file__, task, name]
        environment = self._of_server if job == "ps" else self._of_worker[number]

        def start(over: Callable[[int], None]) -> GuardedProcess:
            return GuardedProcess(
                command, environment, name, self._guard, over, joined=True
            )

        with self._starting:
            self.check_open()
            self._living = [each for each in self._living if not each.over.is_set()]
            try:
                started = Task(name, address, start)
            except RuntimeError as error:
                # Since Python 3.12 an ending interpreter starts no thread; the guard
                # ends what the child has begun.
                if threading.main_thread().is_alive():
                    raise
                raise ClusterError(ALL_ENDED) from error
            self._living.append(started)
        return started

    def end_all(self) -> None:
        """End all: asked to first, then made to."""
        with self._starting:  # nothing is started any more
            living = self._living
        for task in living:
            if task.process is not None:
                task.process.send(signal.SIGTERM)
        end = time.monotonic() + _POLITE_SECONDS
        for task in living:
            if not task.over.wait(max(0.0, end - time.monotonic())):
                task.kill()
        for task in living:
            task.close()
        self._guard.close()

    def abandon(self) -> None:
        """Give up what a fork of this process has of them."""
        self._guard.abandon()


_all: weakref.WeakSet[_ThisHost] = weakref.WeakSet()


def _abandon_all() -> None:
    for place in _all:
        place.abandon()


# The guard would wait for the forks of its parent too, which have copies of its pipe.
os.register_at_fork(after_in_child=_abandon_all)


@final
class LocalProcesses(StartedProcesses):
    """Starts workers and parameter servers as processes, which end with this one.

    They are connected by sockets in a folder that only this user can enter. What they
    print appears behind their names in this process's standard error. A coordinator has
    a worker that ends started again.

    Args:
      workers: how many.
      parameter_servers: how many.
      devices_per_worker: by default an equal share of the GPUs that JAX finds; where
        there are none, one CPU device. More of those are simulated.
      start_seconds: the time that a process has to start.
      patience: seconds without a sign of life after which one that was asked something
        is lost.

    Attributes:
      num_workers: how many workers there are.
      replicas_per_worker: how many devices each worker has.
      platforms: the platform of these devices.
      servers: the parameter servers.

    Raises:
      ValueError: there is no such number of devices.
      ClusterError: a parameter server did not start.
    """

    can_restart_servers = True

    def __init__(
        self,
        workers: int,
        parameter_servers: int,
        devices_per_worker: int | None = None,
        *,
        start_seconds: float = START_SECONDS,
        patience: float = PATIENCE,
    ) -> None:
        workers = positive("workers", workers)
        parameter_servers = positive("parameter_servers", parameter_servers)
        if devices_per_worker is not None:
            positive("devices_per_worker", devices_per_worker)
        told, environments = devices_of_workers(workers, devices_per_worker)
        place, counts = _ThisHost(environments), (workers, parameter_servers)
        super().__init__(place, *counts, start_seconds, patience, told)

    def restart_servers(self, servers: Sequence[int]) -> None:
        """New processes of parameter servers.

        Raises:
          ParameterServerLost: one did not start.
        """
        for number in servers:
            self._servers[number].kill()
            self._servers[number].close()
            try:
                self._servers[number] = task = self._place.task("ps", number)
                self._reach_server(task, time.monotonic() + self._start_seconds)
            except ClusterError as error:
                why = f"Parameter server {number} is lost. {error}"
                raise ParameterServerLost(why) from error
            self._called[number].move_to(task)
