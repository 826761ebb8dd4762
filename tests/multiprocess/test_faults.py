"""Whatever goes wrong on one process ends all of them, with the cause said last."""

import json
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


@pytest.mark.parametrize(
    "count, devices, who",
    [
        (2, 2, 1),
        pytest.param(2, 1, 0, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_the_cause(count, devices, who):
    done = launched(count, devices, "kill", who)
    assert done.returncode == 137, done
    assert last_line(done).endswith(f"rank {who} failed with signal SIGKILL"), done


@pytest.mark.slow
def test_an_exception_is_the_cause():
    done = launched(2, 2, "raise", 1)
    assert done.returncode == 1, done
    assert "[1] ValueError: no such digit" in done.stderr, done
    assert last_line(done).endswith("rank 1 failed with exit code 1"), done


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_watchdog():
    done = launched(2, 1, "stop", 1)
    assert done.returncode in (75, 76), done  # the watchdog, or the board before it
    assert re.search(r"process 1 \(host .*\) has not answered for", done.stderr), done
    assert "train_step" in done.stderr, done
    assert "rank 1 did not end within 3 s and had to be killed" in done.stderr, done
    assert f"rank 0 failed with exit code {done.returncode}" in last_line(done), done


@pytest.mark.slow
def test_a_rank_that_leaves_its_loop_is_named():
    done = launched(2, 1, "leave", 1)
    # The input pipeline of the other, or its step, whichever is first to notice.
    assert done.returncode in (1, 75, 76), done
    assert re.search(r"process 1 \(host .*\) has finished already", done.stderr), done
    assert "rank 0 failed with exit code" in last_line(done), done


@pytest.mark.slow
def test_a_rank_that_dies_while_all_read_ahead(job):
    script = "from workers.faults import main\nmain('reader', 1)"
    env = {"PYTHONPATH": workers.PATH}
    with job(script, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [76, -signal.SIGKILL]
        assert "process 1 (host" in running.ranks[0].output
        assert "has died: killed, out of memory" in running.ranks[0].output


def test_processes_that_do_different_things_are_told(job):
    env = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": "2"}
    script = "from workers.mismatches import main\nmain()"
    with job(script, env=env, started=False) as running:
        assert running.wait(DEADLINE) == [0, 0]
        zero, one = (
            json.loads(re.search("^told (.*)$", rank.output, re.M)[1])
            for rank in running.ranks
        )
        assert zero.keys() == one.keys() == WANTED.keys()
        for name, pattern in WANTED.items():
            assert re.search(pattern, zero[name], re.S), (name, zero[name])
            assert re.search(pattern, one[name], re.S), (name, one[name])


_STEP = r"`\S+ at mismatches.py:\d+` \(\S+mismatches.py:\d+\)"
_VALUE = r"`one value for all replicas` \(\S+mismatches.py:\d+: [^)]*"
WANTED = {
    "shapes": rf"process 0: {_STEP}, array 0 of its arguments: float32\[4, 2\]"
    r"\n  process 1: float32\[4, 3\]\nEach process must call `run` with",
    "functions": r"process 0: `total at .*process 1: `mean at ",
    "numbers": r"array 1 of its arguments: float 1.0\n  process 1: float 2.0",
    "arrays": r"array 1 of its arguments: float32\[1\] of bits \w+\n  process 1: ",
    "how many": rf"process 0: {_STEP} with 1 arrays\n  process 1: the same with 2",
    "mirrored": rf"process 0: {_VALUE}.*: float32\[3\]\n  process 1: float32\[4\]\n"
    "All processes must make, change and read together",
    "a step and a value": rf"process 0: {_VALUE}.*process 1: `total at ",
    "to_host": r"process 0: `to_host`.*float32\[4, 2\]\n  process 1: float32\[4\]",
    "assigning": rf"process 0: {_VALUE}.*: float32\[2\]\n  process 1: float32\[\]",
    "captured": "Processes 0 and 1 have made different programs of `scaled`, and were",
    "reading": "process 0: `the value of variable 'seen'`.*process 1: `to_host`",
}


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
