"""SIGTERM and Ctrl-C end a job of several processes, unless somebody handles them."""

import signal
import subprocess
import sys
import time

import harness
import pytest
import workers
from test_watchdog import LOOP

DEADLINE = 60


@pytest.mark.slow
def test_sigterm_to_one_process_ends_the_job(job):
    who = 1
    with job(LOOP) as running:
        running.wait_for("going")
        running.signal(who, signal.SIGTERM)
        codes = running.wait(20)
        assert codes[who] == -signal.SIGTERM and codes[1 - who] == 76
        assert f"process {who} (host " in running.ranks[1 - who].output


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


def test_a_signal_to_the_launcher_ends_the_job(tmp_path, number=signal.SIGTERM):
    script = tmp_path / "script.py"
    script.write_text(harness.STARTED + LOOP)
    command = [sys.executable, "-m", "jaxstrategy.launch", "-n", "2", "--stop-grace"]
    launcher = subprocess.Popen(
        [*command, str(DEADLINE), "--devices-per-process", "1", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**workers.ENVIRONMENT, "SECONDS": "30"},
    )
    try:
        assert launcher.stdout is not None
        while "going" not in (line := launcher.stdout.readline()):
            assert line, launcher.communicate()
        launcher.send_signal(number)
        begun = time.monotonic()
        out, err = launcher.communicate(timeout=DEADLINE)
        taken = time.monotonic() - begun
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 128 + number, (out, err)
    assert err.rstrip().endswith(f"stopped by {number.name}"), err
    assert taken < DEADLINE / 3, "it sat in the time for saving"
