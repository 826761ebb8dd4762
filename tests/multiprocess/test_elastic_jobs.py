"""A job that loses processes and gets them back computes what it does undisturbed."""

import re
import subprocess
import sys

import pytest
import workers
from workers import elastic


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
