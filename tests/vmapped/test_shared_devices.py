"""Replicas that share devices: programs, state in sync, variables, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, replica
from jax import lax

import jaxstrategy as js


def sharing(devices, each):
    return js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=each)


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


def test_a_value_that_differs_between_devices_is_not_in_sync(eight):
    eight.assert_in_sync(eight.mirror(np.ones(3)))
    eight.assert_in_sync(js.PerReplica(np.ones((8, 3))))
    differing = jax.make_array_from_single_device_arrays(
        (3,),
        eight.mirror(np.ones(3)).sharding,
        [
            jax.device_put(np.full(3, float(i)), device)
            for i, device in enumerate(eight.mesh.devices.flat)
        ],
    )
    message = r"`tree\['w'\]`: replicas 0, 1, 2, 3 \| 4, 5, 6, 7\n"
    with pytest.raises(js.errors.OutOfSyncError, match=message):
        eight.assert_in_sync({"w": differing})
    trusted = eight.mirror(differing, replica=6)  # as it advises
    eight.assert_in_sync(trusted)
    np.testing.assert_array_equal(trusted, np.ones(3))
    lone = np.ones((8, 3), np.float32)
    lone[6] = 2  # on the second device, beside three that agree
    with pytest.raises(js.errors.OutOfSyncError, match="replica 6 differs from the"):
        eight.assert_in_sync(eight.per_replica(lone))


# Variables of replicas that share devices: their rules, and their memory.

SUM, MEAN, FIRST, NONE = (
    getattr(js.VariableAggregation, name)
    for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE")
)


def variable(strategy, value, aggregation, **options):
    with strategy.scope():
        return js.Variable(value, aggregation=aggregation, **options)


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
