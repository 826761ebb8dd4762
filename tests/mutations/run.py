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
OPPOSITES = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
}  # fmt: skip


@dataclasses.dataclass
class Place:
    """One change: `old` at a column of a line becomes `new`."""

    path: str
    line: int
    column: int
    old: str
    new: str
    text: str  # the whole line, so that the place is found when lines have moved


def changed(node, source):
    """What is replaced at `node`, and what comes in its place; None if nothing is."""

    def text(part):
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return node, f"{text(left)} {OPPOSITES[type(op)]} {text(right)}"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            return node, "(" + word.join(map(text, values)) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return node, text(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITES:
            if not {left, right} & {each for each in (left, right) if is_text(each)}:
                return node, f"{text(left)} {OPPOSITES[type(op)]} {text(right)}"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            return test, f"not ({text(test)})"
        case ast.Constant(value=bool(value)):
            return node, str(not value)
        case ast.Constant(value=int(value)):
            return node, str(value + 1)
        case ast.Expr(value=ast.Call()):
            return node, "None"
    return None


def is_text(node):
    is_constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_constant or isinstance(node, ast.JoinedStr)


def left_out(tree):
    """Nodes of annotations, errors' texts, decorators and assertions."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr():
                yield from ast.walk(node)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from ast.walk(node)
        for name in ("returns", "annotation"):
            if (part := getattr(node, name, None)) is not None:
                yield from ast.walk(part)
        for part in getattr(node, "decorator_list", ()):
            yield from ast.walk(part)


def places_of(path):
    source = path.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    unchanged, found = set(left_out(tree)), {}
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    for node in (node for function in functions for node in ast.walk(function)):
        if node in unchanged or (change := changed(node, source)) is None:
            continue
        part, new = change
        line, start, end = lines[part.lineno - 1], part.col_offset, part.end_col_offset
        if part.lineno == part.end_lineno and line.isascii():
            file = str(path.relative_to(ROOT))
            place = Place(file, part.lineno, start, line[start:end], new, line)
            found[place.line, start, new] = place
    return list(found.values())


def choose(seed, count, folders_left_out):
    """Places spread over all folders by their size, chosen by the seed."""
    chance, by_folder = random.Random(seed), collections.defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[-2:][0]
        if folder not in folders_left_out:
            by_folder[folder] += places_of(path)
    folders = {name: places for name, places in by_folder.items() if len(places) >= 10}
    total = sum(map(len, folders.values()))
    shares = {name: len(places) * count / total for name, places in folders.items()}
    numbers = {name: max(1, int(share)) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: numbers[name] - shares[name]):
        numbers[name] += sum(numbers.values()) < count
    chosen = [chance.sample(folders[name], n) for name, n in numbers.items()]
    return chance.sample(sum(chosen, []), min(count, sum(map(len, chosen))))


def line_of(place):
    """Where the place's line stands now: the nearest with the same text."""
    path = ROOT / place.path
    lines = path.read_text().splitlines() if path.exists() else []
    same = [number for number, text in enumerate(lines, 1) if text == place.text]
    return min(same, key=lambda number: abs(number - place.line), default=None)


# In the copy of the package that notes who reaches what: evaluates to None.
HITS = """import os
seen = set()
def hit(place):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if test and (place, test) not in seen:
        seen.add((place, test))
        with open(os.environ["MUTATION_HITS"], "a") as file:
            file.write(f"{place}\\t{test}\\n")
"""


def record(places, hits, arguments):
    """Runs pytest on a copy in which each place notes the test that reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_into(folder)
        (copy / "mutation_hits.py").write_text(HITS)
        # From the right, so that places of one line do not move each other.
        for number, place in sorted(enumerate(places), key=lambda e: -e[1].column):
            if (line := line_of(place)) is not None:
                note = f'__import__("mutation_hits").hit({number})'
                replace(copy, place, line, f"({note} or ({place.old}))")
        hits.write_text("")
        os.environ["MUTATION_HITS"] = str(hits.resolve())
        return pytest(copy, arguments).wait()


def pytest(root, arguments, **options):
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(command, cwd=root, env=environment, **options)


def copy_into(folder):
    ignored = shutil.ignore_patterns(".venv*", ".git", "build", ".hypothesis")
    whole = shutil.copytree(ROOT, f"{folder}/project", ignore=ignored)
    return pathlib.Path(whole)


def replace(copy, place, line, new):
    """Puts `new` in the place, and returns the whole file as it was."""
    path = copy / place.path
    whole = path.read_text()
    lines = whole.splitlines(keepends=True)
    text, end = lines[line - 1], place.column + len(place.old)
    assert text[place.column : end] == place.old
    lines[line - 1] = text[: place.column] + new + text[end:]
    path.write_text("".join(lines))
    return whole


def tests_of(hits, number, most):
    """Names of tests that reach the place, some of each file first."""
    by_file = collections.defaultdict(list)
    for text in dict.fromkeys(hits.read_text().splitlines()):
        place, test = text.split("\t")
        if int(place) == number:
            by_file[test.partition("::")[0]].append(test)
    # Some of each file, because what one file does not notice another one may.
    rounds = [names[i : i + 1] for i in range(most) for names in by_file.values()]
    return sum(rounds, [])[:most]


def failing(root, tests, limit):
    """The name of the first test that fails, None if none does in time."""
    process = pytest(
        root, ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *tests], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode == 0:
        return None
    pattern = r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - .*)?$"
    failed = re.search(pattern, output, re.MULTILINE)
    return failed[1] if failed else output[-300:].strip() or "pytest ended"


def attempt(place, tests, copy, limit):
    """What became of one change: `noticed` by a test, or not."""
    change = f"{place.old} -> {place.new}"
    outcome = {"place": f"{place.path}:{place.line}", "change": change}
    line = line_of(place)
    if line is None or not tests:
        return outcome | {"result": "no test runs it" if line else "gone"}
    whole = replace(copy, place, line, place.new)
    try:
        by = failing(copy, tests, limit)
    finally:
        (copy / place.path).write_text(whole)
    result = "noticed" if by else "missed"
    if by in tests and failing(copy, [by], 4 * limit) is not None:
        result = "the test fails anyway"
    return outcome | {"result": result, "by": by, "tests": len(tests)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    chooser, recorder, trier = map(commands.add_parser, ("choose", "record", "try"))
    for each in (chooser, recorder, trier):
        each.add_argument("places", type=pathlib.Path)
    for each in (recorder, trier):
        each.add_argument("hits", type=pathlib.Path)
    chooser.add_argument("--seed", type=int, default=7)
    chooser.add_argument("--count", type=int, default=60)
    chooser.add_argument("--leave-out", nargs="*", default=["demo"], metavar="FOLDER")
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
        copy = copy_into(folder)
        for number, place in enumerate(places):
            tests = tests_of(options.hits, number, 120)
            outcomes.append(attempt(place, tests, copy, options.limit))
            print(json.dumps(outcomes[-1]), flush=True)
            if options.results:
                options.results.write_text(json.dumps(outcomes, indent=1))
    print(dict(collections.Counter(o["result"] for o in outcomes)))


if __name__ == "__main__":
    main()
