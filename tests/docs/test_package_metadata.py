"""What the wheel will say of itself, and what tries it."""

import re
import sys
import tomllib
from pathlib import Path

import jaxstrategy as js

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
sys.path.insert(0, str(ROOT / "tests" / "wheel"))
import try_wheel  # noqa: E402  (a program beside the wheel's)

sys.path.pop(0)
USERS = [
    name
    for name in PROJECT["optional-dependencies"]
    if not try_wheel.DEVELOPERS.match(name)
]


def test_the_version_has_one_place():
    assert js.__version__ == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## ([\d.]+)", changes, re.MULTILINE)[1] == PROJECT["version"]
    sources = (path.read_text() for path in (ROOT / "jaxstrategy").rglob("*.py"))
    assert not any(f'"{PROJECT["version"]}"' in source for source in sources)


def test_each_extra_has_a_program_that_tries_it():
    programs = {path.stem for path in try_wheel.PROGRAMS.glob("*.py")}
    assert programs == {"none", *USERS}


def test_errors_name_extras_that_exist():
    sources = (path.read_text() for path in (ROOT / "jaxstrategy").rglob("*.py"))
    named = set(re.findall(r"jaxstrategy\[([\w,-]+)\]", " ".join(sources)))
    assert named and named <= set(PROJECT["optional-dependencies"])
