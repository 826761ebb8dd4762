"""A few hundred calls of `make fuzz`, always the same."""

import pathlib
import subprocess
import sys

import pytest

RUN = pathlib.Path(__file__).parents[1] / "fuzz" / "run.py"


@pytest.mark.parametrize("calls", ["100", pytest.param("300", marks=pytest.mark.slow)])
def test_odd_arguments_end_no_process_and_surface_no_error_from_inside(calls):
    done = subprocess.run(
        [sys.executable, RUN, "--seed", "0", "--calls", calls],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--calls {calls}" in done.stdout and "\n0 findings" in done.stdout
