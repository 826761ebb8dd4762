"""SIGTERM and Ctrl-C end a job of several processes, unless somebody handles them."""

import signal

import pytest
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
