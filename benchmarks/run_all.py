"""Runs all benchmarks, one after the other, and writes the page of figures.

    python benchmarks/run_all.py                  25 minutes on two idle cores
    python benchmarks/run_all.py --quick          5 minutes; the page stays as it is
    python benchmarks/run_all.py --check          the same, held against the last page

Each script is a process of its own, with a limit of time. What they measured goes into
`results.json`, of which `FIGURES.md` and `figures.png` are made. Of a script that fails
or is ended, and after Ctrl-C, what was measured is kept, and the page says so.

A machine on which others have more than a tenth of the cores is refused, unless it is
called `--busy`; what others had during each script is on the page.

With `--check`, or with `--quick`, the page stays as it is, and results are written to
another file. `--check` fails if the ratio of ours to a baseline of the same run has
grown: by more than 10 % (or what the script says), with quartiles that do not overlap
those of the page, and once more when the script is run again. A missed target is on the
page; it is no failure here.

The exit code is 0; 1 after a failure or with a regression; 2 on a busy machine; 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import _machine
from _page import BUSY, page
from _results import (
    DONE,
    Record,
    Results,
    condensed,
    difference,
    not_measured,
    regressions,
)
from _suite import SUITE, Script

HERE = pathlib.Path(__file__).parent
# Seconds that a script has to end its own processes.
GRACE = 15.0

Measured = tuple[Record, list[Record]]


class Run:
    """Scripts that run one after the other.

    Attributes:
      machine: what `_machine.about` says, and what others had before.
      measured: each script's record and comparisons, also of those that failed.
      is_interrupted: whether Ctrl-C has ended it.
    """

    def __init__(self, args: argparse.Namespace, folder: pathlib.Path) -> None:
        self._args = args
        self._folder = folder
        self.machine = {**_machine.about(), "others": None}
        self.measured: list[Measured] = []
        self.is_interrupted = False

    @property
    def failed(self) -> list[Record]:
        """The records of scripts that were not done."""
        return [script for script, _ in self.measured if script["outcome"] != DONE]

    @property
    def results(self) -> Results:
        """Of this run alone."""
        return Results().after(self.machine, self.measured)

    def is_refused(self) -> bool:
        """Whether others use the machine, and nobody has said that they may."""
        others = self.machine["others"] = _machine.others_now()
        if others is None or others <= BUSY:
            return False
        wanted = f"at most {BUSY:.0%} are nothing to worry about"
        told = f"Other processes use {others:.0%} of the {self.machine['cores']} cores"
        if self._args.busy:
            print(f"{told} ({wanted}): the page says so.", file=sys.stderr)
            return False
        print(
            f"{told} ({wanted}): times would be wrong. End them, or measure anyway "
            "with `--busy`.",
            file=sys.stderr,
        )
        return True

    def take(self, scripts: Sequence[Script]) -> None:
        """Run these; Ctrl-C ends the one that runs, and no further one begins."""
        for number, script in enumerate(scripts, 1):
            print(f"\n=== {script.name} ({number} of {len(scripts)})", flush=True)
            try:
                self.measured.append(self._taken(script))
            except _Interrupted as interrupted:
                self.measured.append(interrupted.measured)
                self.is_interrupted = True
            except KeyboardInterrupt:  # between two scripts
                self.is_interrupted = True
            if self.is_interrupted:
                return

    def _taken(self, script: Script) -> Measured:
        arguments = self._arguments(script)
        limit = script.quick_seconds if self._args.quick else script.seconds
        watch, begun, before = _machine.Watch(), time.perf_counter(), os.times()
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "comparisons.json")
            path = self._folder / f"{script.name}.py"
            command = [sys.executable, str(path), *arguments, "--json", str(file)]
            outcome = ended(command, limit * self._args.patience)
            written = (
                json.loads(file.read_text())["comparisons"] if file.exists() else []
            )
        after = os.times()
        own = after.children_user + after.children_system
        processor = own - before.children_user - before.children_system
        others = watch.others()
        record = {
            "script": script.name,
            "arguments": shlex.join(self._told(arguments)),
            "seconds": round(time.perf_counter() - begun, 1),
            "processor": round(processor, 1),
            "others": others if others is None else round(others, 3),
            "outcome": outcome or DONE,
        }
        if outcome is None and not written:
            record["outcome"] = "wrote no comparisons"
        if record["outcome"] != DONE:
            print(f"{script.name} {record['outcome']}", file=sys.stderr)
        found = record, [condensed(each) for each in written]
        if outcome == INTERRUPTED:
            raise _Interrupted(found)
        return found

    def _arguments(self, script: Script) -> list[str]:
        quick = self._args.quick and script.quick is not None
        arguments = shlex.split(script.quick if quick else script.arguments)
        if script.others and self._args.others_python:
            arguments += ["--others-python", self._args.others_python]
        return arguments

    def _told(self, arguments: Sequence[str]) -> list[str]:
        """Without the path of this machine."""
        return [
            "PYTHON" if each == self._args.others_python else each for each in arguments
        ]


INTERRUPTED = "was interrupted"


class _Interrupted(Exception):
    """Ctrl-C, with what the script had measured."""

    def __init__(self, measured: Measured) -> None:
        super().__init__()
        self.measured = measured


def ended(command: Sequence[str], limit: float) -> str | None:
    """Run a command to its end; why it was not done, or None.

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
        _end(process)
    if code < 0:
        return f"was killed by signal {-code}"
    return f"failed with exit code {code}" if code else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started and left."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# What is run.


def chosen(suite: Sequence[Script], args: argparse.Namespace) -> list[Script]:
    """The scripts that were asked for; says which are left out."""
    unknown = {*(args.only or ())} - {script.name for script in suite}
    if unknown:
        names = ", ".join(script.name for script in suite)
        sys.exit(f"--only {', '.join(sorted(unknown))}: the scripts are {names}.")
    return [script for script in suite if not _is_left_out(script, args)]


def _is_left_out(script: Script, args: argparse.Namespace) -> bool:
    if args.only is not None and script.name not in args.only:
        return True
    if args.quick and script.quick is None and args.only is None:
        print(f"{script.name}: left out of a quick run")
        return True
    if script.needs_others and not args.others_python:
        print(
            f"{script.name}: left out; it needs `--others-python PYTHON`, of an "
            "environment with the extra `benchmarks-others`. Its figures stay as they "
            "are on the page, with their date."
        )
        return True
    return False


# What is made of it.


def write_page(results: Results, path: pathlib.Path) -> None:
    """The page and its picture, beside the file of results."""
    path.with_name("FIGURES.md").write_text(page(results))
    try:
        import _picture
    except ImportError as error:
        print(f"The picture stays as it was: {error}", file=sys.stderr)
        return
    _picture.save(results, path.with_name("figures.png"))


def check(last: Results, run: Run, scripts: Sequence[Script]) -> bool:
    """Whether nothing got worse; what seems to have is measured once more."""
    found = regressions(last, run.results)
    names = {each.key[0] for each in found}
    if names and scripts and not run.is_interrupted:
        print(f"\nMeasured once more, as it seems slower: {', '.join(sorted(names))}")
        first = {each.key for each in found}
        run.take([script for script in scripts if script.name in names])
        found = [each for each in regressions(last, run.results) if each.key in first]
    return tell(last, run.results, [str(each) for each in found])


def tell(last: Results, new: Results, found: Sequence[str]) -> bool:
    """Prints what got worse and what was not compared; whether nothing got worse."""
    print()
    for line in _differences(last, new):
        print(line)
    missing = not_measured(last, new, [each["script"] for each in new.scripts])
    if missing:
        print(f"{len(missing)} comparisons of the page were not made now.")
    if not found:
        print(f"{len(new.comparisons)} comparisons: none is slower than on the page.")
        return True
    print(f"Slower than on the page, by the ratio to its baseline: {len(found)}")
    for line in found:
        print(f"  {line}")
    return False


def _differences(last: Results, new: Results) -> Iterator[str]:
    """Whether the page is of another machine or of other versions."""
    if not last.runs:
        yield "There is no page yet: nothing is compared."
        return
    lines = [line for run in last.runs for line in difference(run, new.runs[-1])]
    if lines:
        yield "The page is of another machine or other versions; ratios are compared:"
        yield from (f"  {line}" for line in dict.fromkeys(lines))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="scripts, by name")
    add("--quick", action="store_true", help="fewer cases and turns: 5 minutes")
    add("--check", action="store_true", help="fail if a ratio has grown")
    add("--given", type=pathlib.Path, help="results to check; nothing is run")
    add("--busy", action="store_true", help="measure though others use the machine")
    add("--others-python", help="of an environment with TensorFlow and PyTorch")
    add("--patience", type=float, default=1.0, help="times the limits of the scripts")
    add("--draw", action="store_true", help="only write page and picture again")
    add(
        "--results",
        type=pathlib.Path,
        default=HERE / "results.json",
        help="of the page, which is written beside it",
    )
    add(
        "--output",
        type=pathlib.Path,
        help="file for results that the page does not take "
        "(default: build/benchmarks.json)",
    )
    return parser.parse_args(arguments)


def main(
    arguments: Sequence[str] | None = None,
    suite: Sequence[Script] = SUITE,
    folder: pathlib.Path = HERE,
) -> int:
    """Does what the command line says; the exit code."""
    args = parsed(arguments)
    # SIGTERM is like Ctrl-C. A shell's jobs in the background ignore SIGINT, and so
    # would the scripts, which inherit that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    last = Results.read(args.results)
    if args.draw:
        write_page(last, args.results)
        return 0
    if args.given is not None:
        given = Results.read(args.given)
        found = [str(each) for each in regressions(last, given)]
        return 0 if tell(last, given, found) else 1
    scripts = chosen(suite, args)
    run = Run(args, folder)
    if run.is_refused():
        return 2
    run.take(scripts)
    is_kept = not (args.quick or args.check)
    is_right = check(last, run, scripts) if args.check else True
    if is_kept:
        results = last.after(run.machine, run.measured)
        results.write(args.results)
        write_page(results, args.results)
        print(f"\n{args.results} and FIGURES.md beside it are written.")
    else:
        output = args.output or HERE.parent / "build" / "benchmarks.json"
        run.results.write(output)
        print(f"\n{output} is written; the page stays as it was.")
    for script in run.failed:
        print(f"{script['script']} {script['outcome']}", file=sys.stderr)
    if run.is_interrupted:
        return 130
    return 0 if is_right and not run.failed else 1


if __name__ == "__main__":
    sys.exit(main())
