"""A process that does not come, or comes to something else, is named in seconds."""

import re
import signal

import pytest
import workers

DEADLINE = 60


@pytest.fixture
def ended(job):
    """The ranks of a job of two whose process 1 does something else."""

    def of(case, codes):
        script = f"from workers import hanging\nhanging.main({case!r})"
        env = {"PYTHONPATH": workers.PATH}
        with job(script, env=env, started=False) as running:
            found = running.wait(DEADLINE)
            assert sorted(found) in codes, found
            return running.ranks

    return of


# Who waits too long ends with 75, and the others with it, or with 75 as well.
WATCHED = [75, 75], [75, 76]


@pytest.mark.slow
def test_a_stuck_reader_is_named_with_its_batch(ended):
    ranks = ended("reader", WATCHED)
    told = r"the input pipeline of process 1 \(host .*\) has not delivered batch 6 of "
    assert any(re.search(told + "input 0", rank.output) for rank in ranks)
    assert any("in batch 6 of input 0" in rank.output for rank in ranks)


@pytest.mark.slow
def test_a_process_that_dies_while_all_read_ahead(ended):
    zero = ended("dying reader", [[-signal.SIGKILL, 76]])[0]
    assert "has died: killed, out of memory" in zero.output


@pytest.mark.slow
def test_who_sleeps_before_a_step_is_named(ended):
    zero = ended("asleep before new", WATCHED)[0]
    assert re.search(r"process 1 \(host .*\) has not begun this step", zero.last_line)


@pytest.mark.slow
def test_who_leaves_out_a_step_is_told_with_its_batch(ended):
    for rank in ended("skip", [[1, 1]]):
        assert "of batch 5 of input 0\n  process 1: " in rank.output
        assert "of batch 6 of input 0\nEach process must call `run`" in rank.output
        assert "A process that leaves out a step" in rank.output


@pytest.mark.slow
def test_a_one_sided_checkpoint_is_told(ended):
    zero = ended("save one-sided", WATCHED)[0]
    doing = "save checkpoint 2 in `.*saved`"
    assert re.search(rf"in {doing} and ends with exit code 75", zero.last_line)
    other = rf"process 1 \(host .*\) has not come to {doing}"
    assert re.search(other, zero.last_line)


@pytest.mark.slow
def test_what_one_process_reads_alone_is_refused(job):
    script = "from workers import sharded\nsharded.read_alone()\n"
    env = workers.environment(1)
    with job(script, env=env, started=False) as running:
        assert 0 not in running.wait(90)
    told = "".join(rank.output for rank in running.ranks)
    assert "process 0: `to_host` (" in told and "all is well" not in told
