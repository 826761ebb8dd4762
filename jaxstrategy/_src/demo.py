"""Trains on many replicas and on one, compares, and prints a table: `main`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxstrategy as js
from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import with_noun
from jaxstrategy._src.values.arrays import PyTree

if TYPE_CHECKING:
    from flax.training.train_state import TrainState
    from rich.console import Console
    from rich.table import Table


TRAIN_IMAGES = 1440  # of 1,797; the others are for testing


class Examples(NamedTuple):
    """Images `[rows, 8, 8, 1]` from 0 to 1, and the digits they show."""

    images: np.ndarray
    labels: np.ndarray


def load() -> tuple[Examples, Examples]:
    """The examples to train on and those to test on, the same ones every time."""
    from sklearn.datasets import load_digits

    pixels, labels = map(np.asarray, load_digits(return_X_y=True))
    images = pixels.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    # The file goes from writer to writer: in this order both parts have some of each.
    order = np.random.default_rng(0).permutation(len(labels))
    parts = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
    train, test = (Examples(images[rows], labels[rows]) for rows in parts)
    return train, test


EPOCHS = 20
BATCH_SIZE = 96  # 1, 2, 3, 4, 6, 8, 12 and 16 replicas share it equally
LEARNING_RATE = 4e-3
SIMULATED_REPLICAS = 8

EXTRAS = {
    "flax": "Flax",
    "optax": "Optax",
    "sklearn": "scikit-learn",
    "matplotlib": "Matplotlib",
    "rich": "Rich",
}


@dataclasses.dataclass(frozen=True)
class Arguments:
    replicas: int | None
    epochs: int
    batch_size: int
    seed: int
    out: Path

    @property
    def steps(self) -> int:
        return self.epochs * (TRAIN_IMAGES // self.batch_size)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.demo",
        description="Train a small convolutional network on scikit-learn's handwritten "
        "digits, on many replicas and on one, and compare the two loss curves.",
    )
    images = f"{TRAIN_IMAGES} (the number of training images)"
    for flag, kind, default, told in (
        (
            "--replicas",
            number(1, TRAIN_IMAGES, images),
            None,
            "how many devices train together (default: all accelerators of this "
            f"machine, or {SIMULATED_REPLICAS} simulated devices on a plain CPU)",
        ),
        ("--epochs", number(1, 10_000), EPOCHS, "passes over the training images"),
        (
            "--batch-size",
            number(1, TRAIN_IMAGES, images),
            BATCH_SIZE,
            "images in a step, over all replicas",
        ),
        (
            "--seed",
            number(0, 2**32 - 1),
            0,
            "decides the first weights and the order of images",
        ),
        ("--out", picture, "demo.png", "the picture of the loss curves to write"),
    ):
        told += "" if default is None else " (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=default, help=told)
    return parser


def number(least: int, most: int, limit: str = "") -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, which messages call `limit`."""

    def number(text: str) -> int:
        if not least <= (value := int(text)) <= most:
            raise argparse.ArgumentTypeError(
                f"{value} was given; a whole number from {least} to {limit or most} is "
                "needed."
            )
        return value

    return number


def picture(text: str) -> Path:
    path = Path(text)
    written = path if path.exists() else path.parent
    if path.suffix.lower() != ".png":
        complaint = "a file name that ends in .png is needed."
    elif not path.parent.is_dir():
        complaint = f"there is no folder '{path.parent}'. Make it first."
    elif path.is_dir() or not os.access(written, os.W_OK):
        complaint = "it cannot be written. Choose another name or folder."
    else:
        return path
    raise argparse.ArgumentTypeError(f"'{text}' was given; {complaint}")


def misfit(options: Arguments, devices: Sequence[Device]) -> str | None:
    """Why these devices cannot do what the options ask, if they cannot."""
    n = options.replicas or len(devices)
    batch_size = options.batch_size
    if n > len(devices):
        platform = devices[0].platform
        more = "" if platform == "cpu" else ", or simulate more: JAX_PLATFORMS=cpu"
        return (
            f"argument --replicas: {n} were asked for, but JAX has {len(devices)} "
            f"{platform} device(s). Use at most {len(devices)}{more}."
        )
    if batch_size % n:
        near = max(batch_size - batch_size % n, n)
        return (
            f"argument --batch-size: {with_noun(n, 'replica')} cannot share "
            f"{batch_size} images equally. Use a multiple of {n}, such as {near}."
        )
    return None


def training_step(
    strategy: js.Strategy,
) -> Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]]:
    """One step of gradient descent on all replicas: `step(state, images, labels)`.

    Returns the new state and the mean loss of the global batch.
    """
    import optax

    # A gradient that was left unreduced would be an error, not another network on each
    # replica.
    @strategy.run(options=js.RunOptions(donate_argnums=0, expect_mirrored=True))
    def step(
        state: TrainState, images: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: PyTree) -> jax.Array:
            logits = state.apply_fn(params, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        loss, grads = js.get_replica_context().all_reduce("mean", (loss, grads))
        return state.apply_gradients(grads=grads), loss

    return step


def initial_state(strategy: js.Strategy, options: Arguments) -> TrainState:
    """The untrained network and its optimizer, mirrored on all replicas."""
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    # All smooth: with max-pooling and ReLU, rounding may let another pixel win, and the
    # losses of 8 replicas and of 1 then differed by up to 1e-2 (for 4 seeds of 20).
    first, second = nn.Conv(32, (3, 3)), nn.Conv(64, (3, 3), strides=2)
    flatten = jax.vmap(jnp.ravel)
    model = nn.Sequential([first, nn.gelu, second, nn.gelu, flatten, nn.Dense(10)])
    # Small batches at the full rate blow rounding up to 1e-2 (8 images, 40 epochs).
    first_rate = LEARNING_RATE * min(1, options.batch_size / BATCH_SIZE)
    optimizer = optax.adam(optax.cosine_decay_schedule(first_rate, options.steps))

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 8, 8, 1)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    return strategy.init(create, jax.random.key(options.seed))


# Seeds 0 to 19 gave curves that differ by 5e-7 at most.
LARGEST_DIFFERENCE = 1e-4


class Epoch(NamedTuple):
    """One pass over the training images."""

    losses: np.ndarray  # the mean loss of each batch before its step, `[steps]`
    accuracy: float  # the part of the test images recognised afterwards
    seconds: float  # without the test


def loss_curve(history: list[Epoch]) -> np.ndarray:
    return np.concatenate([epoch.losses for epoch in history])


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def table(many: list[Epoch], one: list[Epoch], name: str) -> Table:
    """One row per epoch; `name` says what `many` were."""
    from rich.table import Table

    grid = Table(caption="seconds of epoch 1 include compiling")
    titles = ("epoch", f"loss\n{name}", "loss\n1 replica", "test\naccuracy", "seconds")
    for title in titles:
        grid.add_column(title, justify="right")
    for number, (ours, alone) in enumerate(zip(many, one, strict=True), start=1):
        grid.add_row(
            str(number),
            f"{ours.losses.mean():.6f}",
            f"{alone.losses.mean():.6f}",
            percent(ours.accuracy),
            f"{ours.seconds:.2f}",
        )
    return grid


def draw(path: Path, many: list[Epoch], one: list[Epoch], name: str) -> None:
    """Write a picture of both loss curves, and of their difference, to `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), dpi=150, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    accuracy = many[-1].accuracy
    figure.suptitle(f"Learning handwritten digits: test accuracy {percent(accuracy)}")
    # Thin on thick, so that both are seen where they agree.
    curves = loss_curve(many), loss_curve(one)
    steps = np.arange(1, len(curves[0]) + 1)
    above.semilogy(steps, curves[0], color="#8ecae6", linewidth=5, label=name)
    above.semilogy(steps, curves[1], color="#023047", linewidth=1, label="1 replica")
    above.set_ylabel("loss (cross-entropy, nats)")
    above.legend(frameon=False)
    difference = np.abs(curves[0] - curves[1])
    below.plot(steps, difference, ".", color="#023047", markersize=4)
    below.axhline(LARGEST_DIFFERENCE, color="#d62828", linestyle="--")
    at = {"xytext": (0, 3), "textcoords": "offset points", "color": "#d62828"}
    below.annotate("allowed", (1, LARGEST_DIFFERENCE), **at)
    below.set_yscale("symlog", linthresh=1e-9)
    below.set_yticks([0, 1e-8, 1e-6, 1e-4])
    below.set_ylim(-3e-10, max(3e-3, 3 * difference.max()))
    below.set(xlabel="training step", ylabel="difference (nats)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path, format="png")


# Seeds 0 to 19 gave 98.6 % to 99.4 %.
LEAST_ACCURACY = 0.97


def train(
    strategy: js.Strategy, options: Arguments, advance: Callable[[], object]
) -> list[Epoch]:
    """Train from the start on the strategy's replicas; calls `advance` each step."""
    step = training_step(strategy)

    @strategy.run
    def count(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
        hits = state.apply_fn(state.params, images).argmax(axis=-1) == labels
        return js.get_replica_context().all_reduce("sum", js.masked_sum(hits))

    examples, unseen = load()
    state = initial_state(strategy, options)
    (test,) = strategy.experimental_distribute_dataset([unseen])
    rng = np.random.default_rng(options.seed)
    per_epoch, size = TRAIN_IMAGES // options.batch_size, options.batch_size
    history = []
    for _ in range(options.epochs):
        start = time.perf_counter()
        losses = []
        # A rest is left out.
        order = rng.permutation(TRAIN_IMAGES)[: per_epoch * size]
        shuffled = js.batches(Examples(*(each[order] for each in examples)), size)
        for images, labels in strategy.experimental_distribute_dataset(shuffled):
            state, loss = step(state, images, labels)
            losses.append(loss)
            advance()
        curve = np.array(jax.device_get(losses))
        seconds = time.perf_counter() - start
        accuracy = int(count(state, *test)) / len(unseen.labels)
        strategy.assert_in_sync(state, "state")
        history.append(Epoch(curve, accuracy, seconds))
    return history


def train_both(
    strategy: js.Strategy, options: Arguments, console: Console
) -> tuple[list[Epoch], list[Epoch]]:
    """Train on all replicas of `strategy`, then on one, with progress bars."""
    from rich.progress import Progress

    def train_on(each: js.Strategy) -> list[Epoch]:
        what = f"training on {with_noun(each.num_replicas_in_sync, 'replica')}"
        task = progress.add_task(what, total=options.steps)
        return train(each, options, functools.partial(progress.advance, task))

    # No bar where it would be garbage in a file.
    progress = Progress(console=console, disable=not console.is_terminal)
    # The TensorFloat-32 of GPUs would round by more than the curves may differ.
    with jax.default_matmul_precision("float32"), progress:
        many = train_on(strategy)
        return many, train_on(js.OneDeviceStrategy(strategy.devices[0]))


def run(strategy: js.Strategy, options: Arguments) -> int:
    from rich.console import Console

    console = Console()
    name = with_noun(strategy.num_replicas_in_sync, "replica")
    print(f"Training on {TRAIN_IMAGES} handwritten digits with {strategy}.")
    many, one = train_both(strategy, options, console)
    draw(options.out, many, one, name)
    console.print(table(many, one, name))
    accuracy = many[-1].accuracy
    difference = float(np.abs(loss_curve(many) - loss_curve(one)).max())
    print(f"Test accuracy: {percent(accuracy)}")
    print(
        f"Largest difference of the two loss curves: {difference:.1e} "
        f"(allowed: {LARGEST_DIFFERENCE:.0e})"
    )
    print(f"Picture of both: {options.out}")
    failed = []
    if not difference <= LARGEST_DIFFERENCE:
        failed.append(
            f"the loss curves differ by {difference:.1e}; at most "
            f"{LARGEST_DIFFERENCE:.0e} is allowed."
        )
    is_long_enough = options.epochs >= EPOCHS and options.batch_size == BATCH_SIZE
    if is_long_enough and accuracy < LEAST_ACCURACY:
        failed.append(
            f"the test accuracy is {percent(accuracy)}; at least "
            f"{percent(LEAST_ACCURACY)} was expected."
        )
    for failure in failed:
        print(f"Failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo with these command-line arguments; returns the exit status."""
    parser = make_parser()
    options = Arguments(**vars(parser.parse_args(arguments)))
    for module, package in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"The demo needs {package}, which is not installed. Install the "
                "extra: pip install 'jaxstrategy[demo]'"
            )
    # Without effect on accelerators, and refused once JAX has started its devices.
    # `js.simulate` would turn to the CPU even where there is an accelerator.
    with contextlib.suppress(RuntimeError):
        wanted = options.replicas or SIMULATED_REPLICAS
        jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.local_devices()
    if complaint := misfit(options, devices):
        parser.error(complaint)
    return run(js.MirroredStrategy(devices[: options.replicas]), options)
