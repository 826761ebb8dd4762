"""Whatever goes wrong on one process ends all of them, with the cause said last."""

import re
import subprocess
import sys

import pytest
import workers
from workers import faults

DEADLINE = 90


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_watchdog():
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", "2"]
    done = subprocess.run(
        [*command, "--devices-per-process", "1", faults.__file__],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        stdin=subprocess.DEVNULL,
        env={**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH},
    )

    assert done.returncode in (75, 76), done  # the watchdog, or the board before it
    assert re.search(r"process 1 \(host .*\) has not answered for", done.stderr), done
    assert "train_step" in done.stderr, done
    last_line = done.stderr.rstrip().rsplit("\n", 1)[-1]
    assert "rank 1 did not end within 3 s and had to be killed" in done.stderr, done
    assert f"rank 0 failed with exit code {done.returncode}" in last_line, done
