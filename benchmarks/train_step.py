"""Claim: whole training steps are as fast in `strategy.run` as JAX can do them.

Perceptrons (layers x units), a small residual network and a small transformer, with
Flax and Optax, a small fixed batch per replica, on simulated CPU devices, as

- `run`: a function decorated with `strategy.run`, which averages loss and gradients
  with `get_replica_context().all_reduce("mean", ...)`;
- `shard_map`: `jax.jit(jax.shard_map(...))` by hand, with `lax.pmean` of each leaf;
- `pmap`: `jax.pmap`, with stacked parameters, and the same `lax.pmean`;
- `jit`: plain `jax.jit` of the whole batch, split over the mesh: XLA finds the
  collectives;
- `tensorflow`: `tf.distribute.MirroredStrategy`, and `torch`: PyTorch's
  `DistributedDataParallel` with gloo, where installed (the extra
  `benchmarks-others`, in this or another environment: `--others-python`). In
  processes of their own on the same cores; they do not average the loss.

The state is donated and flows from step to step. All forms take turns, also those in
other processes, which wait meanwhile. A turn is some tens of milliseconds of steps
that are dispatched one after the other, up to the result of the last one. Before that
the first losses of all forms are compared.

It prints; only with `--check` is a missed target a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _others
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import Comparison, add_options, in_turn, report
from flax import linen as nn, traverse_util
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

PyTree = Any
State = tuple[PyTree, PyTree]

AXIS = "replica"
# `run` to the fastest other form of JAX.
TARGET = 1.02
# `run` to TensorFlow: of the three small perceptrons, and of the others.
SMALL, OTHERS = 0.5, 1.0
FRAMEWORKS = ("tensorflow", "torch")

# How many losses are compared, and how far they may be apart: rounding in JAX, which
# grows from step to step, and in other frameworks also other formulas.
LOSSES = 4
TOLERANCE, TOLERANCE_OF_OTHERS = 1e-4, 2e-3
# A turn takes about so long, but not more steps than simulated devices of JAX before
# 0.12 bear without a wait (64 in flight hang).
TURN = 0.03
MOST_STEPS = 16


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


class ResNet(nn.Module):
    """A stem, and residual blocks of two convolutions with group normalisation."""

    widths: Sequence[int] = (16, 16, 32, 64)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(self._norm("stem norm")(self._conv(self.widths[0], "stem")(x)))
        for i, width in enumerate(self.widths):
            stride = 1 if width == x.shape[-1] else 2
            out = self._conv(width, f"{i} first", stride)(x)
            out = nn.relu(self._norm(f"{i} first norm")(out))
            out = self._conv(width, f"{i} second")(out)
            out = self._norm(f"{i} second norm")(out)
            if stride > 1:
                x = self._conv(width, f"{i} skip", stride, size=1)(x)
            x = nn.relu(x + out)
        return nn.Dense(10, name="head")(x.mean((1, 2)))

    def _conv(self, width: int, name: str, stride: int = 1, size: int = 3) -> nn.Conv:
        edge = size // 2
        shape = (size, size)
        return nn.Conv(width, shape, stride, edge, use_bias=False, name=name)

    def _norm(self, name: str) -> nn.GroupNorm:
        return nn.GroupNorm(_others.GROUPS, epsilon=_others.EPSILON, name=name)


class Transformer(nn.Module):
    """Tokens to logits, through blocks of attention and a perceptron."""

    blocks: int = 2
    width: int = 64
    tokens: int = 256

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        draw = nn.initializers.normal(0.05)
        embedding = self.param("embedding", draw, (self.tokens, self.width))
        positions = self.param("positions", draw, (x.shape[1], self.width))
        x = embedding[x] + positions
        for i in range(self.blocks):
            x = x + self._attention(self._norm(f"{i} first norm")(x), i)
            out = self._norm(f"{i} second norm")(x)
            out = nn.gelu(nn.Dense(4 * self.width, name=f"{i} up")(out))
            x = x + nn.Dense(self.width, name=f"{i} down")(out)
        return nn.Dense(self.tokens, name="head")(self._norm("norm")(x))

    def _attention(self, x: jax.Array, i: int) -> jax.Array:
        qkv = nn.Dense(3 * self.width, name=f"{i} qkv")(x)
        heads = qkv.reshape(*x.shape[:2], 3, _others.HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        out = jax.nn.dot_product_attention(q, k, v)
        return nn.Dense(self.width, name=f"{i} out")(out.reshape(x.shape))

    def _norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=_others.EPSILON, name=name)


OPTIMIZERS = {
    "sgd": optax.sgd(_others.RATES["sgd"]),
    "momentum": optax.sgd(_others.RATES["momentum"], momentum=_others.MOMENTUM),
    "adam": optax.adam(_others.RATES["adam"], *_others.BETAS, eps=_others.ADAM_EPSILON),
}


def _normal(draw: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return draw.normal(size=shape).astype(np.float32)


def _whole(limit: int, draw: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return draw.integers(0, limit, shape).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained: a model of a kind that `_others.py` knows, and how."""

    kind: str
    model: nn.Module
    optimizer: str
    rows: int
    shape: tuple[int, ...]

    def batch(self, num_replicas: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and what is wanted of them, each `[replica, row, ...]`."""
        draw = np.random.default_rng(1)
        rows = (num_replicas, self.rows)
        shape = rows + self.shape
        if self.kind == "mlp":
            return _normal(draw, shape), _normal(draw, shape)
        if self.kind == "resnet":
            return _normal(draw, shape), _whole(10, draw, rows)
        return _whole(256, draw, shape), _whole(256, draw, shape)

    def state(self) -> State:
        """First parameters and the optimizer's state, on the host."""
        x, _ = self.batch(1)
        params = self.model.init(jax.random.key(0), x[0])["params"]
        return jax.device_get((params, OPTIMIZERS[self.optimizer].init(params)))

    def loss(self, params: PyTree, x: jax.Array, y: jax.Array) -> jax.Array:
        """The mean loss of some rows."""
        out = self.model.apply({"params": params}, x)
        assert isinstance(out, jax.Array)
        if self.kind == "mlp":
            return jnp.mean((out - y) ** 2)
        return optax.softmax_cross_entropy_with_integer_labels(out, y).mean()

    def step_with(self, mean: Callable[[PyTree], PyTree]) -> Callable[..., Any]:
        """A new function for one replica's step; `mean` is over replicas."""
        optimizer = OPTIMIZERS[self.optimizer]

        def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
            params, slots = state
            loss, grads = mean(jax.value_and_grad(self.loss)(params, x, y))
            updates, slots = optimizer.update(grads, slots, params)
            return (optax.apply_updates(params, updates), slots), loss

        return step


def _perceptron(layers: int, units: int) -> Task:
    return Task("mlp", Perceptron(layers, units), "sgd", 8, (units,))


TASKS: Mapping[str, Task] = {
    "20 x 8": _perceptron(20, 8),
    "30 x 32": _perceptron(30, 32),
    "30 x 128": _perceptron(30, 128),
    "10 x 512": _perceptron(10, 512),
    "resnet": Task("resnet", ResNet(), "momentum", 4, (16, 16, 3)),
    "transformer": Task("transformer", Transformer(), "adam", 2, (32,)),
}
SMALL_TASKS = ("20 x 8", "30 x 32", "30 x 128")


# The forms in JAX.


class Training:
    """A training loop with one form of the step."""

    def __init__(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        self._step = step
        self._state = state
        self._batch = batch

    def losses(self, steps: int) -> list[float]:
        """The mean loss of the replicas before each of some steps."""
        return [float(np.mean(self._next())) for _ in range(steps)]

    def burst(self, steps: int) -> float:
        """Microseconds for each of some steps."""
        start = time.perf_counter()
        for _ in range(steps - 1):
            self._next()
        jax.block_until_ready((self._next(), self._state))
        return 1e6 * (time.perf_counter() - start) / steps

    def _next(self) -> jax.Array:
        self._state, loss = self._step(self._state, *self._batch)
        return loss


def with_run(task: Task, mesh: Mesh) -> Training:
    """As a user of jaxstrategy writes it."""
    strategy = js.MirroredStrategy(list(mesh.devices.flat))

    def mean(tree: PyTree) -> PyTree:
        return js.get_replica_context().all_reduce("mean", tree)

    step = strategy.run(task.step_with(mean), options=js.RunOptions(donate_argnums=0))
    x, y = task.batch(mesh.size)
    batch = strategy.per_replica({"x": x, "y": y})
    return Training(step, strategy.mirror(task.state()), (batch["x"], batch["y"]))


def by_hand(task: Task, mesh: Mesh) -> Training:
    """With `shard_map`."""
    step = jax.shard_map(
        task.step_with(_pmean),
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    jitted = jax.jit(step, donate_argnums=0)
    return Training(jitted, *_mirrored_and_split(task, mesh))


def with_pmap(task: Task, mesh: Mesh) -> Training:
    """With `jax.pmap`."""
    devices = list(mesh.devices.flat)
    step = jax.pmap(task.step_with(_pmean), AXIS, devices=devices, donate_argnums=0)
    split = NamedSharding(mesh, P(AXIS))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * mesh.size), task.state())
    batch = task.batch(mesh.size)
    return Training(step, jax.device_put(stacked, split), jax.device_put(batch, split))


def with_jit(task: Task, mesh: Mesh) -> Training:
    """As for one device; the batch is split."""
    everywhere = NamedSharding(mesh, P())
    step = jax.jit(
        task.step_with(lambda tree: tree),
        donate_argnums=0,
        out_shardings=everywhere,
    )
    return Training(step, *_mirrored_and_split(task, mesh))


def _pmean(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: lax.pmean(leaf, AXIS), tree)


def _mirrored_and_split(task: Task, mesh: Mesh) -> tuple[Any, Any]:
    batch = [array.reshape(-1, *array.shape[2:]) for array in task.batch(mesh.size)]
    return (
        jax.device_put(task.state(), NamedSharding(mesh, P())),
        jax.device_put(batch, NamedSharding(mesh, P(AXIS))),
    )


FORMS: Mapping[str, Callable[[Task, Mesh], Training]] = {
    "run": with_run,
    "shard_map": by_hand,
    "pmap": with_pmap,
    "jit": with_jit,
}


# Other frameworks.


class Framework:
    """Processes of another framework, one or one per replica, that do as told."""

    def __init__(self, python: str, name: str, replicas: int, folder: str) -> None:
        self.name = name
        self._folder = pathlib.Path(folder)
        self._log = self._folder / f"{name}.log"
        script = pathlib.Path(_others.__file__)
        ranks = range(replicas) if name == "torch" else range(1)
        quiet = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    [python, script, name, str(rank), str(replicas), folder],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **quiet},
                    text=True,
                )
                for rank in ranks
            ]
        self._answers()

    def prepare(self, task: Task, replicas: int) -> list[float]:
        """The first losses of a new training."""
        path = self._folder / "arrays.npz"
        x, y = task.batch(replicas)
        params = traverse_util.flatten_dict(task.state()[0], sep="/")
        arrays: dict[str, Any] = {"batch x": x, "batch y": y, **params}
        np.savez(path, **arrays)
        about = {"kind": task.kind, "optimizer": task.optimizer, "file": str(path)}
        return self._ask({"prepare": about, "steps": LOSSES})

    def burst(self, steps: int) -> float:
        """Microseconds for each of some steps."""
        return self._ask({"burst": steps})

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _ask(self, command: Mapping[str, Any]) -> Any:
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps(command), file=process.stdin, flush=True)
        return self._answers()

    def _answers(self) -> Any:
        """What the first process answers, when all have answered."""
        lines = [
            process.stdout.readline() for process in self._processes if process.stdout
        ]
        if not all(lines):
            raise RuntimeError(f"{self.name} failed:\n{self._log.read_text()}")
        return json.loads(lines[0])


def installed(python: str) -> dict[str, str]:
    """The versions of the other frameworks that this interpreter has."""
    code = (
        "import importlib.metadata as m, json\n"
        "by = m.packages_distributions()\n"
        f"found = {{n: m.version(by[n][0]) for n in {FRAMEWORKS} if n in by}}\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True)
    return json.loads(done.stdout)


@contextlib.contextmanager
def started(
    names: Sequence[str], python: str, replicas: int
) -> Iterator[list[Framework]]:
    """These frameworks with so many replicas, while the block runs."""
    running: list[Framework] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                running.append(Framework(python, name, replicas, folder))
            yield running
        finally:
            for framework in running:
                framework.stop()


# What is measured.


@dataclasses.dataclass(frozen=True)
class Case:
    """One task on so many replicas, and the microseconds of each form at each turn."""

    task: str
    replicas: int
    steps: int
    times: Mapping[str, Sequence[float]]
    losses: Mapping[str, Sequence[float]]

    def __str__(self) -> str:
        return f"{self.task}, {self.replicas} devices"

    @property
    def best_other(self) -> str:
        """The form of JAX with the least median, besides ours."""
        others = [name for name in FORMS if name in self.times and name != "run"]
        return min(others, key=lambda name: statistics.median(self.times[name]))

    def against_jax(self) -> Comparison:
        """Held against the best other form."""
        best = self.best_other
        forms = {name: times for name, times in self.times.items() if name in FORMS}
        values = {"run": self.times["run"], "best other": self.times[best], **forms}
        return Comparison(str(self), "JAX", "us", values, TARGET, note=f"best: {best}")

    def against(self, framework: str) -> Comparison:
        """Held against another framework."""
        values = {"run": self.times["run"], framework: self.times[framework]}
        target = SMALL if self.task in SMALL_TASKS else OTHERS
        if framework == "tensorflow":
            return Comparison(str(self), framework, "us", values, target)
        # PyTorch is for comparison: it decides nothing.
        return Comparison(str(self), framework, "us", values, tolerance=1.0)


def measure(
    name: str, mesh: Mesh, others: Sequence[Framework], args: argparse.Namespace
) -> Case:
    """All forms of one task, turn by turn, after a comparison of their losses."""
    task, replicas = TASKS[name], mesh.size
    forms = [form for form in FORMS if form in args.only]
    trainings = {form: FORMS[form](task, mesh) for form in forms}
    losses = {form: each.losses(LOSSES) for form, each in trainings.items()}
    losses |= {each.name: each.prepare(task, replicas) for each in others}
    check_losses(f"{name}, {replicas} devices", losses)
    bursts: dict[str, Callable[[int], float]] = {}
    bursts |= {form: each.burst for form, each in trainings.items()}
    bursts |= {each.name: each.burst for each in others}
    steps = _steps_in_a_turn(trainings["run"])
    for burst in bursts.values():
        burst(steps)  # whatever a framework does only once
    turns = {form: lambda b=burst: b(steps) for form, burst in bursts.items()}
    times = in_turn(turns, args.rounds, args.seconds)
    return Case(name, replicas, steps, times, losses)


def check_losses(case: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Raises unless all forms had the same first losses."""
    first, *_ = losses.values()
    for form, values in losses.items():
        tolerance = TOLERANCE if form in FORMS else TOLERANCE_OF_OTHERS
        if not np.allclose(values, first, rtol=tolerance, atol=0):
            raise AssertionError(f"{case}: {form} had losses {values}, not {first}")


def _steps_in_a_turn(training: Training) -> int:
    training.burst(2)
    one = 1e-6 * training.burst(2)
    return int(min(max(TURN / one, 2), MOST_STEPS))


def measure_all(args: argparse.Namespace, frameworks: Sequence[str]) -> Iterator[Case]:
    """All that was asked for."""
    devices = js.simulate(max(args.devices))
    for n in args.devices:
        mesh = js.MirroredStrategy(devices[:n]).mesh
        with started(frameworks, args.others_python, n) as others:
            for task in args.tasks:
                case = measure(task, mesh, others, args)
                jax.clear_caches()
                print(f"measured: {case}", file=sys.stderr)
                yield case


def compare(
    args: argparse.Namespace, frameworks: Sequence[str]
) -> Iterator[Comparison]:
    """Each case beside the best other form of JAX, and the other frameworks."""
    for case in measure_all(args, frameworks):
        if {*FORMS} & {*args.only} - {"run"}:
            yield case.against_jax()
        for name in frameworks:
            yield case.against(name)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [*FORMS, *FRAMEWORKS]
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--devices", type=int, nargs="+", default=[2, 4, 8])
    add("--only", nargs="+", choices=names, default=names, help="forms besides `run`")
    add("--others-python", default=sys.executable, help="has the other frameworks")
    add_options(parser, rounds=60, seconds=4.0)
    args = parser.parse_args(arguments)
    args.only = ["run", *args.only]
    return args


def main() -> None:
    args = parsed()
    versions = installed(args.others_python)
    frameworks = [name for name in FRAMEWORKS if name in args.only and name in versions]
    about = {"jax": jax.__version__, "machine": platform.machine(), **versions}
    print(f"{about}; medians (quartiles) of the time of a step")
    for name in FRAMEWORKS:
        if name in args.only and name not in versions:
            print(f"{name}: not installed; pip install '.[benchmarks-others]'")
    report(compare(args, frameworks), args)


if __name__ == "__main__":
    main()
