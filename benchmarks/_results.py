"""What runs have measured: one file, and how two of them are compared.

The file has the runs (when, on which machine), the scripts (with which arguments, how
long, how it ended) and the comparisons, each with the number of its run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# A spread in the file: median, lower and upper quartile.
Record = dict[str, Any]
Key = tuple[str, str, str]

DONE = "done"


@dataclasses.dataclass(frozen=True)
class Results:
    """What the file has.

    Attributes:
      runs: what `_machine.about` said, and which share others had.
      scripts: the last run of each.
      comparisons: of all scripts.
    """

    runs: Sequence[Record] = ()
    scripts: Sequence[Record] = ()
    comparisons: Sequence[Record] = ()

    @classmethod
    def read(cls, path: pathlib.Path) -> Results:
        """Of a file; none at all if there is no file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: pathlib.Path) -> None:
        """In one step, with a line for each run, script and comparison."""
        parts = []
        for field in dataclasses.fields(self):
            rows = [json.dumps(each) for each in getattr(self, field.name)]
            listed = ",\n".join(f"  {row}" for row in rows)
            parts.append(
                f' "{field.name}": [\n{listed}\n ]' if rows else f' "{field.name}": []'
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text("{\n" + ",\n".join(parts) + "\n}\n")
        os.replace(part, path)

    def of(self, script: str) -> list[Record]:
        """The comparisons of a script."""
        return [each for each in self.comparisons if each["script"] == script]

    def after(
        self, run: Record, measured: Sequence[tuple[Record, Sequence[Record]]]
    ) -> Results:
        """These results with those of a new run: scripts and their comparisons.

        Of a script that was done, cases that it no longer has are left out, except for
        quantities of which it measured nothing now: other frameworks may be missing
        today. Of one that failed, what it did not come to stays as it was.
        """
        number = len(self.runs)
        scripts = {each["script"]: each for each in self.scripts}
        kept = {_key(each): each for each in self.comparisons}
        for script, comparisons in measured:
            name = script["script"]
            scripts[name] = {**script, "run": number}
            quantities = {each["quantity"] for each in comparisons}
            if script["outcome"] == DONE:
                kept = {
                    key: each
                    for key, each in kept.items()
                    if each["script"] != name or each["quantity"] not in quantities
                }
            for each in comparisons:
                new = {"script": name, "run": number, **each}
                kept[_key(new)] = new
        return Results(
            [*self.runs, run], [*scripts.values()], [*kept.values()]
        )._renumbered()

    def _renumbered(self) -> Results:
        """Without the runs of which nothing is left."""
        used = sorted({each["run"] for each in (*self.scripts, *self.comparisons)})
        number = {run: index for index, run in enumerate(used)}

        def renamed(rows: Iterable[Record]) -> list[Record]:
            return [{**each, "run": number[each["run"]]} for each in rows]

        runs = [self.runs[run] for run in used]
        return Results(runs, renamed(self.scripts), renamed(self.comparisons))


def condensed(comparison: Mapping[str, Any]) -> Record:
    """Of what a script wrote: medians and quartiles in place of every number."""
    given = dict(comparison)
    programs = {name: _rounded(each) for name, each in given.pop("spreads").items()}
    turns = max(map(len, given.pop("values").values()))
    ratio = _rounded(given.pop("ratio"))
    return {**given, "programs": programs, "ratio": ratio, "turns": turns}


def _rounded(spread: Sequence[float] | None) -> list[float] | None:
    """Four digits that count."""
    return None if spread is None else [float(f"{value:.4g}") for value in spread]


def _key(comparison: Record) -> Key:
    return comparison["script"], comparison["case"], comparison["quantity"]


# The comparison of two runs.


@dataclasses.dataclass(frozen=True)
class Regression:
    """A ratio that has grown.

    Attributes:
      before: the comparison of the last page.
      now: the new one.
    """

    before: Record
    now: Record

    @property
    def key(self) -> Key:
        """Script, case and quantity."""
        return _key(self.now)

    def __str__(self) -> str:
        script, case, quantity = self.key
        return (
            f"{script}: {case}, {quantity}: {_told(self.before)}, now {_told(self.now)}"
        )


def regressions(last: Results, new: Results) -> list[Regression]:
    """The comparisons whose ratio has grown.

    The ratio is that of ours to the baseline that was measured in the same run, so that
    another machine or another load changes both. It has grown if its median is larger
    by more than the comparison's tolerance (10 %, if the script says nothing else), and
    the new quartiles do not overlap the old ones; or if ours was stopped and was not
    before. Where the ratio must lie between two limits: if it did, and does not now.
    Where another baseline was measured than on the page, nothing is compared.
    """
    before = {_key(each): each for each in last.comparisons}
    found = (
        Regression(before[_key(each)], each)
        for each in new.comparisons
        if _key(each) in before
    )
    return [each for each in found if _has_grown(each.before, each.now)]


def _has_grown(before: Record, now: Record) -> bool:
    if before["ratio"] is None or _pair(before) != _pair(now):
        return False
    if now["ratio"] is None:
        # Stopped: whether that was ours, which is the first.
        return next(iter(now["programs"].values())) is None
    if now["least"]:
        return before["verdict"] == "met" and now["verdict"] == "missed"
    (old, _, old_high), (median, low, _) = before["ratio"], now["ratio"]
    return median > old * (1 + now["tolerance"]) and low > old_high


def _pair(comparison: Record) -> list[str]:
    """The names of ours and of its baseline."""
    return list(comparison["programs"])[:2]


def _told(comparison: Record) -> str:
    if comparison["ratio"] is None:
        return "stopped"
    median, low, high = comparison["ratio"]
    return f"{median:.3f} ({low:.2f}-{high:.2f})"


def not_measured(last: Results, new: Results, scripts: Iterable[str]) -> list[Key]:
    """Comparisons of the last page that these scripts did not make now."""
    now = {_key(each) for each in new.comparisons}
    names = {*scripts}
    keys = [_key(each) for each in last.comparisons if each["script"] in names]
    return [key for key in keys if key not in now]


def difference(last: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What is another machine or version in two runs, a line each."""
    names = ("processor", "cores", "memory_gib", "system", "machine", "python")
    pairs = {name: (last.get(name), new.get(name)) for name in names}
    packages = {*last.get("versions", {}), *new.get("versions", {})}
    for name in sorted(packages):
        pairs[name] = (last["versions"].get(name), new["versions"].get(name))
    return [f"{name}: {a}, now {b}" for name, (a, b) in pairs.items() if a != b]
