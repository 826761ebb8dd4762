"""A few hundred calls of `make fuzz`, always the same."""

import pathlib
import subprocess
import sys

RUN = pathlib.Path(__file__).parent / "fuzz" / "run.py"


def test_odd_arguments_end_no_process_and_surface_no_error_from_inside():
    done = subprocess.run(
        [sys.executable, RUN, "--seed", "0", "--calls", "300"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--calls 300" in done.stdout and "\n0 findings" in done.stdout
