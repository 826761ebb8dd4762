"""The README is true: its first example runs and prints what it says."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
FIRST = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]


def test_the_first_example_prints_what_the_readme_says(tmp_path):
    (tmp_path / "train.py").write_text(FIRST)
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    loss, accuracy = re.match(r"loss ([\d.]+), .* ([\d.]+)%", done.stdout).groups()
    said = re.search(r"It prints `loss ([\d.]+), .* ([\d.]+)%`", TEXT)
    assert abs(float(loss) - float(said[1])) < 0.005
    assert abs(float(accuracy) - float(said[2])) < 1.5


def test_the_first_example_is_short():
    trained = FIRST[: FIRST.index("guess =")]
    assert sum(bool(line.strip()) for line in trained.splitlines()) <= 25


def test_the_other_examples():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted >= 7 and results.failed == 0


MISTAKES = re.findall(
    r"```python\n# (\w+)\.py\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL
)
BEFORE = re.search(r"`strategy` and `x` are\n\n```python\n(.*?)```", TEXT, re.DOTALL)[1]


@pytest.mark.parametrize(
    "name, code, said",
    [
        pytest.param(*mistake, marks=[] if mistake[0] == "hang" else [pytest.mark.slow])
        for mistake in MISTAKES
    ],
    ids=[mistake[0] for mistake in MISTAKES],
)
def test_the_famous_mistakes_are_answered_as_the_readme_says(
    tmp_path, name, code, said
):
    (tmp_path / f"{name}.py").write_text(f"{BEFORE}\n{code}")
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    printed = done.stderr.replace(f"{tmp_path}/", "")
    assert " ".join(said.split()) in " ".join(printed.split())


def test_there_are_three_famous_mistakes():
    assert [name for name, _, _ in MISTAKES] == ["unreduced", "twice", "hang"]
