"""Programs of users with strict type checkers run; `make lint` checks their types."""

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "typed_programs"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py"))
# Names whose types other packages leave unknown.
FOREIGN = re.compile(
    r"\b(?:optax|cross_entropy|model|TrainState|create|jax\.value_and_grad|state\.apply\w*)\b"
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(name, capsys):
    runpy.run_path(str(FOLDER / name))["main"]()
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_only_types_of_other_packages_are_ignored(name):
    lines = (FOLDER / name).read_text().splitlines()
    ignored = [code for code in lines if re.search(r"# .*: ignore", code)]
    assert all(FOREIGN.search(code) and "js." not in code for code in ignored)
    assert bool(ignored) == (name != "arrays.py")
