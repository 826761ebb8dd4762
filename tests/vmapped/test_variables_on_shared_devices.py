"""Variables of replicas that share devices: their rules, and their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, replica, versions
from jax import lax

import jaxstrategy as js

SUM, MEAN, FIRST, NONE = (
    getattr(js.VariableAggregation, name)
    for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
)
ON_READ = js.VariableSynchronization.ON_READ


def variable(strategy, value, aggregation, **options):
    with strategy.scope():
        return js.Variable(value, aggregation=aggregation, **options)


def test_what_is_equal_is_assigned_once(eight):
    v = variable(eight, 1.0, NONE)
    eight.run(lambda x: v.assign(replica().all_reduce("sum", x)), (ids(eight),))
    assert float(v.numpy()) == 28
    with pytest.raises(ValueError, match="aggregation"):
        eight.run(lambda x: v.assign(x), (ids(eight),))


def test_on_read_variables_have_a_copy_for_each(eight):
    v = variable(eight, 0.0, SUM, synchronization=ON_READ)
    found = eight.run(lambda x: v.assign_add(x + 1) + 0, (ids(eight),))
    assert versions(found) == list(range(1, 9))
    assert float(v.numpy()) == 36


def test_variables_in_loops_and_branches(eight):
    shared = variable(eight, 1.0, SUM)
    own = variable(eight, 0.0, SUM, synchronization=ON_READ)
    rows = variable(eight, np.zeros(4, np.float32), MEAN)

    def step(x):
        def turn(i, carry):
            shared.assign_add(x)  # 28 more each time
            own.assign_add(1.0)
            return carry + shared.read_value()

        total = lax.fori_loop(0, 3, turn, 0.0)

        def more():
            own.assign_add(10.0)
            return 0

        lax.cond(x > 5, more, lambda: 0)  # each for itself
        lax.while_loop(lambda c: c < 7, lambda c: own.assign_add(100.0) * 0 + c + 1, x)

        def all_more():
            rows.assign_add(jnp.arange(4.0) * x)
            return 0

        lax.cond(lax.pmax(x, "replica") > 3, all_more, lambda: 0)
        return total

    total = eight.run(step, (ids(eight),))
    np.testing.assert_array_equal(np.asarray(total).reshape(-1)[0], 29 + 57 + 85)
    assert float(shared.numpy()) == 85
    wanted = 8 * 3 + 2 * 10 + 100 * sum(7 - i for i in range(8))
    assert float(own.numpy()) == wanted
    np.testing.assert_array_equal(rows.numpy(), 3.5 * np.arange(4))


def test_references_that_a_step_makes(eight):
    def step(x):
        held = jax.new_ref(jnp.zeros(4))  # equal on all, until it is written
        held[1] = x

        def turn(i, carry):
            held[i] += x
            return carry

        lax.fori_loop(0, 3, turn, 0)
        other = jax.new_ref(x)
        other[...] = other[...] * 2
        return held[...], other[...]

    held, other = eight.run(step, (ids(eight),))
    wanted = np.outer(np.arange(8), [1, 2, 1, 0])
    np.testing.assert_array_equal(held.stacked, wanted)
    np.testing.assert_array_equal(other.stacked, 2 * np.arange(8))


def compiled(strategy, step, *given):
    return jax.jit(lambda *given: strategy.run(step, given)).lower(*given).compile()


@each_of("inside_jit", [False, True])
def test_a_weight_is_multiplied_once_for_all_replicas_of_a_device(inside_jit):
    """Its copies would be 8 matrices, and the product a batched one."""
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=8)
    w = variable(strategy, np.ones((64, 64), np.float32), MEAN)
    bias = variable(strategy, np.zeros(64, np.float32), MEAN)

    def forward(x):
        found = x @ w.read_value() + bias.read_value()[None]
        bias.assign_sub(replica().all_reduce("mean", found.mean(0)))
        w.assign(w.read_value() * 0.5)
        return found.sum()

    step = jax.jit(forward) if inside_jit else forward
    x = js.PerReplica(np.ones((8, 2, 64), np.float32))
    program = compiled(strategy, step, x)
    products = [line for line in program.as_text().splitlines() if " dot(" in line]
    assert products and all("f32[16,64]" in line for line in products), products
    sizes = program.memory_analysis()
    assert sizes.temp_size_in_bytes < 2 * w.numpy().nbytes
    np.testing.assert_array_equal(
        strategy.run(step, (x,)).stacked, np.full(8, 2 * 64 * 64)
    )
    np.testing.assert_array_equal(w.numpy(), np.full((64, 64), 0.5))
    np.testing.assert_array_equal(bias.numpy(), np.full(64, -64))
