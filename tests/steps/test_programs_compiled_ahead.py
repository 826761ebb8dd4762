"""Programs for TPUs and GPUs that are not there: what runs beside reductions."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import benchmarks

# The packages that compile are large and no part of the tests' extras:
# `pip install libtpu==0.0.50.*`, `pip install --no-deps jax-cuda12-plugin
# jax-cuda12-pjrt`, of the version of jaxlib.
PACKAGES = {"v5e:2x2": "libtpu", "v6e:2x2": "libtpu", "gpu:8": "jax_cuda12_plugin"}


@pytest.mark.slow
@pytest.mark.parametrize("target", PACKAGES)
def test_gradients_are_reduced_beside_the_computation(target, tmp_path):
    if importlib.util.find_spec(PACKAGES[target]) is None:
        pytest.skip(f"{PACKAGES[target]}, which compiles for it, is not installed")
    found = tmp_path / "found.json"
    # In a process of its own: it loads a library that one process at a time may have.
    script = [sys.executable, str(benchmarks.FOLDER / "reductions.py"), "overlap"]
    pack = "4300000" if target == "gpu:8" else "0"
    options = ["--targets", target, "--layers", "4", "--pack", pack]
    done = subprocess.run(
        [*script, *options, "--json", str(found)],
        env=os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        cwd=Path(script[1]).parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(found.read_text())
    beside, alone = (numbers[0] for numbers in comparison["values"].values())
    whole = 4 * 4 * (1024 * 1024 + 1024)
    assert alone == whole  # one reduction at the end
    assert beside <= whole / 3
