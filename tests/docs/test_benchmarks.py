"""Benchmarks take what there is, and a run of all keeps what it measured."""

import ast
import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.benchmarks import FOLDER, load

harness = load("_harness")
run_all = load("run_all")
Script, Comparison = run_all.Script, harness.Comparison
FILES = sorted(path.name for path in FOLDER.glob("*.py"))


def taken(tree):
    """The values that a file takes from the package: module, name, attribute."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                each.asname: (each.name, "")
                for each in node.names
                if each.asname and each.name.startswith("jaxstrategy")
            }
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] == "jaxstrategy":
                found = {e.asname or e.name: (module, e.name) for e in node.names}
                names |= found
                yield from ((*each, "") for each in found.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in names:
                yield (*names[node.value.id], node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if "import jaxstrategy" in node.value or "from jaxstrategy" in node.value:
                yield from taken(ast.parse(node.value))


def value(module, name):
    found = importlib.import_module(module)
    if name and not hasattr(found, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name) if name else found


def test_what_benchmarks_take_from_the_package_is_there():
    for file in FILES:
        tree = ast.parse((FOLDER / file).read_text())
        for module, name, attribute in set(taken(tree)):
            owner = value(module, name)
            # What an instance has, its class need not.
            if attribute and not isinstance(owner, type):
                assert hasattr(owner, attribute), f"{module} {name}.{attribute}"


def test_the_page_is_of_the_committed_results():
    again = "run `python benchmarks/run_all.py --draw`"
    committed = run_all.read(FOLDER / "results.json")
    assert (FOLDER / "FIGURES.md").read_text() == run_all.page(committed), again
    text = (FOLDER / "results.json").read_text()
    assert re.findall(r"(?<![\w.])/(?:home|tmp|work|opt|root|usr)/", text) == []
    found = run_all.by_key(committed).values()
    ratios = [each["ratio"] for each in found if each["ratio"]]
    assert ratios and np.isfinite(ratios).all()


SCRIPT = """
from _harness import Comparison, benchmark, main

@benchmark(dict(), dict())
def {name}(args):
    yield Comparison("small", "step", "us", {values}, 1.0)

main([{name}])
"""
MAIN = """
import os, pathlib, sys
import run_all
from run_all import Script
scripts, *arguments = sys.argv[1:]
run_all.others_now = lambda: float(os.environ["OTHERS"])
sys.exit(run_all.main(arguments, eval(scripts), pathlib.Path.cwd()))
"""


def script(folder, name, ours=(1, 2, 3)):
    values = {"run": [*ours], "by hand": [2, 2, 2]}
    (folder / f"{name}.py").write_text(SCRIPT.format(name=name, values=values))


class Runner:
    """Runs of scripts in a folder, and the files of their page."""

    def __init__(self, folder):
        self.folder = folder
        self.file = folder / "page" / "results.json"
        self.output = folder / "output.json"
        self.scripts = [Script(name, name, 60) for name in ("first", "second")]

    def __call__(self, *arguments, others="0"):
        files = ["--results", str(self.file), "--output", str(self.output)]
        return subprocess.run(
            [sys.executable, "-c", MAIN, repr(self.scripts), *files] + [*arguments],
            env={**os.environ, "PYTHONPATH": str(FOLDER), "OTHERS": others},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def results(self):
        return run_all.read(self.file)

    @property
    def page(self):
        return self.file.with_name("FIGURES.md").read_text()


@pytest.fixture
def runner(tmp_path):
    for name in ("first", "second"):
        script(tmp_path, name)
    return Runner(tmp_path)


def test_all_scripts_go_into_one_file_and_one_page(runner):
    done = runner()
    assert done.returncode == 0, done.stderr
    found = runner.results
    assert {name: each["outcome"] for name, each in found.items()} == {
        "first": "done",
        "second": "done",
    }
    assert [*run_all.by_key(found)] == [
        ("first", "small", "step"),
        ("second", "small", "step"),
    ]
    run = found["first"]["machine"]
    assert run == found["second"]["machine"]
    assert run["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run["versions"]["jax"] and run["cores"] >= 1 and run["commit"]
    assert runner.page == run_all.page(found)
    assert "| small | 2 (1.5-2.5) | 2 | 1.000 (0.75-1.25) | 1.00 | met |" in runner.page
    runner.file.unlink()
    done = runner(others="0.35")
    assert done.returncode == 2 and not runner.file.exists()
    assert "Other processes use 35% of the" in done.stderr and "`--busy`" in done.stderr


def record(median, low=None, high=None, **options):
    low, high = low or median, high or median
    told = {"case": "small", "quantity": "step", "note": ""}
    told |= {"programs": {"run": [1.0] * 3, "by hand": [1.0] * 3}, "least": 0.0}
    told |= {"ratio": [median, low, high], "tolerance": 0.1, "verdict": "met"}
    return {**told, **options}


OTHER = {"programs": {"run": [1.0] * 3, "as wanted": [1.0] * 3}}
STOPPED = {"ratio": None, "programs": {"run": None, "by hand": [1.0] * 3}}


def test_a_ratio_has_grown_or_not():
    for before, now, has_grown in (
        (record(1.0), record(1.11), True),
        (record(1.0), record(1.09), False),
        # The quartiles overlap: it may be chance.
        (record(1.0, 0.8, 1.3), record(1.4, 1.2, 1.5), False),
        (record(1.0, 0.8, 1.3), record(1.4, 1.31, 1.5), True),
        (record(1.0), record(1.4, tolerance=0.5), False),
        (record(0.0), record(0.1), True),
        (record(1.0), record(1.0, **STOPPED), True),
        (record(1.0, **STOPPED), record(9.0), False),
        (record(1.0), record(9.0, **OTHER), False),
        # Between two limits only those matter.
        (record(1.0, least=0.8), record(1.24, least=0.8), False),
        (record(1.0, least=0.8), record(0.7, least=0.8, verdict="missed"), True),
    ):
        old, new = ({"first": {"comparisons": [each]}} for each in (before, now))
        assert bool(run_all.regressions(old, new)) is has_grown, (before, now)
    assert run_all.regressions({}, {"first": {"comparisons": [record(9.0)]}}) == []


def test_a_regression_is_a_failure_with_a_table(runner):
    assert runner().returncode == 0
    kept, shown = runner.file.read_text(), runner.page
    script(runner.folder, "second", ours=(4, 6, 8))
    done = runner("--check")
    assert done.returncode == 1
    assert "Measured once more, as it seems slower: second" in done.stdout
    assert done.stdout.count("=== second") == 2 and done.stdout.count("=== first") == 1
    assert "Slower than on the page, by the ratio to its baseline: 1\n" in done.stdout
    line = "  second: small, step: 1.000 (0.75-1.25), now 3.000 (2.50-3.50)\n"
    assert line in done.stdout
    assert (runner.file.read_text(), runner.page) == (kept, shown)
    assert [*run_all.read(runner.output)] == ["first", "second"]


def test_the_suite_has_every_benchmark_with_options_that_it_takes():
    suite = run_all.SUITE
    assert sum(script.seconds for script in suite) <= run_all.WHOLE
    assert sum(script.quick for script in suite) <= run_all.QUICK
    files = {path.stem for path in FOLDER.glob("[!_]*.py")} - {"run_all"}
    found = {(f, each.name): each for f in sorted(files) for each in load(f).BENCHMARKS}
    # The last compiles only; a plan takes minutes.
    left_out = {("plan", "plan"), ("reductions", "overlap")}
    assert {(script.file, script.name) for script in suite} == {*found} - left_out
    for script in suite:
        each = found[script.file, script.name]
        assert (script.quick > 0) == (each.quick is not None)
        assert {*(each.quick or ())} <= {*each.options}
        arguments = [script.name, "--json", "numbers.json", "--check"]
        if script.others:
            arguments += ["--others-python", "python"]
        (chosen,), options, given = harness.parsed(
            load(script.file).BENCHMARKS, arguments
        )
        assert chosen is each and given.json.name == "numbers.json" and given.check
        assert options == {"others_python": "python"} if script.others else not options
