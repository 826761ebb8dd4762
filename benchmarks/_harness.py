"""What all benchmarks share: measuring in turns, options, processes, tables.

A script has functions that yield a `Comparison` for each quantity of each case, with
options whose defaults are those of a whole run. Programs take turns, so that a machine
that is slow for a while is slow for all of them, and a claim rests on the ratio within
each turn. Only the standard library is imported here: other environments answer by
`serve` too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

HERE = pathlib.Path(__file__).parent
FEWEST = 5  # turns that are taken however long they are


def in_turn(
    measures: Mapping[str, Callable[[], T]], rounds: int, seconds: float = math.inf
) -> dict[str, list[T]]:
    """Returns what each of `measures` returned at each of `rounds` turns.

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


def seconds_of(call: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_seconds(call: Callable[[], object], times: int = 5) -> float:
    """Returns the median wall-clock seconds of a few calls."""
    return statistics.median(seconds_of(call) for _ in range(times))


def counted(number: int, noun: str) -> str:
    """Returns `1 device`, `2 devices`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def scaled(
    values: Mapping[str, Iterable[float]], factor: float
) -> dict[str, list[float]]:
    """Returns all numbers times `factor`."""
    return {name: [factor * each for each in of] for name, of in values.items()}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def as_json(self) -> list[float]:
        return [float(f"{each:.4g}") for each in (self.median, self.low, self.high)]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity of one case: ours first, then the baseline, then others.

    Less is better of every quantity. Case and quantity together name a comparison from
    one run to the next, so they hold nothing that was measured.
    """

    case: str
    quantity: str
    unit: str
    values: Mapping[str, Sequence[float]]  # of each program, a turn each; or stopped
    target: float | None = None  # the ratio may be so much at most
    in_percent: bool = False
    _: dataclasses.KW_ONLY
    least: float = 0.0  # the ratio must be so much
    note: str = ""  # what else was found
    tolerance: float = 0.1  # the part by which the ratio may grow from run to run

    @functools.cached_property
    def ratio(self) -> Spread | None:
        """Ours by the baseline, turn by turn; None without both."""
        if len(self.values) < 2:
            return None
        ours, theirs, *_ = self.values.values()
        if not ours or not theirs:
            return None
        pairs = zip(ours, theirs, strict=True)
        return Spread.of([1.0 if a == b else a / b for a, b in pairs])

    @property
    def is_met(self) -> bool:
        """Whether the median ratio is within the target, or not ours alone stopped."""
        if self.target is None:
            return True
        if self.ratio is None:
            return [len(v) > 0 for v in [*self.values.values()][:2]] != [False, True]
        return self.least <= self.ratio.median <= self.target

    @property
    def verdict(self) -> str:
        """The same in a word; empty where nothing is claimed or was measured."""
        if self.target is None or not any([*self.values.values()][:2]):
            return ""
        return "met" if self.is_met else "missed"

    def as_json(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        programs = {
            n: Spread.of(v).as_json() if v else None for n, v in self.values.items()
        }
        ratio = self.ratio and self.ratio.as_json()
        turns = max(map(len, self.values.values()))
        found = {"programs": programs, "ratio": ratio, "turns": turns}
        return {**fields, **found, "verdict": self.verdict}


# Tables.

# What has been measured of a comparison, as JSON.
Record = dict[str, Any]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    told = ("| " + " | ".join(line) + " |" for line in lines)
    return "".join(f"{re.sub(r' +', ' ', line)}\n" for line in told)


def tables(
    records: Iterable[Record], more: Callable[[Record], str] = lambda record: ""
) -> Iterator[str]:
    """A table for each quantity, with what `more` says of a comparison."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for each in records:
        kind = (each["quantity"], each["unit"], *each["programs"])
        groups.setdefault(kind, []).append(each)
    for (quantity, unit, *programs), group in groups.items():
        told = [
            ", ".join(filter(None, (each["verdict"], each["note"], more(each))))
            for each in group
        ]
        rows = [
            [each["case"], *map(number_text, each["programs"].values())]
            for each in group
        ]
        heads = ["case", *programs]
        if len(programs) > 1:
            heads += ["ratio", "target", ""]
            for row, each, text in zip(rows, group, told, strict=True):
                row += [ratio_text(each), target_text(each), text]
        elif any(told):
            heads += [""]
            rows = [[*row, text] for row, text in zip(rows, told, strict=True)]
        title = f"{quantity}, {unit}" if unit else quantity
        yield f"{title[0].upper()}{title[1:]}:\n"
        yield table(heads, rows)


def number_text(spread: Sequence[float] | None) -> str:
    """Three digits that count, without an exponent where it can be read."""
    if spread is None:
        return "stopped"

    def digits(number: float) -> str:
        if number == 0 or abs(number) >= 100:
            return f"{number:,.0f}"
        return f"{number:.2g}" if abs(number) < 0.001 else f"{number:.3g}"

    median, low, high = map(digits, spread)
    return median if spread[1] == spread[2] else f"{median} ({low}-{high})"


def ratio_text(each: Record) -> str:
    if each["ratio"] is None:
        return ""
    middle, ends = (".2%", ".2%") if each["in_percent"] else (".3f", ".2f")
    median, low, high = each["ratio"]
    spread = f" ({low:{ends}}-{high:{ends}})" if low != high else ""
    return f"{median:{middle}}{spread}"


def target_text(each: Record) -> str:
    if each["target"] is None:
        return ""
    target = f"{each['target']:{'.2%' if each['in_percent'] else '.2f'}}"
    return f"{each['least']:.2f} to {target}" if each["least"] else target


def print_tables(comparisons: Sequence[Comparison]) -> None:
    """Prints a table for each quantity, and how many targets of it are met."""
    print("\n".join(["", *tables(each.as_json() for each in comparisons)]))
    for quantity in dict.fromkeys(each.quantity for each in comparisons):
        of = [e for e in comparisons if e.quantity == quantity and e.verdict]
        if of:
            met = sum(each.verdict == "met" for each in of)
            print(f"{quantity}: met in {met} of {len(of)}")


# Benchmarks and their options.


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Comparisons that a script can make."""

    function: Callable[[Any], Iterator[Comparison]]  # of the options
    options: Mapping[str, Any]  # those of a whole run
    quick: Mapping[str, Any] | None  # what is otherwise in a quick run; None: left out
    name: str

    def comparisons(self, **options: Any) -> Iterator[Comparison]:
        """Makes them, with other options than those of a whole run."""
        return self.function(argparse.Namespace(**{**self.options, **options}))


def benchmark(
    options: Mapping[str, Any], quick: Mapping[str, Any] | None = None, name: str = ""
) -> Callable[[Callable[[Any], Iterator[Comparison]]], Benchmark]:
    """Makes a benchmark of a function that is given options as attributes."""
    return lambda f: Benchmark(f, options, quick, name or f.__name__)


def parsed(
    benchmarks: Sequence[Benchmark], arguments: Sequence[str] | None = None
) -> tuple[list[Benchmark], dict[str, Any], argparse.Namespace]:
    """Returns the benchmarks that a command line asks for, and the options it gives."""
    about = "\n\n".join(f"{b.name}: {inspect.getdoc(b.function)}" for b in benchmarks)
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [each.name for each in benchmarks]
    add("benchmarks", nargs="*", metavar="benchmark", help=f"of {', '.join(names)}")
    add("--quick", action="store_true", help="fewer cases and turns")
    add("--json", type=pathlib.Path, help="a file for every single number")
    add("--check", action="store_true", help="exit with 1 when a target is missed")
    known = {k: v for each in benchmarks for k, v in each.options.items()}
    for name, default in known.items():
        told = f"(default: {default})"
        flag, first = f"--{name.replace('_', '-')}", default
        options: dict[str, Any] = {"help": told, "default": argparse.SUPPRESS}
        if isinstance(default, tuple):
            options["nargs"], first = "+", default[0] if default else 0
        if isinstance(default, bool):
            add(flag, action="store_true", **options)
        else:
            add(flag, type=str if first is None else type(first), **options)
    given = vars(parser.parse_intermixed_args(arguments))
    chosen = [b for b in benchmarks if b.name in (given["benchmarks"] or names)]
    if unknown := {*given["benchmarks"]} - {*names}:
        parser.error(f"there is no {', '.join(unknown)}, but {', '.join(names)}")
    options = {name: given[name] for name in known if name in given}
    for each in chosen if given["benchmarks"] else ():
        if foreign := {*options} - {*each.options}:
            parser.error(f"{each.name} has no option {', '.join(foreign)}")
    return chosen, options, argparse.Namespace(**given)


def main(benchmarks: Sequence[Benchmark]) -> None:
    """Runs what the command line asks for, several in processes of their own."""
    chosen, options, args = parsed(benchmarks)
    if len(chosen) > 1:
        codes = []
        for each in chosen:
            print(f"\n{each.name}", flush=True)
            command = [sys.executable, sys.argv[0], each.name]
            command += ["--quick"] * args.quick + ["--check"] * args.check
            for name in options.keys() & each.options.keys():
                value = options[name]
                command.append(f"--{name.replace('_', '-')}")
                if not isinstance(value, bool):
                    command += map(str, value if isinstance(value, list) else [value])
            codes.append(subprocess.run(command).returncode)
        sys.exit(max(codes))
    (one,) = chosen
    quick = dict(one.quick or {}) if args.quick else {}
    report(one.comparisons(**{**quick, **options}), args.json, args.check)


def report(
    comparisons: Iterable[Comparison],
    file: pathlib.Path | None = None,
    check: bool = False,
) -> None:
    """Prints tables of all comparisons, and writes them to a file.

    The file is written after each, and the tables are printed when an error or Ctrl-C
    ends the measuring, so that nothing that was measured is lost.

    Raises:
      SystemExit: a target was missed, with `check`.
    """
    found: list[Comparison] = []
    try:
        for comparison in comparisons:
            found.append(comparison)
            if file is not None:
                write_whole(file, json.dumps([each.as_json() for each in found]))
    finally:
        if found:
            print_tables(found)
    if check and not all(each.is_met for each in found):
        sys.exit(1)


def write_whole(path: pathlib.Path, content: str) -> None:
    """Writes a file in one step, so that it is whole whenever somebody reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(content)
    os.replace(part, path)


# Processes.


def command(
    function: Callable[..., Any], args: Sequence[Any], how: str, python: str
) -> list[str]:
    """Returns what hands a function of a script, and arguments, to `how`, there."""
    module = pathlib.Path(inspect.getfile(function)).stem
    code = f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import _harness, "
    code += f"{module}; _harness.{how}({module}.{function.__name__}, *json.loads("
    return [python, "-P", "-c", f"{code}sys.argv[1]))", json.dumps(args)]


def in_process(function: Callable[..., T], *args: Any, **env: str) -> T:
    """Returns what a function of a script returns in a process of its own, as JSON."""
    done = subprocess.run(
        command(function, args, "answer", sys.executable),
        env={**os.environ, **env},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def _answers() -> Any:
    """A copy of standard output, to which nothing else is printed from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(function: Callable[..., Any], *args: Any) -> None:
    """Prints what a function returns."""
    answers = _answers()
    print(json.dumps(function(*args)), file=answers, flush=True)


def serve(make: Callable[..., Callable[..., Any]], *args: Any) -> None:
    """Answers lines of standard input, which are arguments of what `make` returns."""
    answers = _answers()
    reply = make(*args)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(*json.loads(line))), file=answers, flush=True)


class Workers:
    """Processes that answer together, while the block of `with` runs.

    Args:
      make: a function of a script; makes what answers, in each process.
      args: of it, for each process.
      envs: what is added to the environment of each process.
      python: another interpreter.
    """

    def __init__(
        self,
        make: Callable[..., Callable[..., Any]],
        args: Sequence[Sequence[Any]],
        envs: Sequence[Mapping[str, str]] = (),
        python: str = sys.executable,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")
        self._processes = [
            subprocess.Popen(
                command(make, each, "serve", python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **env},
                text=True,
            )
            for each, env in zip(args, envs or [{}] * len(args), strict=True)
        ]
        self._hear()

    def ask(self, *request: Any) -> list[Any]:
        """Returns the answers of all processes."""
        for process in self._processes:
            assert process.stdin is not None
            print(json.dumps(request), file=process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> list[Any]:
        lines = [p.stdout.readline() for p in self._processes if p.stdout]
        if not all(lines):
            self.__exit__(RuntimeError)
            self._log.seek(0)
            raise RuntimeError(f"a process ended:\n{self._log.read()}")
        return [json.loads(line) for line in lines]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object = None, *error: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            if kind is None:  # or nothing of what was measured would be told in time
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            process.kill()
            process.wait()
