"""Claim: `assert_in_sync` every 100 steps costs at most 2 % of the training time.

The demo's network, optimizer and training step on simulated CPU devices. A step and a
check of its whole state take turns in one process, each from idle devices until its
result is there. The ratio is one check to the steps between two of them.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from _timing import Comparison, add_options, in_turn, report

import jaxstrategy as js
from jaxstrategy._src.demo import demo as demo

TARGET = 0.02

# Steps, or checks, in each turn; their median counts.
BURST = 5

OPTIONS = demo.Arguments(
    replicas=None,
    epochs=demo.EPOCHS,
    batch_size=demo.BATCH_SIZE,
    seed=0,
    out=pathlib.Path("demo.png"),
)


class Training:
    """The demo's training, on one batch of images that look like noise."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._strategy = js.MirroredStrategy(devices)
        self._step = demo.training_step(self._strategy)
        self._state = demo.initial_state(self._strategy, OPTIONS)
        draw = np.random.default_rng(0)
        images = draw.random((demo.BATCH_SIZE, 8, 8, 1), np.float32)
        labels = draw.integers(0, 10, demo.BATCH_SIZE)
        whole = [(images, labels)]
        (self._batch,) = self._strategy.experimental_distribute_dataset(whole)

    def step(self) -> None:
        """One step of all replicas, until it is done."""
        self._state, loss = self._step(self._state, *self._batch)
        jax.block_until_ready((self._state, loss))

    def check(self) -> None:
        """One check of all that the step returned."""
        self._strategy.assert_in_sync(self._state, "state")

    def size(self) -> str:
        """What the state consists of."""
        arrays = jax.tree.leaves(self._state)
        mib = sum(np.asarray(array).nbytes for array in arrays) / 2**20
        return f"{len(arrays)} arrays, {mib:.2f} MiB on each replica"


def milliseconds(function: Callable[[], None]) -> float:
    """The median time of a few calls."""
    times = []
    for _ in range(BURST):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def compare(training: Training, case: str, args: argparse.Namespace) -> Comparison:
    """One check, against the steps between two of them."""
    for _ in range(2):  # compiles them, for the state that the step returns
        training.step()
        training.check()
    measures = {
        "one check": lambda: milliseconds(training.check),
        f"{args.every} steps": lambda: args.every * milliseconds(training.step),
    }
    times = in_turn(measures, args.rounds, args.seconds)
    return Comparison(case, "share", "ms", times, TARGET, in_percent=True)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[8, 4, 1])
    add("--every", type=int, default=100, help="steps from one check to the next")
    add_options(parser, rounds=50, seconds=20.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    devices = js.simulate(max(args.devices))
    trainings = {f"{n} replicas": Training(devices[:n]) for n in args.devices}
    size = next(iter(trainings.values())).size()
    print(f"JAX {jax.__version__}; the state is {size}; medians (quartiles)")
    report((compare(each, case, args) for case, each in trainings.items()), args)


if __name__ == "__main__":
    main()
