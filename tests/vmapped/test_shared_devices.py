"""Replicas that share devices are replicas: numbers, order, inputs, state, training."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.replicas import ids, replica, versions

import jaxstrategy as js


def sharing(devices, each):
    return js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=each)


@pytest.mark.slow
def test_64_replicas_on_one_device():
    strategy = sharing(1, 64)
    assert strategy.num_replicas_in_sync == 64
    values = strategy.per_replica(list(np.arange(64, dtype=np.float32)))
    reduced = {
        op: float(strategy.reduce(op, values)) for op in ("sum", "mean", "min", "max")
    }
    assert reduced == {"sum": 2016, "mean": 31.5, "min": 0, "max": 63}
    assert len(strategy.experimental_local_results(values)) == 64
    assert values.stacked.shape == (64,) and values.num_replicas == 64
    assert (
        repr(strategy) == "MirroredStrategy(64 replicas, 64 on each device, on cpu:0)"
    )


def rows_of(thing):
    """The cells of its table in a notebook, row by row."""
    rows = ElementTree.fromstring(thing._repr_html_()).iter("tr")
    return [[cell.text for cell in row] for row in rows][1:]


def test_replicas_lie_in_order(eight):
    found = eight.run(lambda: replica().replica_id_in_sync_group)
    assert versions(found) == list(range(8))
    each = 8 // len(eight.mesh.devices.flat)
    devices = [jax.devices()[i // each] for i in range(8)]
    assert [set(found.local(i).devices()) for i in range(8)] == [{d} for d in devices]
    assert list(eight.devices) == devices
    assert [int(x) for x in eight.experimental_local_results(found)] == list(range(8))
    for i, device in enumerate(devices):
        assert [str(i), f"cpu:{device.id}"] == rows_of(eight)[i][:2]


def test_a_value_tells_where_its_versions_are(eight):
    value = ids(eight)
    places = [row[:2] for row in rows_of(eight)]
    assert rows_of(value) == [[*place, f"{i}.0"] for i, place in enumerate(places)]
    with pytest.raises(IndexError, match="8 was asked of a value with 8 replicas"):
        value.local(8)
    gathered = eight.gather(eight.run(lambda x: x[None], (value,)), axis=0)
    np.testing.assert_array_equal(gathered, np.arange(8))


def test_a_program_is_as_long_for_64_replicas_as_for_2():
    def lines(each):
        strategy = sharing(1, each)

        def step(w, x):
            grads = jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)
            return replica().all_reduce("mean", grads)

        x = np.ones((each, 4, 3), np.float32)
        given = strategy.mirror(np.ones((3, 2), np.float32)), js.PerReplica(x)
        run = jax.jit(lambda w, x: strategy.run(step, (w, x)))
        return len(run.lower(*given).as_text().splitlines())

    assert lines(64) == lines(2)


def test_random_keys_are_those_of_own_devices(eight):
    key = jax.random.key(3)
    bits = eight.run(lambda k: jax.random.bits(replica().fold_in(k), (5,)), (key,))
    wanted = [jax.random.bits(jax.random.fold_in(key, i), (5,)) for i in range(8)]
    np.testing.assert_array_equal(np.asarray(bits.stacked), np.stack(wanted))
