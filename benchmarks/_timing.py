"""Programs measured side by side, and the record of what came out.

The programs take turns, so that a machine that is slow for a while is slow for all of
them, and a claim rests on the ratio within each turn. A script yields a `Comparison`
for each quantity of each case and hands them to `report`, which prints tables and
writes the JSON that `run_all.py` collects.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Turns that are taken however long they are.
FEWEST = 5


def in_turn(
    measures: Mapping[str, Callable[[], T]], rounds: int, seconds: float = math.inf
) -> dict[str, list[T]]:
    """What each of `measures` returned at each of `rounds` turns.

    Each turn has another order, the same at each call of this function. Python's
    garbage collector rests during a turn. After `seconds` no further turn is begun.
    """
    names = list(measures)
    results: dict[str, list[T]] = {name: [] for name in measures}
    order = random.Random(0)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= FEWEST and time.perf_counter() - start > seconds:
            break
        gc.collect()
        gc.disable()
        order.shuffle(names)
        try:
            for name in names:
                results[name].append(measures[name]())
        finally:
            gc.enable()
    return results


@dataclasses.dataclass(frozen=True)
class Spread:
    """The middle of some numbers, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and the quartiles of `values`."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity of one case: ours first, then what it is held against, then others.

    Less is better of every quantity. Case and quantity together name a comparison from
    one run to the next, so they hold nothing that was measured.

    Attributes:
      case: what was run.
      quantity: what was measured.
      unit: of the numbers in the table.
      values: for each program, one number per turn; none where it was stopped.
      target: how many times the second program's number the first one's may be; None
        where nothing is claimed.
      in_percent: whether the table shows the ratio as a share.
      least: how many times the second program's number the first one's must be.
      note: what else was found, for the table.
      tolerance: the part by which the ratio may grow from one run to the next.
    """

    case: str
    quantity: str
    unit: str
    values: Mapping[str, Sequence[float]]
    target: float | None = None
    in_percent: bool = False
    _: dataclasses.KW_ONLY
    least: float = 0.0
    note: str = ""
    tolerance: float = 0.1

    @property
    def spreads(self) -> dict[str, Spread | None]:
        """Of each program; None where it was stopped."""
        return {
            name: Spread.of(values) if values else None
            for name, values in self.values.items()
        }

    @property
    def ratio(self) -> Spread | None:
        """The first program's number by the second one's, turn by turn.

        None where there is no second program, or one of both was stopped.
        """
        if len(self.values) < 2:
            return None
        ours, theirs, *_ = self.values.values()
        if not ours or not theirs:
            return None
        return Spread.of([_quotient(a, b) for a, b in zip(ours, theirs, strict=True)])

    @property
    def is_met(self) -> bool:
        """Whether the median ratio is within the target.

        Where one of both was stopped: whether it was not ours alone.
        """
        if self.target is None:
            return True
        if self.ratio is None:
            return self._measured != [False, True]
        return self.least <= self.ratio.median <= self.target

    @property
    def verdict(self) -> str:
        """The same in a word; none where nothing is claimed or was measured."""
        if self.target is None or not any(self._measured):
            return ""
        return "met" if self.is_met else "missed"

    @property
    def _measured(self) -> list[bool]:
        """Whether there are numbers of the first program, and of the second."""
        return [len(values) > 0 for values in list(self.values.values())[:2]]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            **dataclasses.asdict(self),
            "spreads": {
                name: spread and dataclasses.astuple(spread)
                for name, spread in self.spreads.items()
            },
            "ratio": self.ratio and dataclasses.astuple(self.ratio),
            "verdict": self.verdict,
        }


def _quotient(a: float, b: float) -> float:
    return 1.0 if a == b else a / b


# The options that all scripts share, and what they do with what they measured.


def add_options(
    parser: argparse.ArgumentParser,
    *,
    rounds: int | None = None,
    seconds: float | None = None,
) -> None:
    """Give a script's command line what all scripts have.

    `--rounds` and `--seconds` are there if the script has a default for them.
    """
    add = parser.add_argument
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help="turns of each case, at most")
    if seconds is not None:
        told = "of turns of each case, about"
        add("--seconds", type=float, default=seconds, help=told)
    add("--json", type=pathlib.Path, help="a file for every single number")
    add("--check", action="store_true", help="exit with 1 when a target is missed")


def report(comparisons: Iterable[Comparison], options: argparse.Namespace) -> None:
    """Print tables of all comparisons, and write them to the file that was asked for.

    The file is written after each, and the tables are printed when an error or Ctrl-C
    ends the measuring, so that nothing that was measured is lost.

    Raises:
      SystemExit: a target was missed, with `--check`.
    """
    found: list[Comparison] = []
    try:
        for comparison in comparisons:
            found.append(comparison)
            if options.json is not None:
                _write(options.json, found)
    finally:
        if found:
            print_tables(found)
    if options.check and not all(each.is_met for each in found):
        sys.exit(1)


def _write(path: pathlib.Path, found: Sequence[Comparison]) -> None:
    """In one step, so that the file is whole whenever somebody reads it."""
    content = {
        "script": pathlib.Path(sys.argv[0]).stem,
        "arguments": sys.argv[1:],
        "comparisons": [each.as_json() for each in found],
    }
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content))
    os.replace(part, path)


# Tables.


def print_tables(comparisons: Sequence[Comparison]) -> None:
    """A table for all comparisons of the same programs, then a line per quantity."""
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(tuple(comparison.values), []).append(comparison)
    for group in groups.values():
        print()
        quantities = [each.quantity for each in group]
        print_table(sorted(group, key=lambda each: quantities.index(each.quantity)))


def print_table(comparisons: Sequence[Comparison]) -> None:
    """One line per comparison, then one per quantity on whether its target is met.

    Numbers are medians, followed by the quartiles.
    """
    names = list(comparisons[0].values)
    heads = ["", "", *names, "ratio", "target", "", ""]
    rows = [heads, *map(_cells, comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print()
    compared = [each for each in comparisons if each.verdict]
    for quantity, group in itertools.groupby(
        sorted(compared, key=lambda c: c.quantity), key=lambda c: c.quantity
    ):
        print(_verdict(quantity, list(group)))


def _cells(comparison: Comparison) -> list[str]:
    numbers = [spread_text(s, comparison.unit) for s in comparison.spreads.values()]
    return [
        comparison.case,
        comparison.quantity,
        *numbers,
        ratio_text(comparison.ratio, comparison.in_percent),
        target_text(comparison.target, comparison.in_percent),
        comparison.verdict,
        comparison.note,
    ]


def spread_text(spread: Spread | None, unit: str) -> str:
    """A median, and the quartiles in brackets."""
    if spread is None:
        return "stopped"
    form = _digits(spread.median)
    return f"{spread.median:{form}} {unit}{_quartiles(spread, form)}"


def ratio_text(ratio: Spread | None, in_percent: bool = False) -> str:
    """The same of a ratio."""
    if ratio is None:
        return ""
    middle = ".2%" if in_percent else ".3f"
    ends = ".2%" if in_percent else ".2f"
    return f"{ratio.median:{middle}}{_quartiles(ratio, ends)}"


def target_text(target: float | None, in_percent: bool = False) -> str:
    """What a ratio may be at most."""
    if target is None:
        return ""
    return f"{target:.2%}" if in_percent else f"{target:.2f}"


def _digits(number: float) -> str:
    """None behind the point of hundreds, and two that count of what is small."""
    if number == 0 or abs(number) >= 100:
        return ".0f"
    return ".2f" if abs(number) >= 0.1 else ".2g"


def _quartiles(spread: Spread, form: str) -> str:
    """Nothing for what is one number."""
    if spread.low == spread.high:
        return ""
    return f" ({spread.low:{form}}-{spread.high:{form}})"


def _verdict(quantity: str, group: Sequence[Comparison]) -> str:
    met = sum(each.verdict == "met" for each in group)
    told = f"{quantity}: met in {met} of {len(group)}"
    measured = [each for each in group if each.ratio is not None]
    if not measured:
        return told
    worst = max(measured, key=_excess)
    at_most = target_text(worst.target, worst.in_percent)
    ratio = ratio_text(worst.ratio, worst.in_percent)
    return f"{told}; worst {ratio}, at most {at_most} wanted, {worst.case}"


def _excess(comparison: Comparison) -> float:
    """How many times its target the ratio is."""
    assert comparison.ratio is not None and comparison.target is not None
    return comparison.ratio.median / comparison.target
