"""Benchmarks take from the package what it has: tests run none of them in full."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(path.name for path in FOLDER.glob("*.py"))


def taken(tree):
    """The values that a file takes from the package, as `module`, `name`, `attribute`.

    Programs in strings, which run in other processes, count like the file itself.
    """
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


@pytest.mark.parametrize("file", FILES)
def test_what_a_benchmark_takes_is_there(file):
    for module, name, attribute in set(taken(ast.parse((FOLDER / file).read_text()))):
        owner = value(module, name)
        # What an instance has, its class need not.
        if attribute and not isinstance(owner, type):
            assert hasattr(owner, attribute), f"{module} {name} has no {attribute}"


def test_some_take_what_is_private():
    private = {
        module
        for file in FILES
        for module, *_ in taken(ast.parse((FOLDER / file).read_text()))
        if "._" in module
    }
    assert private, "else there would be nothing to test"


@pytest.mark.slow
def test_sharded_compares_all_forms(tmp_path):
    file = tmp_path / "numbers.json"
    options = ["--small", "--exact", "--devices", "2", "--min-bytes", "512"]
    done = subprocess.run(
        [sys.executable, FOLDER / "sharded.py", *options, "--json", file]
        + ["--models", "perceptron"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parameters equal bit by bit") >= 1
    results = json.loads(file.read_text())["comparisons"]
    whole, parts = 3 * 4 * (32 * 32 + 32), 3 * 4 * (32 * 16 + 32)
    at_rest = next(r for r in results if r["quantity"] == "at rest, state")
    # Parameters and two moments; and the number of steps.
    assert at_rest["values"]["replicated"] == [(whole + 4) / 2**20]
    assert at_rest["values"]["jit"] == [(parts + 4) / 2**20]
    quantities = {r["quantity"].split(",")[0] for r in results}
    assert quantities == {"at rest", "peak", "sent"}


@pytest.mark.slow
def test_meshes_compares_all_forms(tmp_path):
    file = tmp_path / "numbers.json"
    done = subprocess.run(
        [
            sys.executable,
            FOLDER / "meshes.py",
            "--quick",
            "--rounds",
            "5",
            "--json",
            file,
        ]
        + ["--before", FOLDER.parent],
        capture_output=True,
        text=True,
    )
    # Else losses were not those of the other form, or an array was gathered.
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["comparisons"]
    held = {
        r["case"]: r["values"] for r in found if r["quantity"] == "state on a device"
    }
    # Parameters and momentum of three pairs of layers, of 32 and 128 units.
    whole = 2 * 3 * 2 * 32 * 128 * 4 / 2**20
    assert held["8 x 1"] == {"run": [whole], "jit": [whole]}
    assert held["4 x 2"] == {"run": [whole / 2], "jit": [whole / 2]}
    assert {r["quantity"] for r in found} == {
        "dispatch",
        "step, one device",
        "first call, to 1",
        "state on a device",
        "step",
    }
