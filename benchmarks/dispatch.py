"""Claim: `strategy.run` costs what a hand-written `shard_map` costs.

One training step (a multilayer perceptron of many small leaves, plain gradient descent,
gradients averaged over the replicas) in three forms, on simulated CPU devices:

- `run`: a function decorated with `strategy.run`;
- `shard_map`: `jax.jit(jax.shard_map(...))` written by hand over the same mesh;
- `pmap`: `jax.pmap`, with stacked parameters.

The forms take turns in one process; the state flows from step to step. Measured are

- dispatch: how long the call takes to return, on idle devices;
- end to end: the call and the wait for its results;
- first call: tracing, compiling and running, with new functions and empty caches;
- peak memory: by how much the step of a large model raises the process's largest
  resident memory, each form in a process of its own.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import Comparison, add_options, in_turn, report
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any

TARGETS = {
    "dispatch": 1.03,
    "end to end": 1.01,
    "first call": 1.50,
    "peak memory": 1.05,
}
PARTS = ("steps", "first-call", "memory")

# Steps that a form makes in each turn; their median counts.
BURST = 5
# First calls of each form in one case, and processes of each form for memory.
FIRST_CALLS = 3
MEMORY_RUNS = 3
RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Model:
    """A perceptron with `layers` square layers of `units`, given `rows` per replica."""

    layers: int
    units: int = 8
    rows: int = 8

    def params(self) -> PyTree:
        """Two leaves per layer, in a dict of dicts."""
        draw = np.random.default_rng(0)
        shape = (self.units, self.units)
        return {
            f"layer{i:03}": {
                "w": draw.normal(0, self.units**-0.5, shape).astype(np.float32),
                "b": np.zeros(self.units, np.float32),
            }
            for i in range(self.layers)
        }

    def batch(self, num_replicas: int) -> np.ndarray:
        """Rows of shape `[replica, row, unit]`."""
        shape = (num_replicas, self.rows, self.units)
        return np.random.default_rng(1).normal(size=shape).astype(np.float32)


# A large model for memory: 64 MiB of parameters on each device.
LARGE = Model(layers=16, units=1024)


def step_with(mean: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
    """A new function for one replica's training step; `mean` is over replicas."""

    def loss_of(params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - y) ** 2)

    def step(params: PyTree, x: jax.Array, y: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        gradients = mean(gradients)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        return params, mean(loss)

    return step


class Loop:
    """A training loop with one form of the step."""

    def __init__(self, step: Callable[..., Any], params: PyTree, batch: Any) -> None:
        self._step = step
        self._params = params
        self._batch = batch

    def times(self) -> tuple[float, float]:
        """The seconds until one more step is dispatched, and until it is done."""
        start = time.perf_counter()
        results = self._step(self._params, self._batch, self._batch)
        dispatched = time.perf_counter()
        jax.block_until_ready(results)
        done = time.perf_counter()
        self._params, _ = results
        return dispatched - start, done - start

    def burst(self) -> tuple[float, float]:
        """The medians of `times` over a few steps."""
        dispatch, end = zip(*(self.times() for _ in range(BURST)), strict=True)
        return statistics.median(dispatch), statistics.median(end)


def with_run(model: Model, devices: Sequence[jax.Device]) -> Loop:
    """The step as a user of jaxstrategy writes it."""
    strategy = js.MirroredStrategy(devices)

    def mean(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("mean", tree)

    step = strategy.run(step_with(mean))
    batch = strategy.per_replica({"rows": model.batch(len(devices))})["rows"]
    return Loop(step, strategy.mirror(model.params()), batch)


def by_hand(model: Model, devices: Sequence[jax.Device]) -> Loop:
    """The same step with JAX alone."""
    mesh = js.MirroredStrategy(devices).mesh
    step = jax.jit(
        jax.shard_map(
            step_with(_pmean),
            mesh=mesh,
            in_specs=(P(), P("replica"), P("replica")),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
    rows = model.batch(len(devices)).reshape(-1, model.units)
    batch = jax.device_put(rows, NamedSharding(mesh, P("replica")))
    return Loop(step, jax.device_put(model.params(), NamedSharding(mesh, P())), batch)


def with_pmap(model: Model, devices: Sequence[jax.Device]) -> Loop:
    """The same step with `jax.pmap`."""
    n = len(devices)
    step = jax.pmap(step_with(_pmean), axis_name="replica", devices=devices)
    split = NamedSharding(js.MirroredStrategy(devices).mesh, P("replica"))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * n), model.params())
    batch = jax.device_put(model.batch(n), split)
    return Loop(step, jax.device_put(stacked, split), batch)


def _pmean(tree: PyTree) -> PyTree:
    return jax.lax.pmean(tree, "replica")


# The first is held against the second.
FORMS: Mapping[str, Callable[[Model, Sequence[jax.Device]], Loop]] = {
    "run": with_run,
    "shard_map": by_hand,
    "pmap": with_pmap,
}


def compare_steps(
    model: Model, devices: Sequence[jax.Device], case: str, args: argparse.Namespace
) -> list[Comparison]:
    """Dispatch and end-to-end time of a compiled step."""
    loops = {name: make(model, devices) for name, make in FORMS.items()}
    for loop in loops.values():
        loop.burst()  # compiles it
    bursts = {name: loop.burst for name, loop in loops.items()}
    times = in_turn(bursts, args.rounds, args.seconds)
    return [
        Comparison(
            case,
            quantity,
            "us",
            {
                name: [1e6 * both[index] for both in of_form]
                for name, of_form in times.items()
            },
            TARGETS[quantity],
        )
        for index, quantity in enumerate(("dispatch", "end to end"))
    ]


def compare_first_calls(
    model: Model, devices: Sequence[jax.Device], case: str
) -> Comparison:
    """The time of a step that JAX has never seen."""
    measures = {
        name: functools.partial(first_call, make, model, devices)
        for name, make in FORMS.items()
    }
    times = in_turn(measures, FIRST_CALLS)
    return Comparison(case, "first call", "s", times, TARGETS["first call"])


def first_call(
    make: Callable[[Model, Sequence[jax.Device]], Loop],
    model: Model,
    devices: Sequence[jax.Device],
) -> float:
    """Seconds that the first step of a new loop takes."""
    loop = make(model, devices)
    jax.clear_caches()
    return loop.times()[1]


def compare_memory(num_devices: int) -> Comparison:
    """How much memory the large model's steps need, in processes of their own."""
    measures = {
        name: functools.partial(memory_in_child, name, num_devices) for name in FORMS
    }
    grown = in_turn(measures, MEMORY_RUNS)
    case = f"64 MiB, {_count(num_devices, 'device')}"
    return Comparison(case, "peak memory", "MiB", grown, TARGETS["peak memory"])


def memory_in_child(form: str, num_devices: int) -> float:
    """MiB by which the steps of `form` raise the peak memory of a new process."""
    command = [sys.executable, __file__, "--memory-of", form]
    done = subprocess.run(
        [*command, "--devices", str(num_devices)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def memory_here(form: str, num_devices: int) -> float:
    """The same for this process, which has done nothing yet."""
    devices = js.simulate(num_devices)
    jax.block_until_ready(jnp.zeros(()) + 1)
    before = _peak_mib()
    loop = FORMS[form](LARGE, devices)
    for _ in range(4):
        loop.times()
    return _peak_mib() - before


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All comparisons that were asked for."""
    if "memory" in args.only:  # first: children may count what their parent holds
        yield compare_memory(max(args.devices))
    devices = js.simulate(max(args.devices))
    for make in FORMS.values():
        first_call(make, Model(layers=1), devices)  # whatever JAX does only once
    for leaves in args.leaves:
        for n in args.devices:
            case = f"{leaves} leaves, {_count(n, 'device')}"
            model = Model(layers=leaves // 2)
            if "first-call" in args.only:
                yield compare_first_calls(model, devices[:n], case)
            if "steps" in args.only:
                yield from compare_steps(model, devices[:n], case, args)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--leaves", type=int, nargs="+", default=[20, 300], help="even numbers")
    add("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    add_options(parser, rounds=200, seconds=12.0)
    add("--memory-of", choices=list(FORMS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    if args.memory_of:
        print(memory_here(args.memory_of, max(args.devices)))
        return
    print(f"JAX {jax.__version__}; medians (quartiles); ratio: run to shard_map")
    report(measure(args), args)


if __name__ == "__main__":
    main()
