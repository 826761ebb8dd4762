"""Whole training steps in `strategy.run`, in the other ways of JAX, and elsewhere.

    python benchmarks/train_step.py [--others-python PYTHON]

TensorFlow runs in a process of its own on the same cores (`_others.py`).
"""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import _others
import jax
import numpy as np
import optax
from _harness import Comparison, Workers, benchmark, in_turn, main, scaled
from _training import (
    Devices,
    FlaxTask,
    Perceptron,
    Training,
    Transformer,
    by_hand,
    check_losses,
    devices_of,
    pmean_of_each,
    with_jit,
    with_pmap,
    with_run,
)
from flax import traverse_util

# How many losses are compared, and how far they may be apart: rounding in JAX, which
# grows from step to step, and in TensorFlow also other formulas.
LOSSES, TOLERANCE, TOLERANCE_OF_TENSORFLOW = 4, 1e-4, 2e-3
# Seconds of a turn, and the most steps of it: before 0.12 JAX hangs with 64 in flight.
TURN, MOST_STEPS = 0.03, 16


SGD = optax.sgd(_others.RATES["sgd"])
ADAM = optax.adam(_others.RATES["adam"], *_others.BETAS, eps=_others.ADAM_EPSILON)
# What is trained; transformers by Adam, all else by plain gradient descent.
TASKS: Mapping[str, FlaxTask] = {
    "20 x 8": FlaxTask(Perceptron(20, 8), SGD, 8),
    "30 x 32": FlaxTask(Perceptron(30, 32), SGD, 8),
    "30 x 128": FlaxTask(Perceptron(30, 128), SGD, 8),
    "10 x 512": FlaxTask(Perceptron(10, 512), SGD, 8),
    "transformer": FlaxTask(Transformer(), ADAM, 2),
}
SMALL_TASKS = ("20 x 8", "30 x 32", "30 x 128")
FORMS: Mapping[str, Callable[[FlaxTask, Devices], Training]] = {
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
    framework: Workers, name: str, replicas: int, folder: str
) -> Sequence[float]:
    """Has TensorFlow make a new training; returns its first losses."""
    path = pathlib.Path(folder, "arrays.npz")
    task = TASKS[name]
    x, y = task.batch(replicas)
    params = traverse_util.flatten_dict(task.state()["params"], sep="/")
    np.savez(path, **{"batch x": x, "batch y": y, **params})
    about = {"kind": "mlp", "optimizer": "sgd"}
    if task.is_transformer:
        about = {"kind": "transformer", "optimizer": "adam"}
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
    case, task = f"{name}, {len(devices)} devices", TASKS[name]
    forms = [form for form in FORMS if form in ("run", *args.only)]
    trainings = {form: FORMS[form](task, devices) for form in forms}
    losses = {form: each.losses(LOSSES) for form, each in trainings.items()}
    check_losses(case, losses, TOLERANCE)
    if other is not None:
        found = prepared(other, name, len(devices), folder)
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
