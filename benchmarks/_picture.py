"""The picture on the page of figures, from results: `run_all.py` draws it."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from _results import Results
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter

# A colour is a program, in all panels; what is measured of it is the style of the line.
COLORS = {
    "run": "#3b82c4",
    "shard_map": "#d9730d",
    "pmap": "#2e9e4f",
    "jit": "#9467bd",
    "tensorflow": "#d64545",
    "torch": "#8a8a8a",
    "best": "#159aa8",  # shard_map, pmap or jit
}
NAMES = {"tensorflow": "TensorFlow", "torch": "PyTorch"}
MARKERS = {
    "run": "o",
    "shard_map": "s",
    "pmap": "^",
    "jit": "D",
    "tensorflow": "v",
    "torch": "P",
    "best": "*",
}


# What the picture shows of the results.


def steps(results: Results) -> list[dict[str, Any]]:
    """Each training step: milliseconds of all forms, and ratios with quartiles."""
    found = {}
    for each in results.of("train_step"):
        task, devices = each["case"].rsplit(", ", 1)
        case = found.setdefault(
            each["case"], {"task": task, "replicas": int(devices.split()[0]), "ms": {}}
        )
        names = {"JAX": "to_best", "tensorflow": "to_tensorflow"}
        for form, spread in each["programs"].items():
            if form in COLORS:
                case["ms"].setdefault(form, spread[0] / 1e3)
        if each["quantity"] in names:
            case[names[each["quantity"]]] = each["ratio"]
    return [case for case in found.values() if "to_best" in case]


def by_replicas(results: Results) -> list[dict[str, Any]]:
    """Start-up and step with so many replicas: processor seconds, milliseconds."""
    found: dict[int, dict[str, Any]] = {}
    for each in _scaling(results, "replica"):
        row = found.setdefault(_count(each), {"replicas": _count(each)})
        for form, spread in each["programs"].items():
            if form == "run":
                row[each["quantity"]] = spread[0]
            elif form == "without communication":
                row["floor"] = spread[0]
    return [found[count] for count in sorted(found)]


def by_arrays(results: Results) -> list[dict[str, Any]]:
    """Start-up with so many arrays: processor seconds of each form."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for each in _scaling(results, "array"):
        for form, spread in each["programs"].items():
            key = (_count(each), form)
            row = found.setdefault(key, {"arrays": key[0], "form": form})
            row[each["quantity"]] = spread[0]
    return [found[key] for key in sorted(found)]


def _scaling(results: Results, noun: str) -> list[Mapping[str, Any]]:
    """What was measured of cases of so many of something."""
    return [
        each
        for each in results.of("scaling")
        if each["case"].split()[1].rstrip("s") == noun
        and None not in each["programs"].values()
    ]


def _count(comparison: Mapping[str, Any]) -> int:
    return int(comparison["case"].split()[0].replace(",", ""))


# The picture.


def draw_ratios(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Points with quartiles: the time of `run` by that of two others, for each task."""
    names = {"to_best": "best", "to_tensorflow": "tensorflow"}
    rows = {"to_best": "the best other way in JAX", "to_tensorflow": "TensorFlow"}
    for shift, (key, label) in zip((-0.15, 0.15), rows.items(), strict=True):
        shown = [(i + shift, *case[key]) for i, case in enumerate(cases) if key in case]
        if not shown:
            continue
        places, middle, ends_low, ends_high = zip(*shown, strict=True)
        low = [a - b for a, b in zip(middle, ends_low, strict=True)]
        high = [b - a for a, b in zip(middle, ends_high, strict=True)]
        axes.errorbar(
            places, middle, (low, high), fmt=MARKERS[names[key]],
            color=COLORS[names[key]], capsize=2,
            markersize=5, label=f"by that of {label}",
        )  # fmt: skip
    axes.axhline(1, color="#7f7f7f", linewidth=1)
    labels = [f"{case['task']}\n{case['replicas']}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set(yscale="log", ylabel="time of a step of run")
    _plain_ticks(axes.yaxis, [0.3, 0.4, 0.5, 0.7, 1.0, 1.2])
    title = "Training steps, by number of devices (median, quartiles)"
    axes.set_title(title, loc="left")
    # Beside the title: points may be anywhere in the axes.
    axes.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def draw_times(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Points: milliseconds of a step of each form, on the most devices."""
    replicas = max(case["replicas"] for case in cases)
    shown = [case for case in cases if case["replicas"] == replicas]
    for form in dict.fromkeys(form for case in shown for form in case["ms"]):
        found = [(i, c["ms"][form]) for i, c in enumerate(shown) if form in c["ms"]]
        places, values = zip(*found, strict=True)
        axes.plot(
            places, values, MARKERS[form],
            color=COLORS[form], markersize=6, alpha=0.85, label=NAMES.get(form, form),
        )  # fmt: skip
    axes.set_xticks(range(len(shown)), [case["task"] for case in shown], fontsize=8)
    axes.set(yscale="log", ylabel="ms")
    _plain_ticks(axes.yaxis, [2, 5, 10, 20, 50, 100])
    axes.set_title(f"A step on {replicas} devices, which share the cores")
    axes.legend(fontsize=7, ncols=3)
    axes.set_xlim(-0.5, len(shown) - 0.5)


def draw_replicas(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Lines: the time of a step with the number of replicas."""
    counts = [row["replicas"] for row in rows]
    styles = {"step": ("run", "o-"), "floor": ("without communication", "o:")}
    for key, (label, style) in styles.items():
        values = [row[key] for row in rows]
        axes.plot(counts, values, style, color=COLORS["run"], markersize=4, label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="replicas, which share the cores",
        ylabel="ms",
    )
    _plain_ticks(axes.xaxis, counts)
    _plain_ticks(axes.yaxis, [1, 2, 5, 10, 20, 40])
    axes.set_title("A step of 30 x 32")
    axes.legend(fontsize=8)


def draw_start(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Lines: tracing and compiling with the number of replicas."""
    counts = [row["replicas"] for row in rows]
    for key, style in (("compile", "o-"), ("trace", "o--")):
        values = [row[key] for row in rows]
        axes.plot(counts, values, style, color=COLORS["run"], markersize=4, label=key)
    axes.set(xscale="log", xlabel="replicas", ylabel="processor seconds")
    _plain_ticks(axes.xaxis, counts)
    axes.set_ylim(bottom=0)
    axes.set_title("Start of run, 60 arrays")
    axes.legend(fontsize=8)


def draw_arrays(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Lines: tracing and compiling with the number of arrays."""
    for form in ("run", "shard_map"):
        own = [row for row in rows if row["form"] == form]
        counts = [row["arrays"] for row in own]
        for key, style in (("compile", "-"), ("trace", "--")):
            axes.plot(
                counts, [row[key] for row in own], MARKERS[form] + style,
                color=COLORS[form], markersize=4, label=f"{key}, {form}",
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="arrays", ylabel="processor seconds")
    _plain_ticks(axes.xaxis, [10, 100, 1000])
    _plain_ticks(axes.yaxis, [0.1, 0.3, 1, 3, 10])
    axes.set_title("Start, 8 replicas")
    axes.legend(fontsize=8)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(FixedLocator([]))
    axis.set_minor_formatter(NullFormatter())


def draw(results: Results) -> Figure:
    """All five; a panel of which nothing was measured stays empty."""
    with plt.style.context("jaxstrategy.demo.pictures"):
        figure = plt.figure(figsize=(11, 10), layout="constrained")
        panels = figure.subplot_mosaic(
            [["ratios"] * 6, ["times"] * 3 + ["replicas"] * 3]
            + [["start"] * 3 + ["arrays"] * 3]
        )
        shown = shown_of(results)
        drawn = {
            "ratios": (draw_ratios, shown["steps"]),
            "times": (draw_times, shown["steps"]),
            "replicas": (draw_replicas, shown["replicas"]),
            "start": (draw_start, shown["replicas"]),
            "arrays": (draw_arrays, shown["arrays"]),
        }
        for name, (draw_panel, rows) in drawn.items():
            if rows:
                draw_panel(panels[name], rows)
            else:
                panels[name].set_axis_off()
        plt.close(figure)
    return figure


def shown_of(results: Results) -> dict[str, list[dict[str, Any]]]:
    """All that the picture is drawn from."""
    return {
        "steps": steps(results),
        "replicas": by_replicas(results),
        "arrays": by_arrays(results),
    }


def digest(results: Results) -> str:
    """Of what a picture is drawn from; it is in the picture's file."""
    return hashlib.sha256(json.dumps(shown_of(results)).encode()).hexdigest()


def save(results: Results, path: pathlib.Path) -> None:
    """The picture's file."""
    metadata = {"Description": digest(results)}
    draw(results).savefig(path, dpi=110, transparent=True, metadata=metadata)
