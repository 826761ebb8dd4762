"""Replicas that share devices are replicas: numbers, order, state, training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.replicas import ids, mirrored, replica
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


# What training needs, of replicas that share devices: against NumPy or own devices.


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_close(have, want, tolerance=1e-6):
    def close(have, want):
        have, want = map(stacked, (have, want))
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)

    jax.tree.map(close, have, want, is_leaf=lambda x: isinstance(x, js.PerReplica))


def stacked(value):
    return np.asarray(value.stacked if isinstance(value, js.PerReplica) else value)


def linen_layer(x, mask):
    layer = js.flax.linen.BatchNorm(use_running_average=False, momentum=0.8)
    stats = {"mean": jnp.ones(3), "var": jnp.full(3, 2.0)}
    scale = {"scale": jnp.arange(3.0), "bias": jnp.ones(3)}
    variables = {"params": scale, "batch_stats": stats}
    y, changed = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
    return y, changed["batch_stats"]["mean"], changed["batch_stats"]["var"]


def nnx_layer(x, mask):
    layer = js.flax.nnx.BatchNorm(3, momentum=0.8, rngs=nnx.Rngs(0))
    layer.mean[...], layer.var[...] = jnp.ones(3), jnp.full(3, 2.0)
    layer.scale[...], layer.bias[...] = jnp.arange(3.0), jnp.ones(3)
    return layer(x, mask=mask), layer.mean[...], layer.var[...]


@pytest.mark.slow
@each_of("layer", [linen_layer, nnx_layer])
def test_normalization_is_over_the_rows_of_all_replicas(eight, layer):
    x = drawn(8, 4, 3) + np.arange(8, dtype=np.float32)[:, None, None]
    mask = np.random.default_rng(1).random((8, 4, 1)) < 0.6
    mask[2] = False  # a replica without a row

    def step(x, mask):
        def loss(x, mask):
            y, *stats = layer(x, mask)
            return jnp.where(mask, y**3, 0).sum(), (y, *stats)

        return jax.grad(loss, has_aux=True)(x, mask)

    found, own = (
        s.run(step, (js.PerReplica(x), js.PerReplica(mask)))
        for s in (eight, mirrored(8))
    )
    assert_close(found, own)
    _, (y, mean, var) = found
    real = x[mask[..., 0]]
    assert_close(mean, 0.8 + 0.2 * real.mean(0), 1e-5)
    assert_close(var, 1.6 + 0.2 * real.var(0), 1e-5)
    assert all(isinstance(each, js.Mirrored) for each in (mean, var))
    scaled = (x - real.mean(0)) / np.sqrt(real.var(0) + 1e-5) * np.arange(3) + 1
    np.testing.assert_allclose(
        stacked(y)[mask[..., 0]], scaled[mask[..., 0]], atol=1e-4
    )


def test_one_replica_that_overflows_stops_all(eight):
    scale = jax.tree.map(jnp.asarray, js.training.DynamicLossScale(8.0, period=1))

    @eight.run
    def step(scale, w, x):
        half = js.training.cast_floating(w, "float16")

        def loss(w):
            return scale.scale((js.training.cast_floating(w, "float16") * x).sum())

        assert half.dtype == jnp.float16
        grads = scale.unscale(jax.grad(loss)(w))
        grads = replica().all_reduce("mean", grads)
        is_finite = js.training.all_finite(grads)
        new = jnp.where(is_finite, w - grads, w)
        return scale.adjust(is_finite), new, is_finite

    x = np.arange(8, dtype=np.float16).reshape(8, 1)
    scale, w, good = step(scale, np.ones(1, np.float32), eight.per_replica(x))
    assert good and float(scale.loss_scale) == 16
    np.testing.assert_allclose(w, 1 - 3.5)
    x[5] = np.inf
    scale, after, good = step(scale, w, eight.per_replica(x))
    assert not good and float(scale.loss_scale) == 8
    np.testing.assert_array_equal(after, w)
    eight.assert_in_sync((scale, after))


def test_an_outer_optimizer_has_parameters_of_each_replica(eight):
    x = drawn(4, 8)
    tx = js.optax.outer(optax.sgd(0.5), optax.sgd(0.5), every=2)

    @eight.run(options=js.RunOptions(expect_mirrored=False))
    def step(w, state, x):
        updates, state = tx.update(w - x, state, w)
        return optax.apply_updates(w, updates), state

    w = met = np.float32(1.0)
    state, own = tx.init(w), np.ones(8)
    for t, each in enumerate(x):
        w, state = step(w, state, eight.per_replica(each))
        own = own - 0.5 * (own - each)
        if t % 2:
            met = met - 0.5 * (met - own.mean())
            own = np.full(8, met)
        versions = np.broadcast_to(stacked(w), (8,))
        np.testing.assert_allclose(versions, own, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params, met, rtol=1e-5)


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
