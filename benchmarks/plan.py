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
from _training import PyTree, Training, bytes_on_a_device, devices_of
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxstrategy as js
from jaxstrategy import planning

WORDS, LENGTH, CLASSES = 512, 32, 16
DONATE = js.RunOptions(donate_argnums=0)


# The models.


class Perceptron(nn.Module):
    """Square layers."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = nn.tanh(nn.Dense(self.width)(x))
        return x


class Convolutions(nn.Module):
    """Of images."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for factor in (1, 2, 4):
            x = nn.relu(nn.Conv(factor * self.width, (3, 3), strides=(2, 2))(x))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class Embedding(nn.Module):
    """A large table and two small layers."""

    width: int

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        x = nn.Embed(64 * WORDS, self.width)(words).mean(1)
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(self.width)(x)))


def over(*names: str | None) -> Any:
    """Initial weights that say how the devices of a replica divide them."""
    return nn.with_partitioning(nn.initializers.lecun_normal(), names)


class Block(nn.Module):
    """Attention, then two layers."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        x = x + nn.MultiHeadDotProductAttention(
            8,
            use_bias=False,
            kernel_init=over(None, "core"),
            out_kernel_init=over("core"),
        )(nn.LayerNorm()(x))
        wide = nn.Dense(4 * self.width, kernel_init=over(None, "core"))
        y = nn.gelu(wide(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width, kernel_init=over("core", None))(y), None


class Transformer(nn.Module):
    """Blocks in a loop, or one after the other."""

    width: int
    blocks: int = 4
    scanned: bool = True

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        x = nn.Embed(WORDS, self.width)(words)
        if self.scanned:
            x, _ = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.blocks,
                metadata_params={nn.PARTITION_NAME: None},
            )(self.width)(x, None)
        else:
            for _ in range(self.blocks):
                x, _ = Block(self.width)(x)
        return nn.Dense(WORDS, use_bias=False)(nn.LayerNorm()(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the shape of a batch."""

    model: Any
    rows: int

    def batch(self) -> dict[str, np.ndarray]:
        """Inputs and classes."""
        draw, model = np.random.default_rng(0), self.model
        wanted: tuple[int, ...] = (self.rows,)
        match model:
            case Perceptron():
                x: Any = draw.normal(size=(self.rows, model.width))
            case Convolutions():
                x = draw.normal(size=(self.rows, 32, 32, 3))
            case _:
                x = draw.integers(0, WORDS, (self.rows, LENGTH))
                wanted = x.shape if isinstance(model, Transformer) else wanted
        x = x.astype(np.int32 if x.dtype.kind == "i" else np.float32)
        return {"x": x, "y": np.zeros(wanted, np.int32)}

    def training(self) -> tuple[Callable[[], TrainState], Callable[..., Any]]:
        """The function that builds the state, and the step."""
        model, optimizer, first = self.model, optax.adamw(1e-3), self.batch()["x"][:1]

        def build() -> TrainState:
            params = model.init(jax.random.key(0), jnp.asarray(first))
            return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

        def step(state: TrainState, batch: PyTree) -> tuple[TrainState, jax.Array]:
            def loss(params: PyTree) -> jax.Array:
                found = model.apply(params, batch["x"])
                entropy = optax.softmax_cross_entropy_with_integer_labels
                return entropy(found, batch["y"]).mean()

            found = jax.value_and_grad(loss)(state.params)
            value, grads = js.get_replica_context().all_reduce("mean", found)
            return state.apply_gradients(grads=grads), value

        return build, step


CASES = {
    f"{type(model).__name__.lower()} {model.width}, {rows} rows": Case(model, rows)
    for model, rows in (
        (Perceptron(256), 64),
        (Perceptron(512), 1024),
        (Perceptron(1024), 64),
        (Convolutions(16), 64),
        (Convolutions(32), 256),
        (Transformer(128), 16),
        (Transformer(128), 64),
        (Transformer(256), 16),
        (Embedding(32), 64),
        (Embedding(64), 512),
    )
}


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
        build, step = case.training()
        batch = case.batch()
        start = time.perf_counter()
        made = js.plan(build, step, batch, devices=machine, options=DONATE)
        seconds = time.perf_counter() - start
        yield Comparison(name, "plan", "s", {"plan": [seconds], "limit": [30.0]}, 1.0)
        known = [layout for layout in made if layout.memory is not None]
        forms = {layout.name: training(layout, build, batch) for layout in known}
        for layout in known:
            assert layout.memory is not None, "those are left out"
            values = {"planned": [layout.memory.arguments / 2**20]}
            form = forms[layout.name]
            values["live"] = [bytes_on_a_device((form.state, form.batch)) / 2**20]
            if layout.several == 1:
                quantity = f"arguments, {layout.name}"
                yield Comparison(name, quantity, "MB", values, 1.05, least=0.95)
        bursts = {
            layout.name: lambda x=layout, form=forms[layout.name]: (
                form.burst(1) / x.several
            )
            for layout in known
        }
        times = in_turn(bursts, args.rounds, args.seconds)
        medians = {form: statistics.median(each) for form, each in times.items()}
        best = min(medians, key=medians.__getitem__)
        for layout in known:
            told = ", ".join(f"{k} {1e3 * v:.2f}" for k, v in layout.seconds.items())
            run = f"{1e3 * medians[layout.name]:.2f} ms"
            planned = f"{1e3 * layout.step_seconds:.2f} ms"
            print(f"{name}: {layout.name}: {run}, planned {planned} ({told})")
        values = {"chosen": times[made.best.name], "best": times[best]}
        note = f"chosen: {made.best.name}; best: {best}"
        yield Comparison(name, "step", "ms", scaled(values, 1e3), 1.15, note=note)
        sys.stdout.flush()
        jax.clear_caches()
    if args.cases != ("",):
        return
    build, step = Case(Transformer(64, blocks=5, scanned=False), 16).training()
    batch = Case(Transformer(64), 16).batch()
    arrays = len(jax.tree.leaves(jax.eval_shape(build).params))
    start = time.perf_counter()
    js.plan(build, step, batch, devices=machine, options=DONATE)
    values = {"plan": [time.perf_counter() - start], "limit": [30.0]}
    yield Comparison(f"transformer, {arrays} arrays", "plan", "s", values, 1.0)


BENCHMARKS = [plan]

if __name__ == "__main__":
    main(BENCHMARKS)
