"""Keras models made in `scope()` train as on one device with the whole batch."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.keras_models import compiled

import jaxstrategy as js

# Keras' arrays take no `copy`, for which NumPy 2 asks (Keras 3.15).
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
    pytest.mark.usefixtures("ranks_may_differ"),
]

ROWS = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
WANTED = ROWS.sum(1, keepdims=True)


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
