"""Keras models in `scope()` train as on one device; what Keras cannot do is refused."""

import contextlib

import jax
import keras
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

# Keras' arrays take no `copy`, for which NumPy 2 asks (Keras 3.15).
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
    pytest.mark.usefixtures("ranks_may_differ"),
]

ROWS = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
WANTED = ROWS.sum(1, keepdims=True)


def compiled(**options):
    """A model with all that is hard to divide: statistics and random numbers."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    # A bias before a norm has no gradient, and Adam takes steps of the rounding.
    dense = layers.Dense(4, use_bias=False)
    norm, drop = layers.BatchNormalization(), layers.Dropout(0.3)
    parts = [keras.Input((3,)), dense, norm, drop, layers.Dense(1)]
    model = keras.Sequential(parts)
    optimizer = keras.optimizers.Adam(1e-2)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(js.simulate(8)[:4])


def in_scope(strategy, **options):
    with strategy.scope():
        return compiled(**options)


def fitted(model, x=ROWS, y=WANTED, **options):
    keras.utils.set_random_seed(2)
    options = {"batch_size": 8, "epochs": 2, "verbose": 0} | options
    return model.fit(x, y, **options).history


def assert_equal_training(have, want):
    assert set(have) == set(want)
    for name in want:
        np.testing.assert_allclose(have[name], want[name], rtol=2e-4)


def assert_equal_models(have, want):
    for a, b in zip(have.variables, want.variables, strict=True):
        np.testing.assert_allclose(a.value, b.value, rtol=1e-3, atol=2e-4)


def assert_on(strategy, model):
    optimizer = model.optimizer.variables
    for variable in [*model.variables, *optimizer]:
        assert variable.value.sharding.device_set == set(strategy.devices)
        assert variable.value.sharding.is_fully_replicated


def test_fit_outside_of_the_scope_has_the_numbers_of_one_device(four):
    compiling = {"steps_per_execution": 2}
    fitting = {"sample_weight": np.linspace(0, 2, 22), "validation_split": 0.3}
    want, have = compiled(**compiling), in_scope(four, **compiling)
    numbers = fitted(want, **fitting)
    assert_equal_training(fitted(have, **fitting), numbers)
    assert_equal_models(have, want)
    assert_on(four, have)
    assert keras.distribution.distribution() is None


@pytest.mark.slow
def test_evaluation_and_predictions_of_uneven_batches_are_exact(four):
    want, have = compiled(), in_scope(four)
    x, y = ROWS[:9], WANTED[:9]  # the last batch has fewer rows than there are devices
    for method in ("evaluate", "predict"):
        data = (x, y) if method == "evaluate" else (x,)
        a, b = (
            getattr(m, method)(*data, batch_size=8, verbose=0) for m in (have, want)
        )
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for method in ("test_on_batch", "predict_on_batch", "train_on_batch"):
        data = (x,) if method.startswith("predict") else (x, y)
        a, b = (getattr(m, method)(*data) for m in (have, want))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_saved_model_goes_on_elsewhere(four, tmp_path):
    have = in_scope(four)
    fitted(have)
    have.save(tmp_path / "model.keras")
    have.save_weights(tmp_path / "all.weights.h5")
    alone = keras.saving.load_model(tmp_path / "model.keras")
    for a, b in zip(alone.get_weights(), have.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    with four.scope():
        again = keras.saving.load_model(tmp_path / "model.keras")
        other = compiled()
        other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "all.weights.h5")
    assert_on(four, again)
    np.testing.assert_allclose(
        other.predict(ROWS, verbose=0), have.predict(ROWS, verbose=0), rtol=1e-5
    )
    a, b = (m.evaluate(ROWS, WANTED, verbose=0) for m in (again, alone))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_a_model_without_an_input_is_built_on_the_devices(four):
    def unbuilt():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    want = unbuilt()
    with four.scope():
        have = unbuilt()
    assert_equal_training(fitted(have), fitted(want))
    assert_on(four, have)


REFUSED = {
    "other devices": (
        lambda: js.experimental.CentralStorageStrategy(js.simulate(8)[:2]),
        "other devices",
    ),
    "shared": (
        lambda: js.MirroredStrategy(js.simulate(8)[:1], replicas_per_device=2),
        "share a device",
    ),
    "inner axes": (
        lambda: js.MirroredStrategy(js.simulate(8), logical_axes={"model": 2}),
        "several devices",
    ),
    "sharding": (
        lambda: js.MirroredStrategy(
            js.simulate(8)[:2], sharding=js.StateSharding("state")
        ),
        "divides state",
    ),
}


@each_of("name", REFUSED)
def test_strategies_that_keras_cannot_follow_are_refused(name):
    make, reason = REFUSED[name]
    with (
        make().scope(),
        pytest.raises(ValueError, match=f"{reason}(.|\n)*ModelParallel"),
    ):
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def test_parts_that_were_made_elsewhere_are_refused(four):
    optimizer = keras.optimizers.Adam()
    with four.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    with pytest.raises(ValueError, match=r"optimizers and metrics in the scope"):
        fitted(model)
    outside = compiled()
    with four.scope(), pytest.raises(ValueError, match="made outside of its scope"):
        fitted(outside)
    two = js.MirroredStrategy(js.simulate(8)[:2])
    with two.scope(), pytest.raises(ValueError, match="made under MirroredStrategy"):
        fitted(model)


def test_the_distribution_is_a_public_one_and_always_the_same(four):
    found = js.keras.distribution(four)
    assert isinstance(found, keras.distribution.DataParallel)
    assert js.keras.distribution(four) is found
    with four.scope():
        assert keras.distribution.distribution() is found
        with four.scope():
            assert keras.distribution.distribution() is found
        assert keras.distribution.distribution() is found
    assert keras.distribution.distribution() is None


# Other ways to run Keras' loops, and other mistakes, under a strategy.


def are_equal(have, want):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def of_both(strategy, program):
    """What a program gives under a strategy, and what it gives under none."""
    return [program(scope) for scope in (strategy.scope(), contextlib.nullcontext())]


class Looking(keras.layers.Layer):
    """Notes where the rows lie that a compiled step gives it."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def call(self, x):
        jax.debug.inspect_array_sharding(x, callback=self.note)
        return x


def test_a_step_that_a_model_overrides_has_divided_rows(four):
    seen = []

    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.looking = Looking(lambda sharding: seen.append(sharding))
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.looking(x))

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return logs | {"twice": logs["loss"] * 2}, state

    def history(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = Mine()
            model.compile(optimizer="sgd", loss="mse")
        return model.fit(ROWS, WANTED, batch_size=8, verbose=0, shuffle=False).history

    have, want = of_both(four, history)
    are_equal(have, want)
    assert set(want) == {"loss", "twice"}
    assert (2, 3) in {sharding.shard_shape((8, 3)) for sharding in seen}


@each_of("method", ["fit", "evaluate", "predict"])
def test_datasets_of_ours_are_refused(four, method):
    with four.scope():
        model = compiled()
    batches = js.batches((ROWS, WANTED), 4)
    datasets = batches, four.experimental_distribute_dataset(batches)
    for data in (*datasets, iter(datasets[1])):
        told = rf"`{method}` was given .*: give arrays of all rows with `batch_size`"
        with pytest.raises(TypeError, match=told):
            getattr(model, method)(data, verbose=0)
    with pytest.raises(TypeError, match=told):
        getattr(model, method)(x=batches)
    generator = (batch for batch in batches)
    assert np.isfinite(model.evaluate(generator, steps=5, verbose=0)[0])


def test_where_keras_cannot_follow_it_is_refused_and_variables_are_not(
    four, monkeypatch
):
    servers = js.ParameterServerStrategy(
        workers=1, parameter_servers=1, backend="threads"
    )
    with servers.scope(), pytest.raises(ValueError, match="are on parameter servers"):
        compiled()
    servers.close()
    shared = js.MirroredStrategy(js.simulate(8)[:2], replicas_per_device=2)
    for strategy in (four, shared):  # the second could train no model of Keras
        with strategy.scope():
            total = js.Variable(0.0, aggregation="sum")
        strategy.run(lambda v: v.assign_add(1.0), (total,))
        assert float(total.value()) == 4.0
    assert keras.distribution.distribution() is None
    model = compiled()
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with (
        four.scope(),
        pytest.raises(ValueError, match="KERAS_BACKEND=jax before Keras"),
    ):
        compiled()
    assert model.built
