"""Whatever goes wrong on one process ends all of them, with the cause said last."""

import re
import signal
import socket
import subprocess
import sys

import pytest
import workers
from workers import faults

DEADLINE = 90


def launched(count, devices, case, who):
    """How the launcher ended, whose workers train until something happens."""
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", str(count)]
    command += ["--devices-per-process", str(devices), faults.__file__, case, str(who)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        stdin=subprocess.DEVNULL,
        env={**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH},
    )


def last_line(done):
    return done.stderr.rstrip().rsplit("\n", 1)[-1]


@pytest.mark.slow
def test_a_killed_rank_is_the_cause():
    done = launched(2, 2, "kill", 1)
    assert done.returncode == 137, done
    assert last_line(done).endswith("rank 1 failed with signal SIGKILL"), done


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_watchdog():
    done = launched(2, 1, "stop", 1)
    assert done.returncode in (75, 76), done  # the watchdog, or the board before it
    assert re.search(r"process 1 \(host .*\) has not answered for", done.stderr), done
    assert "train_step" in done.stderr, done
    assert "rank 1 did not end within 3 s and had to be killed" in done.stderr, done
    assert f"rank 0 failed with exit code {done.returncode}" in last_line(done), done


@pytest.mark.slow
def test_a_rank_that_dies_while_all_read_ahead(job):
    script = "from workers.faults import main\nmain('reader', 1)"
    env = {"PYTHONPATH": workers.PATH}
    with job(script, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [76, -signal.SIGKILL]
        assert "process 1 (host" in running.ranks[0].output
        assert "has died: killed, out of memory" in running.ranks[0].output


@pytest.mark.slow
def test_a_port_that_is_taken(job):
    script = """
    import os, jaxstrategy as js
    try:
        js.MultiWorkerMirroredStrategy()
    except js.ClusterError as error:
        print("told:", error)
        os._exit(3)
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        env = {"JAXSTRATEGY_COORDINATOR": address}
        with job(script, count=2, env=env, started=False) as running:
            assert running.wait(DEADLINE, 0) == [3]  # which ends a launcher's others
            zero = running.ranks[0].output
            assert "told: Process 0 cannot listen" in zero and address in zero
            assert "in use by another program" in zero
