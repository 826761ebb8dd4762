"""Draws `figures.png` from the numbers of `train_step.py` and `scaling.py`.

python benchmarks/train_step.py --json train_step.json
python benchmarks/scaling.py --json scaling.json
python benchmarks/plot.py train_step.json scaling.json
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

# From the Okabe-Ito palette, which colour-blind people can tell apart.
COLORS = {
    "run": "#D55E00",
    "shard_map": "#0072B2",
    "pmap": "#56B4E9",
    "jit": "#009E73",
    "tensorflow": "#999999",
    "torch": "#444444",
    "floor": "#BBBBBB",
}


def draw_steps(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Bars: the time of a step of each form by that of `run`, for each task."""
    replicas = max(case["replicas"] for case in cases)
    shown = [case for case in cases if case["replicas"] == replicas]
    forms = list(shown[0]["times"])
    width = 0.8 / len(forms)
    for i, form in enumerate(forms):
        places = [place + (i + 0.5) * width - 0.4 for place in range(len(shown))]
        ratios = [ratio(case["times"], form) for case in shown]
        bars = axes.bar(places, ratios, width, label=form, color=COLORS[form])
        labels = [f"{value:.1f}" if form != "run" else "" for value in ratios]
        axes.bar_label(bars, labels, fontsize=6, padding=1)
    medians = [statistics.median(case["times"]["run"]) / 1e3 for case in shown]
    labels = [
        f"{case['task']}\n{median:.1f} ms"
        for case, median in zip(shown, medians, strict=True)
    ]
    axes.set_xticks(range(len(shown)), labels)
    axes.axhline(1, color=COLORS["run"], linewidth=0.8)
    axes.set_ylabel("time of a step, by that of run")
    axes.set_title(f"Training steps on {replicas} devices (below: run's own time)")
    axes.legend(ncols=len(forms), fontsize=7, frameon=False)
    axes.margins(y=0.15)


def ratio(times: Mapping[str, Sequence[float]], form: str) -> float:
    """The median over the turns."""
    pairs = zip(times[form], times["run"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def draw_replicas(axes: Any, found: Mapping[str, Sequence[Any]]) -> None:
    """Lines: the time of a step with the number of replicas."""
    names = {"run": "run", "shard_map": "a pmean of each array", "floor": "none"}
    for form, label in names.items():
        draw_line(axes, found, f"step {form}", 1e3, label, COLORS[form])
    log_axes(axes, [int(n) for n in found])
    axes.set(xlabel="replicas, on 2 cores", ylabel="ms")
    axes.set_title("A step of 30 x 32, by communication")
    axes.legend(fontsize=7, frameon=False)


def draw_startup(axes: Any, found: Mapping[str, Sequence[Any]]) -> None:
    """Lines: trace and compile with the number of replicas."""
    draw_line(axes, found, "compile", 1, "compile", COLORS["run"])
    draw_line(axes, found, "trace", 1, "trace", COLORS["shard_map"])
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(n) for n in found], list(found))
    axes.set_ylim(bottom=0)
    axes.set(xlabel="replicas", ylabel="processor seconds")
    axes.set_title("Start of run, 60 arrays")
    axes.legend(fontsize=7, frameon=False)


def draw_leaves(axes: Any, found: Mapping[str, Sequence[Any]]) -> None:
    """Lines: trace and compile with the number of arrays."""
    for form in ("run", "shard_map"):
        own = {
            case.split()[0]: each
            for case, each in found.items()
            if case.endswith(f" {form}") and None not in each
        }
        draw_line(axes, own, "compile", 1, f"compile, {form}", COLORS[form])
        draw_line(axes, own, "trace", 1, f"trace, {form}", COLORS[form], "--")
    axes.set(xscale="log", yscale="log", xlabel="arrays", ylabel="processor seconds")
    axes.set_title("Start, 8 replicas")
    axes.legend(fontsize=7, frameon=False)


def draw_line(
    axes: Any,
    found: Mapping[str, Sequence[Any]],
    quantity: str,
    scale: float,
    label: str,
    color: str,
    style: str = "-",
) -> None:
    """Medians over processes, which are all shown as points."""
    counts = [int(n) for n in found]
    values = [
        [scale * each[quantity] for each in of_case] for of_case in found.values()
    ]
    medians = [statistics.median(of_case) for of_case in values]
    axes.plot(counts, medians, style, color=color, label=label)
    for count, of_case in zip(counts, values, strict=True):
        axes.plot([count] * len(of_case), of_case, ".", color=color, markersize=3)


def log_axes(axes: Any, counts: Sequence[int]) -> None:
    """Logarithmic, with a tick for each count."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw(steps: Mapping[str, Any], scaling: Mapping[str, Any]) -> Figure:
    """All four."""
    figure = Figure(figsize=(11, 7.5), dpi=120, layout="constrained")
    panels = figure.subplot_mosaic([["steps"] * 3, ["replicas", "startup", "leaves"]])
    draw_steps(panels["steps"], steps["cases"])
    draw_replicas(panels["replicas"], scaling["replicas"])
    draw_startup(panels["startup"], scaling["replicas"])
    draw_leaves(panels["leaves"], scaling["leaves"])
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = pathlib.Path(__file__).parent
    parser.add_argument("steps", type=pathlib.Path, help="from train_step.py")
    parser.add_argument("scaling", type=pathlib.Path, help="from scaling.py")
    parser.add_argument("--out", type=pathlib.Path, default=here / "figures.png")
    args = parser.parse_args()
    steps, scaling = (json.loads(p.read_text()) for p in (args.steps, args.scaling))
    draw(steps, scaling).savefig(args.out)


if __name__ == "__main__":
    main()
