"""Claim: a long training keeps what it needs, and no more.

A model is trained for many steps as a user would: a distributed dataset that is read
ahead, `strategy.run` with donated state, variables, a reduction outside of steps, and
asynchronous checkpoints from time to time, restored once. Memory, threads and open
files are told before, on the way and at the end, after the first tenth of the steps,
in which everything is compiled and all buffers are made.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Comparison, add_options, report

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

MB = 2**20
# Allowed from the first tenth on, whatever the number of steps.
GROWTH = 32 * MB
THREADS = 4  # libraries fill their pools when they first need a thread
ROWS, FEATURES = 16, 8


@dataclasses.dataclass(frozen=True)
class Held:
    """What the process holds.

    Attributes:
      step: after which.
      seconds: since the beginning.
      memory: bytes resident.
      threads: of Python and of libraries.
      descriptors: open files.
      arrays: of JAX that are alive.
    """

    step: int
    seconds: float
    memory: int
    threads: int
    descriptors: int
    arrays: int

    @classmethod
    def now(cls, step: int, start: float) -> Held:
        """At this moment."""
        gc.collect()
        status = pathlib.Path("/proc/self/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return cls(
            step,
            time.perf_counter() - start,
            int(fields["VmRSS"].split()[0]) * 1024,
            int(fields["Threads"]),
            len(os.listdir("/proc/self/fd")),
            len(jax.live_arrays()),
        )

    def __str__(self) -> str:
        return (
            f"{self.step:>8} {self.seconds:>8.0f} s {self.memory / MB:>8.1f} MB "
            f"{self.threads:>4} threads {self.descriptors:>4} descriptors "
            f"{self.arrays:>4} arrays"
        )


def train(
    steps: int, devices: Sequence[jax.Device], folder: pathlib.Path, tellings: int
) -> Iterator[Held]:
    """Trains, and yields what is held so many times."""
    start = time.perf_counter()
    strategy = js.MirroredStrategy(devices)
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(4096, FEATURES)).astype(np.float32)
    data = {"x": rows, "y": rows.sum(1, keepdims=True)}
    with strategy.scope():
        seen = js.Variable(0.0, aggregation="sum", synchronization="on_read")

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(weights: jax.Array, batch: dict[str, jax.Array]):
        def loss(weights: jax.Array) -> jax.Array:
            return js.masked_mean(((batch["x"] @ weights - batch["y"]) ** 2).mean(-1))

        value, gradient = jax.value_and_grad(loss)(weights)
        seen.assign_add(1.0)
        gradient = js.get_replica_context().all_reduce("mean", gradient)
        return weights - 0.01 * gradient, value

    dataset = strategy.experimental_distribute_dataset(
        js.batches(data, ROWS * len(devices), shuffle=0, epochs=None)
    )
    batches = iter(dataset)
    weights = strategy.mirror(jnp.zeros((FEATURES, 1)))
    with CheckpointManager(folder, strategy, keep=2) as manager:
        yield Held.now(0, start)
        for number in range(1, steps + 1):
            weights, value = step(weights, next(batches))
            if number % 100 == 0:
                float(strategy.reduce("mean", value, axis=None))
            if number % max(1, steps // 50) == 0:
                manager.save(number, {"weights": weights, "seen": seen})
            if number % max(1, steps // tellings) == 0:
                manager.wait()
                yield Held.now(number, start)
        manager.wait()
        restored = manager.restore({"weights": weights, "seen": seen})
    np.testing.assert_allclose(restored["weights"], np.ones((FEATURES, 1)), atol=0.1)


def comparisons(early: Held, last: Held) -> Iterator[Comparison]:
    """What is held at the end beside what may be held, after what there was early."""
    case = f"{last.step:,} steps"
    limits = {
        "resident memory, MB": (last.memory / MB, (early.memory + GROWTH) / MB),
        "threads": (last.threads, early.threads + THREADS),
        "open files": (last.descriptors, early.descriptors),
        "live arrays": (last.arrays, early.arrays),
    }
    note = f"from step {early.step:,} on"
    for quantity, (found, most) in limits.items():
        values = {"at the end": [found], "at most": [most]}
        yield Comparison(case, quantity, "", values, 1.0, note=note)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=100_000)
    add("--devices", type=int, default=2)
    add("--tellings", type=int, default=10, help="lines on the way")
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}, {args.devices} simulated devices")
    devices = js.simulate(args.devices)
    told: list[Held] = []
    with tempfile.TemporaryDirectory() as folder:
        for held in train(args.steps, devices, pathlib.Path(folder), args.tellings):
            told.append(held)
            print(held, flush=True)
    left = [each.name for each in threading.enumerate() if not each.daemon]
    print(f"threads left at the end: {', '.join(left)}")
    report(comparisons(told[1], told[-1]), args)


if __name__ == "__main__":
    main()
