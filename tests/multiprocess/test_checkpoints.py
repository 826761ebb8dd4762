"""Checkpoints of several processes, and between one and several."""

import re

import jax
import numpy as np
import pytest
import workers
from workers.checkpoints import check, seen, state_of

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

MAIN = "from workers.checkpoints import main\nmain()\n"


@pytest.fixture
def one():
    return js.MirroredStrategy(jax.devices()[:2])


def told(rank, name):
    """The numbers that a process printed behind a name."""
    line = next(x for x in rank.output.splitlines() if x.startswith(f"{name}: "))
    return [float(number) for number in line.partition(": ")[2].split(", ")]


# Devices of each of two processes, and how their replicas lie: always four replicas.
@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, layout",
    [
        (2, {}),
        (4, {"logical_axes": {"core": 2}}),
        (1, {"replicas_per_device": 2}),
    ],
    ids=str,
)
def test_one_and_two_processes_restore_what_the_other_saved(
    devices, layout, job, tmp_path, one
):
    state = state_of(one, 1)
    next(state["data"])
    with CheckpointManager(tmp_path / "one") as manager:
        manager.save(1, state)
    with CheckpointManager(tmp_path / "copies") as manager:
        manager.save(1, {"x": one.per_replica([1.0, 2.0])})
    env = workers.environment(devices, **layout)
    with job(MAIN, count=2, seconds=60, env=env, started=False) as running:
        rest = [seen(one, batch) for batch in state["data"]]
        assert running.wait(150) == [0, 0]
    for rank in running.ranks:
        # Orbax may have more to say at the end, of the save that failed.
        assert "all is well" in rank.output.splitlines()
        np.testing.assert_allclose(told(rank, "one"), rest, rtol=1e-6)
        assert (
            "refused: `x` is a PerReplica of float32[] for 2 replicas in the "
            "checkpoint, and a PerReplica of float32[] for 4 replicas was wanted"
        ) in rank.output
        for full in (0, 1):
            # Orbax's log, of another thread, may stand on the same line.
            line = re.search(f"full {full}: .*", rank.output)[0]
            assert f"Checkpoint {2 + full} could not be written" in line
            assert "File too large" in line
            assert f"process {full}" in line or rank.index == full
    with CheckpointManager(tmp_path / "two", best=("score", "max")) as manager:
        back = state_of(one, 9)
        for step in (manager.best_step(), manager.latest_step()):
            back = manager.restore(back, step)
            check(back, step, saved_by=4)
        left = [seen(one, batch) for batch in back["data"]]
    np.testing.assert_allclose(left, told(running.ranks[0], "two"), rtol=1e-6)
    assert len(left) == 9 and len(rest) == 9
