"""Claim: a reduction of 2 MB on simulated devices takes little longer than its memory.

Simulated devices share the computer's memory, so a reduction is additions and copies
in it. This times ways to reduce the gradients of 30 layers of 128 x 128 numbers, each
with the same update after it, and bounds them by what has to be read and written:

- every replica's gradients are read once, and the sum is written: the *least*, as one
  program without devices does it, with as many threads as there are cores;
- and written on every device, because each has an array of its own: *least, copied*.

    python benchmarks/reduction_limits.py --devices 2 8
"""

from __future__ import annotations

import argparse
import functools
import operator
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Comparison, add_options, in_turn, report
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js

LAYERS, WIDTH = 30, 128
AXIS = "replica"
Reduce = Callable[[list[jax.Array]], list[jax.Array]]


def by_array(arrays: list[jax.Array]) -> list[jax.Array]:
    """XLA's all-reduce of each array."""
    return [lax.psum(array, AXIS) for array in arrays]


def of_one(array: jax.Array) -> jax.Array:
    """One array's all-reduce."""
    return lax.psum(array, AXIS)


def in_a_chain(arrays: list[jax.Array]) -> list[jax.Array]:
    """The same, one after the other, so that XLA does not join them."""
    done: list[jax.Array] = []
    for array in arrays:
        if done:
            array, _ = lax.optimization_barrier((array, done[-1]))
        done.append(lax.psum(array, AXIS))
    return done


def packed(
    reduce: Callable[[jax.Array], jax.Array], arrays: list[jax.Array]
) -> list[jax.Array]:
    """`reduce` of all arrays as one."""
    flat = reduce(jnp.concatenate([array.reshape(-1) for array in arrays]))
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = jnp.split(flat, ends)
    return [part.reshape(a.shape) for part, a in zip(parts, arrays, strict=True)]


def scattered(flat: jax.Array) -> jax.Array:
    """A reduce-scatter, then an all-gather."""
    part = lax.psum_scatter(flat, AXIS, tiled=True)
    return lax.all_gather(part, AXIS, tiled=True)


def gathered(flat: jax.Array) -> jax.Array:
    """All arrays on all devices, each of which adds them."""
    versions = lax.all_gather(flat, AXIS)
    return functools.reduce(operator.add, list(versions))


def exchanged(flat: jax.Array) -> jax.Array:
    """Each device adds one part of all arrays, by an all-to-all."""
    count = lax.axis_size(AXIS)
    parts = lax.all_to_all(flat.reshape(count, -1), AXIS, 0, 0)
    part = functools.reduce(operator.add, list(parts))
    return lax.all_gather(part, AXIS, tiled=True)


def in_pairs(flat: jax.Array) -> jax.Array:
    """Sums of two, four, eight: in as many rounds each device adds another's."""
    count = lax.axis_size(AXIS)
    distance = 1
    while distance < count:
        swap = [(i, i ^ distance) for i in range(count)]
        flat = flat + lax.ppermute(flat, AXIS, swap)
        distance *= 2
    return flat


def by_one(flat: jax.Array) -> jax.Array:
    """The first device adds all arrays, and sends the sum to the others."""
    count = lax.axis_size(AXIS)
    total = flat
    for source in range(1, count):
        total = total + lax.ppermute(flat, AXIS, [(source, 0)])
    distance = 1
    index = lax.axis_index(AXIS)
    while distance < count:  # to as many again in each round
        pairs = [(i, i + distance) for i in range(distance)]
        sent = lax.ppermute(total, AXIS, pairs)
        total = jnp.where((index >= distance) & (index < 2 * distance), sent, total)
        distance *= 2
    return total


WAYS: dict[str, Reduce] = {
    "psum": by_array,
    "psum, not joined": in_a_chain,
    "psum, packed": functools.partial(packed, of_one),
    "scatter + gather": functools.partial(packed, scattered),
    "all to all + gather": functools.partial(packed, exchanged),
    "gather + sum": functools.partial(packed, gathered),
    "pairs": functools.partial(packed, in_pairs),
    "one device sums": functools.partial(packed, by_one),
}


def program(
    reduce: Reduce | None, mesh: Mesh, steps: int
) -> Callable[[], Sequence[jax.Array]]:
    """A call of `steps` reductions of gradients, each followed by an update.

    Without `reduce` the update alone, so that the difference is the reduction.
    """

    def step(params: list[jax.Array], _: None) -> tuple[list[jax.Array], None]:
        grads = [p * 0.5 for p in params]
        sums = grads if reduce is None else reduce(grads)
        count = lax.axis_size(AXIS)
        return [p - s / count for p, s in zip(params, sums, strict=True)], None

    def replica(params: list[jax.Array]) -> list[jax.Array]:
        return lax.scan(step, params, None, length=steps)[0]

    spec = PartitionSpec()
    jitted = jax.jit(
        jax.shard_map(
            replica, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    place = NamedSharding(mesh, spec)
    rng = np.random.default_rng(0)
    params = [
        jax.device_put(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32), place)
        for _ in range(LAYERS)
    ]
    return lambda: jax.block_until_ready(jitted(params))


def least(devices: int, copies: int) -> Callable[[], None]:
    """Adds the arrays of all devices, in threads, and writes the sum so many times."""
    size = LAYERS * WIDTH * WIDTH
    threads = os.cpu_count() or 1
    pool = ThreadPoolExecutor(threads)
    given = [np.ones(size, np.float32) for _ in range(devices)]
    results = [np.empty(size, np.float32) for _ in range(copies)]
    # Parts that fit into the cache, so that nothing is read twice from memory.
    step = min(16 * 1024, -(-size // threads))
    parts = [slice(start, start + step) for start in range(0, size, step)]

    def add(own: Sequence[slice]) -> None:
        for part in own:
            total = results[0][part]
            np.add(given[0][part], given[1][part], out=total)
            for other in given[2:]:
                np.add(total, other[part], out=total)
            for result in results[1:]:
                result[part] = total

    shares = [parts[i::threads] for i in range(threads)]

    def all_threads() -> None:
        for _ in pool.map(add, shares):
            pass

    return all_threads


def milliseconds(call: Callable[[], object], times: int) -> float:
    """How long one of so many takes, at best of three turns."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1000 / times


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All ways on so many devices, in turn."""
    for count in args.devices:
        mesh = Mesh(np.array(jax.devices()[:count]), (AXIS,))
        calls = {
            name: program(reduce, mesh, args.steps) for name, reduce in WAYS.items()
        }
        calls["update alone"] = program(None, mesh, args.steps)
        expected = calls["psum"]()
        for name, call in calls.items():
            if name != "update alone":
                for ours, theirs in zip(call(), expected, strict=True):
                    np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=name)
        calls["update alone"]()
        forms = {
            name: functools.partial(milliseconds, call, args.steps)
            for name, call in calls.items()
        }
        for name, copies in (("least", 1), ("least, copied", count)):
            forms[name] = functools.partial(milliseconds, least(count, copies), 1)
        found = in_turn(forms, args.rounds, args.seconds)
        base = min(found.pop("update alone"))
        bounds = {name: found.pop(name) for name in ("least", "least, copied")}
        own = {name: [min(values) - base] for name, values in found.items()}
        own |= {name: [min(values)] for name, values in bounds.items()}
        best = min(WAYS, key=lambda name: own[name][0])
        yield Comparison(
            f"{LAYERS} x {WIDTH}, {count} devices",
            "one reduction, at best",
            "ms",
            own,
            note=f"fastest: {best}; the update alone {base:.3f} ms",
            tolerance=1.0,
        )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--devices", type=int, nargs="+", default=[2, 8])
    add("--steps", type=int, default=20, help="reductions in one call")
    add_options(parser, rounds=40, seconds=20.0)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    args = parsed()
    js.simulate(max(args.devices))
    report(measure(args), args)


if __name__ == "__main__":
    main()
