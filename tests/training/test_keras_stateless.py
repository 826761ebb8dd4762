"""Loops of one's own with Keras: `stateless_call` and the like inside of steps."""

import functools

import jax
import keras
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

pytestmark = pytest.mark.usefixtures("ranks_may_differ")

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(js.simulate(8)[:2])


def values(variables):
    return [variable.value for variable in variables]


def network(norm):
    keras.utils.set_random_seed(0)
    # A bias before a norm has no gradient, and Adam takes steps of the rounding.
    first = keras.layers.Dense(4, use_bias=False)
    layers = [keras.Input((3,)), first, norm(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    metric = keras.metrics.MeanAbsoluteError()
    lists = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        metric.variables,
    )
    return model, optimizer, metric, tuple(map(values, lists))


def test_a_loop_trains_as_one_device_does(two):
    model, optimizer, metric, state = network(js.keras.BatchNormalization)
    alone, alone_optimizer, alone_metric, want = network(
        keras.layers.BatchNormalization
    )

    def stepping(call, update, mean, optimizer):
        def step(state, x, y):
            trainable, others, slots, seen = state

            def loss_of(trainable):
                out, new = call(trainable, others, x, training=True)
                return ((out - y) ** 2).mean(), (new, out)

            gradient = jax.value_and_grad(loss_of, has_aux=True)
            (loss, (new, out)), grads = gradient(trainable)
            grads, loss = mean((grads, loss))
            trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
            return (trainable, new, slots, update(seen, y, out)), loss

        return step

    step = two.run(
        stepping(
            functools.partial(js.keras.stateless_call, model),
            functools.partial(js.keras.stateless_update_state, metric),
            lambda tree: js.get_replica_context().all_reduce("mean", tree),
            optimizer,
        )
    )
    by_hand = jax.jit(
        stepping(
            alone.stateless_call,
            alone_metric.stateless_update_state,
            lambda tree: tree,
            alone_optimizer,
        )
    )
    have = two.mirror(state)
    for _ in range(5):
        x = RNG.normal(loc=3.0, size=(8, 3)).astype(np.float32)
        y = x.sum(1, keepdims=True)
        want, loss = by_hand(want, x, y)
        parts = [two.per_replica(list(a.reshape(2, 4, -1))) for a in (x, y)]
        have, mean = step(have, *parts)
        np.testing.assert_allclose(mean, loss, rtol=1e-4)
    assert all(isinstance(leaf, js.Mirrored) for leaf in jax.tree.leaves(have))
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)
    errors = metric.stateless_result(have[3]), alone_metric.stateless_result(want[3])
    np.testing.assert_allclose(*errors, rtol=1e-3)


def dropping():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)]
    return keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dropout(0.5)])


def test_each_replica_draws_other_numbers_at_each_call(two):
    model = dropping()

    @two.run
    def step(others, x):
        return js.keras.stateless_call(model, [], others, x, training=True)

    x = two.per_replica(np.ones((2, 4, 32), np.float32))
    state = two.mirror(values(model.non_trainable_variables))
    drawn, after = [], state
    for _ in range(2):
        y, after = step(after, x)
        drawn += list(np.asarray(y.stacked))
    for i, one in enumerate(drawn):
        assert all((one != other).any() for other in drawn[:i])
    for old, new in zip(state, after, strict=True):
        assert isinstance(new, js.Mirrored)
        np.testing.assert_array_equal(new, np.asarray(old) + [0, 2])  # as Keras counts


def test_other_numbers_of_values_are_refused(two):
    model = dropping()
    told = r"was given 1 values for the 3 variables of `sequential.*` that are not"
    with pytest.raises(ValueError, match=told):
        two.run(lambda: js.keras.stateless_call(model, [], [np.ones(2)], np.ones(2)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.RecompilationWarning")
def test_metrics_see_all_rows_and_only_real_ones(two):
    labels = RNG.integers(0, 2, 11).astype(np.float32)
    guesses = RNG.uniform(size=11).astype(np.float32)
    metric, alone = (keras.metrics.AUC(num_thresholds=20) for _ in range(2))
    for rows in np.array_split(np.arange(11), [4, 8]):
        alone.update_state(labels[rows], guesses[rows])

    @two.run
    def step(seen, y, guess):
        weight = js.batch_mask(y)
        update = js.keras.stateless_update_state
        return update(metric, seen, y, guess, sample_weight=weight)

    seen = two.mirror(values(metric.variables))
    batches = js.batches((labels, guesses), 4)
    for batch in two.experimental_distribute_dataset(batches):
        seen = step(seen, *batch)
    np.testing.assert_allclose(metric.stateless_result(seen), alone.result(), rtol=1e-6)


def test_the_layer_is_keras_outside_of_steps_and_can_be_saved():
    layer = js.keras.BatchNormalization(momentum=0.5)
    twin = keras.layers.BatchNormalization(momentum=0.5)
    x = RNG.normal(size=(6, 3)).astype(np.float32)
    for training in (True, False):
        have, want = layer(x, training=training), twin(x, training=training)
        np.testing.assert_allclose(have, want)
    np.testing.assert_allclose(layer.moving_mean, twin.moving_mean)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    )
    assert type(again) is js.keras.BatchNormalization and again.momentum == 0.5


@each_of("trainable, training", [(False, True), (True, False)])
def test_frozen_layers_and_inference_take_the_moving_statistics(
    two, trainable, training
):
    layer = js.keras.BatchNormalization()
    layer.build((None, 3))
    layer.trainable = trainable
    x = RNG.normal(size=(2, 4, 3)).astype(np.float32)

    def step(weights, others, x):
        return js.keras.stateless_call(layer, weights, others, x, training=training)

    weights = two.mirror(values(layer.trainable_variables))
    state = two.mirror(values(layer.non_trainable_variables))
    y, after = two.run(step, (weights, state, two.per_replica(list(x))))
    np.testing.assert_allclose(y.stacked, x / np.sqrt(1 + layer.epsilon), rtol=1e-5)
    for old, new in zip(state, after, strict=True):
        np.testing.assert_array_equal(new, old)


def normalized(two, x, mask=None):
    """What replicas compute of `x`, and the moving statistics afterwards."""
    layer = js.keras.BatchNormalization(momentum=0.5)
    layer.build((None, *x.shape[1:]))
    trainable = two.mirror(values(layer.trainable_variables))
    others = two.mirror(values(layer.non_trainable_variables))

    @two.run
    def step(trainable, others, x, mask):
        js.batch_mask(x)  # the layer asks, too, but has no part in a loss
        call = js.keras.stateless_call
        return call(layer, trainable, others, x, training=True, mask=mask)

    given = [x] if mask is None else [x, mask]
    dataset = two.experimental_distribute_dataset([tuple(given)])
    x, *mask = next(iter(dataset))
    y, after = step(trainable, others, x, *(mask or [None]))
    return two.gather(y, 0), after


def test_rows_that_fill_up_a_batch_do_not_count(two):
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    y, (mean, variance) = normalized(two, x)
    np.testing.assert_allclose(mean, x.mean(0) / 2, rtol=1e-5)
    np.testing.assert_allclose(variance, (1 + x.var(0)) / 2, rtol=1e-5)
    want = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-3)
    np.testing.assert_allclose(y[:5], want, atol=1e-5)


def test_masked_entries_do_not_count(two):
    x = RNG.normal(size=(4, 6, 3)).astype(np.float32)
    mask = RNG.uniform(size=(4, 6)) < 0.5
    _, (mean, variance) = normalized(two, x, mask)
    np.testing.assert_allclose(mean, x[mask].mean(0) / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, (1 + x[mask].var(0)) / 2, rtol=1e-4)


def test_a_model_that_would_train_in_place_is_refused_and_kept(two):
    model, optimizer, *_ = network(keras.layers.BatchNormalization)
    before = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    x = two.per_replica(np.ones((2, 4, 3), np.float32))

    def call(x):
        return model(x, training=True)

    def apply(x):
        weights = model.trainable_variables
        optimizer.apply([w.value * 0 + 1 for w in weights], weights)
        return x

    with pytest.raises(
        js.errors.LeakedTracerError, match=r"model: .*moving_mean(.|\n)*state"
    ):
        two.run(call, (x,))
    with pytest.raises(js.errors.LeakedTracerError, match="stateless_apply"):
        two.run(apply, (x,))
    with pytest.raises(js.errors.LeakedTracerError, match="`m: "):
        two.run(lambda m, x: m(x, training=True), (model, x))
    after = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
