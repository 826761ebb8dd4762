"""Claim: batches reach the replicas as fast as `jax.device_put` can bring them.

Batches of images, 8 replicas, and a trivial step (a sum of each replica's rows), on
simulated CPU devices. The step is fed in three ways:

- `dataset`: `strategy.experimental_distribute_dataset`, which checks each batch, knows
  its real rows and copies it, so that the source may overwrite its memory;
- the same with prefetch: two batches are prepared ahead in a thread;
- `device_put`: a bare loop of `jax.device_put` with the same sharding, and the same
  step. The time of it is what ours is held against.

The ways take turns in one process. Measured are

- examples: time per example through the whole loop, without prefetch and with; from
  `js.batches` of an array in memory, from the same shuffled, and from Grain if it is
  installed;
- stall: a source that takes as long as the step, both made of waiting: by how much a
  step with prefetch takes longer than the step alone.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Comparison, add_options, in_turn, report
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

Array = Any

# As times: 0.95 of the examples per second is 1 / 0.95 of the time.
TARGETS = {"without prefetch": 1 / 0.95, "with prefetch": 1.00, "stall": 1.10}
PARTS = ("examples", "stall")

# Rows of a batch, batches of a pass, and numbers of an example.
SIZES = {"28 x 28": 784, "64 x 64 x 3": 12288, "224 x 224 x 3": 150528}
ROWS = {"28 x 28": 1024, "64 x 64 x 3": 512, "224 x 224 x 3": 64}
BATCHES = 20
# How long a step of the second part waits, and its source.
WAIT_SECONDS = 0.01
STEPS = 50


def images(size: str) -> np.ndarray:
    """The examples of a pass."""
    rows = BATCHES * ROWS[size]
    # Small: what is measured is copying, and a pass should fit into the memory.
    return np.resize(np.arange(2**16, dtype=np.float32), (rows, SIZES[size]))


def of_arrays(array: np.ndarray, rows: int) -> Iterable[Array]:
    """Views of the array."""
    return js.batches(array, rows)


def shuffled(array: np.ndarray, rows: int) -> Iterable[Array]:
    """Rows picked from the array."""
    return js.batches(array, rows, shuffle=0)


def of_grain(array: np.ndarray, rows: int) -> Iterable[Array]:
    """Batches that Grain reads in its threads."""
    import grain

    def part(i: int) -> np.ndarray:
        return array[i * rows : (i + 1) * rows]

    return grain.MapDataset.range(BATCHES).map(part).to_iter_dataset()


SOURCES: dict[str, Callable[[np.ndarray, int], Iterable[Array]]] = {
    "js.batches": of_arrays,
    "shuffled": shuffled,
    "Grain": of_grain,
}


class Feeds:
    """The ways to feed a step from one source."""

    def __init__(self, source: Iterable[Array], strategy: js.Strategy) -> None:
        self._source = source
        self._mesh = strategy.mesh
        self._strategy = strategy

    def dataset(self, ahead: int) -> Iterator[Any]:
        """Ours."""
        options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
        return iter(
            self._strategy.experimental_distribute_dataset(self._source, options)
        )

    def bare(self) -> Iterator[Any]:
        """`device_put` alone."""
        split = NamedSharding(self._mesh, P("replica"))
        n = self._strategy.num_replicas_in_sync
        for batch in self._source:
            batch = batch.reshape(n, batch.shape[0] // n, *batch.shape[1:])
            yield js.PerReplica(jax.device_put(batch, split))


def pass_over(
    feed: Callable[[], Iterator[Any]], step: Callable[[Any], Any], rows: int
) -> float:
    """The time of a pass per example, in nanoseconds."""
    begun = time.perf_counter()
    last = None
    for batch in feed():
        last = step(batch)
    jax.block_until_ready(last)
    return 1e9 * (time.perf_counter() - begun) / (BATCHES * rows)


def total(batch: jax.Array) -> jax.Array:
    """The trivial step."""
    return jnp.sum(batch)


def compare_examples(
    name: str, size: str, strategy: js.Strategy, args: argparse.Namespace
) -> list[Comparison]:
    """Time per example from one source, without prefetch and with."""
    rows = ROWS[size]
    array = images(size)
    feeds = Feeds(SOURCES[name](array, rows), strategy)
    step = strategy.run(total)
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "without prefetch": lambda: feeds.dataset(0),
        "with prefetch": lambda: feeds.dataset(2),
        "device_put": feeds.bare,
    }
    # An array of a dataset carries a mask, so there are two programs.
    measures = {
        way: lambda feed=feed: pass_over(feed, step, rows) for way, feed in ways.items()
    }
    for measure in measures.values():
        measure()
    wanted = [float(batch.sum()) for batch in feeds._source]
    for way, feed in ways.items():
        found = [float(strategy.reduce("sum", step(batch))) for batch in feed()]
        if way != "device_put" and name == "shuffled":
            found, wanted = [sum(found)], [sum(wanted)]
        np.testing.assert_allclose(sum(found), sum(wanted), rtol=1e-3)
    times = in_turn(measures, args.rounds, args.seconds)
    return [
        Comparison(
            f"{name}, {rows} x {size}",
            way,
            "ns/example",
            {"dataset": times[way], "device_put": times["device_put"]},
            TARGETS[way],
        )
        for way in ("without prefetch", "with prefetch")
    ]


def compare_stall(strategy: js.Strategy, args: argparse.Namespace) -> Comparison:
    """The time of a step whose source takes as long as it does."""
    batch = np.ones((64, 16), np.float32)

    def source() -> Iterator[Array]:
        for _ in range(STEPS):
            time.sleep(WAIT_SECONDS)
            yield batch

    step = strategy.run(total)
    split = NamedSharding(strategy.mesh, P("replica"))
    placed = js.PerReplica(jax.device_put(batch.reshape(8, 8, 16), split))

    def waited(value: Any) -> None:
        jax.block_until_ready(step(value).stacked)
        time.sleep(WAIT_SECONDS)

    def fed() -> float:
        iterator = iter(strategy.experimental_distribute_dataset(source))
        waited(next(iterator))  # what comes first cannot have been prepared
        begun = time.perf_counter()
        for value in iterator:
            waited(value)
        return 1e3 * (time.perf_counter() - begun) / (STEPS - 1)

    def alone() -> float:
        begun = time.perf_counter()
        for _ in range(STEPS - 1):
            waited(placed)
        return 1e3 * (time.perf_counter() - begun) / (STEPS - 1)

    rounds = max(5, args.rounds // 10)
    times = in_turn({"dataset": fed, "device_put": alone}, rounds, args.seconds)
    case = f"a source and a step of {1e3 * WAIT_SECONDS:.0f} ms"
    return Comparison(case, "stall", "ms/step", times, TARGETS["stall"])


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons that were asked for."""
    strategy = js.MirroredStrategy(js.simulate(8))
    for name in args.sources if "examples" in args.only else ():
        if name == "Grain" and importlib.util.find_spec("grain") is None:
            print("Grain is left out: it is not installed")
            continue
        for size in args.sizes:
            yield from compare_examples(name, size, strategy, args)
    if "stall" in args.only:
        yield compare_stall(strategy, args)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    add("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    add_options(parser, rounds=50, seconds=40.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: dataset to device_put")
    report(measure(args), args)


if __name__ == "__main__":
    main()
