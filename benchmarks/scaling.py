"""Claim: start-up does not grow with replicas, and `run` adds little to the floor.

A perceptron of 30 layers x 32 units (Flax, Optax, 8 rows per replica) on 1 to 64
simulated CPU devices, each number of them in processes of its own, which take turns.
Measured are

- trace: Python's part of the first call (tracing, analysis, lowering), and
- compile: XLA's part; neither may grow by more than 1.3 from 2 to 64 replicas;
- step: `run` beside the same step by hand without any communication, the floor; all
  devices share the machine's cores, so that the floor itself grows with them;
- memory: what one device needs for a step, from XLA's memory analysis.

And how trace and compile grow with the number of arrays (10 to 10,000, perceptrons of 8
units), beside `jax.jit(jax.shard_map(...))` by hand with a `lax.pmean` of each.

Trace and compile are in processor seconds of all threads, which other work on the
machine hardly changes; steps are in seconds on the clock, in turns. A process that uses
more processor seconds than a limit is stopped, and the table says so.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import Comparison, add_options, report
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any
# What one process found; None: it was stopped.
Found = dict[str, float] | None

AXIS = "replica"
PARTS = ("replicas", "leaves")
ROWS = 8
# From the second of `REPLICAS` to the last.
GROWTH = 1.3
# Of the hand-written program's.
START = 1.15
# Between two runs, of tracing or compiling alone: of a few processes.
TOLERANCE = 0.2
REPLICAS = (1, 2, 4, 8, 16, 32, 64)
LEAVES = (10, 100, 1000, 10_000)
LAYERS, UNITS, UNITS_OF_LEAVES = 30, 32, 8
REPLICAS_OF_LEAVES = 8
# Seconds of steps in one process, and the steps in a turn of them.
SECONDS, BURST = 1.5, 5
# From so many arrays on, there is one process for each case.
MANY = 1000


class Perceptron(nn.Module):
    """Square layers, each a kernel and a bias."""

    layers: int
    units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            x = jnp.tanh(nn.Dense(self.units, name=f"{i}")(x))
        return x


# One process.


def step_with(model: Perceptron, mean: Callable[[PyTree], PyTree]) -> Callable:
    """A new function for one replica's step; `mean` is over replicas."""
    optimizer = optax.sgd(0.1)

    def loss_of(params: PyTree, x: jax.Array) -> jax.Array:
        out = model.apply({"params": params}, x)
        assert isinstance(out, jax.Array)
        return jnp.mean((out - x) ** 2)

    def step(params: PyTree, x: jax.Array) -> tuple[PyTree, jax.Array]:
        loss, grads = mean(jax.value_and_grad(loss_of)(params, x))
        updates, _ = optimizer.update(grads, optimizer.init(params))  # it is empty
        return optax.apply_updates(params, updates), loss

    return step


def arrays(model: Perceptron, num_replicas: int) -> tuple[PyTree, np.ndarray]:
    """First parameters, and a batch `[replica, row, unit]`."""
    draw = np.random.default_rng(0)
    shape, units = (model.units, model.units), model.units
    params = {
        f"{i}": {
            "kernel": draw.normal(0, units**-0.5, shape).astype(np.float32),
            "bias": np.zeros(units, np.float32),
        }
        for i in range(model.layers)
    }
    batch = draw.normal(size=(num_replicas, ROWS, units)).astype(np.float32)
    return params, batch


Prepared = tuple[Callable[[], Callable[..., Any]], tuple[Any, Any]]


def with_run(model: Perceptron, mesh: Mesh) -> Prepared:
    """What makes the step with jaxstrategy, and its arguments."""
    strategy = js.MirroredStrategy(list(mesh.devices.flat))

    def mean(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("mean", tree)

    def make() -> Callable[..., Any]:
        options = js.RunOptions(donate_argnums=0)
        return strategy.run(step_with(model, mean), options=options)

    params, batch = arrays(model, mesh.size)
    placed = strategy.per_replica({"x": batch})["x"]
    return make, (strategy.mirror(params), placed)


def by_hand(
    model: Perceptron, mesh: Mesh, mean: Callable[[PyTree], PyTree]
) -> Prepared:
    """The same with JAX alone."""

    def make() -> Callable[..., Any]:
        step = jax.shard_map(
            step_with(model, mean),
            mesh=mesh,
            in_specs=(P(), P(AXIS)),
            out_specs=P(),
            check_vma=False,
        )
        return jax.jit(step, donate_argnums=0)

    params, batch = arrays(model, mesh.size)
    rows = batch.reshape(-1, model.units)
    return make, (
        jax.device_put(params, NamedSharding(mesh, P())),
        jax.device_put(rows, NamedSharding(mesh, P(AXIS))),
    )


def _pmean(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: lax.pmean(leaf, AXIS), tree)


FORMS: Mapping[str, Callable[[Perceptron, Mesh], Prepared]] = {
    "run": with_run,
    "shard_map": functools.partial(by_hand, mean=_pmean),
    # The replicas' parameters drift apart, which JAX is told to overlook.
    "floor": functools.partial(by_hand, mean=lambda tree: tree),
}


def startup(prepared: Prepared) -> dict[str, float]:
    """Processor seconds to trace and to compile a new step, and bytes per device."""
    make, args = prepared
    jax.clear_caches()
    whole = jax.jit(make(), donate_argnums=0)
    start = time.process_time()
    lowered = whole.lower(*args)
    traced = time.process_time()
    compiled = lowered.compile()
    done = time.process_time()
    found = {"trace": traced - start, "compile": done - traced}
    memory = compiled.memory_analysis()
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    size = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    return {**found, "memory": float(size)}


class Training:
    """A training loop with one form of the step."""

    def __init__(self, prepared: Prepared) -> None:
        make, (self._params, self._batch) = prepared
        self._step = make()

    def next(self) -> jax.Array:
        """The loss of one more step."""
        self._params, loss = self._step(self._params, self._batch)
        return loss

    def burst(self) -> float:
        """Seconds for each of a few steps."""
        start = time.perf_counter()
        for _ in range(BURST - 1):
            self.next()
        jax.block_until_ready((self.next(), self._params))
        return (time.perf_counter() - start) / BURST


def steps(model: Perceptron, mesh: Mesh) -> dict[str, float]:
    """Median seconds of a step of `run`, of one by hand, and of the floor."""
    trainings = {name: Training(make(model, mesh)) for name, make in FORMS.items()}
    for _ in range(3):
        losses = [trainings[name].next() for name in ("run", "shard_map")]
        assert np.allclose(*losses, rtol=1e-4, atol=0), losses
    for training in trainings.values():
        training.burst()
    found: dict[str, list[float]] = {name: [] for name in trainings}
    names, order = list(trainings), random.Random(0)
    start = time.perf_counter()
    while len(found["run"]) < 5 or time.perf_counter() - start < SECONDS:
        order.shuffle(names)
        for name in names:
            found[name].append(trainings[name].burst())
    return {name: statistics.median(times) for name, times in found.items()}


def in_this_process(form: str, leaves: int, replicas: int) -> dict[str, float]:
    """What this process, which has done nothing yet, finds about one case."""
    # The strategy's mesh, so that all forms use the same.
    mesh = js.MirroredStrategy(js.simulate(replicas)).mesh
    startup(FORMS[form](Perceptron(1, UNITS), mesh))  # what JAX does only once
    if leaves:
        model = Perceptron(leaves // 2, UNITS_OF_LEAVES)
        return startup(FORMS[form](model, mesh))
    model = Perceptron(LAYERS, UNITS)
    found = startup(FORMS[form](model, mesh))
    timed = {f"step {name}": t for name, t in steps(model, mesh).items()}
    return {**found, **timed}


def in_child(limit: int, form: str, leaves: int, replicas: int) -> Found:
    """What a new process finds, unless it needs more than `limit` processor seconds."""
    numbers = [form, str(leaves), str(replicas), str(limit)]
    command = [sys.executable, __file__, "--child", *numbers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == -signal.SIGXCPU:
        return None
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


# All of them.


def in_rounds(
    cases: Mapping[str, Callable[[], Found]], rounds: int
) -> dict[str, list[Found]]:
    """What each case found in each round; one that was stopped is not tried again."""
    found: dict[str, list[Found]] = {name: [] for name in cases}
    names, order = list(cases), random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)
        for name in names:
            if None not in found[name]:
                found[name].append(cases[name]())
    return found


def values(found: Sequence[Found], quantity: str, scale: float = 1.0) -> list[float]:
    """Of a quantity, a round each; none if the case was stopped."""
    if None in found:
        return []
    return [scale * each[quantity] for each in found if each is not None]


def starts(found: Sequence[Found]) -> list[float]:
    """Tracing and compiling together."""
    both = (values(found, "trace"), values(found, "compile"))
    return [sum(pair) for pair in zip(*both, strict=True)]


def compare_replicas(args: argparse.Namespace) -> Iterator[Comparison]:
    """Start-up with so many replicas beside that with two, and steps."""
    cases = {
        str(n): functools.partial(in_child, args.limit, "run", 0, n)
        for n in args.replicas
    }
    found = in_rounds(cases, args.rounds)
    few = min((n for n in args.replicas if n > 1), default=None)
    for n in args.replicas:
        own, case = found[str(n)], f"{n} replica{'s' * (n > 1)}"
        for quantity in ("trace", "compile"):
            both = {"run": values(own, quantity)}
            is_compared = few is not None and n > few
            if is_compared:
                both[f"{few} replicas"] = values(found[str(few)], quantity)
            target = GROWTH if is_compared else None
            yield Comparison(case, quantity, "cpu s", both, target, tolerance=TOLERANCE)
        both = {
            "run": values(own, "step run", 1e3),
            "without communication": values(own, "step floor", 1e3),
        }
        yield Comparison(case, "step", "ms", both)
        memory = {"run": values(own, "memory", 2**-10)}
        yield Comparison(case, "memory of a device", "KiB", memory)


def compare_leaves(args: argparse.Namespace, leaves: int) -> Iterator[Comparison]:
    """Start-up of a step of so many arrays beside that of the hand-written one."""
    cases = {
        form: functools.partial(in_child, args.limit, form, leaves, REPLICAS_OF_LEAVES)
        for form in ("run", "shard_map")
    }
    found = in_rounds(cases, args.rounds if leaves < MANY else 1)
    case = f"{leaves:,} arrays"
    note = "" if None not in found["run"] else f"stopped after {args.limit} s"
    for quantity in ("trace", "compile"):
        both = {form: values(each, quantity) for form, each in found.items()}
        yield Comparison(case, quantity, "cpu s", both, note=note, tolerance=TOLERANCE)
    both = {form: starts(each) for form, each in found.items()}
    yield Comparison(case, "trace + compile", "cpu s", both, START, note=note)


def measure(args: argparse.Namespace) -> Iterator[Comparison]:
    """All that was asked for."""
    if "replicas" in args.only:
        yield from compare_replicas(args)
    if "leaves" in args.only:
        for n in args.leaves:
            yield from compare_leaves(args, n)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=REPLICAS, help="from few to many")
    add("--leaves", type=int, nargs="+", default=LEAVES, help="even numbers")
    add("--limit", type=int, default=60, help="processor seconds of one process")
    add("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    add_options(parser, rounds=3)
    add("--child", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    args = parsed()
    if args.child:
        form, *numbers = args.child
        leaves, replicas, limit = map(int, numbers)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        print(json.dumps(in_this_process(form, leaves, replicas)))
        return
    about = {"jax": jax.__version__, "machine": platform.machine()}
    print(f"{about}; medians (quartiles) over processes")
    report(measure(args), args)


if __name__ == "__main__":
    main()
