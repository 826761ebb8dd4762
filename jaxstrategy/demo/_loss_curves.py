"""The losses of two trainings, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

# Seeds 0 to 19 gave curves that differ by 5e-7 at most.
LARGEST_DIFFERENCE = 1e-4


class Epoch(NamedTuple):
    """One pass over the training images.

    Attributes:
      losses: the mean loss of each batch before its step, `[steps]`.
      accuracy: the part of the test images recognised afterwards.
      seconds: how long the pass took, without the test.
    """

    losses: np.ndarray
    accuracy: float
    seconds: float


def loss_curve(history: list[Epoch]) -> np.ndarray:
    """The loss at each step of all epochs."""
    return np.concatenate([epoch.losses for epoch in history])


def percent(part: float) -> str:
    """`98.6 %`."""
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
    accuracy = percent(many[-1].accuracy)
    figure.suptitle(f"Learning handwritten digits: test accuracy {accuracy}")
    draw_curves(above, loss_curve(many), loss_curve(one), name)
    draw_difference(below, np.abs(loss_curve(many) - loss_curve(one)))
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    figure.align_ylabels()
    figure.savefig(path, format="png")


def draw_curves(axes: Axes, many: np.ndarray, one: np.ndarray, name: str) -> None:
    """Both loss curves, thin on thick, so that both are seen where they agree."""
    steps = np.arange(1, len(many) + 1)
    axes.semilogy(steps, many, color="#8ecae6", linewidth=5, label=name)
    axes.semilogy(steps, one, color="#023047", linewidth=1, label="1 replica")
    axes.set_ylabel("loss (cross-entropy, nats)")
    axes.legend(frameon=False)


def draw_difference(axes: Axes, difference: np.ndarray) -> None:
    """How far the curves are apart at each step, below the limit; equal losses at 0."""
    steps = np.arange(1, len(difference) + 1)
    axes.plot(steps, difference, ".", color="#023047", markersize=4)
    axes.axhline(LARGEST_DIFFERENCE, color="#d62828", linestyle="--")
    above = {"xytext": (0, 3), "textcoords": "offset points", "color": "#d62828"}
    axes.annotate("allowed", (1, LARGEST_DIFFERENCE), **above)
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set_yticks([0, 1e-8, 1e-6, 1e-4])
    axes.set_ylim(-3e-10, max(3e-3, 3 * difference.max()))
    axes.set(xlabel="training step", ylabel="difference (nats)")
