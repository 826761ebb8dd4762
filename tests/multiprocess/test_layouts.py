"""Replicas of several devices, and several on a device, in real processes."""

import pytest
import workers

MAIN = "from workers.layouts import main\nmain()\n"


def env(what, devices, **layout):
    return workers.environment(devices, **layout) | {"WHAT": what}


@pytest.mark.slow
def test_a_replica_of_two_processes_is_refused_in_each_of_them(job):
    more = env("of_three_devices", 3)
    with job(MAIN, count=2, seconds=30, env=more, started=False) as running:
        assert running.wait(90) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()


@pytest.mark.slow
def test_processes_that_count_other_replicas_are_told_before_they_begin(job):
    more = env("of_one_device", 1)
    with job(MAIN, count=2, seconds=30, env=more, started=False) as running:
        assert running.wait(90) == [1, 1]
    for rank in running.ranks:
        told = rank.output.partition("now differs")[2]
        assert "process 0: `make a strategy of 2 replicas` (" in told
        assert "process 1: `make a strategy of 4 replicas, 2 on each device` (" in told
