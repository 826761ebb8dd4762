"""Copies and updates on the devices of several processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


def copies(strategy):
    extended, own = strategy.extended, jax.process_index()
    everywhere = extended.worker_devices
    for value in (3.0 + own, np.full(2, 3.0 + own)):  # the first one's counts
        for destinations in (everywhere, list(everywhere), strategy.mirror(1.0)):
            copy = extended.copy_to(value, destinations)
            assert isinstance(copy, js.Mirrored)
            assert copy.devices() == set(everywhere)
            np.testing.assert_array_equal(js.to_host(copy), np.full(np.shape(value), 3))
    here = extended.copy_to(strategy.mirror(5.0), "CPU:1")
    assert here == 5.0 and here.devices() == {jax.local_devices()[1]}
    name = "/job:worker/replica:0/task:{}/device:CPU:0"
    assert extended.reduce_to("sum", strategy.mirror(5.0), name.format(own)) == 20.0
    with pytest.raises(ValueError, match="Cannot reduce to another worker"):
        extended.reduce_to("sum", strategy.mirror(5.0), name.format(1 - own))


def updates(strategy):
    extended = strategy.extended
    with strategy.scope():
        v = js.Variable(0.5)
        o = js.Variable(1.0, synchronization="on_read", aggregation="sum")
        with extended.colocate_vars_with(extended.worker_devices):
            assert js.Variable(1.0).devices == v.devices

    def change(x):
        return v.assign_add(x)

    result = extended.update_on(extended.worker_devices, change, (1.0,))
    assert js.to_host(result) == 1.5
    assert v.numpy() == 1.5
    # One entry for each copy in this process.
    assert extended.update_on(v, change, (1.0,), group=False) == (2.5, 2.5)
    extended.update_on(v, lambda: o.assign(o + 1.0))
    assert o.numpy() == 8.0

    def merge(s, x):
        s.extended.update_on(v, change, (s.extended.copy_to(s.reduce("sum", x), v),))

    strategy.run(
        lambda x: js.get_replica_context().merge_call(merge, (x,)),
        (strategy.mirror(1.0),),
    )
    assert v.numpy() == 6.5


def numbers(strategy):
    """They give way to the dtypes of arrays, as in one process."""

    def product(x, y):
        return x * y

    short = strategy.mirror(np.ones(2, jnp.bfloat16))
    for number in (2, 2.0, jnp.asarray(2.0)):
        for given in (number, strategy.mirror(number)):
            for times in (product, strategy.run(product)):
                twice = strategy.run(times, (short, given))
                assert twice.dtype == jnp.bfloat16, (number, twice)
                np.testing.assert_array_equal(js.to_host(twice), [2.0, 2.0])
    traced = jax.jit(lambda x: strategy.run(product, (x, 2.0)))(short)
    assert traced.dtype == jnp.bfloat16
    exact = strategy.run(product, (short, np.float32(2.0)))
    assert exact.dtype == np.float32
    assert js.to_host(strategy.mirror(3.0 + jax.process_index())) == 3.0
    large = strategy.mirror(np.int32(2**30))
    assert int(strategy.run(product, (large, 1))) == 2**30
    with pytest.raises(ValueError, match="was given, and int32 holds"):
        strategy.run(product, (short, 2**40))


def main():
    strategy = js.MultiWorkerMirroredStrategy()
    numbers(strategy)
    copies(strategy)
    updates(strategy)
