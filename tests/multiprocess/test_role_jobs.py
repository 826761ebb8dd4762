"""Scripts that the launcher starts with workers and parameter servers."""

import os
import signal
import sys

import pytest
from helpers.processes import Program, with_variable
from helpers.threads import until

# A script that counts on its workers; what it does between, `THEN` says.
SCRIPT = """
import json, os, signal, sys, time
import jax.numpy as jnp
import jaxstrategy as js
from jaxstrategy.coordinator import ClusterCoordinator

task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
if task == "evaluator":
    print("evaluates", flush=True)
    time.sleep(600)
print("begins", flush=True)
strategy = js.ParameterServerStrategy()
with strategy.scope():
    total = js.Variable(jnp.zeros(()), name="total")
coordinator = ClusterCoordinator(strategy)

@coordinator.function
def add(x):
    total.assign_add(x)
    return x

def count(n):
    for _ in range(n):
        coordinator.schedule(add, (1.0,))
    coordinator.join()
    print("total", float(total.read_value()), flush=True)

count(20)
THEN
"""


class Launched(Program):
    """The launcher with a job of a worker and a parameter server."""

    def __init__(self, folder, then, options):
        self._mark = f"MARK={folder}/mark\0"
        (folder / "train.py").write_text(SCRIPT.replace("THEN", then))
        # Each process of the job is known by the mark in its environment.
        env = {**os.environ, "MARK": f"{folder}/mark", "JAX_PLATFORMS": "cpu"}
        env |= {"JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, "-m", "jaxstrategy.launch", "--workers", "1"]
        command += [*options, str(folder / "train.py")]
        super().__init__(folder / "output.txt", command, env)

    def kill(self, job, index=0, number=signal.SIGKILL):
        (pid,) = self.pids(f'"type": "{job}", "index": {index}')
        os.kill(pid, number)

    def pids(self, text=""):
        """The processes of the job, or those in whose environment there is a text."""
        found = with_variable(self._mark)
        return [pid for pid, variables in found.items() if text in variables]


@pytest.fixture
def launch(tmp_path):
    """Launches a job; nothing may be left of it, and what it said is shown."""
    jobs = []

    def launched(then="", *options):
        jobs.append(Launched(tmp_path, then, options))
        return jobs[-1]

    yield launched
    for job in jobs:
        job.close()
        print(job.output)
        until(lambda: not job.pids())  # noqa: B023


def test_a_script_finds_its_workers(launch):
    job = launch("", "--workers", "2")
    assert "[chief] total 20.0" in job.finish()
    assert not job.pids()


@pytest.mark.slow
def test_a_worker_that_is_killed_works_on_and_an_evaluator_runs_beside(launch):
    then = """
n, before = 20, [state.starts for state in coordinator.workers]
while coordinator.workers[0].starts == before[0]:
    count(1)
    n += 1
assert float(total.read_value()) == n  # each counts once
print("again", flush=True)
"""
    job = launch(then, "--evaluator")
    job.wait_for("[chief] total 21.0")
    job.kill("worker", 0)
    job.finish()
    assert "[chief] again" in job.output
    assert "worker 0 ended with signal SIGKILL and is started again" in job.output
    assert "[evaluator] evaluates" in job.output


@pytest.mark.slow
def test_a_script_is_started_again_after_its_server_was_lost(launch):
    """The new coordinator takes over the workers, and makes its variables anew."""
    then = """
if not os.path.exists(sys.argv[0] + ".again"):
    open(sys.argv[0] + ".again", "w").close()
    print("waits", flush=True)
    while True: count(1)
"""
    job = launch(then, "--max-restarts", "1")
    job.wait_for("[chief] waits")
    job.kill("ps", 0)
    job.finish()
    assert "ParameterServerLost" in job.output
    assert job.output.count("[chief] begins") == 2
    assert job.output.rstrip().endswith("[chief] total 20.0")


@pytest.mark.slow
def test_a_script_that_is_killed_ends_the_job(launch):
    job = launch("print('waits', flush=True)\ntime.sleep(600)")
    job.wait_for("[chief] waits")
    job.kill("chief")
    job.finish(128 + signal.SIGKILL)
    assert "chief failed with signal SIGKILL" in job.output
    assert not job.pids()


@pytest.mark.slow
def test_a_signal_goes_to_the_script(launch):
    then = """
signal.signal(signal.SIGTERM, lambda *_: (print("saves", flush=True), sys.exit(0)))
print("waits", flush=True)
time.sleep(600)
"""
    job = launch(then)
    job.wait_for("[chief] waits")
    job.process.send_signal(signal.SIGTERM)
    job.finish()
    assert "[chief] saves" in job.output
    assert not job.pids()


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(launch):
    job = launch("print('waits', flush=True)\ntime.sleep(600)")
    job.wait_for("[chief] waits")
    assert len(job.pids()) >= 4
    job.process.kill()
    until(lambda: not job.pids())
