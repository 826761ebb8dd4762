"""What training needs, of replicas that share devices: against NumPy or own devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.replicas import ids, mirrored, replica

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions

INT8 = CommunicationOptions(compression="int8")
RANK2 = CommunicationOptions(compression=js.experimental.PowerSGD(rank=2))


def sharing(devices, each):
    return js.MirroredStrategy(jax.devices()[:devices], replicas_per_device=each)


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


@pytest.mark.slow
@each_of("options", [INT8, RANK2])
def test_compressed_sums_are_those_of_own_devices(eight, options):
    grads = [{"b": drawn(8, 3, seed=i), "w": drawn(8, 16, 20, seed=i)} for i in (1, 2)]

    def trained(strategy):
        @strategy.run(options=js.RunOptions(expect_mirrored=(True, False)))
        def step(value, state):
            return replica().all_reduce_compressed("mean", value, state, options)

        like = jax.tree.map(lambda x: x[0], grads[0])
        state = strategy.compression_state(like, options)
        for grad in grads:
            mean, state = step(strategy.per_replica(grad), state)
        return mean, state

    (mean, state), own = trained(eight), trained(mirrored(8))
    assert_close(mean, own[0], 1e-5)
    assert_close(state.errors, own[1].errors, 1e-5)
    assert_close(mean["b"], grads[-1]["b"].mean(0))
    assert state.errors["w"].stacked.shape == (8, 16, 20)
    eight.assert_in_sync(mean)


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


@pytest.mark.slow
def test_a_report_counts_what_a_device_sends():
    def step(w, x):
        return w - replica().all_reduce("mean", w * x)

    strategy = sharing(2, 4)
    given = strategy.mirror(np.ones(64, np.float32)), ids(strategy)
    found = strategy.explain(step, given)
    (over,) = found.collectives
    assert over.nbytes == 256
    (compiled,) = found.compiled_collectives
    assert (compiled.kind, compiled.nbytes) == ("all_reduce", 256)
    with strategy.profile(strategy.run(step), every=2) as timed:
        for _ in range(4):
            result = timed(*given)
    np.testing.assert_allclose(result, np.full(64, -2.5))
    report = timed.report()
    assert (report.calls, report.steps) == (4, 4)
