"""What somebody does who has a new clone and README.md: `make demo`, then a program.

The clone has no environment; `make demo` makes it, with what pip's index has, and all
that follows runs in it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_guides import FIRST, README as TEXT

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parents[1] / "first_ten_minutes"
CLONED = ["jaxstrategy", "Makefile", "README.md", "LICENSE", "pyproject.toml"]
# Of TensorFlow 2.21 on eight replicas, with Keras' SGD and scaled sums.
TENSORFLOW = [
    *(1.09961712, 1.07616949, 1.08029270, 1.06145012, 1.03337634),
    *(1.02072239, 1.00192893, 0.96915823, 0.98810542, 0.92350626),
    *(0.87872332, 0.89495248, 0.98179901, 0.93394756, 0.91271943),
    *(1.01927423, 0.91498435, 0.93915784, 0.93593752, 0.98749214),
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def ran(*command, cwd):
    # A new user has set none of what these tests run with.
    # MAKE...: `make test-all VENV=x` would have `make demo` use that environment, too.
    others = ("JAX_", "XLA_", "MAKE", "MFLAGS", "VENV", "JOBS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    for name in CLONED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def demo(clone):
    """What `make demo` prints, the first command of the README."""
    return ran("make", "demo", f"PYTHON={sys.executable}", cwd=clone)


@pytest.fixture
def python(clone, demo):
    return clone / ".venv" / "bin" / "python"


def printed(python, program, folder):
    """The numbers that a program prints, one a line."""
    shutil.copy(PROGRAMS / program, folder)
    lines = ran(python, "-W", "error", program, cwd=folder).split()
    return [float(line) for line in lines]


def test_the_demo_trains(clone, demo):
    accuracy = re.search(r"Test accuracy: ([\d.]+) %", demo)
    assert float(accuracy[1]) > 97
    assert (clone / "demo.png").exists()


def test_the_readmes_program_prints_what_it_says(python, tmp_path):
    (tmp_path / "train.py").write_text(FIRST)
    said = re.search(r"It prints `loss ([\d.]+), .* ([\d.]+)%`", TEXT).groups()
    loss, accuracy = re.findall(r"[\d.]+(?=,|%)", ran(python, "train.py", cwd=tmp_path))
    assert abs(float(loss) - float(said[0])) < 0.005
    assert abs(float(accuracy) - float(said[1])) < 1.5


def test_a_program_of_tensorflow_has_its_losses(python, tmp_path):
    losses = printed(python, "tensorflow_user.py", tmp_path)
    np.testing.assert_allclose(losses, TENSORFLOW, atol=2e-5)


def test_a_program_of_pmap_has_its_losses(python, tmp_path):
    before = printed(python, "pmap_before.py", tmp_path)
    after = printed(python, "pmap_after.py", tmp_path)
    assert len(after) == 11
    np.testing.assert_allclose(after, before, atol=2e-5)


def test_the_programs_have_the_lines_that_the_readme_says():
    tensorflow = (PROGRAMS / "tensorflow_user.py").read_text()
    before = (PROGRAMS / "pmap_before.py").read_text()
    after = (PROGRAMS / "pmap_after.py").read_text()
    for program, *lines in [
        (tensorflow, "js.MirroredStrategy()", 'all_reduce("sum", grads)'),
        (before, "jax.pmap", "lax.pmean(", "jax_utils.replicate", "x.reshape(8, -1, "),
        (
            after,
            "@strategy.run",
            'all_reduce("mean", ',
            "experimental_distribute_dataset",
        ),
    ]:
        for line in lines:
            assert line in program and line.removesuffix("(").rstrip(" ,") in TEXT


def test_the_same_program_runs_in_two_processes(python, tmp_path):
    program = FIRST.replace(
        "MirroredStrategy(js.simulate(8))", "MultiWorkerMirroredStrategy()"
    )
    (tmp_path / "train.py").write_text(program.replace("batches * 10", "batches"))
    launch = "-m jaxstrategy.launch -n 2 --devices-per-process 4 train.py".split()
    lines = ran(python, *launch, cwd=tmp_path).splitlines()
    losses = [line.partition("] ")[2] for line in lines if "] loss " in line]
    assert len(losses) == 2 and len(set(losses)) == 1


def test_a_missing_extra_is_named_with_the_command_that_installs_it(python, tmp_path):
    (tmp_path / "old.py").write_text("import tensorflow as tf\n")
    done = subprocess.run(
        [python, "-m", "jaxstrategy.compat.port", "old.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode and "pip install 'jaxstrategy[port]'" in done.stderr
