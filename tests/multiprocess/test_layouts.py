"""Replicas of several devices, and several on a device, in real processes."""

import jax
import numpy as np
import pytest
import workers
from workers.layouts import KERNEL, descent

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

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


# Devices of each of two processes.
@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, layout",
    [
        (2, {"logical_axes": {"core": 2}}),
        (1, {"replicas_per_device": 3}),
    ],
    ids=str,
)
def test_processes_train_and_save_as_numpy_does(devices, layout, job, tmp_path):
    one = js.MirroredStrategy(jax.devices()[:1])
    with CheckpointManager(tmp_path / "one", one) as manager:
        manager.save(1, {"w": one.mirror(KERNEL * 2), "n": one.mirror(7)})
    more = env("values", devices, **layout)
    with job(MAIN, count=2, seconds=40, env=more, started=False) as running:
        assert running.wait(120) == [0, 0]
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
    wanted, _ = descent(3)
    for strategy in (
        one,
        js.MirroredStrategy(logical_axes={"core": 2}),
        js.MirroredStrategy(jax.devices()[:2], replicas_per_device=2),
    ):
        like = {"w": strategy.mirror(KERNEL), "n": strategy.mirror(0)}
        with CheckpointManager(tmp_path / "several", strategy) as manager:
            back = manager.restore(like)
        np.testing.assert_allclose(back["w"], wanted, rtol=1e-4, atol=1e-5)
        assert int(back["n"]) == 3
