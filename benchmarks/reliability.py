"""Faults, recovery from them, and what a long training keeps.

python benchmarks/reliability.py [recovery] [soak]
python benchmarks/reliability.py faults [--only NAME ...]    # no part of `make bench`
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _harness import HERE, Comparison, benchmark, command, main
from _training import all_reduce_mean

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

# Recovery.

PHASES = (
    ("detect, and end all", "killed", "again"),
    ("start Python, import JAX", "again", "imported"),
    ("rendezvous", "imported", "joined"),
    ("restore", "joined", "restored"),
    ("first step, with compiling", "restored", "stepped"),
    ("all", "killed", "stepped"),
)


@benchmark(dict(processes=(2, 4)))
def recovery(args: Any) -> Iterator[Comparison]:
    """A job trains again within 6 s of the kill of one of its processes.

    The launcher starts a small training, one process of which kills itself; it starts
    all again, and they go on from the last checkpoint. Seconds from the kill to
    the end of the next step, and of each phase.
    """
    for processes in args.processes:
        marks = marks_of_a_job(processes)
        for name, begin, end in PHASES:
            values = {"found": [marks[end] - marks[begin]]}
            target = 1.0 if name == "all" else None
            if name == "all":
                values["at most"] = [6.0]
            # Single times, of processes that start, differ by much.
            case = f"{processes} processes"
            yield Comparison(case, name, "s", values, target, tolerance=0.5)


def marks_of_a_job(processes: int) -> dict[str, float]:
    """When the last process came to each mark."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "train.py")
        *_, code, args = command(train, (folder,), "answer", sys.executable)
        script.write_text(f"import sys; sys.argv = ['', {args!r}]; {code}")
        job = [sys.executable, "-m", "jaxstrategy.launch", "-n", str(processes)]
        job += ["--devices-per-process", "1", "--max-restarts", "1", str(script)]
        launcher = subprocess.Popen(
            job, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        marks: dict[str, float] = {}
        said = []
        assert launcher.stdout is not None
        for line in launcher.stdout:
            said.append(line)
            if "again: attempt 1" in line:
                marks["again"] = time.time()
            # What a process said before its end, the launcher shows once more.
            elif found := re.search(r"MARK (\w+) ([\d.]+)", line):
                marks[found[1]] = max(marks.get(found[1], 0), float(found[2]))
        if launcher.wait() or "stepped" not in marks:
            raise SystemExit("".join(said))
        return marks


def train(folder: str) -> None:
    """What each process runs."""
    is_again = os.environ["JAXSTRATEGY_ATTEMPT"] != "0"

    def mark(name: str) -> None:
        if is_again or name == "killed":
            print(f"MARK {name} {time.time()}", flush=True)

    mark("imported")
    strategy = js.MultiWorkerMirroredStrategy()
    mark("joined")
    is_last = strategy.process_index == strategy.process_count - 1
    rows = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    data = js.batches((rows, rows.sum(1)), 64, epochs=None)

    @strategy.run
    def step(w, x, y):
        grad = jax.grad(lambda w: js.masked_mean((x @ w - y) ** 2))(w)
        return w - 0.05 * all_reduce_mean(grad)

    with js.training.training_loop(
        strategy.experimental_distribute_dataset(data),
        lambda: strategy.mirror(np.zeros(8, np.float32)),
        steps=40,
        checkpoint=folder,
        every=5,
        strategy=strategy,
    ) as loop:
        mark("restored")
        for number, (done, (x, y)) in enumerate(loop):
            if done == 20 and not is_again:
                assert loop.manager is not None
                loop.manager.wait()
                if is_last:
                    mark("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
            loop.state = step(loop.state, x, y)
            if number == 0:
                jax.block_until_ready(loop.state)
                mark("stepped")


# A long training.


@benchmark(dict(steps=10_000, devices=2, reports=10))
def soak(args: Any) -> Iterator[Comparison]:
    """A long training keeps what it needs, and no more.

    A distributed dataset, `run` with donated state, variables, a reduction outside of
    steps, and asynchronous checkpoints, restored once. Memory, threads, files and
    arrays at the end, against those after the first tenth of the steps.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for step, resources in long_training(args, pathlib.Path(folder)):
            print(
                f"{step:>8}",
                *(f"{n:,.0f} {k}" for k, n in resources.items()),
                flush=True,
            )
            found.append(resources)
    left = [each.name for each in threading.enumerate() if not each.daemon]
    print(f"threads left at the end: {', '.join(left)}")
    # Libraries fill their pools when they first need a thread.
    more = {"resident memory, MB": 32, "threads": 4}
    for quantity, number in found[-1].items():
        limit = found[1][quantity] + more.get(quantity, 0)
        values = {"at the end": [number], "at most": [limit]}
        note = f"from step {args.steps // args.reports:,} on"
        yield Comparison(f"{args.steps:,} steps", quantity, "", values, 1.0, note=note)


def resources_now() -> dict[str, float]:
    """What the process has."""
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "resident memory, MB": int(fields["VmRSS"].split()[0]) / 2**10,
        "threads": int(fields["Threads"]),
        "open files": len(os.listdir("/proc/self/fd")),
        "live arrays": len(jax.live_arrays()),
    }


def long_training(
    args: Any, folder: pathlib.Path
) -> Iterator[tuple[int, dict[str, float]]]:
    """Trains, and yields the step and what the process has so many times."""
    strategy = js.MirroredStrategy(js.simulate(args.devices))
    rows = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    data = {"x": rows, "y": rows.sum(1, keepdims=True)}
    with strategy.scope():
        seen = js.Variable(0.0, aggregation="sum", synchronization="on_read")

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(weights: jax.Array, batch: dict[str, jax.Array]):
        def loss(weights: jax.Array) -> jax.Array:
            return js.masked_mean(((batch["x"] @ weights - batch["y"]) ** 2).mean(-1))

        value, gradient = jax.value_and_grad(loss)(weights)
        seen.assign_add(1.0)
        return weights - 0.01 * all_reduce_mean(gradient), value

    source = js.batches(data, 16 * args.devices, shuffle=0, epochs=None)
    batches = iter(strategy.experimental_distribute_dataset(source))
    weights = strategy.mirror(jnp.zeros((8, 1)))
    with CheckpointManager(folder, strategy, keep=2) as manager:
        yield 0, resources_now()
        for number in range(1, args.steps + 1):
            weights, value = step(weights, next(batches))
            if number % 100 == 0:
                float(strategy.reduce("mean", value, axis=None))
            if number % max(1, args.steps // 50) == 0:
                manager.save(number, {"weights": weights, "seen": seen})
            if number % max(1, args.steps // args.reports) == 0:
                manager.wait()
                yield number, resources_now()
        manager.wait()
        restored = manager.restore({"weights": weights, "seen": seen})
    np.testing.assert_allclose(restored["weights"], np.ones((8, 1)), atol=0.1)


# Faults.

TESTS = str(HERE.parent / "tests" / "multiprocess")
TIMEOUT_SECONDS, DEADLINE = 4, 120

# What the processes run tells when the fault happens.
MARKS = """
import time

def mark():
    print("MARK", time.time(), flush=True)

slept = time.sleep

def sleep(seconds):
    if seconds >= 600:
        mark()
    slept(seconds)

time.sleep = sleep
"""
# What each process trains, process 1 until its 30th step.
LOOP = """
for step in range(100_000):
    if step == 30 and RANK == 1:
        mark()
        {}
    out = total(RANK)
    if step % 5 == 0:
        float(out)
    time.sleep(0.005)
"""
SAVES = """
from jaxstrategy.checkpoint import CheckpointManager
saved = CheckpointManager.save

def save(*args, **kwargs):
    mark()
    return saved(*args, **kwargs)

CheckpointManager.save = save
"""
LEAVES_OUT = """
from workers import hanging
rows = hanging.rows

def marked(context):
    for number, batch in enumerate(rows(context)):
        if hanging.RANK == 1 and number == 5:
            mark()
        yield batch

hanging.rows = marked
"""
PORT = f"{MARKS}\nimport jaxstrategy as js\nmark()\njs.MultiWorkerMirroredStrategy()\n"
STARTED = "STARTED"  # stands for the beginning of the tests' programs


def loop(fault: str) -> str:
    return STARTED + MARKS + LOOP.format(fault)


def hanging(case: str, before: str = "") -> str:
    return f"{MARKS}{before}\nfrom workers import hanging\nhanging.main({case!r})"


def ending(way: str) -> str:
    return f"{MARKS}\nfrom workers import endings\nmark()\nendings.{way}()"


# Of each fault: what runs, and whether the watchdog has to find it.
FAULTS: dict[str, tuple[str, bool]] = {
    "killed": (loop("os.kill(os.getpid(), signal.SIGKILL)"), False),
    "SIGTERM": (loop("os.kill(os.getpid(), signal.SIGTERM)"), False),
    "stopped": (loop("os.kill(os.getpid(), signal.SIGSTOP)"), True),
    "exception": (loop("raise ValueError('no such digit')"), False),
    "exit code": (loop("sys.exit(9)"), False),
    "all fail": (
        f"{STARTED}{MARKS}float(total(RANK)); mark(); raise ValueError(RANK)",
        False,
    ),
    "leaves early": (loop("break"), False),
    "another program": (ending("another_program"), False),
    "another value": (ending("another_exchange"), False),
    "leaves out a step": (hanging("skip", LEAVES_OUT), False),
    "asleep before a new step": (hanging("asleep before new"), True),
    "asleep before a known step": (hanging("asleep before known"), True),
    "stuck reader": (hanging("reader"), True),
    "one saves": (hanging("save one-sided"), True),
    "one restores": (hanging("restore one-sided"), True),
    "saves another folder": (hanging("save another folder", SAVES), False),
    "saves other leaves": (hanging("save other leaves", SAVES), False),
    "dies while reading": (
        f"{MARKS}\nfrom workers import faults\nkill = faults.os.kill\n"
        "faults.os.kill = lambda *args: (mark(), kill(*args))\n"
        "faults.main('reader', 1)",
        False,
    ),
    "the port is taken": (PORT, False),
}


@benchmark(dict(only=tuple(FAULTS)), name="faults")
def seconds_to_end(args: Any) -> Iterator[Comparison]:
    """How many seconds after a fault all processes of a job have ended.

    The faults are those of the README's table and of `tests/multiprocess/`, whose
    programs run here. Seconds are counted from the fault to the end of the last one;
    where a watchdog has to find it, its `timeout_seconds`, 4 here, is taken off.
    """
    sys.path.insert(0, TESTS)
    harness: Any = importlib.import_module("harness")  # the tests' own

    for name in args.only:
        script, is_watched = FAULTS[name]
        script = script.replace(STARTED, harness.STARTED)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            env, is_port = {"PYTHONPATH": TESTS}, script == PORT
            if is_port:
                env["JAXSTRATEGY_COORDINATOR"] = f"127.0.0.1:{taken.getsockname()[1]}"
            # A stopped process does not end, nor one that waits for a coordinator.
            ends = (0,) if is_port or "SIGSTOP" in script else ()
            options = {"seconds": TIMEOUT_SECONDS, "env": env, "started": False}
            running = stack.enter_context(harness.job(folder, script, **options))
            running.wait(DEADLINE, *ends)
            ended = time.time()
            replies = itertools.islice(running.ranks, 1 if is_port else None)
            said = "".join(rank.output for rank in replies)
        seconds = ended - max(map(float, re.findall(r"MARK ([\d.]+)", said)))
        seconds -= TIMEOUT_SECONDS * is_watched
        told = "s after the watchdog's timeout" if is_watched else "s"
        yield Comparison(name, "end of all processes", told, {"found": [seconds]})


BENCHMARKS = [recovery, soak, seconds_to_end]

if __name__ == "__main__":
    main(BENCHMARKS)
