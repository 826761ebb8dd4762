"""Plans of steps that were not run, against what running them shows.

python benchmarks/plan.py [--cases perceptron transformer]
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Comparison, benchmark, in_turn, main, scaled, seconds_of
from _training import (
    FlaxTask,
    Perceptron,
    PyTree,
    Training,
    Transformer,
    all_reduce_mean,
    bytes_on_a_device,
    devices_of,
)
from flax import linen as nn

import jaxstrategy as js
from jaxstrategy import planning

DONATE = js.RunOptions(donate_argnums=0)
ADAMW = optax.adamw(1e-3)
WORDS, CLASSES = 2**15, 16


class Convolutions(nn.Module):
    """Of images."""

    units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for factor in (1, 2, 4):
            x = nn.relu(nn.Conv(factor * self.units, (3, 3), strides=(2, 2))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Embedding(nn.Module):
    """A large table and two small layers."""

    units: int

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        x = nn.Embed(WORDS, self.units)(words).mean(1)
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(self.units)(x)))


@dataclasses.dataclass(frozen=True)
class Classified(FlaxTask):
    """Images, or rows of words, and the class of each."""

    def batch(self, replicas: int) -> Sequence[np.ndarray]:
        draw, shape = np.random.default_rng(1), (replicas, self.rows)
        x = draw.integers(0, WORDS, (*shape, self.length)).astype(np.int32)
        if isinstance(self.model, Convolutions):
            x = draw.normal(size=(*shape, 32, 32, 3)).astype(np.float32)
        return [x, np.zeros(shape, np.int32)]

    def loss(self, params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        out: Any = self.model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()


def transformer(width: int) -> Transformer:
    return Transformer(512, width, 4, "scan", divided=True)


CASES = {
    f"{name}, {rows} rows": kind(model, ADAMW, rows)
    for name, kind, model, rows in (
        ("perceptron 256", FlaxTask, Perceptron(4, 256), 64),
        ("perceptron 512", FlaxTask, Perceptron(4, 512), 1024),
        ("perceptron 1024", FlaxTask, Perceptron(4, 1024), 64),
        ("transformer 128", FlaxTask, transformer(128), 16),
        ("transformer 128", FlaxTask, transformer(128), 64),
        ("transformer 256", FlaxTask, transformer(256), 16),
        ("convolutions 16", Classified, Convolutions(16), 64),
        ("convolutions 32", Classified, Convolutions(32), 256),
        ("embedding 32", Classified, Embedding(32), 64),
        ("embedding 64", Classified, Embedding(64), 512),
    )
}


def parts_of(
    task: FlaxTask,
) -> tuple[Callable[[], PyTree], Callable[..., Any], Sequence[np.ndarray]]:
    """What a plan is made of: what builds the state, the step, and a batch."""
    step = task.step_with(all_reduce_mean)
    batch = [x[0] for x in task.batch(1)]
    return lambda: task.build(jax.random.key(0)), lambda s, xy: step(s, *xy), batch


def planned(task: FlaxTask, machine: Any) -> tuple[planning.Plan, Any]:
    """The plan, and the seconds that it took beside those that it may take."""
    start = time.perf_counter()
    made = js.plan(*parts_of(task), devices=machine, options=DONATE)
    return made, {"plan": [time.perf_counter() - start], "limit": [30.0]}


def measured(devices: Sequence[Any]) -> planning.Machine:
    """The devices by numbers, with what short programs take on all of them at once."""
    strategy = js.MirroredStrategy(devices)
    # So much work that a call is a small part of it.
    is_cpu = devices[0].platform == "cpu"
    side, large, turns = (256, 2**21, 8) if is_cpu else (4096, 2**28, 8)
    x = strategy.per_replica([1 / side] * len(devices))

    def product(x: jax.Array) -> jax.Array:
        y = jnp.full((side, side), x)
        return jax.lax.fori_loop(0, turns, lambda _, z: z @ y, y)

    def passes(x: jax.Array) -> jax.Array:
        y = jnp.full((large,), x)
        return jax.lax.fori_loop(0, turns, lambda _, z: z * 0.5 + 1.0, y)

    def seconds(step: Callable[..., Any]) -> float:
        run = strategy.step(step)
        jax.block_until_ready(run(x))
        call = lambda: jax.block_until_ready(run(x))  # noqa: E731
        return statistics.median(seconds_of(call) for _ in range(9))

    call = seconds(lambda x: x + 1)
    return planning.describe(
        devices,
        memory="16GiB",
        flops=turns * 2 * side**3 / max(seconds(product) - call, 1e-6),
        memory_bandwidth=turns * 8 * large / max(seconds(passes) - call, 1e-6),
        call_seconds=call,
        topology=strategy.measure_links(),
    )


def training(layout: Any, build: Callable[[], PyTree], batch: PyTree) -> Training:
    """A layout of a plan that is run; with several steps in a call, a batch of each."""
    strategy = layout.strategy()
    count = strategy.num_replicas_in_sync
    rows = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
    placed = jax.tree.map(strategy.per_replica, rows)
    given = placed if layout.several == 1 else (placed,) * layout.several
    made = Training(layout.step(strategy), strategy.init(build), [given])
    made.burst(1)
    return made


@benchmark(
    {"cases": ("",), "platform": "cpu", "rounds": 15, "seconds": 20.0},
    {"cases": ("perceptron 256",)},
)
def plan(args: Any) -> Iterator[Comparison]:
    """Claim: the layout that a plan has first takes at most 1.15 of the fastest one.

    All layouts of each model are run in turns, on 8 simulated devices or on those of
    another platform. The memory that a plan tells of arguments is held against the
    bytes of live arrays, and the time of a plan against 30 s; of a transformer of 60
    arrays, too.
    """
    devices = devices_of(args.platform, 8)
    machine = measured(devices)
    print(
        f"measured: {machine.flops / 1e9:.0f} Gflop/s and "
        f"{machine.memory_bandwidth / 1e9:.1f} GB/s of a device, "
        f"{1e6 * machine.call_seconds:.0f} us a call"
    )
    for name, case in CASES.items():
        if not any(name.startswith(each) for each in args.cases):
            continue
        made, seconds = planned(case, machine)
        yield Comparison(name, "plan", "s", seconds, 1.0)
        build, _, batch = parts_of(case)
        known = [layout for layout in made if layout.memory is not None]
        bursts = {}
        for layout in known:
            form = training(layout, build, batch)
            bursts[layout.name] = lambda n=layout.several, f=form: f.burst(1) / n
            assert layout.memory is not None, "those are left out"
            values = {"planned": [layout.memory.arguments / 2**20]}
            values["live"] = [bytes_on_a_device((form.state, form.batch)) / 2**20]
            if layout.several == 1:
                quantity = f"arguments, {layout.name}"
                yield Comparison(name, quantity, "MB", values, 1.05, least=0.95)
        times = in_turn(bursts, args.rounds, args.seconds)
        medians = {form: statistics.median(each) for form, each in times.items()}
        best = min(medians, key=medians.__getitem__)
        for layout in known:
            text = ", ".join(f"{k} {1e3 * v:.2f}" for k, v in layout.seconds.items())
            run = f"{1e3 * medians[layout.name]:.2f} ms"
            told = f"{1e3 * layout.step_seconds:.2f} ms"
            print(f"{name}: {layout.name}: {run}, planned {told} ({text})")
        values = {"chosen": times[made.best.name], "best": times[best]}
        note = f"chosen: {made.best.name}; best: {best}"
        yield Comparison(name, "step", "ms", scaled(values, 1e3), 1.15, note=note)
        sys.stdout.flush()
        jax.clear_caches()
    if args.cases != ("",):
        return
    task = FlaxTask(Transformer(512, 64, 5, divided=True), ADAMW, 16)
    shapes = jax.eval_shape(parts_of(task)[0])["params"]
    case = f"transformer, {len(jax.tree.leaves(shapes))} arrays"
    yield Comparison(case, "plan", "s", planned(task, machine)[1], 1.0)


BENCHMARKS = [plan]

if __name__ == "__main__":
    main(BENCHMARKS)
