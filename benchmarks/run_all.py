"""Runs all benchmarks, one after the other, and writes the page of figures.

    python benchmarks/run_all.py                  at most 20 minutes on two idle cores
    python benchmarks/run_all.py --quick          5 minutes; the page stays as it is
    python benchmarks/run_all.py --check          the same, held against the last page

Each benchmark is a process of its own, with a limit of time. What they measured goes
into `results.json`, of which `FIGURES.md` and `figures.png` are made. Of one that fails
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
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import _results
from _harness import HERE
from _results import BUSY, DONE, Record, Results

# Seconds that a benchmark has to end its own processes.
GRACE = 15.0
INTERRUPTED = "was interrupted"
WHOLE, QUICK = 20 * 60, 5 * 60


@dataclasses.dataclass(frozen=True)
class Script:
    """A benchmark of a whole run."""

    file: str
    name: str
    seconds: int  # a limit, on two idle cores, at which it is ended
    quick: int = 0  # the same in a quick run, which leaves it out where this is 0
    others: bool = False  # whether it compares with other frameworks
    needs_others: bool = False  # whether it is left out without them


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
    Script("processes", "multiprocess", 50, 20, others=True),
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


class Run:
    """Benchmarks that run one after the other.

    Attributes:
      machine: what `about_machine` says, and what others had before.
      measured: the record and comparisons of each, also of those that failed.
      is_interrupted: whether Ctrl-C has ended it.
    """

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self._args = args
        self._folder = folder
        self.machine = {**_results.about_machine(), "others": None}
        self.measured: list[tuple[Record, list[Record]]] = []
        self.is_interrupted = False

    @property
    def results(self) -> Results:
        """Of this run alone."""
        return Results().after(self.machine, self.measured)

    def is_refused(self) -> bool:
        """Whether others use the machine, and nobody has said that they may."""
        others = self.machine["others"] = _results.others_now()
        if others is None or others <= BUSY:
            return False
        wanted = f"at most {BUSY:.0%} are nothing to worry about"
        told = f"Other processes use {others:.0%} of the {self.machine['cores']} cores"
        end = "times would be wrong. End them, or measure anyway with `--busy`."
        end = "the page says so." if self._args.busy else end
        print(f"{told} ({wanted}): {end}", file=sys.stderr)
        return not self._args.busy

    def take(self, scripts: Sequence[Script]) -> None:
        """Runs these; Ctrl-C ends the one that runs, and no further one begins."""
        for number, script in enumerate(scripts, 1):
            print(f"\n=== {script.name} ({number} of {len(scripts)})", flush=True)
            try:
                self._take(script)
            except KeyboardInterrupt:  # between two
                self.is_interrupted = True
            if self.is_interrupted:
                return

    def _take(self, script: Script) -> None:
        arguments = [f"{script.file}.py"]
        arguments += [script.name] * (script.name != script.file)
        arguments += ["--quick"] * bool(self._args.quick and script.quick)
        told = " ".join(arguments)
        if script.others and self._args.others_python:
            arguments += ["--others-python", self._args.others_python]
            told += " --others-python PYTHON"  # without the path of this machine
        limit = script.quick if self._args.quick and script.quick else script.seconds
        watch, begun, before = _results.Watch(), time.perf_counter(), os.times()
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "comparisons.json")
            path = self._folder / arguments[0]
            command = [sys.executable, str(path), *arguments[1:], "--json", str(file)]
            outcome = ended(command, limit * self._args.patience)
            found = json.loads(file.read_text()) if file.exists() else []
        after, others = os.times(), watch.others()
        processor = after.children_user - before.children_user
        processor += after.children_system - before.children_system
        record = {
            "script": script.name,
            "command": told,
            "seconds": round(time.perf_counter() - begun, 1),
            "processor": round(processor, 1),
            "others": others if others is None else round(others, 3),
            "outcome": outcome or (DONE if found else "wrote no comparisons"),
        }
        if record["outcome"] != DONE:
            print(f"{script.name} {record['outcome']}", file=sys.stderr)
        for each in found:
            del each["values"]
        self.measured.append((record, found))
        self.is_interrupted = outcome == INTERRUPTED


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


def write_page(results: Results, path: pathlib.Path) -> None:
    """Writes the page and its picture, beside the file of results."""
    path.with_name("FIGURES.md").write_text(_results.page(results))
    try:
        _results.draw(results, path.with_name("figures.png"))
    except ImportError as error:  # of matplotlib
        print(f"The picture stays as it was: {error}", file=sys.stderr)


def check(last: Results, run: Run, scripts: Sequence[Script]) -> bool:
    """Whether nothing got worse; what seems to have is measured once more."""
    found = _results.regressions(last, run.results)
    names = {now["script"] for _, now in found}
    if names and scripts and not run.is_interrupted:
        print(f"\nMeasured once more, as it seems slower: {', '.join(sorted(names))}")
        first = {_results.key(now) for _, now in found}
        run.take([script for script in scripts if script.name in names])
        found = _results.regressions(last, run.results)
        found = [pair for pair in found if _results.key(pair[1]) in first]
    return tell(last, run.results, found)


def tell(last: Results, new: Results, found: Sequence[tuple[Record, Record]]) -> bool:
    """Prints what got worse and what was not compared; whether nothing got worse."""
    print()
    if not last.runs:
        print("There is no page yet: nothing is compared.")
    elif lines := _results.differences(last, new):
        print("The page is of another machine or other versions; ratios are compared:")
        print("\n".join(lines))
    now = {_results.key(each) for each in new.comparisons}
    names = {each["script"] for each in new.scripts}
    then = {_results.key(e) for e in last.comparisons if e["script"] in names}
    if missing := then - now:
        print(f"{len(missing)} comparisons of the page were not made now.")
    if not found:
        print(f"{len(new.comparisons)} comparisons: none is slower than on the page.")
        return True
    print(f"Slower than on the page, by the ratio to its baseline: {len(found)}")
    for pair in found:
        print(f"  {_results.regression_text(*pair)}")
    return False


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="benchmarks, by name")
    add("--quick", action="store_true", help="fewer cases and turns: 5 minutes")
    add("--check", action="store_true", help="fail if a ratio has grown")
    add("--given", type=pathlib.Path, help="results to check; nothing is run")
    add("--busy", action="store_true", help="measure though others use the machine")
    add("--others-python", help="of an environment with TensorFlow and PyTorch")
    add("--patience", type=float, default=1.0, help="times the limits of time")
    add("--draw", action="store_true", help="only write page and picture again")
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
    last = Results.read(args.results)
    if args.draw:
        write_page(last, args.results)
        return 0
    if args.given is not None:
        given = Results.read(args.given)
        return 0 if tell(last, given, _results.regressions(last, given)) else 1
    scripts = chosen(suite, args)
    run = Run(args, folder)
    if run.is_refused():
        return 2
    run.take(scripts)
    is_right = check(last, run, scripts) if args.check else True
    if args.quick or args.check:
        run.results.write(args.output)
        print(f"\n{args.output} is written; the page stays as it was.")
    else:
        results = last.after(run.machine, run.measured)
        results.write(args.results)
        write_page(results, args.results)
        print(f"\n{args.results} and FIGURES.md beside it are written.")
    failed = [script for script, _ in run.measured if script["outcome"] != DONE]
    for script in failed:
        print(f"{script['script']} {script['outcome']}", file=sys.stderr)
    if run.is_interrupted:
        return 130
    return 0 if is_right and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
