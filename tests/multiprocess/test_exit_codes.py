"""Exit codes are those of the guide on many processes, however a process ends."""

import sys

import pytest
import workers

EXIT = """
float(total(RANK))
try:
    raise SystemExit(4)
except SystemExit:
    pass
if RANK == 1:
    {}
for _ in range(100_000):
    float(total(RANK))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit(9)", "raise SystemExit(9)"])
def test_an_exit_code_is_kept_however_it_is_given(job, way):
    if way.startswith("raise") and sys.version_info < (3, 12):
        pytest.skip("Python 3.11 does not tell of it")
    with job(EXIT.format(way)) as running:
        assert running.wait(30) == [76, 9]
        assert "failed: it ended by SystemExit(9)" in running.ranks[0].last_line


@pytest.mark.slow
def test_who_catches_an_exit_ends_well(job):
    with job(EXIT.format("pass").replace("100_000", "5")) as running:
        assert running.wait(30) == [0, 0]


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


@pytest.mark.slow
def test_who_catches_the_common_error_learns_of_the_others_end(job):
    script = "from workers import endings\nendings.caught_in_process_0()"
    with job(script, env={"PYTHONPATH": workers.PATH}, started=False) as running:
        assert running.wait(60) == [76, 1]
        assert "process 1 (host" in running.ranks[0].last_line


@pytest.mark.slow
def test_none_is_aborted_when_all_fail_at_once(job):
    script = "float(total(RANK)); raise ValueError(f'bad batch of {RANK}')"
    with job(script, count=4) as running:
        codes = running.wait(40)
        assert set(codes) <= {1, 76} and 1 in codes, codes
