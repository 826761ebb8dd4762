"""Breaks the library on purpose, and counts how many of the changes a test notices.

Run by hand, from the root of the project:

    python tests/mutations/run.py choose places.json --seed 7 --count 60
    python tests/mutations/run.py record places.json hits.txt -n 2 -m "not slow"
    python tests/mutations/run.py try places.json hits.txt

`record` runs the suite once on a copy of the package that notes which tests reach
which place, in the processes that tests start, too. `try` makes each change in a copy
and runs tests that reach it for at most a minute (`--limit`). What fails a test counts
as noticed if the same test passes without the change.
"""

import argparse
import ast
import collections
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "jaxstrategy"

_COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in",
}  # fmt: skip
_ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*"}


@dataclasses.dataclass
class Place:
    """One change: `old` at a column of a line becomes `new`."""

    path: str
    line: int
    column: int
    old: str
    new: str
    text: str  # the whole line, so that the place is found when lines have moved


def _changes(node: ast.AST, source: str) -> list[tuple[ast.AST, str]]:
    """The nodes to replace at `node`, each with what comes in its place."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return [(node, f"{text(left)} {_COMPARISONS[type(op)]} {text(right)}")]
        case ast.BoolOp(op=op, values=[first, *rest]):
            word = " or " if isinstance(op, ast.And) else " and "
            return [(node, "(" + word.join(map(text, [first, *rest])) + ")")]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return [(node, text(operand))]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            if any(map(_is_text, (left, right))):
                return []
            return [(node, f"{text(left)} {_ARITHMETIC[type(op)]} {text(right)}")]
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return [(test, f"not ({text(test)})")]
        case ast.Constant(value=bool(value)):
            return [(node, str(not value))]
        case ast.Constant(value=int(value)):
            return [(node, str(value + 1))]
        case ast.Expr(value=ast.Call()):
            return [(node, "None")]
    return []


def _is_text(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr)


def _unchangeable(tree: ast.AST) -> set[ast.AST]:
    """Nodes of annotations, errors' texts, decorators and assertions."""
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                parts = [node]
            case ast.FunctionDef():
                parts = [node.returns, *node.decorator_list]
                arguments = node.args
                for a in [
                    *arguments.args,
                    *arguments.kwonlyargs,
                    *arguments.posonlyargs,
                ]:
                    parts.append(a.annotation)
            case ast.AnnAssign():
                parts = [node.annotation]
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                parts = [node]
        for part in parts:
            if part is not None:
                left_out.update(ast.walk(part))
    return left_out


def _places_of(path: pathlib.Path) -> list[Place]:
    source = path.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    left_out, found = _unchangeable(tree), []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if node in left_out:
                continue
            for part, new in _changes(node, source):
                if (
                    part.lineno != part.end_lineno
                    or not lines[part.lineno - 1].isascii()
                ):
                    continue
                old = ast.get_source_segment(source, part)
                line = lines[part.lineno - 1]
                found.append(
                    Place(
                        str(path.relative_to(ROOT)),
                        part.lineno,
                        part.col_offset,
                        old,
                        new,
                        line,
                    )
                )
    return list({(p.line, p.column, p.new): p for p in found}.values())


def choose(seed: int, count: int, leave_out: list[str]) -> list[Place]:
    """Places spread over all folders by their size, chosen by the seed."""
    chance = random.Random(seed)
    by_folder: dict[str, list[Place]] = collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[-2:][0]
        if folder not in leave_out:
            by_folder[folder].extend(_places_of(path))
    folders = {name: places for name, places in by_folder.items() if len(places) >= 10}
    total = sum(map(len, folders.values()))
    shares = {name: len(places) * count / total for name, places in folders.items()}
    numbers = {name: max(1, int(share)) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: numbers[name] - shares[name]):
        if sum(numbers.values()) < count:
            numbers[name] += 1
    chosen = [
        p
        for name, places in folders.items()
        for p in chance.sample(places, numbers[name])
    ]
    return chance.sample(chosen, min(count, len(chosen)))


def _line_of(place: Place) -> int | None:
    """Where the place's line stands now: the nearest with the same text."""
    path = ROOT / place.path
    if not path.exists():
        return None
    lines = path.read_text().splitlines()
    same = [number for number, text in enumerate(lines, 1) if text == place.text]
    return min(same, key=lambda number: abs(number - place.line), default=None)


# In the copy of the package that notes who reaches what: evaluates to None.
_HITS = """import os
seen = set()
def hit(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (place, test) not in seen:
        seen.add((place, test))
        with open(os.environ["MUTATION_HITS"], "a") as file:
            file.write(f"{place}\\t{test}\\n")
"""


def record(places: list[Place], hits: pathlib.Path, arguments: list[str]) -> int:
    """Runs pytest on a copy in which each place notes the test that reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_into(folder)
        (copy / "mutation_hits.py").write_text(_HITS)
        # From the right, so that places of one line do not move each other.
        for number, place in sorted(
            enumerate(places), key=lambda item: item[1].column, reverse=True
        ):
            line = _line_of(place)
            if line is not None:
                note = f'__import__("mutation_hits").hit({number})'
                _replace(copy, place, line, f"({note} or ({place.old}))")
        hits.write_text("")
        return subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=copy,
            env={
                **os.environ,
                "PYTHONPATH": str(copy),
                "MUTATION_HITS": str(hits.resolve()),
            },
        ).returncode


def _copy_into(folder: str) -> pathlib.Path:
    ignored = shutil.ignore_patterns(".venv*", ".git", "build", ".hypothesis")
    return pathlib.Path(
        shutil.copytree(ROOT, pathlib.Path(folder) / "project", ignore=ignored)
    )


def _replace(copy: pathlib.Path, place: Place, line: int, new: str) -> str:
    """Puts `new` in the place, and returns the whole file as it was."""
    path = copy / place.path
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    text, end = lines[line - 1], place.column + len(place.old)
    assert text[place.column : end] == place.old
    lines[line - 1] = text[: place.column] + new + text[end:]
    path.write_text("".join(lines))
    return whole


def _tests_of(hits: pathlib.Path, number: int, most: int) -> list[str]:
    """Names of tests that reach the place, some of each file first."""
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for text in dict.fromkeys(hits.read_text().splitlines()):
        place, test = text.split("\t")
        if int(place) == number:
            by_file[test.partition("::")[0]].append(test)
    # Some of each file, because what one file does not notice another one may.
    rounds = [names[i : i + 1] for i in range(most) for names in by_file.values()]
    return [name for names in rounds for name in names][:most]


def _run(root: pathlib.Path, tests: list[str], limit: float) -> str | None:
    """The name of the first test that fails, None if none does in time."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    process = subprocess.Popen(
        command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    failed = re.search(
        r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE
    )
    if process.returncode == 0:
        return None
    return failed.group(1) if failed else output[-300:].strip() or "pytest ended"


def attempt(place: Place, tests: list[str], copy: pathlib.Path, limit: float) -> dict:
    """What became of one change: `noticed` by a test, or not."""
    outcome = {
        "place": f"{place.path}:{place.line}",
        "change": f"{place.old} -> {place.new}",
    }
    line = _line_of(place)
    if line is None:
        return outcome | {"result": "gone"}
    if not tests:
        return outcome | {"result": "no test runs it"}
    whole = _replace(copy, place, line, place.new)
    try:
        by = _run(copy, tests, limit)
    finally:
        (copy / place.path).write_text(whole)
    if by in tests and _run(copy, [by], 4 * limit) is not None:
        return outcome | {"result": "the test fails anyway", "by": by}
    result = "noticed" if by else "missed"
    return outcome | {"result": result, "by": by, "tests": len(tests)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose")
    chooser.add_argument("places", type=pathlib.Path)
    chooser.add_argument("--seed", type=int, default=7)
    chooser.add_argument("--count", type=int, default=60)
    chooser.add_argument("--leave-out", nargs="*", default=["demo"], metavar="FOLDER")
    recorder = commands.add_parser("record")
    recorder.add_argument("places", type=pathlib.Path)
    recorder.add_argument("hits", type=pathlib.Path)
    trier = commands.add_parser("try")
    trier.add_argument("places", type=pathlib.Path)
    trier.add_argument("hits", type=pathlib.Path)
    trier.add_argument("--limit", type=float, default=60.0, metavar="SECONDS")
    trier.add_argument("--results", type=pathlib.Path)
    options, rest = parser.parse_known_args()
    if options.command == "choose":
        places = choose(options.seed, options.count, options.leave_out)
        options.places.write_text(json.dumps([vars(p) for p in places], indent=1))
        return
    places = [Place(**fields) for fields in json.loads(options.places.read_text())]
    if options.command == "record":
        sys.exit(record(places, options.hits, rest))
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_into(folder)
        for number, place in enumerate(places):
            tests = _tests_of(options.hits, number, 120)
            outcomes.append(attempt(place, tests, copy, options.limit))
            print(json.dumps(outcomes[-1]), flush=True)
            if options.results:
                options.results.write_text(json.dumps(outcomes, indent=1))
    print(dict(collections.Counter(o["result"] for o in outcomes)))


if __name__ == "__main__":
    main()
