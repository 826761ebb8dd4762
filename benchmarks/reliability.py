"""Recovery from faults, and what a long training keeps.

python benchmarks/reliability.py [recovery] [soak]
"""

from __future__ import annotations

import gc
import os
import pathlib
import re
import signal
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
from _harness import Comparison, benchmark, command, main
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


BENCHMARKS = [recovery, soak]

if __name__ == "__main__":
    main(BENCHMARKS)
