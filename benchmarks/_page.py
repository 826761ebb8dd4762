"""The page of figures, `FIGURES.md`, from results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _results import DONE, Results
from _timing import Spread, ratio_text, target_text

# More of the machine than this share in other processes, and figures are uncertain.
BUSY = 0.10

Record = Mapping[str, Any]

HEAD = """# Figures

<!-- `python benchmarks/run_all.py` writes this page, from results.json. -->

Numbers are medians of turns (quartiles in brackets); a ratio is of the first program to
the second, turn by turn. [What each script claims](README.md).
"""


def page(results: Results) -> str:
    """All of it."""
    parts = [HEAD, *_machines(results), PICTURE, _summary(results), _missed(results)]
    for script in results.scripts:
        parts += _section(script, results)
    return "\n".join(part for part in parts if part).rstrip() + "\n"


PICTURE = "![Steps of all forms; scaling of a step and of start-up](figures.png)\n"


def is_busy(script: Record) -> bool:
    """Whether others used the machine while the script ran."""
    return script["others"] is not None and script["others"] > BUSY


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    told = ("| " + " | ".join(line) + " |" for line in lines)
    return "".join(f"{re.sub(r' +', ' ', line)}\n" for line in told)


# The whole run.


def _machines(results: Results) -> Iterable[str]:
    """A table of the machine for each run of which there are figures."""
    newest = len(results.runs) - 1
    for number, run in reversed([*enumerate(results.runs)]):
        others = run["others"]
        count = sum(each["run"] == number for each in results.comparisons)
        part = f"{count} of {len(results.comparisons)} comparisons" if newest else ""
        share = "not known" if others is None else f"{others:.0%} of the cores"
        rows = [
            ("measured", _listed(run["date"], run["commit"], part)),
            ("machine", _machine(run)),
            ("software", _software(run)),
            ("other processes before", share),
        ]
        yield _table(("", ""), rows)


def _machine(run: Record) -> str:
    # Where the system does not tell it, it is 0.
    memory = f"{run['memory_gib']:g} GiB" if run["memory_gib"] else ""
    return _listed(run["processor"], f"{run['cores']} cores", memory, run["system"])


def _software(run: Record) -> str:
    packages = (f"{name} {version}" for name, version in run["versions"].items())
    return _listed(f"Python {run['python']}", *packages)


def _listed(*parts: str) -> str:
    """Those that are there."""
    return ", ".join(part for part in parts if part)


def _summary(results: Results) -> str:
    """A line a script."""
    rows = []
    for script in results.scripts:
        name = script["script"]
        claimed = [each for each in results.of(name) if each["verdict"]]
        met = sum(each["verdict"] == "met" for each in claimed)
        others = script["others"]
        rows.append(
            (
                f"[{name}](#{name})",
                str(len(results.of(name))),
                f"{met} of {len(claimed)}" if claimed else "",
                f"{script['seconds']:.0f}",
                "not known" if others is None else f"{others:.0%}",
                "" if script["outcome"] == DONE else script["outcome"],
            )
        )
    heads = ("script", "comparisons", "targets met", "seconds", "others had", "")
    return "## All scripts\n\n" + _table(heads, rows)


def _missed(results: Results) -> str:
    """What is not as it should be, farthest first."""
    missed = [each for each in results.comparisons if each["verdict"] == "missed"]
    if not missed:
        return ""
    missed.sort(key=_excess, reverse=True)
    rows = [
        (each["script"], each["case"], each["quantity"], _ratio(each), _target(each))
        for each in missed
    ]
    heads = ("script", "case", "quantity", "ratio", "target")
    return "## Missed targets\n\n" + _table(heads, rows)


def _excess(comparison: Record) -> float:
    """How many times its limit the ratio is."""
    if comparison["ratio"] is None:
        return float("inf")
    median, least = comparison["ratio"][0], comparison["least"]
    over = median / comparison["target"] if comparison["target"] else float("inf")
    return max(over, least / median if median else 0.0)


# A script.


def _section(script: Record, results: Results) -> Iterable[str]:
    name = script["script"]
    command = f"python benchmarks/{name}.py {script['arguments']}".strip()
    told = f"`{command}`, {results.runs[script['run']]['date']}."
    if is_busy(script):
        told += f" **Other processes had {script['others']:.0%} of the cores.**"
    if script["outcome"] != DONE:
        told += f" **It {script['outcome']}.**"
    yield f"## {name}\n\n{told}\n"
    groups: dict[tuple[str, ...], list[Record]] = {}
    for each in results.of(name):
        kind = (each["quantity"], each["unit"], *each["programs"])
        groups.setdefault(kind, []).append(each)
    for (quantity, unit, *programs), group in groups.items():
        heads = ["case", *programs]
        if len(programs) > 1:
            heads += ["ratio", "target", ""]
        elif any(each["note"] for each in group):
            heads += [""]
        title = f"{quantity}, {unit}" if unit else quantity
        rows = [_row(each, len(heads), script, results) for each in group]
        yield f"{title[0].upper()}{title[1:]}:\n"
        yield _table(heads, rows)


def _row(
    comparison: Record, columns: int, script: Record, results: Results
) -> Sequence[str]:
    numbers = [_number(each) for each in comparison["programs"].values()]
    notes = [comparison["verdict"], comparison["note"]]
    if comparison["run"] != script["run"]:
        notes.append(f"measured {results.runs[comparison['run']]['date'].split()[0]}")
    told = ", ".join(note for note in notes if note)
    row = [comparison["case"], *numbers]
    if len(numbers) > 1:
        return [*row, _ratio(comparison), _target(comparison), told]
    if columns > len(row):
        return [*row, told]
    return [f"{comparison['case']} ({told})" if told else comparison["case"], *numbers]


def _number(spread: Sequence[float] | None) -> str:
    if spread is None:
        return "stopped"
    median, low, high = spread
    if low == high:
        return _digits(median)
    return f"{_digits(median)} ({_digits(low)}-{_digits(high)})"


def _digits(number: float) -> str:
    """Three that count, without an exponent where it can be read."""
    if number == 0 or abs(number) >= 100:
        return f"{number:,.0f}"
    if abs(number) < 0.001:
        return f"{number:.2g}"
    return f"{number:.3g}"


def _ratio(comparison: Record) -> str:
    given = comparison["ratio"]
    ratio = None if given is None else Spread(*given)
    return ratio_text(ratio, comparison["in_percent"])


def _target(comparison: Record) -> str:
    target = target_text(comparison["target"], comparison["in_percent"])
    if comparison["least"] and target:
        return f"{comparison['least']:.2f} to {target}"
    return target
