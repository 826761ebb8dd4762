"""The README is short and true: its example runs and prints what it says."""

import re
import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FIRST = BLOCKS[0]


def ran(folder, code, *options):
    """The outcome of a script of these lines, in a process of its own."""
    (folder / "train.py").write_text(code)
    return subprocess.run(
        [sys.executable, *options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_it_takes_a_minute():
    assert len(TEXT.split()) <= 700


def test_its_code_fits_on_one_screen():
    assert len(BLOCKS) == 1 and len(FIRST.splitlines()) <= 45


def test_the_first_example_prints_what_the_readme_says(tmp_path):
    done = ran(tmp_path, FIRST, "-W", "error")
    assert done.returncode == 0, done.stderr
    loss, accuracy = re.match(r"loss ([\d.]+), .* ([\d.]+)%", done.stdout).groups()
    said = re.search(r"It prints `loss ([\d.]+), .* ([\d.]+)%`", TEXT)
    assert abs(float(loss) - float(said[1])) < 0.005
    assert abs(float(accuracy) - float(said[2])) < 1.5


def test_the_first_example_is_short():
    trained = FIRST[: FIRST.index("guess =")]
    assert sum(bool(line.strip()) for line in trained.splitlines()) <= 25


def test_a_forgotten_reduction_is_answered_as_the_readme_says(tmp_path):
    [reduction] = re.findall(r"^.*all_reduce\(.*\n", FIRST, re.MULTILINE)
    assert (
        "Forget the `all_reduce`, and a `NotMirroredWarning` says since which" in TEXT
    )
    forgotten = FIRST.replace(reduction, "").replace("batches * 10", "batches[:1]")
    lines = [line.strip() for line in forgotten.splitlines()]
    varies = lines.index("logits = state.apply_fn(params, images)")
    warned = ran(tmp_path, forgotten).stderr
    assert "NotMirroredWarning" in warned
    assert f"since: {tmp_path}/train.py:{varies + 1}: {lines[varies]}" in warned


def test_there_are_no_badges():
    assert "![" not in TEXT and "<img" not in TEXT
