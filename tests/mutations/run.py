"""Breaks the library on purpose, and counts how many of the changes a test notices.

Run by hand, on an idle machine, from the root of the project, with `coverage` and
`pytest-cov` installed:

    pytest -n 2 -m "not slow" --cov --cov-config=tests/mutations/coveragerc \\
        --cov-context=test --cov-report=
    coverage combine --rcfile=tests/mutations/coveragerc
    python tests/mutations/run.py choose places.json --seed 7 --count 60
    python tests/mutations/run.py try places.json

Each change is made in a copy of the package. The tests that run its line, by the
contexts that coverage has recorded, are tried against it for at most a minute
(`--limit`). What fails a test counts as noticed if the same test passes without the
change.
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
        folder = path.relative_to(PACKAGE).parts[0]
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


def _tests_of(data: pathlib.Path, place: Place, line: int, most: int) -> list[str]:
    """Names of tests that run the line: those first that run most of its file."""
    import coverage

    recorded = coverage.CoverageData(str(data))
    recorded.read()
    path = next(
        (f for f in recorded.measured_files() if f.endswith("/" + place.path)), None
    )
    if path is None:
        return []
    tests: collections.Counter[str] = collections.Counter()
    by_line = recorded.contexts_by_lineno(path)
    for context in by_line.get(line, []):
        if "::" in context:
            tests[_test_name(context)] = 0
    for contexts in by_line.values():
        tests.update(t for t in map(_test_name, contexts) if t in tests)
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for name, _ in sorted(tests.items(), key=lambda item: (-item[1], item[0])):
        by_file[name.partition("::")[0]].append(name)
    # Some of each file, because what one file does not notice another one may.
    rounds = [names[i : i + 1] for i in range(most) for names in by_file.values()]
    return [name for names in rounds for name in names][:most]


def _test_name(context: str) -> str:
    return re.sub(r"(\|\w*| \(\w+\))+$", "", context.lstrip("|"))


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


def attempt(place: Place, data: pathlib.Path, copy: pathlib.Path, limit: float) -> dict:
    """What became of one change: `noticed` by a test, or not."""
    outcome = {
        "place": f"{place.path}:{place.line}",
        "change": f"{place.old} -> {place.new}",
    }
    line = _line_of(place)
    if line is None:
        return outcome | {"result": "gone"}
    tests = _tests_of(data, place, line, 120)
    if not tests:
        return outcome | {"result": "no test runs it"}
    path = copy / place.path
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    text = lines[line - 1]
    assert text[place.column :].startswith(place.old)
    lines[line - 1] = (
        text[: place.column] + place.new + text[place.column + len(place.old) :]
    )
    path.write_text("".join(lines))
    try:
        by = _run(copy, tests, limit)
    finally:
        path.write_text(whole)
    if by in tests and _run(copy, [by], 4 * limit) is not None:
        return outcome | {"result": "the test fails anyway", "by": by}
    return outcome | {
        "result": "noticed" if by else "missed",
        "by": by,
        "tests": len(tests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    chooser = commands.add_parser("choose")
    chooser.add_argument("places", type=pathlib.Path)
    chooser.add_argument("--seed", type=int, default=7)
    chooser.add_argument("--count", type=int, default=60)
    chooser.add_argument("--leave-out", nargs="*", default=["demo"], metavar="FOLDER")
    trier = commands.add_parser("try")
    trier.add_argument("places", type=pathlib.Path)
    trier.add_argument(
        "--coverage", type=pathlib.Path, default=pathlib.Path(".coverage")
    )
    trier.add_argument("--limit", type=float, default=60.0, metavar="SECONDS")
    trier.add_argument("--results", type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "choose":
        places = choose(options.seed, options.count, options.leave_out)
        options.places.write_text(json.dumps([vars(p) for p in places], indent=1))
        return
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "project"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "build")
        )
        for fields in json.loads(options.places.read_text()):
            outcome = attempt(Place(**fields), options.coverage, copy, options.limit)
            outcomes.append(outcome)
            print(json.dumps(outcome), flush=True)
            if options.results:
                options.results.write_text(json.dumps(outcomes, indent=1))
    print(dict(collections.Counter(o["result"] for o in outcomes)))


if __name__ == "__main__":
    main()
