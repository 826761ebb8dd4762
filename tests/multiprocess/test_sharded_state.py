"""State of which each device of several processes keeps a part."""

import jax
import numpy as np
import pytest
import workers
from workers.sharded import STEPS, first_state, trained

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

MAIN = "from workers.sharded import main\nmain()\n"


def env(what, devices, **more):
    found = {"PYTHONPATH": workers.PATH, "JAX_NUM_CPU_DEVICES": str(devices)}
    return found | {"WHAT": what} | more


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def strategy_of(count, sharding=None):
    return js.MirroredStrategy(jax.devices()[:count], sharding=sharding)


# Processes, and devices of each: always four replicas.
@pytest.mark.slow
@pytest.mark.parametrize("count, devices", [(2, 2)])
def test_several_processes_place_read_and_save_as_one_does(
    count, devices, job, tmp_path
):
    one = strategy_of(8, js.StateSharding(min_bytes=0))
    state = one.init(first_state, jax.random.key(3))
    with CheckpointManager(tmp_path / "one") as manager:
        manager.save(1, state)
    np.save(tmp_path / "w.npy", state["params"]["w"])
    more = env("values", devices)
    with job(MAIN, count=count, seconds=60, env=more, started=False) as running:
        assert running.wait(150) == [0] * count
    for rank in running.ranks:
        assert "all is well" in rank.output.splitlines()
    for strategy in (strategy_of(1), strategy_of(2), one):
        with CheckpointManager(tmp_path / "several", strategy) as manager:
            back = manager.restore(jax.eval_shape(first_state, jax.random.key(0)))
        assert bits(back) == bits(state)
        is_divided = isinstance(back["params"]["w"], js.Sharded)
        assert is_divided is (strategy is one)


@pytest.mark.slow
def test_what_one_process_reads_alone_is_refused(job):
    more = env("alone", 1)
    with job(MAIN, count=2, seconds=30, env=more, started=False) as running:
        assert 0 not in running.wait(90)
    told = "".join(rank.output for rank in running.ranks)
    assert "process 0: `to_host` (" in told and "all is well" not in told


@pytest.mark.slow
@pytest.mark.parametrize("then", [(4, 1), (1, 2)], ids=str)
def test_killed_training_goes_on_in_other_processes(then, job, tmp_path):
    killed = env("train", 2, KILLED="2", RANK="1")
    with job(MAIN, count=2, seconds=30, env=killed, started=False) as running:
        codes = running.wait(120)
    assert codes[1] == -9 and codes[0] not in (0, -9)
    whole = trained(strategy_of(4), tmp_path / "whole")
    with CheckpointManager(tmp_path / "trained") as manager:
        assert manager.latest_step() == 2
    count, devices = then
    if count == 1:
        strategy = strategy_of(devices, js.StateSharding(min_bytes=0))
        found = jax.tree.leaves(trained(strategy, tmp_path / "trained"))
    else:
        more = env("train", devices)
        with job(MAIN, count=count, seconds=60, env=more, started=False) as running:
            assert running.wait(150) == [0] * count
        with np.load(tmp_path / "found.npz") as loaded:
            found = [loaded[f"arr_{i}"] for i in range(len(loaded.files))]
    assert int(whole["n"]) == STEPS
    for ours, expected in zip(found, jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-6)
