"""Jobs of several processes that are preempted, or killed, and go on."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "preempted.py"
SECONDS = 120


def launched(n, folder, *arguments, options=()):
    """What the launcher printed, and its exit code."""
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", str(n), *options]
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What 60 steps of two processes give when nothing happens."""
    output, code = launched(2, tmp_path_factory.mktemp("whole"), "-1", "0")
    assert code == 0
    (one, other) = ends(output)
    assert one == other
    return one


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_one_step(tmp_path, whole):
    output, code = launched(2, tmp_path, "20", "0.05")
    assert code == 0 and "preempted, the state is saved" in output
    first = begins(output)
    assert first[:2] == [0, 0] and first[2] == first[3] >= 20
    assert ends(output) == [whole, whole]  # bit by bit


@pytest.mark.slow
def test_four_processes(tmp_path):
    output, code = launched(4, tmp_path, "20", "0.05")
    assert code == 0
    steps = begins(output)
    assert steps[:4] == [0] * 4 and len(set(steps[4:])) == 1 and steps[4] >= 20
    assert len(ends(output)) == 4 and len(set(ends(output))) == 1


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path, whole):
    """Two processes are killed; one goes on from their last checkpoint."""
    options = ("--max-restarts", "1", "--min-processes", "1")
    output, code = launched(2, tmp_path, "20", "0.02", "kill", options=options)
    assert code == 0
    steps = begins(output)  # the launcher repeats what the killed one said
    assert steps[0] == 0 and steps[-1] == 20
    (state,) = ends(output)
    found = [float.fromhex(number) for number in state.split()]
    wanted = [float.fromhex(number) for number in whole.split()]
    assert found == pytest.approx(wanted, rel=1e-5)
