"""Training by the methods of `compat.v1`: numbers of TensorFlow's own tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.first_generation import (
    central,
    each,
    mirrored,
    one,
    replica_id,
    sharded,
    shared,
)

import jaxstrategy as js
from jaxstrategy.compat import v1


def reduced_and_applied(strategy, v, g):
    """The update pattern of the documents."""
    extended = strategy.extended
    with extended.colocate_vars_with(v):
        g = extended.reduce_to(v1.ReduceOp.SUM, g, destinations=v)
    extended.update(v, lambda v, g: v.assign_sub(0.05 * g), args=(g,))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (one, [0.1, 0.19, 0.271]),
        (v1.get_strategy, [0.1, 0.19, 0.271]),
        (mirrored, [0.2, 0.36, 0.488]),
        (central, [0.2, 0.36, 0.488]),
        (sharded, [0.2, 0.36, 0.488]),
        (lambda: mirrored(4), [0.4, 0.64, 0.784]),
        (shared, [0.4, 0.64, 0.784]),
    ],
)
def test_gradients_reduced_across_replicas(make, expected):
    s = make()
    with s.scope():
        w = js.Variable(0.0)

    def step(x):
        g = jax.grad(lambda w: (w * x - 1.0) ** 2)(w.value())
        return g

    for value in expected:
        with s.scope():
            x = s.extended.broadcast_to(np.float32(1.0), w)
            g = s.extended.call_for_each_replica(step, args=(x,))
            if v1.has_strategy():
                reduced_and_applied(s, w, g)
            else:
                g = s.extended.reduce_to("sum", g, w)
                s.extended.update(w, lambda w, g: w.assign_sub(0.05 * g), (g,))
        assert float(s.extended.read_var(w)) == pytest.approx(value, rel=1e-5)
        assert each(s, s.run(lambda: w.value())) == pytest.approx(
            [value] * s.num_replicas_in_sync, rel=1e-5
        )


@pytest.mark.parametrize(
    ("n", "momentum", "expected"),
    [
        (1, 0.8, [[12.0, 12.2], [21.6, 21.96]]),
        (2, 0.8, [[22.0, 22.2], [39.6, 39.96]]),
        (4, 0.9, [[21.0, 21.1], [39.9, 40.09]]),
    ],
)
def test_moving_means_of_batch_normalization(n, momentum, expected):
    s = mirrored(n)
    with s.scope():
        mean = js.Variable(jnp.zeros(2), synchronization="on_read", aggregation="mean")

    def step():
        batch_mean = 60.0 + jnp.arange(2.0) + 100.0 * replica_id()
        mean.assign_sub((mean.value() - batch_mean) * (1 - momentum))

    for values in expected:
        s.run(step)
        np.testing.assert_allclose(s.extended.read_var(mean), values, rtol=1e-5)


def test_on_read_variables_of_central_storage():
    """TensorFlow keeps one copy of each, so that its numbers are others."""
    s = central()
    with s.scope():
        total = js.Variable(1.0, synchronization="on_read", aggregation="sum")
        mean = js.Variable(4.0, synchronization="on_read", aggregation="mean")

    def step():
        i = replica_id()
        total.assign_add(2.0 + i)
        mean.assign(6.0 * i)
        return total.value(), mean.value()

    s.extended.update(total, lambda v: v.assign(1.0))
    own = s.run(step)
    assert each(s, own[0]) == [3, 4] and each(s, own[1]) == [0, 6]
    read = s.extended.read_var
    assert (float(read(total)), float(read(mean))) == (7, 3)
