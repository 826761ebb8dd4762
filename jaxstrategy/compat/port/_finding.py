"""What the tool tells about names of a program: `Finding`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import final


@final
@dataclasses.dataclass(frozen=True, order=True)
class CodePlace:
    """Where a name stands: line and column, both from 1.

    `cell` is the number of a notebook's code cell, from 1; 0 in other files.
    """

    cell: int
    line: int
    column: int

    def __str__(self) -> str:
        spot = f"{self.line}:{self.column}"
        return f"cell {self.cell}:{spot}" if self.cell else spot


@final
@dataclasses.dataclass(frozen=True)
class Finding:
    """Names of which the same is to know or to do.

    Attributes:
      text: what to do, or what differs.
      names: each with its places, in order; with TensorFlow's modules.
      decide: a person must do it; False: it works, and differs.
    """

    text: str
    names: tuple[tuple[str, tuple[CodePlace, ...]], ...]
    decide: bool

    @property
    def first(self) -> CodePlace:
        return self.names[0][1][0]

    def line(self, path: str) -> str:
        """The finding in one line that editors can follow."""
        kind = "decide" if self.decide else "note"
        (name, (_, *others)), *rest = self.names
        told = [_told(name, others), *(_told(*each) for each in rest)]
        return f"{path}:{self.first}: {kind}: {', '.join(told)}: {self.text}"

    def moved(self, move: Callable[[CodePlace], CodePlace]) -> Finding:
        """The same with other places."""
        names = tuple((n, tuple(map(move, places))) for n, places in self.names)
        return dataclasses.replace(self, names=names)


def found(name: str, text: str, place: CodePlace, decide: bool) -> Finding:
    """A finding of one name at one place."""
    return Finding(text, ((name, (place,)),), decide)


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each text: what is to decide before what is to know."""
    by_text: dict[tuple[bool, str], dict[str, set[CodePlace]]] = {}
    for each in findings:
        names = by_text.setdefault((each.decide, each.text), {})
        for name, places in each.names:
            names.setdefault(name, set()).update(places)
    together = [
        Finding(text, _in_order(names), decide)
        for (decide, text), names in by_text.items()
    ]
    return tuple(sorted(together, key=lambda f: (not f.decide, f.first, f.text)))


def _in_order(
    names: dict[str, set[CodePlace]],
) -> tuple[tuple[str, tuple[CodePlace, ...]], ...]:
    rows = [(name, tuple(sorted(places))) for name, places in names.items()]
    return tuple(sorted(rows, key=lambda row: (row[1][0], row[0])))


def _told(name: str, places: Iterable[CodePlace]) -> str:
    spots = ", ".join(map(str, places))
    return f"{name} ({spots})" if spots else name
