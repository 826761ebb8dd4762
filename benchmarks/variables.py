"""Claim: a step over many variables costs what one over donated arrays costs.

Every variable moves a little towards the mean of the replicas' inputs, in two forms, on
simulated CPU devices:

- `variables`: a function decorated with `strategy.run` that reads and assigns them;
- `shard_map`: `jax.jit(jax.shard_map(...))` written by hand, which is given the arrays
  and returns them, with their memory donated.

The forms take turns in one process. Measured are

- end to end: the call of a compiled step and the wait for all that it changed;
- live: what the arrays that JAX keeps between two steps take on all devices;
- program: what the compiled step needs on one device, as XLA reports it: arguments,
  results that have no donated memory, and what is needed in between.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Comparison, add_options, in_turn, report
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

TARGETS = {"end to end": 1.25, "live": 1.05, "program": 1.05}
PARTS = ("steps", "memory")

# Steps that a form makes in each turn; their median counts.
BURST = 5
RATE = 0.1

# Numbers in each variable; for memory there are 16 of 4 MiB.
SMALL = 8
LARGE, LARGE_VARIABLES = 2**20, 16


def start(number: int, size: int) -> list[np.ndarray]:
    """What the variables start as."""
    draw = np.random.default_rng(0)
    return [draw.random(size, np.float32) for _ in range(number)]


def inputs(num_replicas: int, size: int) -> np.ndarray:
    """A row for each replica."""
    return np.random.default_rng(1).random((num_replicas, size), np.float32)


class WithVariables:
    """The step as a user of variables writes it."""

    def __init__(self, number: int, size: int, devices: Sequence[jax.Device]) -> None:
        strategy = js.MirroredStrategy(devices)
        with strategy.scope():
            variables = [js.Variable(a) for a in start(number, size)]

        @strategy.run
        def step(x: jax.Array) -> jax.Array:
            mean = js.get_replica_context().all_reduce("mean", x)
            for variable in variables:
                variable.assign_add(RATE * (mean - variable.value()))
            return mean.sum()

        self._strategy, self._step = strategy, step
        self._x = strategy.per_replica(inputs(len(devices), size))
        self._variables = variables

    def step(self) -> Any:
        """One more step."""
        return self._step(self._x)

    def program_bytes(self) -> int:
        """What a step needs."""
        memory = self._strategy.explain(self._step, (self._x,)).memory
        assert memory is not None
        return memory.peak - memory.code

    def values(self) -> list[np.ndarray]:
        """What the variables hold."""
        return [variable.numpy() for variable in self._variables]


class ByHand:
    """The same step with JAX alone."""

    def __init__(self, number: int, size: int, devices: Sequence[jax.Device]) -> None:
        mesh = js.MirroredStrategy(devices).mesh

        def step(arrays: list[jax.Array], x: jax.Array) -> Any:
            mean = jax.lax.pmean(x[0], "replica")
            return [a + RATE * (mean - a) for a in arrays], mean.sum()

        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        )
        self._step = jax.jit(mapped, donate_argnums=0)
        same, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
        self._x = jax.device_put(inputs(len(devices), size), split)
        # Copied, so that no array shares the memory of a host array.
        arrays = [jax.device_put(a, same) for a in start(number, size)]
        self._arrays = list(map(jnp.copy, arrays))

    def step(self) -> Any:
        """One more step."""
        self._arrays, loss = self._step(self._arrays, self._x)
        return loss

    def program_bytes(self) -> int:
        """What a step needs."""
        lowered = self._step.lower(self._arrays, self._x)
        stats = lowered.compile().memory_analysis()
        used = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return used - stats.alias_size_in_bytes + stats.temp_size_in_bytes

    def values(self) -> list[np.ndarray]:
        """What the arrays hold."""
        return [np.asarray(array) for array in self._arrays]


# The first is held against the second.
FORMS: Mapping[str, Callable[..., Any]] = {
    "variables": WithVariables,
    "shard_map": ByHand,
}


def burst(form: Any) -> float:
    """The median time of a few steps, each of them waited for, in microseconds."""
    times = []
    for _ in range(BURST):
        begun = time.perf_counter()
        # One program computes everything: with this result there is the rest.
        jax.block_until_ready(form.step())
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times)


def compare_steps(
    number: int, devices: Sequence[jax.Device], args: argparse.Namespace
) -> list[Comparison]:
    """The time of a compiled step, and what stays between two of them."""
    case = f"{number} variables, {_count(len(devices), 'device')}"
    forms, live = {}, {}
    for name, make in FORMS.items():
        before = live_kib()
        forms[name] = make(number, SMALL, devices)
        for _ in range(3):  # compiles it
            jax.block_until_ready(forms[name].step())
        live[name] = [live_kib() - before]
    times = in_turn(
        {name: functools.partial(burst, form) for name, form in forms.items()},
        args.rounds,
        args.seconds,
    )
    ours, theirs = (form.values() for form in forms.values())
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    return [
        Comparison(case, "end to end", "us", times, TARGETS["end to end"]),
        Comparison(case, "live", "KiB", live, TARGETS["live"]),
    ]


def live_kib() -> float:
    """KiB of all arrays that are alive, counted once for each device."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    return sum(a.nbytes * len(a.sharding.device_set) for a in arrays) / 2**10


def compare_programs(number: int, size: int, devices: Sequence[jax.Device]) -> Any:
    """The memory that the compiled steps need."""
    used = {
        name: [make(number, size, devices).program_bytes() / 2**10]
        for name, make in FORMS.items()
    }
    each = f"of {size * 4 / 2**20:.0f} MiB" if size >= LARGE else "small"
    case = f"{number} {each}, {_count(len(devices), 'device')}"
    return Comparison(case, "program", "KiB", used, TARGETS["program"])


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons that were asked for."""
    devices = js.simulate(max(args.devices))
    for n in args.devices:
        for number in args.variables:
            if "steps" in args.only:
                yield from compare_steps(number, devices[:n], args)
            if "memory" in args.only:
                yield compare_programs(number, SMALL, devices[:n])
        if "memory" in args.only:
            yield compare_programs(LARGE_VARIABLES, LARGE, devices[:n])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variables", type=int, nargs="+", default=[100, 1000])
    add("--devices", type=int, nargs="+", default=[1, 2, 8])
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    add_options(parser, rounds=200, seconds=12.0)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: variables to shard_map")
    report(measure(args), args)


if __name__ == "__main__":
    main()
