"""Exit codes are those of the guide on many processes, however a process ends."""

import pytest
import workers


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
