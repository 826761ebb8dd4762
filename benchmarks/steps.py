"""What a step costs in `strategy.run`, against what is written by hand.

    python benchmarks/steps.py [dispatch] [several] [in_sync] [nnx] [variables]

Small steps on simulated CPU devices, where the host's part shows. The forms take turns
in one process; the state flows from step to step.
"""

from __future__ import annotations

import functools
import gc
import pathlib
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import (
    Comparison,
    benchmark,
    counted,
    in_process,
    in_turn,
    main,
    median_seconds,
    scaled,
)
from _training import (
    AXIS,
    Devices,
    PyTree,
    Task,
    Training,
    all_reduce_mean,
    by_hand,
    mapped,
    mirrored_and_split,
    perceptron,
    pmean,
    with_pmap,
    with_run,
)
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src import demo

# The first is held against the second.
FORMS: dict[str, Callable[..., Training]] = {
    "run": with_run,
    "shard_map": by_hand,
    "pmap": with_pmap,
}
MEMORY = dict(layers=16, units=1024)  # 64 MiB of parameters on each device


def compare_times(
    case: str,
    trainings: dict[str, Training],
    targets: dict[str, float],
    args: Any,
    per: int = 1,
) -> Iterator[Comparison]:
    """Microseconds of dispatch, and end to end, of one of `per` steps in a call."""
    for each in trainings.values():
        each.median_times()  # compiles it
    measures = {name: each.median_times for name, each in trainings.items()}
    times = in_turn(measures, args.rounds, args.seconds)
    for index, (quantity, target) in enumerate(targets.items()):
        found = {name: [both[index] for both in each] for name, each in times.items()}
        yield Comparison(case, quantity, "us", scaled(found, 1e6 / per), target)


@benchmark(
    dict(
        only=("memory", "steps"),
        leaves=(20, 300),
        devices=(1, 4, 8),
        rounds=200,
        seconds=2.0,
    ),
    dict(leaves=(20,), devices=(4,), only=("steps",), seconds=1.0),
)
def dispatch(args: Any) -> Iterator[Comparison]:
    """A call of `run` costs at most 1.03 of a hand-written `shard_map`, a step 1.01.

    A step of a perceptron of many small leaves: until the call returns on idle devices,
    and until it is done (steps); and by how much the step of a large model raises the
    largest resident memory, in processes of their own (memory).
    """
    n = max(args.devices)
    if "memory" in args.only:  # first: children may count what their parent holds
        measures = {
            form: functools.partial(in_process, peak, form, n) for form in FORMS
        }
        case = f"64 MiB, {counted(n, 'device')}"
        yield Comparison(case, "peak memory", "MiB", in_turn(measures, 3), 1.05)
    simulated = js.simulate(n)
    for count in args.leaves if "steps" in args.only else ():
        for n in args.devices:
            case, task = (
                f"{count} leaves, {counted(n, 'device')}",
                perceptron(count // 2),
            )
            made = {f: FORMS[f](task, simulated[:n], donates=False) for f in FORMS}
            targets = {"dispatch": 1.03, "end to end": 1.01}
            yield from compare_times(case, made, targets, args)


def peak(form: str, num_devices: int) -> float:
    """MiB by which the steps of a form raise the peak memory of a new process."""
    devices = js.simulate(num_devices)
    jax.block_until_ready(jnp.zeros(()) + 1)

    def peak_mib() -> float:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit

    before = peak_mib()
    loop = FORMS[form](perceptron(**MEMORY), devices, donates=False)
    for _ in range(4):
        loop.times()
    return peak_mib() - before


# Several steps in a call.


@benchmark(
    dict(k=(1, 10, 50), devices=(2, 8), layers=5, rounds=200, seconds=1.0),
    dict(k=(10,), devices=(8,), seconds=1.0),
)
def several(args: Any) -> Iterator[Comparison]:
    """k steps in one call cost at most 1.03 of a hand-written scan, end to end.

    `strategy.several(step)` of a tuple of k batches, against a `shard_map` by hand that
    stacks and scans over the same tuple, and a loop in Python over `run`. A call is one
    of `run`, so that for small k its target for dispatch is larger.
    """
    simulated, task = js.simulate(max(args.devices)), perceptron(args.layers)
    for n in args.devices:
        for each in args.k:
            case = f"{counted(n, 'device')}, k = {each}"
            first = 1.10 if each < 10 else 1.03
            targets = {"dispatch": first, "end to end": 1.03}
            made = forms_of_several(task, simulated[:n], each)
            yield from compare_times(case, made, targets, args, each)


def forms_of_several(task: Task, devices: Devices, k: int) -> dict[str, Training]:
    strategy = js.MirroredStrategy(devices)
    step = task.step_with(all_reduce_mean)
    batch = strategy.per_replica(task.batch(len(devices))[0])
    run = strategy.run(step)

    def in_python(params: PyTree, batches: Any) -> tuple[PyTree, Any]:
        losses = []
        for batch in batches:
            params, loss = run(params, batch)
            losses.append(loss)
        return params, losses

    def scanned(params: PyTree, batches: Any) -> tuple[PyTree, jax.Array]:
        return jax.lax.scan(task.step_with(pmean), params, jnp.stack(batches))

    mirrored = strategy.mirror(task.state())
    state, (rows,) = mirrored_and_split(task, strategy.mesh)
    return {
        "several": Training(strategy.several(step), mirrored, [(batch,) * k]),
        "shard_map": Training(
            jax.jit(mapped(scanned, strategy.mesh, (P(), P(AXIS)))),
            state,
            [(rows,) * k],
        ),
        "run": Training(in_python, mirrored, [(batch,) * k]),
    }


# Checks.


@benchmark(
    dict(devices=(8, 4, 1), every=100, rounds=50, seconds=4.0),
    dict(devices=(8,), seconds=1.0),
)
def in_sync(args: Any) -> Iterator[Comparison]:
    """`assert_in_sync` every 100 steps costs at most 2 % of the training time.

    The demo's network, optimizer and training step. A check of its whole state takes
    turns with steps; the ratio is one check to the steps between two of them.
    """
    simulated = js.simulate(max(args.devices))
    options = demo.Arguments(
        None, demo.EPOCHS, demo.BATCH_SIZE, seed=0, out=pathlib.Path("demo.png")
    )
    draw = np.random.default_rng(0)
    images = draw.random((demo.BATCH_SIZE, 8, 8, 1), np.float32)
    labels = draw.integers(0, 10, demo.BATCH_SIZE)
    for n in args.devices:
        strategy = js.MirroredStrategy(simulated[:n])
        (batch,) = strategy.experimental_distribute_dataset([(images, labels)])
        state = demo.initial_state(strategy, options)
        training = Training(demo.training_step(strategy), state, batch)

        def check(strategy=strategy, training=training) -> None:
            strategy.assert_in_sync(training.state, "state")

        for _ in range(2):  # compiles them, for the state that the step returns
            training.times()
            check()
        measures = {
            "one check": lambda check=check: 1e3 * median_seconds(check),
            f"{args.every} steps": lambda t=training: (
                1e3 * args.every * t.median_times()[1]
            ),
        }
        times = in_turn(measures, args.rounds, args.seconds)
        case = f"{n} replicas"
        yield Comparison(case, "share", "ms", times, 0.02, in_percent=True)


# Objects of Flax NNX.


def dense() -> nnx.Sequential:
    """A small network: its steps cost the host more than the device."""
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(16, 16, rngs=rngs) for _ in range(12)]
    return nnx.Sequential(*(f for layer in layers for f in (layer, jnp.tanh)))


class Block(nnx.Module):
    """A block of a transformer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.wide = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.narrow(nnx.gelu(self.wide(self.norms[1](x))))


def transformer(depth: int, width: int) -> nnx.Sequential:
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*(Block(width, rngs) for _ in range(depth)))


# How each network is made, and the shape of its batch.
NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "12 dense layers": (dense, (8, 16)),
    "2-block transformer": (lambda: transformer(2, 64), (8, 32, 64)),
    "12-block transformer": (lambda: transformer(12, 128), (8, 64, 128)),
}
# The first of a pair is held against the second.
PAIRS = {("run", "nnx.jit"): 1.2, ("bind", "functional"): 1.1}


@benchmark(
    dict(networks=tuple(NETWORKS), rounds=30, seconds=4.0),
    dict(networks=("12 dense layers",), seconds=1.0),
    name="nnx",
)
def nnx_objects(args: Any) -> Iterator[Comparison]:
    """Flax NNX objects in `run` cost at most 1.2 of `nnx.jit`, `bind` 1.1 of arrays.

    A step of a network on one device: `run` of a module and an optimizer, `nnx.jit` of
    the same function, `bind` of both objects, and `run` of the arrays of both, which
    puts the objects together (functional). Until the call returns, and until it is
    done.
    """
    for network in args.networks:
        forms = {name: nnx_step(name, network) for pair in PAIRS for name in pair}
        losses = [[float(step()) for _ in range(4)] for step in forms.values()]
        np.testing.assert_allclose(losses, losses[:1] * len(losses), rtol=1e-4)
        # One program computes everything: with the loss there is the rest.
        trainings = {
            name: Training(lambda _, step=step: (None, step()), None, [])
            for name, step in forms.items()
        }
        bursts = {name: each.median_times for name, each in trainings.items()}
        turns = in_turn(bursts, args.rounds, args.seconds)
        for index, quantity in enumerate(("host", "end to end")):
            times = {k: [1e6 * both[index] for both in v] for k, v in turns.items()}
            for (ours, theirs), target in PAIRS.items():
                found = {ours: times[ours], theirs: times[theirs]}
                label = f"{quantity}, {ours} to {theirs}"
                yield Comparison(network, label, "us", found, target)


def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    """One step."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def nnx_step(form: str, network: str) -> Callable[[], Any]:
    """Returns what takes a step of one of the forms."""
    make, shape = NETWORKS[network]
    strategy = js.OneDeviceStrategy("CPU:0")
    model = make()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x = jax.device_put(rows, NamedSharding(strategy.mesh, P()))
    run: Any = strategy.run(train)
    if form == "bind":
        return functools.partial(run.bind(model, optimizer), x)
    if form != "functional":
        step: Any = run if form == "run" else nnx.jit(train)
        return functools.partial(step, model, optimizer, x)
    graph, state = nnx.split([model, optimizer])
    leaves, structure = jax.tree.flatten(state)

    @strategy.run
    def merged(leaves: list[jax.Array], x: jax.Array) -> Any:
        objects: Any = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        loss = train(objects[0], objects[1], x)
        return loss, jax.tree.leaves(nnx.state(objects))

    def call() -> Any:
        nonlocal leaves
        loss, leaves = merged(leaves, x)
        return loss

    return call


# Variables.


@benchmark(dict(variables=(100,), devices=(2, 8), rounds=200, seconds=2.0))
def variables(args: Any) -> Iterator[Comparison]:
    """Variables cost what donated arrays cost.

    Every variable moves a little towards the mean of the replicas' inputs, against a
    `shard_map` by hand of donated arrays: a step; what the arrays that JAX keeps
    between two steps take on all devices; and what the compiled step needs on one
    device.
    """
    simulated = js.simulate(max(args.devices))
    for n in args.devices:
        on, named = simulated[:n], counted(n, "device")
        for number in args.variables:
            forms, live = {}, {}
            for name, make in KEPT.items():
                before = live_kib()
                forms[name] = make(number, 8, on)
                for _ in range(3):  # compiles it
                    jax.block_until_ready(forms[name].step())
                live[name] = [live_kib() - before]

            def microseconds(made: Any) -> float:
                return 1e6 * median_seconds(lambda: jax.block_until_ready(made.step()))

            measures = {k: functools.partial(microseconds, v) for k, v in forms.items()}
            times = in_turn(measures, args.rounds, args.seconds)
            ours, theirs = (list(map(np.asarray, f.values())) for f in forms.values())
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
            case = f"{number} variables, {named}"
            yield Comparison(case, "end to end", "us", times, 1.25)
            yield Comparison(case, "live", "KiB", live, 1.05)
            yield compare_programs(f"{number} small, {named}", number, 8, on)
        yield compare_programs(f"16 of 4 MiB, {named}", 16, 2**20, on)


def compare_programs(case: str, number: int, size: int, devices: Devices) -> Comparison:
    used = {
        name: [make(number, size, devices).program_bytes() / 2**10]
        for name, make in KEPT.items()
    }
    return Comparison(case, "program", "KiB", used, 1.05)


def live_kib() -> float:
    """KiB of all arrays that are alive, counted once for each device."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    return sum(a.nbytes * len(a.sharding.device_set) for a in arrays) / 2**10


class Kept(NamedTuple):
    """A step that keeps state between calls."""

    step: Callable[[], Any]
    program_bytes: Callable[[], int]
    values: Callable[[], list[Any]]


def start(number: int, size: int, replicas: int) -> tuple[list[np.ndarray], np.ndarray]:
    """What the variables start as, and a row for each replica."""
    draw, rows = np.random.default_rng(0), np.random.default_rng(1)
    arrays = [draw.random(size, np.float32) for _ in range(number)]
    return arrays, rows.random((replicas, size), np.float32)


def with_variables(number: int, size: int, devices: Devices) -> Kept:
    """The step as a user of variables writes it."""
    strategy = js.MirroredStrategy(devices)
    arrays, rows = start(number, size, len(devices))
    with strategy.scope():
        variables = [js.Variable(array) for array in arrays]

    @strategy.run
    def step(x: jax.Array) -> jax.Array:
        mean = all_reduce_mean(x)
        for variable in variables:
            variable.assign_add(0.1 * (mean - variable.value()))
        return mean.sum()

    x = strategy.per_replica(rows)

    def program_bytes() -> int:
        memory = strategy.explain(step, (x,)).memory
        assert memory is not None
        return memory.peak - memory.code

    return Kept(lambda: step(x), program_bytes, lambda: [v.numpy() for v in variables])


def with_arrays(number: int, size: int, devices: Devices) -> Kept:
    """The same with JAX alone, and donated memory."""
    mesh = js.MirroredStrategy(devices).mesh
    arrays, rows = start(number, size, len(devices))

    def step(arrays: list[jax.Array], x: jax.Array) -> Any:
        mean = pmean(x[0])
        return [a + 0.1 * (mean - a) for a in arrays], mean.sum()

    jitted: Any = jax.jit(mapped(step, mesh, (P(), P(AXIS))), donate_argnums=0)
    x = jax.device_put(rows, NamedSharding(mesh, P(AXIS)))
    # Copied, so that no array shares the memory of a host array.
    state = [jnp.copy(jax.device_put(a, NamedSharding(mesh, P()))) for a in arrays]

    def call() -> Any:
        nonlocal state
        state, loss = jitted(state, x)
        return loss

    def program_bytes() -> int:
        stats = jitted.lower(state, x).compile().memory_analysis()
        used = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return used - stats.alias_size_in_bytes + stats.temp_size_in_bytes

    return Kept(call, program_bytes, lambda: state)


KEPT = {"variables": with_variables, "shard_map": with_arrays}


BENCHMARKS = [dispatch, several, in_sync, nnx_objects, variables]

if __name__ == "__main__":
    main(BENCHMARKS)
