"""State of which each device of several processes keeps a part."""

import shutil

import jax
import numpy as np
import pytest
import workers
from workers.sharded import STEPS, trained

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager


def main(what):
    return f"from workers import sharded\nsharded.{what}\n"


@pytest.mark.slow
def test_what_one_process_reads_alone_is_refused(job):
    env = workers.environment(1)
    with job(main("read_alone()"), env=env, started=False) as running:
        assert 0 not in running.wait(90)
    told = "".join(rank.output for rank in running.ranks)
    assert "process 0: `to_host` (" in told and "all is well" not in told


@pytest.mark.slow
def test_killed_training_goes_on_in_other_processes(job, tmp_path):
    env = workers.environment(2)
    with job(main("train(then=2)"), env=env, started=False) as running:
        codes = running.wait(120)
    assert codes[1] == -9 and codes[0] not in (0, -9)
    with CheckpointManager(tmp_path / "trained") as manager:
        assert manager.latest_step() == 2
    shutil.copytree(tmp_path / "trained", tmp_path / "alone")
    one = js.MirroredStrategy(jax.devices()[:4])
    whole = trained(one, tmp_path / "whole")
    assert int(whole["n"]) == STEPS
    two = js.MirroredStrategy(jax.devices()[:2], sharding=js.StateSharding(min_bytes=0))
    found = [jax.tree.leaves(trained(two, tmp_path / "alone"))]
    env = workers.environment(1)
    with job(main("train()"), count=4, seconds=60, env=env, started=False) as running:
        assert running.wait(150) == [0] * 4
    with np.load(tmp_path / "found.npz") as loaded:
        found.append([loaded[f"arr_{i}"] for i in range(len(loaded.files))])
    for leaves in found:
        for ours, expected in zip(leaves, jax.tree.leaves(whole), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6)
