"""A job that loses processes and gets them back computes what it does undisturbed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import workers
from helpers.sockets import free_addresses
from workers import elastic, sharded_state


def launched(options, *arguments):
    command = [sys.executable, "-m", "jaxstrategy.launch", *options.split()]
    command += ["--devices-per-process", "1", elastic.__file__, *map(str, arguments)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    curve = re.findall(r"attempt (\d) of (\d): (\d+) (\S+)", done.stdout)
    return done, curve, re.findall(r"parameters (\w+)", done.stdout)


@pytest.mark.slow
def test_killed_to_three_and_two_and_grown_to_four_the_bits_are_the_same(tmp_path):
    _, curve, parameters = launched("-n 1", tmp_path / "one")
    wanted = {int(step): loss for _, _, step, loss in curve}
    assert sorted(wanted) == list(range(elastic.STEPS))

    options = "-n 1:4 --max-restarts 2 --grow-every 15"
    done, curve, others = launched(options, tmp_path / "two", "disturbed")
    # On a busy machine it may grow before the second process is killed.
    for text in ("starting 3 processes again: attempt 1", "starting 4 processes again"):
        assert text in done.stderr, done.stdout + done.stderr
    # The loss cost two steps or, if the last snapshot was not whole, five.
    found = re.search(
        r"goes on after step (\d), from a snapshot in memory", done.stderr
    )
    assert found and found[1] in ("3", "6"), done.stderr
    counts = {count for _, count, _, _ in curve}
    assert {"4"} < counts, done.stdout
    # Steps that are made again have the same bits, too.
    assert all(wanted[int(step)] == loss for _, _, step, loss in curve)
    assert {int(step) for _, _, step, _ in curve} == set(wanted)
    assert others == parameters


@contextlib.contextmanager
def nodes(folder, count, options, program, *arguments):
    """Launchers of as many machines, which are ended; what they said if it failed."""
    env = {**workers.ENVIRONMENT, "PYTHONPATH": workers.PATH}
    env["JAXSTRATEGY_CLUSTER_SECRET"] = "0123456789abcdef"
    started = []

    def start(rank):
        command = [sys.executable, "-m", "jaxstrategy.launch", *options.split()]
        command += ["--node-rank", str(rank), "--devices-per-process", "1"]
        command += [program.__file__, *map(str, arguments)]
        with open(folder / f"node{rank}.txt", "ab") as said:
            started.append(subprocess.Popen(command, stdout=said, stderr=said, env=env))
        return started[-1]

    try:
        yield start, [start(rank) for rank in range(count)]
    except BaseException:
        for path in sorted(folder.glob("node*.txt")):
            print(f"--- {path.name}\n{path.read_text()}")
        raise
    finally:
        for launcher in started:
            launcher.kill()
            launcher.wait()


def until(claim, seconds=100):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_machine_costs_no_snapshot(tmp_path, lost):
    """Its neighbour has a copy of the part that no other machine had.

    Node 0 may be lost, too, if others have an address.
    """
    addresses = ",".join(free_addresses(2))
    options = f"--nodes 1:3 --max-restarts 1 --grace 3 --coordinator {addresses}"
    checkpoints, there = tmp_path / "checkpoints", tmp_path / "there"
    there.mkdir()
    with nodes(tmp_path, 3, options, sharded_state, checkpoints, there) as (_, started):
        until(lambda: len(os.listdir(there)) == 3)
        started[lost].send_signal(signal.SIGKILL)
        for rank, launcher in enumerate(started):
            if rank != lost:
                assert launcher.wait(100) == 0
                said = (tmp_path / f"node{rank}.txt").read_text()
                assert f"restored step {sharded_state.LAST} with 2" in said
    assert not checkpoints.exists()
