"""What somebody does who has a new clone and README.md: `make demo`, then a program."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
from helpers.oracle import recorded
from test_guides import FIRST, README as TEXT

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parents[1] / "first_ten_minutes"
CLONED = ["jaxstrategy", "Makefile", "README.md", "LICENSE", "pyproject.toml"]

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


def printed(program, folder):
    """The numbers that a program prints, one a line."""
    shutil.copy(PROGRAMS / program, folder)
    lines = ran(sys.executable, "-W", "error", program, cwd=folder).split()
    return [float(line) for line in lines]


def test_the_demo_trains(tmp_path):
    for name in CLONED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tmp_path)
    # What pip finds there it need not install.
    venv.create(tmp_path / ".venv")
    (packages,) = (tmp_path / ".venv").glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(sysconfig.get_path("purelib"))
    said = ran("make", "demo", cwd=tmp_path)
    accuracy = re.search(r"Test accuracy: ([\d.]+) %", said)
    assert float(accuracy[1]) > 97
    assert (tmp_path / "demo.png").exists()


def test_a_program_of_tensorflow_has_its_losses(tmp_path):
    losses = printed("tensorflow_user.py", tmp_path)
    (eight,) = recorded("mlp_sgd.json")["runs"]  # on as many replicas, by Keras' SGD
    np.testing.assert_allclose(losses, eight["losses"], atol=2e-5)


def test_a_program_of_pmap_has_its_losses(tmp_path):
    before = printed("pmap_before.py", tmp_path)
    after = printed("pmap_after.py", tmp_path)
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


def test_the_same_program_runs_in_two_processes(tmp_path):
    program = FIRST.replace(
        "MirroredStrategy(js.simulate(8))", "MultiWorkerMirroredStrategy()"
    )
    (tmp_path / "train.py").write_text(program.replace("batches * 10", "batches"))
    launch = "-m jaxstrategy.launch -n 2 --devices-per-process 4 train.py".split()
    lines = ran(sys.executable, *launch, cwd=tmp_path).splitlines()
    losses = [line.partition("] ")[2] for line in lines if "] loss " in line]
    assert len(losses) == 2 and len(set(losses)) == 1
