"""Models, and training loops: `strategy.run`, and what is written by hand."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _others import EPSILON, HEADS
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any
Mean = Callable[[PyTree], PyTree]
Devices = Sequence[jax.Device]

AXIS = "replica"
WHOLE = P()
RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained; `FlaxTask` is one, too."""

    state: Callable[[], PyTree]  # the first one, on the host
    batch: Callable[[int], Sequence[np.ndarray]]  # `[replica, row, ...]`
    # From the mean over replicas to a step `(state, *batch) -> (state, loss)` of one.
    step_with: Callable[[Mean], Callable[..., Any]]


class Training:
    """A training loop with one form of the step."""

    def __init__(
        self, step: Callable[..., Any], state: PyTree, batch: Sequence[Any]
    ) -> None:
        self.step, self.state, self.batch = step, state, batch
        self.name = ""  # of the step's program

    def next(self) -> jax.Array:
        """Takes one more step; returns its loss."""
        self.state, loss = self.step(self.state, *self.batch)
        return loss

    def losses(self, steps: int) -> list[float]:
        """Returns the mean loss of the replicas before each of some steps."""
        return [float(np.mean(self.next())) for _ in range(steps)]

    def burst(self, steps: int) -> float:
        """Returns the seconds for each of some steps, dispatched at once."""
        start = time.perf_counter()
        for _ in range(steps - 1):
            self.next()
        jax.block_until_ready((self.next(), self.state))
        return (time.perf_counter() - start) / steps

    def times(self) -> tuple[float, float]:
        """Returns the seconds until a step is dispatched, and until it is done."""
        start = time.perf_counter()
        loss = self.next()
        dispatched = time.perf_counter()
        jax.block_until_ready((loss, self.state))
        return dispatched - start, time.perf_counter() - start

    def median_times(self, steps: int = 5) -> tuple[float, float]:
        """Returns the medians of `times` over a few steps."""
        dispatched, done = zip(*(self.times() for _ in range(steps)), strict=True)
        return statistics.median(dispatched), statistics.median(done)


def bytes_on_a_device(tree: PyTree) -> int:
    """Of all arrays, on the first device that has a part of each."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


# The means over replicas.


def devices_of(platform: str, count: int) -> Devices:
    """Devices of this machine; simulated ones of the processor."""
    return js.simulate(count) if platform == "cpu" else jax.devices(platform)[:count]


def all_reduce_mean(tree: PyTree) -> PyTree:
    """That of `run`."""
    return js.get_replica_context().all_reduce("mean", tree)


def pmean(tree: PyTree) -> PyTree:
    """One `lax.pmean` of a tree."""
    return lax.pmean(tree, AXIS)


def pmean_of_each(tree: PyTree) -> PyTree:
    """A `lax.pmean` of each leaf."""
    return jax.tree.map(pmean, tree)


def unchanged(tree: PyTree) -> PyTree:
    return tree


# The forms, on devices or those of a strategy.

Where = Devices | js.Strategy
AnyTask: TypeAlias = "Task | FlaxTask"


def strategy_of(where: Where) -> js.Strategy:
    return where if isinstance(where, js.Strategy) else js.MirroredStrategy(where)


def with_run(task: AnyTask, where: Where, donates: bool = True) -> Training:
    """As a user of jaxstrategy writes it."""
    strategy = strategy_of(where)
    options = js.RunOptions(donate_argnums=0) if donates else js.RunOptions()
    step = strategy.run(task.step_with(all_reduce_mean), options=options)
    rows = task.batch(strategy.num_replicas_in_sync)
    batch = [strategy.per_replica(each) for each in rows]
    return Training(step, strategy.mirror(task.state()), batch)


def mapped(
    step: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: P = WHOLE
) -> Callable[..., Any]:
    """Returns `shard_map` by hand, as a program of today writes it."""
    options: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(step, mesh=mesh, **options)


def by_hand(
    task: AnyTask, where: Where, donates: bool = True, mean: Mean = pmean
) -> Training:
    """With `jax.jit(jax.shard_map(...))`."""
    mesh = strategy_of(where).mesh
    state, batch = mirrored_and_split(task, mesh)
    step = mapped(task.step_with(mean), mesh, (P(), *[P(AXIS)] * len(batch)))
    return Training(jax.jit(step, donate_argnums=(0,) * donates), state, batch)


def with_pmap(
    task: AnyTask, devices: Devices, donates: bool = True, mean: Mean = pmean
) -> Training:
    """With `jax.pmap`, and stacked parameters."""
    mesh = js.MirroredStrategy(devices).mesh
    donated = (0,) * donates
    step = jax.pmap(task.step_with(mean), AXIS, devices=devices, donate_argnums=donated)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * mesh.size), task.state())
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P(AXIS)))
    return Training(step, put(stacked), [put(each) for each in task.batch(mesh.size)])


def with_jit(task: AnyTask, devices: Devices) -> Training:
    """With `jax.jit` of the whole batch, split: XLA finds the collectives."""
    mesh = js.MirroredStrategy(devices).mesh
    everywhere = NamedSharding(mesh, P())
    step = task.step_with(unchanged)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    return Training(jitted, *mirrored_and_split(task, mesh))


def mirrored_and_split(task: AnyTask, mesh: Mesh) -> tuple[PyTree, list[jax.Array]]:
    """Returns the first state on all devices, and the rows of the batch over them."""
    split = NamedSharding(mesh, P(AXIS))
    rows = [each.reshape(-1, *each.shape[2:]) for each in task.batch(mesh.size)]
    state = jax.device_put(task.state(), NamedSharding(mesh, P()))
    return state, [jax.device_put(each, split) for each in rows]


def check_losses(
    case: str, losses: Mapping[str, Sequence[float]], tolerance: float
) -> None:
    """Raises unless the first losses of all forms are those of the first."""
    first = next(iter(losses.values()))
    for form, values in losses.items():
        if not np.allclose(values, first, rtol=tolerance, atol=0):
            raise AssertionError(f"{case}: {form} had losses {values}, not {first}")


def sgd_task(
    params: PyTree, loss: Callable[[PyTree, jax.Array], jax.Array], *shape: int
) -> Task:
    """Plain gradient descent on rows of random numbers; `shape` is of a replica's."""

    def batch(replicas: int) -> Sequence[np.ndarray]:
        rows = np.random.default_rng(1).normal(size=(replicas, *shape))
        return [rows.astype(np.float32)]

    def step_with(mean: Mean) -> Callable[..., Any]:
        def step(params: PyTree, x: jax.Array) -> tuple[PyTree, jax.Array]:
            value, gradients = mean(jax.value_and_grad(loss)(params, x))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
            return params, value

        return step

    return Task(lambda: jax.tree.map(np.float32, params), batch, step_with)


def perceptron(layers: int, units: int = 8, rows: int = 8) -> Task:
    """Square layers of two arrays each, inputs as targets."""
    draw = np.random.default_rng(0)
    params = {
        f"layer{i:03}": {
            "w": draw.normal(0, units**-0.5, (units, units)),
            "b": np.zeros(units),
        }
        for i in range(layers)
    }

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        y = x
        for layer in params.values():
            y = jnp.tanh(y @ layer["w"] + layer["b"])
        return jnp.mean((y - x) ** 2)

    return sgd_task(params, loss, rows, units)


# Models of Flax. Their parameters have the names that `_others.py` knows.


class Perceptron(nn.Module):
    """Square layers with a hyperbolic tangent."""

    layers: int
    units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            x = jnp.tanh(nn.Dense(self.units, name=f"{i}")(x))
        return x


class Block(nn.Module):
    """Attention and two layers; `divided` over the devices of a replica."""

    divided: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        width = x.shape[-1]

        def dense(units: int, name: str, *axes: str | None) -> nn.Dense:
            init: Any = nn.initializers.lecun_normal()
            if self.divided:
                init = nn.with_partitioning(init, axes)
            return nn.Dense(units, name=name, kernel_init=init)

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(epsilon=EPSILON, name=name)

        qkv = dense(3 * width, "qkv", None, "core")(norm("first norm")(x))
        heads = qkv.reshape(*x.shape[:2], HEADS, 3, -1)
        out = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 3, 0))
        x = x + dense(width, "out", "core", None)(out.reshape(x.shape))
        out = nn.gelu(dense(4 * width, "up", None, "core")(norm("second norm")(x)))
        return x + dense(width, "down", "core", None)(out), None


class Transformer(nn.Module):
    """Tokens to logits, through blocks that are written in one of several ways."""

    tokens: int = 256
    width: int = 64
    blocks: int = 2
    variant: str = "loop"  # or "jit", "remat", "scan", "scan of remat"
    divided: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        draw = nn.initializers.normal(0.05)
        embedding = self.param("embedding", draw, (self.tokens, self.width))
        x = embedding[x] + self.param("positions", draw, (x.shape[1], self.width))
        block: Any = {"jit": nn.jit, "remat": nn.remat}.get(self.variant, lambda b: b)
        if self.variant == "scan of remat":
            block = functools.partial(nn.remat, prevent_cse=False)
        if self.variant.startswith("scan"):
            stack: Any = nn.scan(
                block(Block),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.blocks,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x, _ = stack(self.divided)(x, None)
        else:
            for i in range(self.blocks):
                x, _ = block(Block)(self.divided, name=f"block{i}")(x)
        x = nn.LayerNorm(epsilon=EPSILON, name="norm")(x)
        return nn.Dense(self.tokens, name="head")(x)


@dataclasses.dataclass(frozen=True)
class FlaxTask:
    """A model of Flax and an optimizer of Optax; the state has `params` and `slots`."""

    model: Any
    optimizer: optax.GradientTransformation
    rows: int
    length: int = 32  # of a row of tokens

    @property
    def is_transformer(self) -> bool:
        return isinstance(self.model, Transformer)

    def batch(self, replicas: int) -> Sequence[np.ndarray]:
        """Inputs and what is wanted of them, each `[replica, row, ...]`."""
        draw, shape = np.random.default_rng(1), (2, replicas, self.rows)
        if self.is_transformer:
            drawn = draw.integers(0, self.model.tokens, (*shape, self.length))
            return [*drawn.astype(np.int32)]
        return [*draw.normal(size=(*shape, self.model.units)).astype(np.float32)]

    def build(self, key: jax.Array) -> PyTree:
        """First parameters and the optimizer's state."""
        params = self.model.init(key, self.batch(1)[0][0])["params"]
        return {"params": params, "slots": self.optimizer.init(params)}

    def state(self) -> PyTree:
        """The same on the host."""
        return jax.device_get(self.build(jax.random.key(0)))

    def loss(self, params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        """The mean loss of some rows."""
        out: Any = self.model.apply({"params": params}, x)
        if self.is_transformer:
            return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()
        return jnp.mean((out - y) ** 2)

    def step_with(self, mean: Mean) -> Callable[..., Any]:
        """A new function for one replica's step; `mean` is over replicas."""

        def step(state: PyTree, x: jax.Array, y: jax.Array) -> tuple[PyTree, jax.Array]:
            params, slots = state["params"], state["slots"]
            loss, grads = mean(jax.value_and_grad(self.loss)(params, x, y))
            updates, slots = self.optimizer.update(grads, slots, params)
            return {
                "params": optax.apply_updates(params, updates),
                "slots": slots,
            }, loss

        return step
