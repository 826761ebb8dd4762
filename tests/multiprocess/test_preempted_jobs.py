"""Jobs of several processes that are preempted and go on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "preempted.py"
SECONDS = 120


def launched(folder, *arguments):
    """What the launcher of two processes printed, and its exit code."""
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", "2"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    print(done.stdout)  # shown when the test fails
    return done.stdout, done.returncode


def ends(output):
    return re.findall(r"\[\d\] ended at 60 with (.*)", output)


def begins(output):
    return [int(step) for step in re.findall(r"\[\d\] begins at (\d+)", output)]


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_one_step(tmp_path):
    output, code = launched(tmp_path / "whole", "-1", "0")
    assert code == 0
    (whole, other) = ends(output)
    assert whole == other
    output, code = launched(tmp_path, "20", "0.05")
    assert code == 0 and "preempted, the state is saved" in output
    first = begins(output)
    assert first[:2] == [0, 0] and first[2] == first[3] >= 20
    assert ends(output) == [whole, whole]  # bit by bit
