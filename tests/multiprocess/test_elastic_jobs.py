"""A job that loses processes and gets them back computes what it does undisturbed."""

import contextlib
import json
import os
import re
import signal
import sys

import numpy as np
import pytest
import workers
from harness import launched
from helpers.processes import Program
from helpers.sockets import free_addresses
from helpers.threads import until
from workers import elastic, sharded_state

RUNS = int(os.environ.get("ELASTIC_RUNS", "1"))  # the proof has 20
GROW_SECONDS = 30  # while an attempt of three takes 15 to be killed, on busy cores


def trained(options, folder, faults):
    program = "--devices-per-process", 1, elastic.__file__
    return launched(*options.split(), *program, folder, json.dumps(faults))


def curve(done):
    """The steps: attempt, number of processes, which one, loss; then the parameters."""
    assert done.returncode == 0
    steps = re.findall(r"attempt (\d+) of (\d): (\d+) (\S+)", done.stdout)
    (parameters,) = re.findall(r"parameters (\w+)", done.stdout)
    return [(int(a), int(n), int(k), loss) for a, n, k, loss in steps], parameters


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    steps, parameters = curve(trained("-n 1", tmp_path_factory.mktemp("one"), {}))
    losses = {k: loss for *_, k, loss in steps}
    assert sorted(losses) == list(range(elastic.STEPS)) and len(steps) == len(losses)
    return losses, parameters


def check_same(done, undisturbed):
    """The losses, of steps that are made again, too, and the parameters bit by bit."""
    steps, parameters = curve(done)
    losses, wanted = undisturbed
    assert all(losses[k] == loss for *_, k, loss in steps)
    for attempt in {attempt for attempt, *_ in steps}:  # none left out, none twice
        made = [k for a, _, k, _ in steps if a == attempt]
        assert made == list(range(made[0], made[0] + len(made)))
    assert {k for *_, k, _ in steps} == set(losses)
    assert parameters == wanted
    return steps


def repeated(done):
    """What each recovery has cost: numbers of processes, and steps."""
    found = re.findall(
        r"(\d) process(?:es)?, before (\d): goes on after step (\d+), from (a "
        r"snapshot in memory|a checkpoint), repeating (\d+) steps?; \S+ (?:m?s|min)",
        done.stderr,
    )
    # The launcher may show it once more, among the last lines of a process.
    return [(int(n), int(b), int(s), int(r)) for n, b, s, _, r in dict.fromkeys(found)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(RUNS))
def test_killed_to_one_and_grown_to_four_the_bits_are_the_same(
    tmp_path, undisturbed, seed
):
    random = np.random.default_rng(seed)
    faults, step = {}, 0
    for attempt, count in enumerate((4, 3, 2)):
        step += int(random.integers(3, 6))
        who, later = int(random.integers(count)), int(random.integers(40))
        faults[attempt] = [[who, step, "kill", later]]
    options = f"-n 1:4 --max-restarts 3 --grow-every {GROW_SECONDS} --grace 5"
    done = trained(options, tmp_path / "disturbed", faults)
    steps = check_same(done, undisturbed)
    counts = [n for _, n, _, _ in steps]
    # Where a machine is so busy that it grows between, a later kill is left out.
    assert sorted(set(counts)) == [1, 2, 3, 4] and counts[-1] == 4, faults
    costs = repeated(done)
    assert len(costs) == len({a for a, *_ in steps}) - 1
    # That since the last snapshot, and one more if that was not whole.
    assert max(cost for *_, cost in costs) <= 2 * elastic.MEMORY_EVERY


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        {0: [[2, 9, "save"]]},
        {0: [[1, 8, "snapshot"]]},
        {0: [[0, 8, "kill", 0]], 1: [[1, 0, "restore", 0]]},
        {0: [[0, 8, "kill", 3]], 1: [[0, 0, "restore", 20]]},
        {0: [[1, 8, "kill", 0], [3, 8, "kill", 0]]},
        {0: [[2, 8, "stop"]]},
    ],
    ids=["save", "snapshot", "recovery", "recovery of 0", "two", "stopped"],
)
def test_processes_that_are_lost_at_bad_moments(tmp_path, undisturbed, faults):
    options = "-n 2:4 --max-restarts 2 --grow-every 600 --grace 5"
    done = trained(options, tmp_path / "disturbed", faults)
    steps = check_same(done, undisturbed)
    assert steps[-1][1] == 4 - len(faults)
    assert len(faults) <= len(repeated(done)) + 1 <= 2


@pytest.mark.slow
def test_more_losses_than_are_allowed_end_the_job(tmp_path):
    faults = {k: [[0, 8, "kill", 0]] for k in range(2)}
    done = trained("-n 1:2 --max-restarts 1 --grace 5", tmp_path / "lost", faults)
    assert done.returncode == 137
    assert "the 1 restart of --max-restarts have been made" in done.stderr
    assert done.stderr.endswith("rank 0 failed with signal SIGKILL\n")


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
        started.append(Program(folder / f"node{rank}.txt", command, env, mode="ab"))
        return started[-1].process

    try:
        yield start, [start(rank) for rank in range(count)]
    except BaseException:
        for path in sorted(folder.glob("node*.txt")):
            print(f"--- {path.name}\n{path.read_text()}")
        raise
    finally:
        for launcher in started:
            launcher.close()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_machine_costs_no_snapshot(tmp_path, lost):
    """Its neighbour has a copy of the part that no other machine had."""
    addresses = ",".join(free_addresses(2))
    options = f"--nodes 1:3 --max-restarts 1 --grace 3 --coordinator {addresses}"
    checkpoints, there = tmp_path / "checkpoints", tmp_path / "there"
    there.mkdir()
    with nodes(tmp_path, 3, options, sharded_state, checkpoints, there) as (_, started):
        until(lambda: len(os.listdir(there)) == 3, 100)
        started[lost].send_signal(signal.SIGKILL)
        for rank, launcher in enumerate(started):
            if rank != lost:
                assert launcher.wait(100) == 0
                said = (tmp_path / f"node{rank}.txt").read_text()
                assert f"restored step {sharded_state.LAST} with 2" in said
    assert not checkpoints.exists()


@pytest.mark.slow
def test_machines_come_and_go_and_the_bits_are_the_same(tmp_path, undisturbed):
    """Node 0 is lost first, and comes back; then one of those that went on."""
    addresses = ",".join(free_addresses(3))
    options = f"--nodes 1:3 --max-restarts 3 --grace 3 --coordinator {addresses}"
    options += f" --grow-every {GROW_SECONDS}"
    faults = {"0": [[0, 8, "machine", 5]], "2": [[2, 21, "machine", 0]], "slow": 2}
    arguments = tmp_path / "disturbed", json.dumps(faults)
    with nodes(tmp_path, 3, options, elastic, *arguments) as (start, started):
        assert started[0].wait(100) == -signal.SIGKILL
        went_on = "attempt 1 is on 2 of 3 machines"
        until(lambda: went_on in (tmp_path / "node1.txt").read_text(), 100)
        started[0] = start(0)
        assert started[1].wait(200) == 0
        codes = [launcher.wait(100) for launcher in started]
        assert sorted(codes) == [-signal.SIGKILL, 0, 0], codes
        said = "".join(path.read_text() for path in tmp_path.glob("node*.txt"))
        print(said)
        found = set(re.findall(r"attempt (\d+) of (\d): (\d+) (\S+)", said))
        losses, parameters = undisturbed
        assert all(losses[int(k)] == loss for *_, k, loss in found)
        # What node 0 says of the step in which it is lost may be lost with it.
        assert {int(k) for *_, k, _ in found} | {8} == set(losses)
        assert sorted({(a, n) for a, n, *_ in found}) == [
            ("0", "3"),
            ("1", "2"),
            ("2", "3"),
            ("3", "2"),
        ]
        assert f"parameters {parameters}" in said
