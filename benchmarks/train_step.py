"""Whole training steps in `strategy.run`, in the other ways of JAX, and elsewhere.

    python benchmarks/train_step.py [--others-python PYTHON]

TensorFlow runs in a process of its own on the same cores (`_others.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _others
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Comparison, Workers, benchmark, in_turn, main, scaled
from _training import (
    Devices,
    Mean,
    PyTree,
    Task,
    Training,
    by_hand,
    check_losses,
    devices_of,
    pmean_of_each,
    with_jit,
    with_pmap,
    with_run,
)
from flax import linen as nn, traverse_util

# How many losses are compared, and how far they may be apart: rounding in JAX, which
# grows from step to step, and in TensorFlow also other formulas.
LOSSES, TOLERANCE, TOLERANCE_OF_TENSORFLOW = 4, 1e-4, 2e-3
# Seconds of a turn, and the most steps of it: before 0.12 JAX hangs with 64 in flight.
TURN, MOST_STEPS = 0.03, 16


# The models. Their parameters have the names that `_others.py` knows.


class Perceptron(nn.Module):
    """Square layers with a hyperbolic tangent."""

    layers: int
    units: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            x = jnp.tanh(nn.Dense(self.units, name=f"{i}")(x))
        return x


class Transformer(nn.Module):
    """Tokens to logits, through blocks of attention and a perceptron."""

    blocks: int = 2
    width: int = 64
    tokens: int = 256

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        draw = nn.initializers.normal(0.05)
        embedding = self.param("embedding", draw, (self.tokens, self.width))
        x = embedding[x] + self.param("positions", draw, (x.shape[1], self.width))
        for i in range(self.blocks):
            x = x + self._attention(self._norm(f"{i} first norm")(x), i)
            out = self._norm(f"{i} second norm")(x)
            out = nn.gelu(nn.Dense(4 * self.width, name=f"{i} up")(out))
            x = x + nn.Dense(self.width, name=f"{i} down")(out)
        return nn.Dense(self.tokens, name="head")(self._norm("norm")(x))

    def _attention(self, x: jax.Array, i: int) -> jax.Array:
        qkv = nn.Dense(3 * self.width, name=f"{i} qkv")(x)
        heads = qkv.reshape(*x.shape[:2], 3, _others.HEADS, -1)
        out = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0))
        return nn.Dense(self.width, name=f"{i} out")(out.reshape(x.shape))

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=_others.EPSILON, name=name)


OPTIMIZERS = {
    "sgd": optax.sgd(_others.RATES["sgd"]),
    "momentum": optax.sgd(_others.RATES["momentum"], momentum=_others.MOMENTUM),
    "adam": optax.adam(_others.RATES["adam"], *_others.BETAS, eps=_others.ADAM_EPSILON),
}


@dataclasses.dataclass(frozen=True)
class Described:
    """What is trained: a model of a kind that `_others.py` knows, and how."""

    kind: str
    model: nn.Module
    optimizer: str
    rows: int
    shape: tuple[int, ...]

    def batch(self, num_replicas: int) -> Sequence[np.ndarray]:
        """Inputs and what is wanted of them, each `[replica, row, ...]`."""
        draw = np.random.default_rng(1)
        shape = (num_replicas, self.rows, *self.shape)
        numbers = draw.normal(size=(2, *shape)).astype(np.float32)
        if self.kind == "mlp":
            return [*numbers]
        return [*draw.integers(0, 256, (2, *shape)).astype(np.int32)]

    def state(self) -> tuple[PyTree, PyTree]:
        """First parameters and the optimizer's state, on the host."""
        params = self.model.init(jax.random.key(0), self.batch(1)[0][0])["params"]
        return jax.device_get((params, OPTIMIZERS[self.optimizer].init(params)))

    def loss(self, params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        """The mean loss of some rows."""
        out: Any = self.model.apply({"params": params}, x)
        if self.kind == "mlp":
            return jnp.mean((out - y) ** 2)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    def step_with(self, mean: Mean) -> Callable[..., Any]:
        """A new function for one replica's step; `mean` is over replicas."""
        optimizer = OPTIMIZERS[self.optimizer]

        def step(state: PyTree, x: jax.Array, y: jax.Array) -> tuple[PyTree, jax.Array]:
            params, slots = state
            loss, grads = mean(jax.value_and_grad(self.loss)(params, x, y))
            updates, slots = optimizer.update(grads, slots, params)
            return (optax.apply_updates(params, updates), slots), loss

        return step

    @property
    def task(self) -> Task:
        return Task(self.state, self.batch, self.step_with)


def perceptron(layers: int, units: int) -> Described:
    return Described("mlp", Perceptron(layers, units), "sgd", 8, (units,))


TASKS: Mapping[str, Described] = {
    "20 x 8": perceptron(20, 8),
    "30 x 32": perceptron(30, 32),
    "30 x 128": perceptron(30, 128),
    "10 x 512": perceptron(10, 512),
    "transformer": Described("transformer", Transformer(), "adam", 2, (32,)),
}
SMALL_TASKS = ("20 x 8", "30 x 32", "30 x 128")
FORMS: Mapping[str, Callable[[Task, Devices], Training]] = {
    "run": with_run,
    "shard_map": lambda *args: by_hand(*args, mean=pmean_of_each),
    "pmap": lambda *args: with_pmap(*args, mean=pmean_of_each),
    "jit": with_jit,
}


def has_tensorflow(python: str) -> bool:
    """Whether this interpreter has it."""
    code = (
        "import importlib.util as i, sys; sys.exit(i.find_spec('tensorflow') is None)"
    )
    return subprocess.run([python, "-c", code]).returncode == 0


def prepared(
    framework: Workers, described: Described, replicas: int, folder: str
) -> Sequence[float]:
    """Has TensorFlow make a new training; returns its first losses."""
    path = pathlib.Path(folder, "arrays.npz")
    x, y = described.batch(replicas)
    params = traverse_util.flatten_dict(described.state()[0], sep="/")
    np.savez(path, **{"batch x": x, "batch y": y, **params})
    about = {"kind": described.kind, "optimizer": described.optimizer}
    return framework.ask("prepare", {**about, "file": str(path)}, LOSSES)[0]


@benchmark(
    dict(
        tasks=tuple(TASKS),
        devices=(2, 8),
        platform="cpu",
        only=(*FORMS, "tensorflow"),
        others_python=sys.executable,
        rounds=60,
        seconds=2.0,
    ),
    dict(tasks=("20 x 8", "30 x 128", "transformer"), devices=(8,), seconds=1.0),
)
def train_step(args: Any) -> Iterator[Comparison]:
    """A step costs at most 1.02 of the best other way in JAX, half of TensorFlow's.

    Perceptrons (layers x units) and a small transformer in Flax and Optax, as `run`;
    `shard_map` and `pmap` by hand, with `lax.pmean` of each leaf; `jit` of the whole
    batch, split over the mesh; and `tensorflow` (`MirroredStrategy`) where installed,
    which does not average the loss. The state is donated. A turn is some tens of
    milliseconds of steps, dispatched one after the other, up to the result of the last
    one. Before that the first losses of all forms are compared.
    """
    with_tensorflow = "tensorflow" in args.only
    if with_tensorflow and not has_tensorflow(args.others_python):
        with_tensorflow = False
        print("without TensorFlow; pip install '.[benchmarks-others]'")
    devices = devices_of(args.platform, max(args.devices))
    for n in args.devices:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            other = None
            if with_tensorflow:
                start = _others.started(n, args.others_python)
                other = stack.enter_context(start)
            for task in args.tasks:
                yield from compare(task, devices[:n], other, folder, args)
                jax.clear_caches()


def compare(
    name: str, devices: Devices, other: Workers | None, folder: str, args: Any
) -> Iterator[Comparison]:
    """All forms of one task, turn by turn, after a comparison of their losses."""
    described, case = TASKS[name], f"{name}, {len(devices)} devices"
    forms = [form for form in FORMS if form in ("run", *args.only)]
    trainings = {form: FORMS[form](described.task, devices) for form in forms}
    losses = {form: each.losses(LOSSES) for form, each in trainings.items()}
    check_losses(case, losses, TOLERANCE)
    if other is not None:
        found = prepared(other, described, len(devices), folder)
        both = {"run": losses["run"], "tensorflow": found}
        check_losses(case, both, TOLERANCE_OF_TENSORFLOW)
    trainings["run"].burst(2)
    steps = int(min(max(TURN / trainings["run"].burst(2), 2), MOST_STEPS))
    bursts: dict[str, Any] = {
        form: lambda t=t: t.burst(steps) for form, t in trainings.items()
    }
    if other is not None:
        bursts["tensorflow"] = lambda: other.ask("burst", steps)[0]
    for burst in bursts.values():
        burst()  # whatever is done only once
    times = scaled(in_turn(bursts, args.rounds, args.seconds), 1e6)
    print(f"measured: {case}", file=sys.stderr)
    of_jax = {form: times[form] for form in forms}
    if len(forms) > 1:
        best = min(forms[1:], key=lambda form: statistics.median(times[form]))
        values = {"run": times["run"], "best other": times[best], **of_jax}
        yield Comparison(case, "JAX", "us", values, 1.02, note=f"best: {best}")
    if other is not None:
        values = {name: times[name] for name in ("run", "tensorflow")}
        target = 0.5 if name in SMALL_TASKS else 1.0
        yield Comparison(case, "tensorflow", "us", values, target)


BENCHMARKS = [train_step]

if __name__ == "__main__":
    main(BENCHMARKS)
