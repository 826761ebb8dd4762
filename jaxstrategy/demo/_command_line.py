"""The command line of the demo: options, their limits, and the devices they ask for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.demo._digits import TRAIN_IMAGES
from jaxstrategy.replicas._devices import Device
from jaxstrategy.text._units import with_noun

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
    """The options of the command line."""

    replicas: int | None
    epochs: int
    batch_size: int
    seed: int
    out: Path

    @property
    def steps(self) -> int:
        """Training steps in all epochs."""
        return self.epochs * (TRAIN_IMAGES // self.batch_size)

    @property
    def learning_rate(self) -> float:
        """The first one; it falls to 0 along a cosine."""
        # Small batches at the full rate blow rounding up to 1e-2 (8 images, 40 epochs).
        return LEARNING_RATE * min(1, self.batch_size / BATCH_SIZE)

    @property
    def trains_long_enough(self) -> bool:
        """Whether the accuracy of the defaults can be expected."""
        return self.epochs >= EPOCHS and self.batch_size == BATCH_SIZE


def make_parser() -> argparse.ArgumentParser:
    """The options' names, defaults, limits and help."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.demo",
        description="Train a small convolutional network on scikit-learn's handwritten "
        "digits, on many replicas and on one, and compare the two loss curves.",
    )
    add = parser.add_argument
    add(
        "--replicas",
        type=number(1, TRAIN_IMAGES, "the number of training images"),
        help="how many devices train together (default: all accelerators of this "
        f"machine, or {SIMULATED_REPLICAS} simulated devices on a plain CPU)",
    )
    add(
        "--epochs",
        type=number(1, 10_000),
        default=EPOCHS,
        help="passes over the training images (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=number(1, TRAIN_IMAGES, "the number of training images"),
        default=BATCH_SIZE,
        help="images in a step, over all replicas (default: %(default)s)",
    )
    add(
        "--seed",
        type=number(0, 2**32 - 1),
        default=0,
        help="decides the first weights and the order of images (default: %(default)s)",
    )
    add(
        "--out",
        type=picture,
        default="demo.png",
        help="the picture of the loss curves to write (default: %(default)s)",
    )
    return parser


def number(least: int, most: int, reason: str = "") -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, which is there for a `reason`."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            limit = f"{most} ({reason})" if reason else f"{most}"
            raise argparse.ArgumentTypeError(
                f"{value} was given; a whole number from {least} to {limit} is needed."
            )
        return value

    return number


def picture(text: str) -> Path:
    """Reads where a picture can be written."""
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


def find_devices(wanted: int | None) -> list[Device]:
    """This host's accelerators or, on a plain CPU, that many simulated devices."""
    # Without effect on accelerators, and refused once JAX has started its devices.
    # `js.simulate` would turn to the CPU even where there is an accelerator.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", wanted or SIMULATED_REPLICAS)
    return jax.local_devices()


def require_extras() -> None:
    """Raises `MissingExtraError` if one of the demo's dependencies is missing."""
    for module, package in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"The demo needs {package}, which is not installed. Install the "
                "extra: pip install 'jaxstrategy[demo]'"
            )
