"""What runs have measured, how two runs are compared, and the page `FIGURES.md`.

One file has the runs (when, on which machine), the scripts (by which command, how long,
how it ended) and the comparisons, each with the number of its run.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from _harness import HERE, Spread, ratio_text, target_text, write_whole

# A spread in the file: median, lower and upper quartile.
Record = dict[str, Any]
Key = tuple[str, str, str]

DONE = "done"
# More of the machine than this share in other processes, and figures are uncertain.
BUSY = 0.10


def key(comparison: Record) -> Key:
    return comparison["script"], comparison["case"], comparison["quantity"]


@dataclasses.dataclass(frozen=True)
class Results:
    """What the file has.

    Attributes:
      runs: what `about_machine` said, and which share others had.
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
        """With a line for each run, script and comparison."""
        parts = []
        for field in dataclasses.fields(self):
            rows = ",\n".join(
                f"  {json.dumps(row)}" for row in getattr(self, field.name)
            )
            parts.append(f' "{field.name}": [' + (f"\n{rows}\n ]" if rows else "]"))
        write_whole(path, "{\n" + ",\n".join(parts) + "\n}\n")

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
        scripts = {each["script"]: each for each in self.scripts}
        kept = {key(each): each for each in self.comparisons}
        for script, comparisons in measured:
            name = script["script"]
            scripts[name] = {**script, "run": len(self.runs)}
            if script["outcome"] == DONE:
                again = {(name, each["quantity"]) for each in comparisons}
                kept = {k: v for k, v in kept.items() if (k[0], k[2]) not in again}
            for each in comparisons:
                new = {"script": name, "run": len(self.runs), **each}
                kept[key(new)] = new
        rows = [*scripts.values()], [*kept.values()]
        # Runs of which nothing is left go, and the others are numbered anew.
        used = sorted({each["run"] for of in rows for each in of})
        renumbered = [
            [{**each, "run": used.index(each["run"])} for each in of] for of in rows
        ]
        return Results([[*self.runs, run][number] for number in used], *renumbered)


# The comparison of two runs.


def regressions(last: Results, new: Results) -> list[tuple[Record, Record]]:
    """Returns the comparisons whose ratio has grown, of the last page and of now.

    The ratio is that of ours to the baseline that was measured in the same run, so that
    another machine or another load changes both. It has grown if its median is larger
    by more than the comparison's tolerance (10 %, if the script says nothing else), and
    the new quartiles do not overlap the old ones; or if ours was stopped and was not
    before. Where the ratio must lie between two limits: if it did, and does not now.
    Where another baseline was measured than on the page, nothing is compared.
    """
    before = {key(each): each for each in last.comparisons}
    pairs = ((before[key(new)], new) for new in new.comparisons if key(new) in before)
    return [(then, now) for then, now in pairs if _has_grown(then, now)]


def _has_grown(then: Record, now: Record) -> bool:
    if then["ratio"] is None or [*then["programs"]][:2] != [*now["programs"]][:2]:
        return False
    if now["ratio"] is None:
        # Stopped: whether that was ours, which is the first.
        return next(iter(now["programs"].values())) is None
    if now["least"]:
        return then["verdict"] == "met" and now["verdict"] == "missed"
    (old, _, old_high), (median, low, _) = then["ratio"], now["ratio"]
    return median > old * (1 + now["tolerance"]) and low > old_high


def regression_text(then: Record, now: Record) -> str:
    texts = []
    for ratio in (then["ratio"], now["ratio"]):
        median, low, high = ratio or (0, 0, 0)
        texts.append(f"{median:.3f} ({low:.2f}-{high:.2f})" if ratio else "stopped")
    return "{}: {}, {}: ".format(*key(now)) + ", now ".join(texts)


def differences(last: Results, new: Results) -> list[str]:
    """Returns what is another machine or version in two runs, a line each."""
    names = ("processor", "cores", "memory_gib", "system", "machine", "python")
    found = {}
    for then in last.runs:
        now = new.runs[-1]
        pairs = {name: (then.get(name), now.get(name)) for name in names}
        versions = [run.get("versions", {}) for run in (then, now)]
        for name in sorted({*versions[0], *versions[1]}):
            pairs[name] = (versions[0].get(name), versions[1].get(name))
        lines = (f"  {name}: {a}, now {b}" for name, (a, b) in pairs.items() if a != b)
        found |= dict.fromkeys(lines)
    return [*found]


# The machine, and what else runs there.

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
STAT = pathlib.Path("/proc/stat")
# The columns of /proc/stat in which a processor works: user, nice, system, interrupts
# of both kinds, and what the host gives to others. Guests are part of the first two.
BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


def about_machine() -> Record:
    """Returns the machine, the versions of what is measured, date and commit."""
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    memory = 0.0  # where it is not known
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def cores() -> int:
    """Returns how many of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _commit() -> str:
    """The commit, and whether files differ from it; nothing outside of a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    try:
        found = git("rev-parse", "--short", "HEAD")
        return f"{found}, changed" if git("status", "--porcelain", "-uno") else found
    except OSError:
        return ""


class Watch:
    """Tells which share of the cores other processes have had since it was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float | None:
        """The share of all cores; None where that cannot be known.

        Children of this process count as its own once it has waited for them.
        """
        pairs = zip(self._start, self._now(), strict=True)
        seconds, busy, own = (b - a for a, b in pairs)
        if not STAT.exists() or seconds <= 0:
            return None
        return max(0.0, (busy - own) / (seconds * cores()))

    def _now(self) -> tuple[float, float, float]:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        total = 0
        if STAT.exists():
            allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            for line in STAT.read_text().splitlines():
                name, *columns = line.split()
                if name in allowed:
                    total += sum(int(columns[i]) for i in BUSY_COLUMNS)
        return time.perf_counter(), total / os.sysconf("SC_CLK_TCK"), own


def others_now(seconds: float = 3.0) -> float | None:
    """Returns the share of all cores that others have while this process waits.

    Where the system does not tell that: by the load average of the last minute.
    """
    watch = Watch()
    time.sleep(seconds)
    share = watch.others()
    if share is None and hasattr(os, "getloadavg"):
        return os.getloadavg()[0] / cores()
    return share


# The page.

HEAD = """# Figures

<!-- `python benchmarks/run_all.py` writes this page, from results.json. -->

Numbers are medians of turns (quartiles in brackets); a ratio is of the first program to
the second, turn by turn. [What each benchmark claims](README.md).
"""
PICTURE = "![Steps of all forms; scaling of a step and of start-up](figures.png)\n"


def page(results: Results) -> str:
    """Returns the page."""
    parts = [HEAD, *_machines(results), PICTURE, _summary(results), _missed(results)]
    for script in results.scripts:
        parts += _section(script, results)
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    told = ("| " + " | ".join(line) + " |" for line in lines)
    return "".join(f"{re.sub(r' +', ' ', line)}\n" for line in told)


def _share(others: float | None) -> str:
    return "not known" if others is None else f"{others:.0%}"


def _machines(results: Results) -> Iterator[str]:
    """A table of the machine for each run of which there are figures."""

    def listed(*parts: str) -> str:
        return ", ".join(part for part in parts if part)

    for number, run in reversed([*enumerate(results.runs)]):
        count = sum(each["run"] == number for each in results.comparisons)
        part = f"{count} of {len(results.comparisons)} comparisons"
        memory = f"{run['memory_gib']:g} GiB" if run["memory_gib"] else ""
        processor = run["processor"], f"{run['cores']} cores"
        packages = (f"{name} {version}" for name, version in run["versions"].items())
        several = len(results.runs) > 1
        others = run["others"]
        rows = [
            ("measured", listed(run["date"], run["commit"], part if several else "")),
            ("machine", listed(*processor, memory, run["system"])),
            ("software", listed(f"Python {run['python']}", *packages)),
            (
                "other processes before",
                _share(others) + " of the cores" * (others is not None),
            ),
        ]
        yield _table(("", ""), rows)


def _summary(results: Results) -> str:
    rows = []
    for script in results.scripts:
        name = script["script"]
        claimed = [each for each in results.of(name) if each["verdict"]]
        met = sum(each["verdict"] == "met" for each in claimed)
        rows.append(
            (
                f"[{name}](#{name})",
                str(len(results.of(name))),
                f"{met} of {len(claimed)}" if claimed else "",
                f"{script['seconds']:.0f}",
                _share(script["others"]),
                "" if script["outcome"] == DONE else script["outcome"],
            )
        )
    heads = ("benchmark", "comparisons", "targets met", "seconds", "others had", "")
    return "## All benchmarks\n\n" + _table(heads, rows)


def _missed(results: Results) -> str:
    """What is not as it should be, farthest first."""

    def excess(each: Mapping[str, Any]) -> float:
        if each["ratio"] is None:
            return float("inf")
        median, least = each["ratio"][0], each["least"]
        over = median / each["target"] if each["target"] else float("inf")
        return max(over, least / median if median else 0.0)

    missed = [each for each in results.comparisons if each["verdict"] == "missed"]
    missed.sort(key=excess, reverse=True)
    rows = [(*key(each), _ratio(each), _target(each)) for each in missed]
    heads = ("benchmark", "case", "quantity", "ratio", "target")
    return "## Missed targets\n\n" + _table(heads, rows) if rows else ""


def _section(script: Record, results: Results) -> Iterator[str]:
    name, others = script["script"], script["others"]
    told = f"`python benchmarks/{script['command']}`, "
    told += f"{results.runs[script['run']]['date']}."
    if others is not None and others > BUSY:
        told += f" **Other processes had {others:.0%} of the cores.**"
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
        yield f"{title[0].upper()}{title[1:]}:\n"
        yield _table(heads, [_row(each, heads, script, results) for each in group])


def _row(
    each: Record, heads: Sequence[str], script: Record, results: Results
) -> list[str]:
    numbers = [_number(spread) for spread in each["programs"].values()]
    notes = [each["verdict"], each["note"]]
    if each["run"] != script["run"]:
        notes.append(f"measured {results.runs[each['run']]['date'].split()[0]}")
    told = ", ".join(note for note in notes if note)
    row = [each["case"], *numbers]
    if len(numbers) > 1:
        return [*row, _ratio(each), _target(each), told]
    if len(heads) > len(row):
        return [*row, told]
    return [f"{each['case']} ({told})" if told else each["case"], *numbers]


def _number(spread: Sequence[float] | None) -> str:
    """Three digits that count, without an exponent where it can be read."""
    if spread is None:
        return "stopped"

    def digits(number: float) -> str:
        if number == 0 or abs(number) >= 100:
            return f"{number:,.0f}"
        return f"{number:.2g}" if abs(number) < 0.001 else f"{number:.3g}"

    median, low, high = map(digits, spread)
    return median if spread[1] == spread[2] else f"{median} ({low}-{high})"


def _ratio(each: Mapping[str, Any]) -> str:
    ratio = None if each["ratio"] is None else Spread(*each["ratio"])
    return ratio_text(ratio, each["in_percent"])


def _target(each: Mapping[str, Any]) -> str:
    target = target_text(each["target"], each["in_percent"])
    if each["least"] and target:
        return f"{each['least']:.2f} to {target}"
    return target


# The picture.

# The colour and the marker of a program, in all panels.
STYLES = {
    "run": ("#3b82c4", "o"),
    "shard_map": ("#d9730d", "s"),
    "pmap": ("#2e9e4f", "^"),
    "jit": ("#9467bd", "D"),
    "tensorflow": ("#d64545", "v"),
    "torch": ("#8a8a8a", "P"),
    "best other way in JAX": ("#159aa8", "*"),
}
PANELS = {
    "ratios": ("Training steps, by number of devices", "time of run, by that of"),
    "times": ("A step on 8 devices, which share the cores", "ms"),
    "step": ("A step of 30 x 32, by number of replicas", "ms"),
    "start": ("Start of run, 60 arrays, by number of replicas", "processor seconds"),
    "arrays": ("Start on 8 replicas, by number of arrays", "processor seconds"),
}


def drawn_of(results: Results) -> dict[str, list[list[Any]]]:
    """Returns the points of each panel: label, style, place, median and quartiles."""
    found: dict[str, list[list[Any]]] = {name: [] for name in PANELS}
    names = {"JAX": "best other way in JAX", "tensorflow": "tensorflow"}
    for each in results.of("train_step"):
        task, devices = each["case"].rsplit(", ", 1)
        if name := names.get(each["quantity"]):
            place = f"{task}\n{devices.split()[0]}"
            found["ratios"].append([name, name, place, *each["ratio"]])
        for form, spread in each["programs"].items():
            row = [form, form, task, *(us / 1e3 for us in spread)]
            known = (old[:3] for old in found["times"])
            if form in STYLES and devices == "8 devices" and row[:3] not in known:
                found["times"].append(row)
    for each in results.of("scaling"):
        number, noun = each["case"].split()[:2]
        programs, quantity = each["programs"], each["quantity"]
        for form, spread in programs.items() if None not in programs.values() else ():
            style = form if form in STYLES else "run"
            point = [style, number, *spread]
            if noun.startswith("array"):
                if quantity in ("trace", "compile"):
                    found["arrays"].append([f"{quantity}, {form}", *point])
            elif quantity == "step":
                found["step"].append([form, *point])
            elif form == "run" and quantity in ("trace", "compile"):
                found["start"].append([quantity, *point])
    return found


def draw(results: Results, path: pathlib.Path) -> None:
    """Writes the picture; a panel of which nothing was measured stays empty."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    with plt.style.context("jaxstrategy.demo.pictures"):
        figure = plt.figure(figsize=(11, 10), layout="constrained")
        rows: Any = [["ratios", "ratios"], ["times", "step"], ["start", "arrays"]]
        panels = figure.subplot_mosaic(rows)
        for name, points in drawn_of(results).items():
            axes, (title, unit) = panels[name], PANELS[name]
            if not points:
                axes.set_axis_off()
                continue
            places = list(dict.fromkeys(place for _, _, place, *_ in points))
            labels = list(dict.fromkeys(label for label, *_ in points))
            for i, label in enumerate(labels):
                own = [point for point in points if point[0] == label]
                x = [places.index(point[2]) for point in own]
                middle, low, high = zip(*(point[3:] for point in own), strict=True)
                errors = [
                    [abs(a - b) for a, b in zip(middle, ends, strict=True)]
                    for ends in (low, high)
                ]
                color, marker = STYLES[own[0][1]]
                if name in ("ratios", "times"):  # beside each other, and no line
                    x = [each + 0.1 * (i - (len(labels) - 1) / 2) for each in x]
                else:
                    is_dashed = label.startswith(("trace", "without"))
                    marker += "--" if is_dashed else "-"
                style = {"color": color, "markersize": 5, "capsize": 2}
                axes.errorbar(x, middle, errors, fmt=marker, label=label, **style)
            axes.set(ylabel=unit)
            axes.set_xticks(range(len(places)), places, fontsize=8)
            axes.set_title(title, loc="left")
            axes.legend(fontsize=7, ncols=2)
            if name == "start":
                axes.set_ylim(bottom=0)
                continue
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        plt.close(figure)
        metadata = {"Description": digest(results)}
        figure.savefig(path, dpi=110, transparent=True, metadata=metadata)


def digest(results: Results) -> str:
    """Of what a picture is drawn from; it is in the picture's file."""
    return hashlib.sha256(json.dumps(drawn_of(results)).encode()).hexdigest()
