"""Batches to the replicas, and checkpoints to disk and back.

python benchmarks/input.py [input] [checkpoint]
"""

from __future__ import annotations

import functools
import importlib.util
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from _harness import Comparison, benchmark, in_turn, main, scaled, seconds_of
from _training import PyTree
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

# Rows of a batch, and numbers of an example.
SIZES = {
    "28 x 28": (1024, 784),
    "64 x 64 x 3": (512, 12288),
    "224 x 224 x 3": (64, 150528),
}
BATCHES = 20  # of a pass
# How long a step waits, and its source, and how many there are.
WAIT_SECONDS, STEPS = 0.01, 50


def of_grain(array: np.ndarray, rows: int) -> Iterable[np.ndarray]:
    """Batches that Grain reads in its threads."""
    import grain

    def part(i: int) -> np.ndarray:
        return array[i * rows : (i + 1) * rows]

    return grain.MapDataset.range(BATCHES).map(part).to_iter_dataset()


SOURCES: dict[str, Callable[[np.ndarray, int], Iterable[np.ndarray]]] = {
    "js.batches": js.batches,
    "shuffled": functools.partial(js.batches, shuffle=0),
    "Grain": of_grain,
}


def total(batch: jax.Array) -> jax.Array:
    """The trivial step."""
    return jnp.sum(batch)


@benchmark(
    dict(
        only=("examples", "stall"),
        sources=tuple(SOURCES),
        sizes=tuple(SIZES),
        rounds=50,
        seconds=2.0,
    ),
    dict(sizes=("28 x 28",), seconds=1.0),
    name="input",
)
def feeding(args: Any) -> Iterator[Comparison]:
    """Batches reach the replicas as fast as `jax.device_put` can bring them.

    Batches of images, 8 replicas, and a trivial step, fed by
    `experimental_distribute_dataset` without and with prefetch, and by a bare loop of
    `jax.device_put` with the same sharding: time per example, from `js.batches` of an
    array, from the same shuffled, and from Grain; and, of a source that takes as long
    as the step, by how much a step takes longer than the step alone (stall).
    """
    strategy = js.MirroredStrategy(js.simulate(8))
    step, split = strategy.run(total), NamedSharding(strategy.mesh, P("replica"))

    def placed(batch: np.ndarray) -> js.PerReplica:
        return js.PerReplica(
            jax.device_put(batch.reshape(8, -1, batch.shape[-1]), split)
        )

    for name in args.sources if "examples" in args.only else ():
        if name == "Grain" and importlib.util.find_spec("grain") is None:
            print("Grain is left out: it is not installed")
            continue
        for size in args.sizes:
            rows, numbers = SIZES[size]
            # Small: what is measured is copying, and a pass should fit into the memory.
            values = np.arange(2**16, dtype=np.float32)
            source = SOURCES[name](np.resize(values, (BATCHES * rows, numbers)), rows)

            def dataset(ahead: int, source: Any = source) -> Iterable[Any]:
                options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
                return strategy.experimental_distribute_dataset(source, options)

            ways: dict[str, Callable[[], Iterable[Any]]] = {
                "without prefetch": functools.partial(dataset, 0),
                "with prefetch": functools.partial(dataset, 2),
                "device_put": functools.partial(map, placed, source),
            }

            def one_pass(feed: Callable[[], Iterable[Any]]) -> None:
                *_, last = (step(batch) for batch in feed())
                jax.block_until_ready(last)

            # An array of a dataset carries a mask, so there are two programs.
            wanted = sum(float(batch.sum()) for batch in source)
            for feed in ways.values():
                one_pass(feed)
                sums = (strategy.reduce("sum", step(batch)) for batch in feed())
                np.testing.assert_allclose(sum(map(float, sums)), wanted, rtol=1e-3)
            measures = {
                k: lambda feed=v: seconds_of(lambda: one_pass(feed))
                for k, v in ways.items()
            }
            times = in_turn(measures, args.rounds, args.seconds)
            times = scaled(times, 1e9 / (BATCHES * rows))
            # As times: 0.95 of the examples per second is 1 / 0.95 of the time.
            targets = {"without prefetch": 1 / 0.95, "with prefetch": 1.00}
            for way, target in targets.items():
                both = {"dataset": times[way], "device_put": times["device_put"]}
                case = f"{name}, {rows} x {size}"
                yield Comparison(case, way, "ns/example", both, target)
    if "stall" in args.only:
        batch = np.ones((64, 16), np.float32)

        def slowly() -> Iterator[np.ndarray]:
            for _ in range(STEPS):
                time.sleep(WAIT_SECONDS)
                yield batch

        def milliseconds(feed: Callable[[], Iterable[Any]]) -> float:
            iterator = iter(feed())
            waited(next(iterator))  # what comes first cannot have been prepared
            start = time.perf_counter()
            for value in iterator:
                waited(value)
            return 1e3 * (time.perf_counter() - start) / (STEPS - 1)

        def waited(value: Any) -> None:
            jax.block_until_ready(step(value).stacked)
            time.sleep(WAIT_SECONDS)

        fed = functools.partial(strategy.experimental_distribute_dataset, slowly)
        ways = {"dataset": fed, "device_put": lambda: [placed(batch)] * STEPS}
        measures = {k: functools.partial(milliseconds, v) for k, v in ways.items()}
        times = in_turn(measures, 5)
        case = f"a source and a step of {1e3 * WAIT_SECONDS:.0f} ms"
        yield Comparison(case, "stall", "ms/step", times, 1.10)


# Checkpoints.


class Ours:
    """Saves and restores as a user of jaxstrategy does."""

    def __init__(self, folder: pathlib.Path, structs: PyTree) -> None:
        manager = CheckpointManager(folder, keep=1)
        self.save, self.wait, self.close = manager.save, manager.wait, manager.close
        self.restore = lambda step: manager.restore(structs, step)


class Orbax:
    """Saves and restores with Orbax alone."""

    def __init__(self, folder: pathlib.Path, structs: PyTree) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        manager = ocp.CheckpointManager(folder, options=options)
        self.wait, self.close = manager.wait_until_finished, manager.close
        save, restore = ocp.args.StandardSave, ocp.args.StandardRestore(structs)
        self.save = lambda step, state: manager.save(step, args=save(state))
        self.restore = lambda step: manager.restore(step, args=restore)


@benchmark(dict(sizes=(100,), devices=8, folder=None, rounds=7, seconds=math.inf))
def checkpoint(args: Any) -> Iterator[Comparison]:
    """To save, to write and to restore takes no longer than with Orbax alone.

    The same arrays, mirrored, by `js.checkpoint.CheckpointManager`, by Orbax's own, and
    by that once more: how far to trust a ratio. Until an asynchronous `save` returns,
    until the checkpoint is complete, and until the arrays lie on a quarter of the
    devices.
    """
    devices = js.simulate(args.devices)
    strategy = js.MirroredStrategy(devices)
    other = js.MirroredStrategy(devices[: max(1, len(devices) // 4)])
    where, draw = other.mirror(0.0).sharding, np.random.default_rng(0)
    for size in args.sizes:
        state = {
            f"array {i}": strategy.mirror(draw.random(size * 2**18 // 20, np.float32))
            for i in range(20)
        }
        structs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), state
        )
        with tempfile.TemporaryDirectory(dir=args.folder) as root:
            kinds = {"ours": Ours, "orbax": Orbax, "again": Orbax}
            managers = {k: v(pathlib.Path(root, k), structs) for k, v in kinds.items()}
            turns = {k: turns_of(v, state) for k, v in managers.items()}
            measures = {k: functools.partial(next, v) for k, v in turns.items()}
            for measure in measures.values():
                measure()
            found = in_turn(measures, args.rounds, args.seconds)
            for manager in managers.values():
                manager.close()
        for quantity in ("blocked", "written", "restored"):
            times = {k: [t[quantity] for t in v] for k, v in found.items()}
            case = f"{size} MB, {len(devices)} devices"
            yield Comparison(case, quantity, "ms", scaled(times, 1e3), 1.0)


def turns_of(manager: Any, state: PyTree) -> Iterator[Mapping[str, float]]:
    """Seconds of one form, a step further at each turn."""
    step = 0
    while True:
        step += 1
        blocked = seconds_of(functools.partial(manager.save, step, state))
        written = blocked + seconds_of(manager.wait)
        start = time.perf_counter()
        jax.block_until_ready(manager.restore(step))
        restored = time.perf_counter() - start
        yield {"blocked": blocked, "written": written, "restored": restored}


BENCHMARKS = [feeding, checkpoint]

if __name__ == "__main__":
    main(BENCHMARKS)
