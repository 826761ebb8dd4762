"""`experimental_local_results` gives what can be computed with each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js


def per_replica(strategy, shape=(), dtype=np.float32):
    n = strategy.num_replicas_in_sync
    values = np.arange(n * int(np.prod(shape))).reshape(n, *shape).astype(dtype)
    return strategy.per_replica(values), values


@pytest.mark.slow
@each_of("shape", [(), (3,), (2, 0)])
@each_of("dtype", [np.float32, bool])
def test_versions_are_summed_and_stacked(strategy, shape, dtype):
    x, host = per_replica(strategy, shape, dtype)
    versions = strategy.experimental_local_results(x)
    assert len(versions) == strategy.num_replicas_in_sync
    np.testing.assert_array_equal(jnp.stack(versions), host)
    np.testing.assert_array_equal(
        sum(v.astype(int) for v in versions), host.sum(0, int)
    )
    mirrored = strategy.mirror(np.ones(shape, np.float32))
    np.testing.assert_array_equal(versions[-1] + mirrored, host[-1] + 1.0)


def test_so_are_mirrored_arrays_and_containers(four):
    x, _ = per_replica(four)
    w = four.mirror(np.ones((300, 300), np.float32))
    versions = four.experimental_local_results({"x": x, "w": w, "n": 3})
    total = sum(v["x"] * v["w"][0, 0] * v["n"] for v in versions)
    assert total == 18
    assert all(v["w"] is w for v in versions)  # nothing is copied
    assert sum(four.experimental_local_results(w)).shape == (300, 300)


def test_large_versions_are_not_copied(four):
    x, host = per_replica(four, (17000,))
    versions = four.experimental_local_results(x)
    assert [v.devices() for v in versions] == [{device} for device in four.devices]
    np.testing.assert_array_equal(np.stack(jax.device_get(versions)), host)
    with pytest.raises(ValueError, match="incompatible devices"):
        sum(versions)
    together = [jax.device_put(v, four.devices[0]) for v in versions]
    np.testing.assert_array_equal(sum(together), host.sum(0))


def test_random_keys_and_real_rows(four):
    keys = four.run(lambda: js.get_replica_context().fold_in(jax.random.key(0)))
    versions = four.experimental_local_results(keys)
    wanted = [jax.random.fold_in(jax.random.key(0), i) for i in range(4)]
    for version, key in zip(versions, wanted, strict=True):
        assert (jax.random.key_data(version) == jax.random.key_data(key)).all()
    _, batch = four.experimental_distribute_dataset(js.batches(np.arange(10.0), 8))
    rows = four.experimental_local_results(batch)
    np.testing.assert_array_equal(jnp.concatenate(rows), [8, 9])


def test_they_are_made_by_one_program(four, compilations):
    x, _ = per_replica(four)
    tree = [x, x, {"a": x}]
    four.experimental_local_results(tree)
    assert compilations() == 1
    four.experimental_local_results(tree)
    assert compilations() == 0
