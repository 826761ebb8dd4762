"""A job of eight processes, one of which is killed."""

import signal

import pytest
import workers

START_SECONDS, END_SECONDS = 180, 60  # two cores may have to do for all of them
WHO = 5


@pytest.mark.slow
def test_seven_of_eight_end_by_the_name_of_the_killed_one(job):
    call = f"main('kill', {WHO}, timeout_seconds=300)"
    script = f"from workers.faults import main\n{call}"
    env = {"PYTHONPATH": workers.PATH}
    with job(script, count=8, env=env, started=False) as running:
        assert running.wait(START_SECONDS, WHO) == [-signal.SIGKILL]
        running.wait(END_SECONDS)
        for rank in running.ranks[:WHO] + running.ranks[WHO + 1 :]:
            assert rank.code == 76, rank.index
            assert f"process {WHO} (host" in rank.last_line, rank.index
            assert "has died: killed, out of memory" in rank.last_line, rank.index
