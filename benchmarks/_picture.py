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

# The colour and the marker of a program, in all panels; best is shard_map, pmap or jit.
STYLES = {
    "run": ("#3b82c4", "o"),
    "shard_map": ("#d9730d", "s"),
    "pmap": ("#2e9e4f", "^"),
    "jit": ("#9467bd", "D"),
    "tensorflow": ("#d64545", "v"),
    "torch": ("#8a8a8a", "P"),
    "best": ("#159aa8", "*"),
}
Rows = Sequence[Mapping[str, Any]]


def shown_of(results: Results) -> dict[str, list[dict[str, Any]]]:
    """Returns what the picture is drawn from: medians, and ratios with quartiles."""
    steps: dict[str, dict[str, Any]] = {}
    for each in results.of("train_step"):
        task, devices = each["case"].rsplit(", ", 1)
        new = {"task": task, "replicas": int(devices.split()[0]), "ms": {}}
        case = steps.setdefault(each["case"], new)
        for form, spread in each["programs"].items():
            if form in STYLES:
                case["ms"].setdefault(form, spread[0] / 1e3)
        names = {"JAX": "to_best", "tensorflow": "to_tensorflow"}
        if each["quantity"] in names:
            case[names[each["quantity"]]] = each["ratio"]
    # Start-up and step: with so many replicas of `run`, and with so many arrays.
    replicas: dict[int, dict[str, Any]] = {}
    arrays: dict[tuple[int, str], dict[str, Any]] = {}
    for each in results.of("scaling"):
        number, noun = each["case"].split()[:2]
        count = int(number.replace(",", ""))
        for form, spread in each["programs"].items():
            if None in each["programs"].values():
                continue
            if noun.startswith("array"):
                row = arrays.setdefault((count, form), {"arrays": count, "form": form})
                row[each["quantity"]] = spread[0]
                continue
            row = replicas.setdefault(count, {"replicas": count})
            if form in ("run", "without communication"):
                row[each["quantity"] if form == "run" else "floor"] = spread[0]
    return {
        "steps": [case for case in steps.values() if "to_best" in case],
        "replicas": [replicas[key] for key in sorted(replicas)],
        "arrays": [arrays[key] for key in sorted(arrays)],
    }


def draw_ratios(axes: Any, cases: Rows) -> None:
    """Points with quartiles: the time of `run` by that of two others, for each task."""
    rows = {"best": "the best other way in JAX", "tensorflow": "TensorFlow"}
    for shift, (form, label) in zip((-0.15, 0.15), rows.items(), strict=True):
        key, (color, marker) = f"to_{form}", STYLES[form]
        shown = [(i + shift, *case[key]) for i, case in enumerate(cases) if key in case]
        if shown:
            places, middle, low, high = map(list, zip(*shown, strict=True))
            errors = [
                [a - b for a, b in zip(middle, low, strict=True)],
                [b - a for a, b in zip(middle, high, strict=True)],
            ]
            style = {"color": color, "capsize": 2, "markersize": 5}
            told = f"by that of {label}"
            axes.errorbar(places, middle, errors, fmt=marker, label=told, **style)
    axes.axhline(1, color="#7f7f7f", linewidth=1)
    labels = [f"{case['task']}\n{case['replicas']}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set(yscale="log", ylabel="time of a step of run")
    plain_ticks(axes.yaxis, [0.3, 0.4, 0.5, 0.7, 1.0, 1.2])
    title = "Training steps, by number of devices (median, quartiles)"
    axes.set_title(title, loc="left")
    # Beside the title: points may be anywhere in the axes.
    axes.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))


def draw_times(axes: Any, cases: Rows) -> None:
    """Points: milliseconds of a step of each form, on the most devices."""
    most = max(case["replicas"] for case in cases)
    shown = [case for case in cases if case["replicas"] == most]
    names = {"tensorflow": "TensorFlow", "torch": "PyTorch"}
    for form in dict.fromkeys(form for case in shown for form in case["ms"]):
        color, marker = STYLES[form]
        found = {i: c["ms"][form] for i, c in enumerate(shown) if form in c["ms"]}
        style = {"color": color, "markersize": 6, "alpha": 0.85}
        told = names.get(form, form)
        axes.plot(list(found), list(found.values()), marker, label=told, **style)
    axes.set_xticks(range(len(shown)), [case["task"] for case in shown], fontsize=8)
    axes.set(yscale="log", ylabel="ms")
    plain_ticks(axes.yaxis, [2, 5, 10, 20, 50, 100])
    axes.set_title(f"A step on {most} devices, which share the cores")
    axes.legend(fontsize=7, ncols=3)
    axes.set_xlim(-0.5, len(shown) - 0.5)


def draw_lines(
    axes: Any, rows: Rows, x: str, lines: Mapping[str, tuple[str, str, str]]
) -> None:
    """A line of a key of `rows` for each label: the key, the form, and the style."""
    for label, (key, form, style) in lines.items():
        own = [row for row in rows if row.get("form", form) == form]
        values = [row[x] for row in own], [row[key] for row in own]
        color, marker = STYLES[form]
        axes.plot(*values, marker + style, color=color, markersize=4, label=label)
    axes.set(xscale="log", xlabel=x, ylabel="processor seconds")
    axes.legend(fontsize=8)


def draw_replicas(axes: Any, rows: Rows) -> None:
    lines = {
        "run": ("step", "run", "-"),
        "without communication": ("floor", "run", ":"),
    }
    draw_lines(axes, rows, "replicas", lines)
    axes.set(yscale="log", xlabel="replicas, which share the cores", ylabel="ms")
    plain_ticks(axes.xaxis, [row["replicas"] for row in rows])
    plain_ticks(axes.yaxis, [1, 2, 5, 10, 20, 40])
    axes.set_title("A step of 30 x 32")


def draw_start(axes: Any, rows: Rows) -> None:
    lines = {"compile": ("compile", "run", "-"), "trace": ("trace", "run", "--")}
    draw_lines(axes, rows, "replicas", lines)
    plain_ticks(axes.xaxis, [row["replicas"] for row in rows])
    axes.set_ylim(bottom=0)
    axes.set_title("Start of run, 60 arrays")


def draw_arrays(axes: Any, rows: Rows) -> None:
    lines = {
        f"{key}, {form}": (key, form, style)
        for form in ("run", "shard_map")
        for key, style in (("compile", "-"), ("trace", "--"))
    }
    draw_lines(axes, rows, "arrays", lines)
    axes.set(yscale="log")
    plain_ticks(axes.xaxis, [10, 100, 1000])
    plain_ticks(axes.yaxis, [0.1, 0.3, 1, 3, 10])
    axes.set_title("Start, 8 replicas")


def plain_ticks(axis: Any, values: Sequence[float]) -> None:
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(FixedLocator([]))
    axis.set_minor_formatter(NullFormatter())


def draw(results: Results) -> Figure:
    """Draws all five; a panel of which nothing was measured stays empty."""
    shown = shown_of(results)
    drawn = {
        "ratios": (draw_ratios, shown["steps"]),
        "times": (draw_times, shown["steps"]),
        "replicas": (draw_replicas, shown["replicas"]),
        "start": (draw_start, shown["replicas"]),
        "arrays": (draw_arrays, shown["arrays"]),
    }
    with plt.style.context("jaxstrategy.demo.pictures"):
        figure = plt.figure(figsize=(11, 10), layout="constrained")
        rows = [["ratios", "ratios"], ["times", "replicas"], ["start", "arrays"]]
        panels = figure.subplot_mosaic(rows)
        for name, (draw_panel, of) in drawn.items():
            if of:
                draw_panel(panels[name], of)
            else:
                panels[name].set_axis_off()
        plt.close(figure)
    return figure


def digest(results: Results) -> str:
    """Of what a picture is drawn from; it is in the picture's file."""
    return hashlib.sha256(json.dumps(shown_of(results)).encode()).hexdigest()


def save(results: Results, path: pathlib.Path) -> None:
    """Writes the picture's file."""
    metadata = {"Description": digest(results)}
    draw(results).savefig(path, dpi=110, transparent=True, metadata=metadata)
