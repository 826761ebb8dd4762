"""Every block of code in README.md and in the prose of the guides runs."""

import doctest
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from helpers.guides import FOLDER, ROOT, names, prose

PAGES = ["README.md", *names()]
FENCES = re.compile(r"^```(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A script needs no line of what every program of a guide begins with.
BEGINNING = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxstrategy as js

js.simulate(8)
"""
# Programs that other tests run: with what stands before and behind them.
PORTED = ("# before: ", "# after", "# mixed", "# eager")
ELSEWHERE = {"porting.md": PORTED}


def text(page):
    return TEXT if page == "README.md" else prose(page)


TEXT = (ROOT / "README.md").read_text()


def blocks(page, language):
    return [body for kind, body in FENCES.findall(text(page)) if kind == language]


def scripts():
    for page in PAGES[1:]:  # test_readme.py runs the README's
        for number, body in enumerate(blocks(page, "python")):
            if ">>>" not in body and not body.startswith(ELSEWHERE.get(page, ("\0",))):
                yield pytest.param(body, id=f"{page}-{number}")


def commands():
    for page in PAGES:
        for body in blocks(page, "console"):
            joined = body.replace("\\\n", " ")
            for line in filter(None, map(str.strip, joined.splitlines())):
                yield pytest.param(shlex.split(line, comments=True), id=line)


@pytest.mark.parametrize("page", PAGES)
def test_each_block_says_its_language(page):
    kinds = {kind for kind, _ in FENCES.findall(text(page))}
    assert kinds <= {"python", "console", "text"}


@pytest.mark.parametrize("page", [p for p in names() if ">>> " in text(p)])
def test_examples_of_a_session_print_what_they_say(page):
    examples = doctest.DocTestParser().get_doctest(text(page), {}, page, page, 0)
    assert examples.examples
    results = doctest.DocTestRunner().run(examples)
    assert results.attempted and not results.failed


@pytest.mark.slow
@pytest.mark.parametrize("code", list(scripts()))
def test_other_blocks_run_as_scripts(code, tmp_path):
    (tmp_path / "block.py").write_text(BEGINNING + code)
    done = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def makes(target):
    made = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return target in " ".join(made).split()


def extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def asked(module):
    """What a module says of its options."""
    return subprocess.run(
        [sys.executable, "-m", *module.split(), "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


OPTION = re.compile(r"^--?[a-z][\w-]*")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_exist(command):
    match command:
        case ["make", *targets]:
            assert all(makes(target) for target in targets if "=" not in target)
        case ["pip", "install", *what]:
            named = re.findall(r"\[([\w,-]+)\]", " ".join(what))
            assert {extra for each in named for extra in each.split(",")} <= extras()
        case ["python", "-m", module, *rest]:
            said = asked(module)
            options = [option for word in rest for option in OPTION.findall(word)]
            assert [o for o in options if not re.search(rf"{o}\b", said)] == []
        case ["python", file, *_]:
            assert (ROOT / file).exists() or (FOLDER / file).exists()
        case _:
            pytest.fail(f"nothing here runs {command}")
