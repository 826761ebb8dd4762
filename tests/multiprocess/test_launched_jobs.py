"""Jobs that `jaxstrategy.launch` starts: what it does and says around its processes."""

import json
import re
import socket
from pathlib import Path

import pytest
import workers
from harness import launched
from workers import late

PREEMPTED = Path(__file__).parent / "workers" / "preempted.py"
HANGING = PREEMPTED.with_name("hanging.py")


def last_line(done):
    return done.stderr.rstrip().rsplit("\n", 1)[-1]


TWO = "-n", "2", "--devices-per-process", "1"


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_watchdog():
    done = launched(*TWO, HANGING, "stopped")
    assert done.returncode in (75, 76)  # the watchdog, or the store before it
    assert re.search(r"process 1 \(host .*\) has not answered for", done.stderr)
    assert "train_step" in done.stderr
    assert "rank 1 did not end within 3 s and had to be killed" in done.stderr
    told = f"rank 0 failed with exit code {done.returncode}"
    assert told in last_line(done)


@pytest.mark.slow
def test_a_late_process_is_named_while_running_in_the_profile_and_at_the_end():
    done = launched(*TWO, late.__file__)
    told = r"process 1 \(host .*\) is late: it comes [\d.]+ ms after the first to a st"
    assert done.returncode == 0
    assert len(re.findall(rf"^\[0\] {told}", done.stdout, re.M)) == 1
    assert re.search(rf"\[0\]   processes  +{told}", done.stdout)
    assert re.search(rf"^jaxstrategy.launch: {told}", last_line(done))


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_after_one_step_and_they_go_on(tmp_path):
    def ends(done):
        assert done.returncode == 0
        return re.findall(r"\[\d\] ended at 60 with (.*)", done.stdout)

    (whole, other) = ends(launched("-n", 2, PREEMPTED, tmp_path / "whole", -1, 0))
    assert whole == other
    done = launched("-n", 2, PREEMPTED, tmp_path, 20, 0.05)
    assert ends(done) == [whole, whole]  # bit by bit
    assert "preempted, the state is saved" in done.stderr
    first = [int(step) for step in re.findall(r"\[\d\] begins at (\d+)", done.stdout)]
    assert first[:2] == [0, 0] and first[2] == first[3] >= 20


@pytest.mark.slow
def test_the_cache_of_a_job_has_the_programs_of_process_0(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from workers.compiled_ahead import cached\ncached()\n")

    def started():
        """Of each process: programs that were asked for, and that the cache had."""
        options = "--compilation-cache", tmp_path / "cache"
        done = launched("-n", 2, *options, script, **workers.environment(1))
        assert done.returncode == 0
        found = re.findall(r"^\[(\d)\] cached (.*)$", done.stdout, re.MULTILINE)
        return [json.loads(counts) for _, counts in sorted(found)]

    first, other = started()
    assert first[0] > 0 == first[1]
    assert other[0] > 0 == other[1]
    (asked, found), other = started()
    assert asked == first[0] == found
    # JAX's keys differ between processes on CPUs. Where this fails, JAX has come to
    # share programs between them, and `js.experimental.compilation_cache` can say so.
    assert other[0] > other[1]


# `launch --check` says what works between the processes, and what does not.


@pytest.mark.slow
def test_what_works_is_told():
    done = launched("-n", 2, "--devices-per-process", 2, "--check")
    assert done.returncode == 0
    met = r"2 processes met in [\d.]+ s, with jaxstrategy .*, jax "
    assert re.search(met, done.stdout)
    for index in (0, 1):
        assert re.search(rf"process {index} \(host .*\): 2 cpu devices", done.stdout)
    assert "a sum over 4 replicas is 6, 6 was wanted" in done.stdout
    assert re.search(r"check: all is well, after [\d.]+ s", done.stdout)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_the_cause():
    options = "-n", 1, "--nodes", 2, "--node-rank", 0, "--coordinator"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    done = launched(*options, address, "--check", JAXSTRATEGY_CHECK_SECONDS="2")
    assert done.returncode == 1
    told = "check: failed after .*1 of 2 processes came within 2 s; process 1 did not"
    assert re.search(told, done.stderr)
