"""Exit codes are those of the guide on many processes, however a process ends."""

import pytest
import workers


@pytest.mark.parametrize(
    "way",
    ["another_program", pytest.param("another_exchange", marks=pytest.mark.slow)],
)
def test_processes_that_differ_all_end_with_1(job, way):
    script = f"from workers import endings\nendings.{way}()"
    with job(script, env={"PYTHONPATH": workers.PATH}, started=False) as running:
        assert running.wait(60) == [1, 1]
        for rank in running.ranks:
            assert "ClusterError: " in rank.output
            assert rank.last_line.endswith("ends, and with it the job")
