"""Starts real processes, each with a deadline, and shows what all said on failure."""

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import workers
from helpers.processes import Program
from helpers.sockets import free_address
from helpers.threads import until  # noqa: F401 (the tests take it from here)

from jaxstrategy._src.processes import (
    messages,
    rendezvous as _rendezvous,
    secret,
    store,
    stragglers,
    watchdog as _watchdog,
)

# What tests of the mechanism itself need, which no user sees.
Client, RefusedError = messages.Client, messages.RefusedError
RemoteError = messages.RemoteError
Secret = secret.Secret
Member, meet = _rendezvous.Member, _rendezvous.meet
Store = store.Store
ProcessState = store.ProcessState
Watchdog, stacks = _watchdog.Watchdog, _watchdog.stacks
ExitCode = _watchdog.ExitCode
rendezvous, watchdog, late = _rendezvous, _watchdog, stragglers

# Each rank of a job runs this first: `processes` are those of the job, and
# `total(x)` sums over all of them a number that each gives.
STARTED = """
import os, signal, sys, time
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxstrategy._src.processes import job as _processes
from jaxstrategy._src.cluster.resolvers.cluster_resolver import Process

RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
COUNT = int(os.environ["JAXSTRATEGY_NUM_PROCESSES"])
ADDRESS = os.environ["JAXSTRATEGY_COORDINATOR"]
processes = _processes.start(
    Process(RANK, COUNT, ADDRESS), timeout_seconds=float(os.environ["SECONDS"]),
    start_seconds=30,
)
board, watchdog = processes.store, processes.watchdog
mesh = jax.make_mesh((jax.device_count(),), ("r",), axis_types=(AxisType.Auto,))
_sum = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))


def total(number):
    local = np.full(jax.local_device_count(), number, np.float32)
    split = NamedSharding(mesh, P("r"))
    busy = None if watchdog._step else "compiles"
    watchdog.step_started("total", "script.py:8", busy)
    try:
        out = _sum(jax.make_array_from_process_local_data(split, local))
        watchdog.watch(out)
    finally:
        watchdog.step_dispatched()
    return out
"""


# What processes say that have met only in tests.
VERSIONS = {"jaxstrategy": "0.1", "jax": "0.12.0", "jaxlib": "0.12.0", "Python": "3.12"}


# What the watchdog of a process says that has done nothing.
STATUS = {
    "step": 0,
    "what": "no step yet",
    "pending": None,
    "seconds": None,
    "busy": None,
    "writes": None,
    "arrivals": [],
    "reads": [],
}


def meets(zero, attend, **options):
    """Whether a job of two still meets when its own process 1 comes."""
    one = attend(1, **options)
    return len(zero.result(10).members) == len(one.members) == 2


class Job:
    """Ranks that run one script."""

    def __init__(self, folder, script, count, seconds, env, scripts):
        self.address = free_address()
        self.ranks = []
        for index in range(count):
            path = pathlib.Path(folder) / f"script{index}.py"
            path.write_text((scripts or {}).get(index, script))
            own = {
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "1",
                "JAXSTRATEGY_COORDINATOR": self.address,
                "JAXSTRATEGY_PROCESS_ID": str(index),
                "JAXSTRATEGY_NUM_PROCESSES": str(count),
                "SECONDS": str(seconds),
                **env,
            }
            said = pathlib.Path(folder) / f"rank{index}.txt"
            self.ranks.append(Program(said, [sys.executable, "-u", str(path)], own))
            self.ranks[-1].index = index

    def wait(self, seconds, *ranks):
        """The exit codes of these ranks, or all; fails when they take longer."""
        end = time.monotonic() + seconds
        waited = [self.ranks[k] for k in ranks] or self.ranks
        while any(rank.code is None for rank in waited):
            if time.monotonic() > end:
                late = [rank.index for rank in waited if rank.code is None]
                raise AssertionError(f"ranks {late} have not ended in {seconds} s")
            time.sleep(0.02)
        return [rank.code for rank in waited]

    def wait_for(self, text, seconds=40, ranks=None):
        """Until each of these ranks, or all, has printed `text`."""
        end = time.monotonic() + seconds
        waiting = [self.ranks[k] for k in ranks] if ranks else list(self.ranks)
        while waiting := [rank for rank in waiting if text not in rank.output]:
            ended = [rank.index for rank in waiting if rank.code is not None]
            assert not ended, f"ranks {ended} ended before they said {text!r}"
            late = [rank.index for rank in waiting]
            assert time.monotonic() < end, f"ranks {late} have not said {text!r}"
            time.sleep(0.02)

    def signal(self, index, number):
        self.ranks[index].process.send_signal(number)

    def end(self):
        for rank in self.ranks:
            rank.close()

    def show(self):
        for rank in self.ranks:
            print(f"--- rank {rank.index}, exit code {rank.code}\n{rank.output}")


@contextlib.contextmanager
def job(folder, script="", count=2, seconds=30, env=None, scripts=None, started=True):
    """A running job; whatever is left of it is ended, and shown if a check failed."""

    def whole(text):
        return (STARTED if started else "") + textwrap.dedent(text)

    scripts = {k: whole(text) for k, text in (scripts or {}).items()}
    running = Job(folder, whole(script), count, seconds, env or {}, scripts)
    try:
        yield running
    except BaseException:
        running.end()
        running.show()
        raise
    finally:
        running.end()


def launched(*arguments, **variables):
    """How a launcher ended, with its output."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxstrategy.launch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH, **variables},
    )
    print(done.stdout, done.stderr)  # shown when the test fails
    return done
