"""`launch --check` says what works between the processes, and what does not."""

import re
import socket
import subprocess
import sys

import pytest
import workers


def checked(*options, **variables):
    return subprocess.run(
        [sys.executable, "-m", "jaxstrategy.launch", *options, "--check"],
        capture_output=True,
        text=True,
        timeout=90,
        stdin=subprocess.DEVNULL,
        env={**workers.ENVIRONMENT, **variables},
    )


@pytest.mark.slow
def test_what_works_is_told():
    done = checked("-n", "2", "--devices-per-process", "2")
    assert done.returncode == 0, done
    assert re.search(
        r"2 processes met in [\d.]+ s, with jaxstrategy .*, jax ", done.stdout
    )
    for index in (0, 1):
        assert re.search(rf"process {index} \(host .*\): 2 cpu devices", done.stdout)
    assert "a sum over 4 replicas is 6, 6 was wanted" in done.stdout
    assert re.search(r"check: all is well, after [\d.]+ s", done.stdout)
    alone = checked("-n", "1")
    assert re.search(r"process 0 \(host .*\): 1 cpu device\n", alone.stdout)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_the_cause():
    options = "-n", "1", "--nodes", "2", "--node-rank", "0", "--coordinator"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    done = checked(*options, address, JAXSTRATEGY_CHECK_SECONDS="2")
    assert done.returncode == 1, done
    told = "check: failed after .*1 of 2 processes came within 2 s; process 1 did not"
    assert re.search(told, done.stderr), done


def test_a_script_is_none_of_its_business():
    done = subprocess.run(
        [sys.executable, "-m", "jaxstrategy.launch", "--check", "train.py"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--check runs a program of its own: leave out script" in done.stderr
