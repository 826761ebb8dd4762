"""What the package says of itself: versions, extras, citation, templates, changes."""

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import jaxstrategy as js

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEEL = runpy.run_path(str(ROOT / "tests" / "wheel" / "try_wheel.py"))
TYPED = sorted((ROOT / "tests" / "typed_programs").glob("*.py"))


def test_the_version_and_the_citation_say_the_same():
    assert js.__version__ == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## ([\d.]+)", changes, re.MULTILINE)[1] == PROJECT["version"]
    cite = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"authors", "cff-version", "message", "title"} <= set(cite)
    assert cite["cff-version"] == "1.2.0" and cite["type"] == "software"
    assert cite["version"] == js.__version__ and cite["license"] == PROJECT["license"]
    assert cite["title"] == f"{PROJECT['name']}: {PROJECT['description']}"


def test_extras_have_programs_that_try_them_and_errors_name_them():
    extras = PROJECT["optional-dependencies"]
    users = [name for name in extras if not WHEEL["DEVELOPERS"].match(name)]
    programs = {path.stem for path in WHEEL["PROGRAMS"].glob("*.py")}
    assert programs == {"none", *users}
    sources = (path.read_text() for path in (ROOT / "jaxstrategy").rglob("*.py"))
    named = set(re.findall(r"jaxstrategy\[([\w,-]+)\]", " ".join(sources)))
    assert named and named <= set(extras)


def test_templates_are_forms_with_questions_and_name_what_exists():
    assert [path.stem for path in TEMPLATES] == ["bug", "missing"]
    for path in TEMPLATES:
        text = path.read_text()
        form = yaml.safe_load(text)
        assert {"name", "description", "body"} <= set(form)
        ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
        assert len(ids) == len(set(ids)) >= 2
        assert all(each["attributes"]["label"] for each in form["body"])
        for name in re.findall(r"python -m ([\w.]+)", text):
            assert importlib.util.find_spec(f"{name}.__main__"), name
        for name in re.findall(r"`js\.(\w+)", text):
            assert hasattr(js, name), name


@pytest.mark.slow
@pytest.mark.parametrize("path", TYPED, ids=lambda path: path.stem)
def test_typed_programs_run(path, capsys):
    """`make lint` checks their types; those that are ignored are other packages'."""
    runpy.run_path(str(path))["main"]()
    assert capsys.readouterr().out
    lines = [n for n in path.read_text().splitlines() if re.search("# .*: ignore", n)]
    assert not any("js." in line.partition("#")[0] for line in lines)


def test_odd_arguments_end_no_process_and_surface_no_error_from_inside(calls="100"):
    """A few hundred calls of `make fuzz`, always the same."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/fuzz/run.py", "--seed", "0", "--calls", calls],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--calls {calls}" in done.stdout and "\n0 findings" in done.stdout


def test_a_library_that_is_missing_is_named_with_its_extra():
    code = """
import sys
for name in ("flax", "keras", "optax", "orbax", "orbax.checkpoint"):
    sys.modules[name] = None
import jaxstrategy as js
assert js.flax.axis_name() is None
for use in (
    lambda: js.flax.linen.BatchNorm,
    lambda: js.flax.nnx.BatchNorm,
    lambda: js.optax.all_reduce_gradients(),
    lambda: js.optax.apply_if_finite(None, 1),
    lambda: js.keras.BatchNormalization,
    lambda: js.checkpoint.CheckpointManager("saved"),
):
    try:
        use()
    except js.errors.MissingExtraError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=120, capture_output=True
    )
    said = done.stdout.decode().splitlines()
    for line, name, library, extra in zip(
        said,
        ["flax.linen.BatchNorm", "flax.nnx.BatchNorm", "optax.all_reduce_gradients",
         "optax.apply_if_finite", "keras.BatchNormalization", "checkpoint"],
        ["Flax", "Flax", "Optax", "Optax", "Keras", "Orbax"],
        ["flax"] * 4 + ["keras", "checkpoint"],
        strict=True,
    ):  # fmt: skip
        assert name in line or name == "checkpoint", said
        assert library in line and "not installed" in line
        assert line.endswith(f"pip install 'jaxstrategy[{extra}]'"), line
