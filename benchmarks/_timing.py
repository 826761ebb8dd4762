"""Programs measured side by side, and a table of what came out.

The programs take turns, so that a machine that is slow for a while is slow for all of
them, and a claim rests on the ratio within each turn.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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

    Attributes:
      case: what was run.
      quantity: what was measured.
      unit: of the numbers in the table.
      values: for each program, one number per turn.
      target: how many times the second program's number the first one's may be.
      in_percent: whether the table shows the ratio as a share.
    """

    case: str
    quantity: str
    unit: str
    values: Mapping[str, Sequence[float]]
    target: float
    in_percent: bool = False

    @property
    def ratio(self) -> Spread:
        """The first program's number by the second one's, turn by turn."""
        ours, theirs, *_ = self.values.values()
        return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])

    @property
    def is_met(self) -> bool:
        """Whether the median ratio is within the target."""
        return self.ratio.median <= self.target

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {**dataclasses.asdict(self), "ratio": dataclasses.asdict(self.ratio)}


def print_table(comparisons: Sequence[Comparison]) -> None:
    """One line per comparison, then one per quantity on whether its target is met.

    Numbers are medians, followed by the quartiles.
    """
    names = list(comparisons[0].values)
    heads = ["", "", *names, "ratio", "target", ""]
    rows = [heads, *map(_cells, comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    print()
    for quantity, group in itertools.groupby(
        sorted(comparisons, key=lambda c: c.quantity), key=lambda c: c.quantity
    ):
        print(_verdict(quantity, list(group)))


def _cells(comparison: Comparison) -> list[str]:
    numbers = [
        _text(Spread.of(values), comparison.unit)
        for values in comparison.values.values()
    ]
    return [
        comparison.case,
        comparison.quantity,
        *numbers,
        _ratio_text(comparison),
        _target_text(comparison),
        "met" if comparison.is_met else "missed",
    ]


def _ratio_text(comparison: Comparison) -> str:
    ratio = comparison.ratio
    middle = ".2%" if comparison.in_percent else ".3f"
    ends = ".2%" if comparison.in_percent else ".2f"
    return f"{ratio.median:{middle}}{_quartiles(ratio, ends)}"


def _target_text(comparison: Comparison) -> str:
    if comparison.in_percent:
        return f"{comparison.target:.2%}"
    return f"{comparison.target:.2f}"


def _text(spread: Spread, unit: str) -> str:
    form = ".0f" if spread.median >= 100 else ".2f"
    return f"{spread.median:{form}} {unit}{_quartiles(spread, form)}"


def _quartiles(spread: Spread, form: str) -> str:
    """Nothing for what is one number."""
    if spread.low == spread.high:
        return ""
    return f" ({spread.low:{form}}-{spread.high:{form}})"


def _verdict(quantity: str, group: Sequence[Comparison]) -> str:
    met = sum(comparison.is_met for comparison in group)
    worst = max(group, key=lambda comparison: comparison.ratio.median)
    return (
        f"{quantity}: at most {_target_text(worst)} wanted, met in {met} of "
        f"{len(group)}; worst {_ratio_text(worst)}, {worst.case}"
    )
