"""What the first call of the demo's step costs in a process that is started again.

    python benchmarks/warm_start.py [--rounds 5]

Fresh processes take turns: one compiles the step, one finds its program in JAX's
compilation cache, one loads a step that was compiled ahead of time and saved. Measured
is the processor time from there until the first results are on the devices.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from _timing import Comparison, add_options, in_turn, report

TARGET = 0.2
# Of single calls in processes that start.
TOLERANCE = 0.3
DEADLINE = 300  # seconds

RUN = """
import sys, time
import numpy as np
import jax
import jaxstrategy as js
from jaxstrategy._src.demo import demo

cache, saved, how = sys.argv[1:]
if how == "cache":
    js.experimental.compilation_cache(cache)
strategy = js.MirroredStrategy()
options = demo.Arguments(**vars(demo.make_parser().parse_args([])))
state = demo.initial_state(strategy, options)
examples, _ = demo.load()
numbers = np.random.default_rng(0)
batches = demo.batches(examples, options.batch_size, numbers)
batch = next(iter(strategy.experimental_distribute_dataset(batches)))
step = demo.training_step(strategy)
jax.block_until_ready((state, batch))
start = time.process_time()
if how == "save":
    strategy.compile(step, (state, *batch)).save(saved)
else:
    if how == "saved":
        step = strategy.load_compiled(saved, step, (state, *batch))
    _, loss = jax.block_until_ready(step(state, *batch))
    print(time.process_time() - start, float(loss))
"""


def first_call(folder: str, how: str) -> list[float]:
    """The processor seconds of a first call in a process of its own, and the loss."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, f"{folder}/cache", f"{folder}/saved", how],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if done.returncode:
        sys.exit(f"the process ({how}) has failed:\n{done.stderr}")
    return [float(word) for word in done.stdout.split()]


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """First calls with the cache and of a saved step, against those that compile."""
    with tempfile.TemporaryDirectory() as folder:
        first_call(folder, "save")
        first_call(folder, "cache")
        ways = ("saved", "cache", "cold")
        found = in_turn(
            {how: lambda how=how: first_call(folder, how) for how in ways}, args.rounds
        )
    losses = {loss for each in found.values() for _, loss in each}
    if len(losses) != 1:
        sys.exit(f"the first calls have different losses: {losses}")
    seconds = {how: [second for second, _ in each] for how, each in found.items()}
    for how, name in (("saved", "a saved step"), ("cache", "the compilation cache")):
        yield Comparison(
            f"the demo's step, {name}",
            "first call of a new process",
            "cpu s",
            {"again": seconds[how], "compiled": seconds["cold"]},
            TARGET,
            tolerance=TOLERANCE,
        )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, rounds=5)
    return parser.parse_args(arguments)


def main() -> None:
    """Prints the tables."""
    args = parsed()
    report(measure(args), args)


if __name__ == "__main__":
    main()
