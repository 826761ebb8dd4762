"""Checkpoints of replicas with several devices, read by any strategy."""

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import cored, drawn, over

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

W = drawn(16, 8)

STRATEGIES = {
    "2 cores": lambda: cored(4, 2),
    "4 cores": lambda: cored(2, 4),
    "8 cores": lambda: cored(1, 8),
    "mirrored": lambda: js.MirroredStrategy(jax.devices()[:4]),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of arrays and a variable that lie over two cores."""
    strategy = cored(4, 2)
    with strategy.scope():
        v = js.Variable(over(strategy, 3 * W, None, "core"))
    state = {
        "w": over(strategy, W, None, "core"),
        "rows": over(strategy, 2 * W, "core"),
        "b": strategy.mirror(np.arange(3.0)),
        "key": jax.random.split(jax.random.key(1), 4),
        "v": v,
    }
    folder = tmp_path_factory.mktemp("checkpoint")
    with CheckpointManager(folder, strategy) as manager:
        manager.save(1, state)
    return folder


@pytest.mark.slow
@each_of("name", STRATEGIES)
def test_any_strategy_reads_it(written, name):
    strategy = STRATEGIES[name]()
    has_cores = bool(strategy._replicas.inner_axes)

    def place(array, *spec):
        return over(strategy, array, *spec) if has_cores else strategy.mirror(array)

    with strategy.scope():
        v = js.Variable(place(0 * W, None, "core"))
    target = {
        "w": place(0 * W, None, "core"),
        "rows": place(0 * W),  # is to be whole
        "b": strategy.mirror(np.zeros(3)),
        "key": strategy.mirror(jax.random.split(jax.random.key(0), 4)),
        "v": v,
    }
    before = jax.tree.map(lambda x: x.sharding, {**target, "v": v.value()})
    with CheckpointManager(written, strategy) as manager:
        restored = manager.restore(target)
    assert restored["v"] is v
    for key, wanted in {"w": W, "rows": 2 * W, "v": 3 * W, "b": np.arange(3.0)}.items():
        np.testing.assert_array_equal(restored[key], wanted)
    after = jax.tree.map(lambda x: x.sharding, {**restored, "v": v.value()})
    for key, where in before.items():
        assert after[key].is_equivalent_to(where, np.ndim(restored[key])), key
    keys = jax.random.split(jax.random.key(1), 4)
    assert (restored["key"] == keys).all()


def size_of(folder):
    return sum(
        path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()
    )


@each_of("spec", [(None, "core"), (), None])
def test_several_devices_write_an_array_once(tmp_path, spec):
    """Those of a replica, and those over which state is divided."""
    divided = js.MirroredStrategy(sharding=js.StateSharding("state", min_bytes=0))
    strategy = divided if spec is None else cored(2, 4)
    large = drawn(64, 256)  # which no compression makes smaller than 3/4
    w = strategy.mirror(large) if spec is None else over(strategy, large, *spec)
    with CheckpointManager(tmp_path, strategy) as manager:
        manager.save(1, {"w": w})
    assert 0.75 * large.nbytes < size_of(tmp_path) < 1.5 * large.nbytes
