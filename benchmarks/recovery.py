"""How long a job takes to train again after one of its processes is killed.

    python benchmarks/recovery.py [--processes 2 4 8]

The launcher starts a small training, one process of which kills itself; the launcher
starts all again, and they go on from the last checkpoint. The target is 10 s from the
kill to the end of the next step.
"""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from _timing import Comparison, add_options, report

TARGET_SECONDS = 10.0
# From one run to the next: single times, of processes that start.
TOLERANCE = 0.5
PHASES = (
    ("detect, and end all", "killed", "again"),
    ("start Python, import JAX", "again", "imported"),
    ("meet", "imported", "met"),
    ("restore", "met", "restored"),
    ("first step, with compiling", "restored", "stepped"),
    ("all", "killed", "stepped"),
)


def train(folder: str) -> None:
    """What each process runs."""
    import jax
    import numpy as np

    import jaxstrategy as js

    is_again = os.environ["JAXSTRATEGY_ATTEMPT"] != "0"
    if is_again:
        mark("imported")
    strategy = js.MultiWorkerMirroredStrategy()
    if is_again:
        mark("met")
    is_last = strategy.process_index == strategy.process_count - 1
    rows = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    data = js.batches((rows, rows.sum(1)), 64, epochs=None)

    @strategy.run
    def step(w, x, y):
        grad = jax.grad(lambda w: js.masked_mean((x @ w - y) ** 2))(w)
        return w - 0.05 * js.get_replica_context().all_reduce("mean", grad)

    with js.training.training_loop(
        strategy.experimental_distribute_dataset(data),
        lambda: strategy.mirror(np.zeros(8, np.float32)),
        steps=40,
        checkpoint=folder,
        every=5,
        strategy=strategy,
    ) as loop:
        if is_again:
            mark("restored")
        for number, (done, (x, y)) in enumerate(loop):
            if done == 20 and not is_again:
                loop.manager.wait()
                if is_last:
                    mark("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
            loop.state = step(loop.state, x, y)
            if number == 0 and is_again:
                jax.block_until_ready(loop.state)
                mark("stepped")


def mark(name: str) -> None:
    """Tell when something happened."""
    print(f"MARK {name} {time.time()}", flush=True)


def measured(processes: int) -> dict[str, float]:
    """When the last process came to each mark."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxstrategy.launch", "-n", str(processes)]
        command += ["--devices-per-process", "1", "--max-restarts", "1"]
        command += [str(pathlib.Path(__file__)), "--worker", folder]
        launcher = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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


def compare(processes: int) -> Iterator[Comparison]:
    """Seconds of each phase; all of them are held against the target."""
    marks = measured(processes)
    case = f"{processes} processes"
    for name, begin, end in PHASES:
        found = [marks[end] - marks[begin]]
        if name == "all":
            values = {"found": found, "at most": [TARGET_SECONDS]}
            yield Comparison(case, name, "s", values, 1.0, tolerance=TOLERANCE)
        else:
            yield Comparison(case, name, "s", {"found": found})


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    add_options(parser)
    return parser.parse_args(arguments)


def main() -> None:
    given = parsed()
    if given.worker:
        train(given.worker)
        return
    report((each for count in given.processes for each in compare(count)), given)


if __name__ == "__main__":
    main()
