"""Variables of replicas with several devices: they lie over these as they were made.

The oracle is NumPy, a plain loop over the replicas.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import COLUMNS, all_gathers, cored, drawn, lies, over
from helpers.replicas import replica
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

W = drawn(16, 8)


def variable(strategy, value=W, **options):
    """One that lies over the cores."""
    with strategy.scope():
        return js.Variable(over(strategy, value, None, "core"), **options)


def rows(strategy, *shape):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([drawn(*shape, seed=i) for i in range(n)])


@pytest.mark.slow
def test_assigning_outside_of_steps_leaves_it_over_the_cores():
    strategy = cored()
    w = variable(strategy)
    assert lies(w) == COLUMNS and isinstance(w, js.Mirrored)
    for change, wanted in [
        (lambda: w.assign(2 * W), 2 * W),
        (lambda: w.assign_add(W), 3 * W),
        (lambda: w.assign_sub(over(strategy, W, None, "core")), 2 * W),
        (lambda: w.assign_add(jnp.ones_like(w)), 2 * W + 1),
        (lambda: w[1:3].assign(W[1:3]), None),
        (lambda: w[:, 2].assign(W[:, 2]), None),
        (lambda: w.scatter_add(js.IndexedSlices(W[:2], [5, 5])), None),
    ]:
        assert lies(change()) == COLUMNS
        assert lies(w.value()) == COLUMNS
        if wanted is not None:
            np.testing.assert_allclose(w, wanted, rtol=1e-6, atol=1e-6)
    wanted = 2 * W + 1
    wanted[1:3] = W[1:3]
    wanted[:, 2] = W[:, 2]
    wanted[5] += W[0] + W[1]
    np.testing.assert_allclose(w, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_assignments_in_steps():
    """Of TensorFlow's `test_spmd_variable_update`: N x, N (x - d), N (x - d + e)."""
    strategy = cored()
    w = variable(strategy)
    x, d, e = (drawn(16, 8, seed=i) for i in range(1, 4))

    def changed(change, value):
        def step(value):
            getattr(w, change)(jax.lax.with_sharding_constraint(value, COLUMNS))
            return w.value()

        return strategy.reduce("sum", strategy.run(step, (value,)))

    n = strategy.num_replicas_in_sync
    wanted = np.zeros_like(W)
    for change, value, sign in [
        ("assign", x, 1),
        ("assign_sub", d, -1),
        ("assign_add", e, 1),
    ]:
        wanted = wanted + sign * value
        found = changed(change, value)
        np.testing.assert_allclose(found, n * wanted, rtol=1e-5, atol=1e-5)
        assert w.value().sharding.is_equivalent_to(w.sharding, 2)
        assert w.value().sharding.shard_shape((16, 8)) == (16, 4)


def test_a_variable_that_is_made_anywhere_can_say_how_it_lies():
    strategy = cored()
    with strategy.scope():
        w = js.Variable(lambda: jnp.ones((16, 8)), sharding=COLUMNS)
        b = js.Variable(W, sharding=P())
        plain = js.Variable(over(strategy, W, None, "core"), sharding="whole")
        numbers = js.Variable(over(strategy, W, None, "core"), sharding=P("core"))
    assert lies(w) == lies(w.value()) == COLUMNS
    assert lies(b) == P()
    assert lies(plain) == COLUMNS  # each replica has the whole of it
    assert lies(numbers) == lies(numbers.value()) == P("core")
    np.testing.assert_array_equal(w, np.ones((16, 8)))
    np.testing.assert_array_equal(numbers, W)
    assert js.Variable(W, sharding=COLUMNS).numpy().tolist() == W.tolist()  # ordinary


@each_of(
    ("spec", "error", "words"),
    [
        (P("expert"), ValueError, "names an axis 'expert', but a replica has 'core'"),
        (P("replica"), ValueError, "names 'replica', the axis along which"),
        (P(None, None, "core"), ValueError, r"3 entries for an array .*\(3, 4\)"),
        (P("core"), ValueError, "dimension 0 of its .* is 3, no multiple of 2"),
        ("core", TypeError, "a `PartitionSpec` over logical axes was wanted"),
    ],
)
def test_a_placement_that_cannot_be(spec, error, words):
    with cored().scope(), pytest.raises(error, match=words):
        js.Variable(np.zeros((3, 4)), name="table", sharding=spec)


def test_a_step_gathers_nothing_over_the_cores():
    strategy = cored()
    large = drawn(256, 130)
    w = variable(strategy, large, aggregation="mean")
    copies = variable(
        strategy, large, synchronization="on_read", aggregation="only_first_replica"
    )

    def step(x):
        gradient = x * w.value()
        w.assign_sub(0.5 * gradient)
        copies.assign_add(gradient)

    x = rows(strategy, 256, 1)
    assert all_gathers(strategy, step, x) == 0
    strategy.run(step, (x,))
    mean = np.mean([each * large for each in x.values], 0)
    np.testing.assert_allclose(w, large - 0.5 * mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(copies, large + x.local(0) * large, rtol=1e-4, atol=1e-5)
    assert lies(copies.distributed()) == P("replica", None, "core")
    assert lies(copies.value()) == COLUMNS


@pytest.mark.slow
@each_of("aggregation", ["sum", "mean", "only_first_replica"])
def test_copies_that_are_combined_when_read(aggregation):
    strategy = cored()
    v = variable(strategy, synchronization="on_read", aggregation=aggregation)
    assert lies(v) == P("replica", None, "core")
    x = rows(strategy, 16, 8)
    strategy.run(lambda x: v.assign_add(x), (x,))
    copies = W + np.stack(x.values)
    combined = {
        "sum": copies.sum(0),
        "mean": copies.mean(0),
        "only_first_replica": copies[0],
    }
    np.testing.assert_allclose(v, combined[aggregation], rtol=1e-5, atol=1e-5)
    assert lies(v.value()) == COLUMNS
    v.assign(W)
    np.testing.assert_allclose(v, W, rtol=1e-5, atol=1e-6)
    assert lies(v.distributed()) == P("replica", None, "core")
    v[2].assign(W[3])
    assert lies(v.distributed()) == P("replica", None, "core")


EVERYTHING = js.StateSharding("state", min_bytes=0)


@pytest.mark.slow
@each_of(
    ("choice", "lies_as"),
    [
        (None, P("replica", "core")),
        (lambda shape, dtype: [1, 2], P(None, "core")),
        ("whole", P(None, "core")),
        (P("core"), P("core", "replica")),
    ],
)
def test_replicas_and_their_devices_divide_different_dimensions(choice, lies_as):
    strategy = cored(sharding=EVERYTHING)
    w = variable(strategy, sharding=choice)
    assert lies(w) == lies(w.value()) == lies_as
    assert w.numpy().tolist() == W.tolist()
    x = rows(strategy, 16, 8)

    def step(x):
        w.assign_sub(0.5 * replica().all_reduce("mean", x * w.value()))

    wanted = W
    for _ in range(2):
        strategy.run(step, (x,))
        wanted = wanted - 0.5 * np.mean([each * wanted for each in x.values], 0)
        np.testing.assert_allclose(w, wanted, rtol=1e-4, atol=1e-5)
        assert lies(w.value()) == lies_as
    assert lies(w.assign_add(W)) == lies_as
    np.testing.assert_allclose(w, wanted + W, rtol=1e-4, atol=1e-5)


def test_a_dimension_that_the_cores_divide_is_refused():
    with pytest.raises(ValueError, match="was 1, the dimension that the devices of"):
        variable(cored(), name="table", sharding=1)
