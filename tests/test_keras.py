"""Keras models in `run`: what is refused, and the recipe of the README.

The oracle is the same model on one device with the whole batch.
"""

import functools
import os
import re
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import pytest

import jaxstrategy as js


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras' layer with the statistics of the global batch, as in the README."""

    def call(self, inputs, training=None, mask=None):
        if not training:
            return super().call(inputs, training=False, mask=mask)
        axes = [i for i in range(inputs.ndim) if i != self.axis % inputs.ndim]
        mean, square = js.get_replica_context().all_reduce(
            "mean", (inputs.mean(axes), (inputs**2).mean(axes))
        )
        variance = square - mean**2
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
            assert moving is not None
            moving.assign(moving * self.momentum + new * (1 - self.momentum))
        return keras.ops.batch_normalization(
            inputs, mean, variance, self.axis, self.beta, self.gamma, self.epsilon
        )


def network(norm):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(4), norm(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(model.trainable_variables)
    return model, optimizer


def state_of(model, optimizer):
    lists = model.trainable_variables, model.non_trainable_variables
    return tuple([v.value for v in each] for each in (*lists, optimizer.variables))


def step_of(model, optimizer, mean):
    def loss_of(trainable, others, x):
        y, others = model.stateless_call(trainable, others, x, training=True)
        return ((y - x.sum(-1, keepdims=True)) ** 2).mean(), others

    def step(state, x):
        trainable, others, slots = state
        gradient = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), grads = gradient(trainable, others, x)
        trainable, slots = optimizer.stateless_apply(slots, mean(grads), trainable)
        return (trainable, others, slots), mean(loss)

    return step


def with_own_seeds(model):
    """The README's `stateless_call`, for layers that draw."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    code = re.search(r"```\n(def stateless_call\(.*?)```", text, re.DOTALL)
    assert code is not None
    names = {"model": model, "js": js}
    exec(code[1], names)
    return names["stateless_call"]


@pytest.fixture(autouse=True)
def ranks_may_differ():
    """Keras adds a bias to a matrix."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(js.simulate(8)[:2])


def test_the_recipe_trains_as_one_device_does(two):
    alone = network(keras.layers.BatchNormalization)
    ours = network(SyncBatchNormalization)
    by_hand = jax.jit(step_of(*alone, lambda tree: tree))
    step = two.run(
        step_of(*ours, lambda t: js.get_replica_context().all_reduce("mean", t))
    )
    want, have = state_of(*alone), two.mirror(state_of(*ours))
    for i in range(5):
        x = np.random.default_rng(i).normal(size=(8, 3)).astype(np.float32)
        want, loss = by_hand(want, x)
        have, mean = step(have, two.per_replica(list(x.reshape(2, 4, 3))))
        np.testing.assert_allclose(mean, loss, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def dropping():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization(center=False)]
    return keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dropout(0.5)])


def masks(strategy, call, state, calls):
    """What is dropped on each replica, at each call; and the state in the end."""
    x = strategy.per_replica(np.ones((2, 4, 32), np.float32))
    step = strategy.run(lambda state, x: call([], state, x))
    taken = []
    for _ in range(calls):
        y, state = step(state, x)
        taken.append(np.asarray(y.stacked) != 0)
    return taken, state


def test_keras_itself_drops_the_same_on_all_replicas(two):
    """The README says so; when it is no longer true, its recipe can go."""
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dropout(0.5)])
    state = two.mirror([v.value for v in model.non_trainable_variables])
    call = functools.partial(model.stateless_call, training=True)
    ((first, second),), state = masks(two, call, state, 1)
    np.testing.assert_array_equal(first, second)


def test_with_own_seeds_each_replica_drops_other_numbers(two):
    model = dropping()
    trainable = [v.value for v in model.trainable_variables]
    names = [v.path for v in model.non_trainable_variables]
    state = two.mirror([v.value for v in model.non_trainable_variables])

    def call(_, others, x):
        y, new = with_own_seeds(model)(trainable, others, x)
        mean = js.get_replica_context().all_reduce
        moving = ["moving" in name for name in names]
        return y, [
            mean("mean", n) if m else n for n, m in zip(new, moving, strict=True)
        ]

    taken, after = masks(two, call, state, 2)
    drawn = [mask for replicas in taken for mask in replicas]
    for i, mask in enumerate(drawn):
        assert all((mask != other).any() for other in drawn[:i])
    for name, old, new in zip(names, state, after, strict=True):
        assert isinstance(new, jax.Array) and isinstance(new, js.Mirrored)
        if "seed_generator" in name:  # as Keras counts: one draw for each call
            np.testing.assert_array_equal(new, np.asarray(old) + [0, 2])


def test_a_model_that_would_train_in_place_is_refused_and_kept(two):
    model, optimizer = network(keras.layers.BatchNormalization)
    before = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    x = two.per_replica(np.ones((2, 4, 3), np.float32))

    def call(x):
        return model(x, training=True)

    def apply(x):
        weights = model.trainable_variables
        optimizer.apply([w.value * 0 + 1 for w in weights], weights)
        return x

    with pytest.raises(js.LeakedTracerError, match=r"model: .*moving_mean(.|\n)*state"):
        two.run(call, (x,))
    with pytest.raises(js.LeakedTracerError, match="stateless_apply"):
        two.run(apply, (x,))
    with pytest.raises(js.LeakedTracerError, match="`m: "):
        two.run(lambda m, x: m(x, training=True), (model, x))
    after = [np.asarray(v.value) for v in (*model.variables, *optimizer.variables)]
    for a, b in zip(after, before, strict=True):
        np.testing.assert_array_equal(a, b)
