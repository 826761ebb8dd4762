"""SIGTERM and Ctrl-C end a job of several processes, unless somebody handles them."""

import signal
import sys

import harness
import pytest
import workers
from helpers.processes import Program
from test_watchdog import LOOP


@pytest.mark.slow
def test_sigterm_to_one_process_ends_the_job(job):
    who = 1
    with job(LOOP) as running:
        running.wait_for("going")
        running.signal(who, signal.SIGTERM)
        codes = running.wait(20)
        assert codes[who] == -signal.SIGTERM and codes[1 - who] == 76
        assert f"process {who} (host " in running.ranks[1 - who].output


# A program that has started JAX's runtime itself, and then asks for the processes.
ADOPTED = """
import os, time
import jax
RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
jax.distributed.initialize(os.environ["JAXSTRATEGY_COORDINATOR"], 2, RANK)
import jaxstrategy as js
js.MultiWorkerMirroredStrategy()
print("going")
time.sleep(60)
"""


@pytest.mark.slow
def test_sigterm_where_the_user_has_started_jax(job):
    with job(ADOPTED, started=False) as running:
        running.wait_for("going")
        running.signal(1, signal.SIGTERM)
        assert running.wait(20) == [76, -signal.SIGTERM]


@pytest.mark.slow
def test_a_handler_of_the_users_own_stays(job):
    script = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: print("heard"))
    import jaxstrategy as js
    js.MultiWorkerMirroredStrategy()
    print("going")
    signal.pause()
    """
    with job(script, started=False) as running:
        running.wait_for("going")
        for rank in (0, 1):
            running.signal(rank, signal.SIGTERM)
        assert running.wait(20) == [0, 0]
        assert all("heard" in rank.output for rank in running.ranks)


def test_a_signal_to_the_launcher_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text(harness.STARTED + LOOP)
    options = "-n 2 --stop-grace 60 --devices-per-process 1 script.py"
    command = [sys.executable, "-m", "jaxstrategy.launch", *options.split()]
    env = {**workers.ENVIRONMENT, "SECONDS": "30"}
    launcher = Program(tmp_path / "output.txt", command, env, tmp_path)
    try:
        launcher.wait_for("going")
        launcher.process.send_signal(signal.SIGTERM)
        # It does not sit in the time for saving.
        assert launcher.process.wait(20) == 128 + signal.SIGTERM, launcher.output
        assert launcher.last_line.endswith("stopped by SIGTERM")
    finally:
        launcher.close()


# Exit codes are those of the guide on many processes, however a process ends.


def test_processes_that_differ_all_end_with_1(job):
    script = "from workers import endings\nendings.another_program()"
    with job(script, env={"PYTHONPATH": workers.PATH}, started=False) as running:
        assert running.wait(60) == [1, 1]
        for rank in running.ranks:
            assert "ClusterError: " in rank.output
            assert rank.last_line.endswith("ends, and with it the job")


@pytest.mark.slow
def test_who_catches_the_common_error_learns_of_the_others_end(job):
    script = "from workers import endings\nendings.caught_in_process_0()"
    with job(script, env={"PYTHONPATH": workers.PATH}, started=False) as running:
        assert running.wait(60) == [76, 1]
        assert "process 1 (host" in running.ranks[0].last_line


@pytest.mark.slow
def test_none_is_aborted_when_all_fail_at_once(job):
    script = "float(total(RANK)); raise ValueError(f'bad batch of {RANK}')"
    with job(script, count=3) as running:
        codes = running.wait(40)
        assert set(codes) <= {1, 76} and 1 in codes, codes
