"""Runs all benchmarks, one after the other, and writes the page of figures.

    python benchmarks/run_all.py                  at most 20 minutes on two idle cores
    python benchmarks/run_all.py --quick          5 minutes; the page stays as it is
    python benchmarks/run_all.py --check          the same, held against the last page

Each benchmark is a process of its own, with a limit of time. What they measured goes
into `results.json`, of which `FIGURES.md` is made. Of one that fails
or is ended, and after Ctrl-C, what was measured is kept, and the page says so.

A machine on which others have more than a tenth of the cores is refused, unless it is
called `--busy`; what others had during each benchmark is on the page.

With `--check`, or with `--quick`, the page stays as it is, and results are written to
another file. `--check` fails if the ratio of ours to a baseline of the same run has
grown: by more than 10 % (or what the benchmark says), with quartiles that do not
overlap those of the page, and once more when it is run again. A missed target is on the
page; it is no failure here.

The exit code is 0; 1 after a failure or with a regression; 2 on a busy machine; 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import psutil
from _harness import (
    HERE,
    Record,
    ratio_text,
    table,
    tables,
    target_text,
    write_whole,
)

DONE, INTERRUPTED = "done", "was interrupted"
# More of the machine than this share in other processes, and figures are uncertain.
BUSY = 0.10
# Seconds that a benchmark has to end its own processes.
GRACE = 15.0
WHOLE, QUICK = 20 * 60, 5 * 60


@dataclasses.dataclass(frozen=True)
class Script:
    """A benchmark of a whole run."""

    file: str
    name: str
    seconds: int  # a limit, on two idle cores, at which it is ended
    quick: int = 0  # the same in a quick run, which leaves it out where this is 0
    others: bool = False  # whether it compares with TensorFlow
    needs_others: bool = False  # whether it is left out without it


# In the order in which they run: what matters most comes first.
SUITE = (
    Script("train_step", "train_step", 180, 45, others=True),
    Script("steps", "dispatch", 85, 20),
    Script("tracing", "scaling", 105, 28),
    Script("reductions", "allreduce", 85, 20),
    Script("steps", "nnx", 60, 20),
    Script("steps", "several", 25, 15),
    Script("steps", "variables", 20),
    Script("tracing", "analysis", 25),
    Script("steps", "in_sync", 22, 12),
    Script("input", "input", 50, 13),
    Script("processes", "multiprocess", 50, 20),
    Script("processes", "predictions", 90, 20),
    Script("sharded", "meshes", 45, 25),
    Script("sharded", "sharded", 85),
    Script("input", "checkpoint", 22),
    Script("reductions", "compressed", 30, 15),
    Script("processes", "coordinator", 55, others=True, needs_others=True),
    Script("reliability", "soak", 18),
    Script("reliability", "recovery", 16),
    Script("tracing", "warm_start", 30),
    Script("reductions", "wide", 50, 15),
)


# The last run of each benchmark by its name: the command, how long it took, how it
# ended, on which machine and when, and its comparisons.
Results = dict[str, Record]


def read(path: pathlib.Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: pathlib.Path, results: Results) -> None:
    """Writes results, a line for each benchmark."""
    rows = (f" {json.dumps(k)}: {json.dumps(v)}" for k, v in results.items())
    write_whole(path, "{\n" + ",\n".join(rows) + "\n}\n")


def by_key(results: Results) -> dict[tuple[str, str, str], Record]:
    """The comparisons by benchmark, case and quantity."""
    return {
        (name, each["case"], each["quantity"]): each
        for name, record in results.items()
        for each in record["comparisons"]
    }


# The comparison of two runs.


# Benchmark, case and quantity, and what was measured then and now.
Regression = tuple[str, str, str, Record, Record]


def regressions(last: Results, new: Results) -> list[Regression]:
    """Returns the comparisons whose ratio has grown since the last page.

    The ratio is that of ours to the baseline that was measured in the same run, so that
    another machine or another load changes both. It has grown if its median is larger
    by more than the comparison's tolerance (10 %, if the script says nothing else), and
    the new quartiles do not overlap the old ones; or if ours was stopped and was not
    before. Where the ratio must lie between two limits: if it did, and does not now.
    Where another baseline was measured than on the page, nothing is compared.
    """
    before, now = by_key(last), by_key(new)
    return [
        (*name, before[name], each)
        for name, each in now.items()
        if name in before and _has_grown(before[name], each)
    ]


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


def differences(last: Results, new: Results) -> list[str]:
    """Returns what is another machine or version in two runs, a line each."""

    def about(record: Record) -> Record:
        machine = dict(record["machine"])
        for name in ("date", "commit", "load", "others"):
            machine.pop(name, None)
        return {**machine, **machine.pop("versions")}

    pairs = ((about(last[k]), about(new[k])) for k in new if k in last)
    found = (
        f"  {name}: {then.get(name)}, now {now[name]}"
        for then, now in pairs
        for name in now
        if then.get(name) != now[name]
    )
    return list(dict.fromkeys(found))


# The machine, and what else runs there.

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def about_machine() -> Record:
    """Returns the machine, the versions of what is measured, date and commit."""
    info = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "cores": len(cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
        "load": round(psutil.getloadavg()[0], 2),
    }


def cores() -> list[int]:
    """Returns those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


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

    def others(self) -> float:
        """The share of all cores.

        Children of this process count as its own once it has waited for them.
        """
        pairs = zip(self._start, self._now(), strict=True)
        seconds, busy, own = (b - a for a, b in pairs)
        return max(0.0, (busy - own) / (seconds * len(cores())))

    def _now(self) -> tuple[float, float, float]:
        of_each = psutil.cpu_times(percpu=True)
        # Guests are part of other columns; what waits for a disk does not work.
        idle = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(
            value
            for core in cores()
            for name, value in of_each[core]._asdict().items()
            if name not in idle
        )
        return time.perf_counter(), busy, sum(os.times()[:4])


def others_now(seconds: float = 3.0) -> float:
    """Returns the share of all cores that others have while this process waits."""
    watch = Watch()
    time.sleep(seconds)
    return watch.others()


# The page.

HEAD = """# Figures

<!-- `python benchmarks/run_all.py` writes this page, from results.json. -->

Numbers are medians of turns (quartiles in brackets); a ratio is of the first program to
the second, turn by turn. [What each benchmark claims](README.md).
"""


def page(results: Results) -> str:
    """Returns the page."""
    parts = [HEAD, *_machines(results), _summary(results), _missed(results)]
    for name, record in results.items():
        told = f"`python benchmarks/{record['command']}`, {record['machine']['date']}."
        if record["others"] > BUSY:
            told += f" **Other processes had {record['others']:.0%} of the cores.**"
        if record["outcome"] != DONE:
            told += f" **It {record['outcome']}.**"
        parts += [f"## {name}\n\n{told}\n", *tables(record["comparisons"])]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _machines(results: Results) -> Iterator[str]:
    """A table for each run of which there are figures, the newest first."""
    runs: dict[str, list[str]] = {}
    for name, record in results.items():
        runs.setdefault(json.dumps(record["machine"]), []).append(name)
    for text, names in sorted(runs.items(), reverse=True):
        run = json.loads(text)
        measured = [run["date"], run["commit"], *(names if len(runs) > 1 else ())]
        packages = (f"{name} {version}" for name, version in run["versions"].items())
        machine = (
            run["processor"],
            f"{run['cores']} cores",
            f"{run['memory_gib']:g} GiB",
            run["system"],
        )
        rows = [
            ("measured", ", ".join(filter(None, measured))),
            ("machine", ", ".join(machine)),
            ("software", ", ".join([f"Python {run['python']}", *packages])),
            ("other processes before", f"{run['others']:.0%} of the cores"),
        ]
        yield table(("", ""), rows)


def _summary(results: Results) -> str:
    rows = []
    for name, record in results.items():
        verdicts = [e["verdict"] for e in record["comparisons"] if e["verdict"]]
        met = f"{verdicts.count('met')} of {len(verdicts)}" if verdicts else ""
        row = f"[{name}](#{name})", str(len(record["comparisons"])), met
        row += f"{record['seconds']:.0f}", f"{record['others']:.0%}"
        rows.append((*row, "" if record["outcome"] == DONE else record["outcome"]))
    heads = ("benchmark", "comparisons", "targets met", "seconds", "others had", "")
    return "## All benchmarks\n\n" + table(heads, rows)


def _missed(results: Results) -> str:
    """What is not as it should be, farthest first."""

    def excess(each: Record) -> float:
        if each["ratio"] is None or not each["target"]:
            return float("inf")
        median, least = each["ratio"][0], each["least"]
        return max(median / each["target"], least / median if median else 0.0)

    missed = [(k, e) for k, e in by_key(results).items() if e["verdict"] == "missed"]
    missed.sort(key=lambda pair: excess(pair[1]), reverse=True)
    rows = [(*k, ratio_text(each), target_text(each)) for k, each in missed]
    heads = ("benchmark", "case", "quantity", "ratio", "target")
    return "## Missed targets\n\n" + table(heads, rows) if rows else ""


# A run.


def is_refused(machine: Record, args: argparse.Namespace) -> bool:
    """Whether others use the machine, and nobody has said that they may."""
    others = machine["others"] = others_now()
    if others <= BUSY:
        return False
    wanted = f"at most {BUSY:.0%} are nothing to worry about"
    told = f"Other processes use {others:.0%} of the {machine['cores']} cores"
    end = "times would be wrong. End them, or measure anyway with `--busy`."
    end = "the page says so." if args.busy else end
    print(f"{told} ({wanted}): {end}", file=sys.stderr)
    return not args.busy


def measure(
    scripts: Sequence[Script],
    args: argparse.Namespace,
    folder: pathlib.Path,
    machine: Record,
    results: Results,
) -> bool:
    """Runs benchmarks one after the other; whether Ctrl-C has ended that."""
    for number, script in enumerate(scripts, 1):
        print(f"\n=== {script.name} ({number} of {len(scripts)})", flush=True)
        try:
            record = record_of(script, args, folder)
        except KeyboardInterrupt:  # between two
            return True
        results[script.name] = {**record, "machine": machine}
        if record["outcome"] == INTERRUPTED:
            return True
    return False


def record_of(script: Script, args: argparse.Namespace, folder: pathlib.Path) -> Record:
    """Runs a benchmark."""
    arguments = [f"{script.file}.py"]
    arguments += [script.name] * (script.name != script.file)
    arguments += ["--quick"] * bool(args.quick and script.quick)
    told = " ".join(arguments)
    if script.others and args.others_python:
        arguments += ["--others-python", args.others_python]
        told += " --others-python PYTHON"  # without the path of this machine
    limit = script.quick if args.quick and script.quick else script.seconds
    watch, begun = Watch(), time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        file = pathlib.Path(temporary, "comparisons.json")
        command = [sys.executable, str(folder / arguments[0]), *arguments[1:]]
        outcome = ended([*command, "--json", str(file)], limit * args.patience)
        found = json.loads(file.read_text()) if file.exists() else []
    for each in found:
        del each["values"]
    outcome = outcome or (DONE if found else "wrote no comparisons")
    if outcome != DONE:
        print(f"{script.name} {outcome}", file=sys.stderr)
    return {
        "command": told,
        "seconds": round(time.perf_counter() - begun, 1),
        "others": round(watch.others(), 3),
        "outcome": outcome,
        "comparisons": found,
    }


def ended(command: Sequence[str], limit: float) -> str | None:
    """Runs a command to its end; returns why it was not done, or None.

    It has a process group of its own, which is ended with it: first as Ctrl-C does, so
    that it tells what it has measured.
    """
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"was ended after its {limit:g} seconds"
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code < 0:
        return f"was killed by signal {-code}"
    return f"failed with exit code {code}" if code else None


def chosen(suite: Sequence[Script], args: argparse.Namespace) -> list[Script]:
    """Returns the benchmarks that were asked for; says which are left out."""
    if unknown := {*(args.only or ())} - {script.name for script in suite}:
        names = ", ".join(script.name for script in suite)
        sys.exit(f"--only {', '.join(sorted(unknown))}: the benchmarks are {names}.")
    found = []
    for script in suite:
        if args.only is not None and script.name not in args.only:
            continue
        if args.quick and not script.quick and args.only is None:
            print(f"{script.name}: left out of a quick run")
        elif script.needs_others and not args.others_python:
            print(
                f"{script.name}: left out; it needs `--others-python PYTHON`, of an "
                "environment with the extra `benchmarks-others`. Its figures stay as "
                "they are on the page, with their date."
            )
        else:
            found.append(script)
    return found


def tell(last: Results, new: Results, found: Sequence[Regression]) -> bool:
    """Prints what got worse and what was not compared; whether nothing got worse."""
    print()
    if not last:
        print("There is no page yet: nothing is compared.")
    elif lines := differences(last, new):
        print("The page is of another machine or other versions; ratios are compared:")
        print("\n".join(lines))
    made = by_key(new)
    if missing := [k for k in by_key(last) if k[0] in new and k not in made]:
        print(f"{len(missing)} comparisons of the page were not made now.")
    if not found:
        print(f"{len(made)} comparisons: none is slower than on the page.")
        return True
    print(f"Slower than on the page, by the ratio to its baseline: {len(found)}")
    for *name, then, now in found:
        told = (ratio_text(each) or "stopped" for each in (then, now))
        print(f"  {name[0]}: {name[1]}, {name[2]}: {', now '.join(told)}")
    return False


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="benchmarks, by name")
    add("--quick", action="store_true", help="fewer cases and turns: 5 minutes")
    add("--check", action="store_true", help="fail if a ratio has grown")
    add("--busy", action="store_true", help="measure though others use the machine")
    add("--others-python", help="of an environment with TensorFlow")
    add("--patience", type=float, default=1.0, help="times the limits of time")
    add("--draw", action="store_true", help="only write the page again")
    page, other = HERE / "results.json", HERE.parent / "build" / "benchmarks.json"
    add("--results", type=pathlib.Path, default=page, help="of the page beside it")
    told = "for results that the page does not take"
    add("--output", type=pathlib.Path, default=other, help=told)
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None,
    suite: Sequence[Script] = SUITE,
    folder: pathlib.Path = HERE,
) -> int:
    """Does what the command line says; returns the exit code."""
    args = parsed(arguments)
    # SIGTERM is like Ctrl-C. A shell's jobs in the background ignore SIGINT, and so
    # would the benchmarks, which inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    last, drawn = read(args.results), args.results.with_name("FIGURES.md")
    if args.draw:
        drawn.write_text(page(last))
        return 0
    scripts, machine = chosen(suite, args), about_machine()
    if is_refused(machine, args):
        return 2
    new: Results = {}
    where, is_right = (args, folder, machine, new), True
    is_interrupted = measure(scripts, *where)
    if args.check:
        found = regressions(last, new)
        names = {name for name, *_ in found}
        if again := [s for s in scripts if s.name in names and not is_interrupted]:
            told = ", ".join(sorted(names))
            print(f"\nMeasured once more, as it seems slower: {told}")
            is_interrupted = measure(again, *where)
            first = {regression[:3] for regression in found}
            found = [each for each in regressions(last, new) if each[:3] in first]
        is_right = tell(last, new, found)
    if args.quick or args.check:
        write(args.output, new)
        print(f"\n{args.output} is written; the page stays as it was.")
    else:
        write(args.results, last | new)
        drawn.write_text(page(last | new))
        print(f"\n{args.results} and FIGURES.md beside it are written.")
    failed = {k: each["outcome"] for k, each in new.items() if each["outcome"] != DONE}
    for name, outcome in failed.items():
        print(f"{name} {outcome}", file=sys.stderr)
    if is_interrupted:
        return 130
    return 0 if is_right and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
