"""Modules, optimizers and metrics of Flax NNX in `run`.

The oracle is the same model trained with Flax alone on one device, or NumPy.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.objects import (
    STEPS,
    WIDTH,
    Net,
    Phases,
    adam,
    arrays,
    assert_equal,
    divided,
    mean,
    rows,
    train,
    train_alone,
    trained_alone,
)

import jaxstrategy as js


@pytest.mark.parametrize(
    "strategy", [js.MirroredStrategy(js.simulate(8)[:4]), js.get_strategy()], ids=repr
)
def test_training_is_that_on_one_device(strategy):
    want, losses = trained_alone()
    model = Net()
    optimizer, traces = adam(model), []

    @strategy.run
    def step(model, optimizer, x, y):
        traces.append(1)
        return train(model, optimizer, x, y)

    for i in range(STEPS):
        loss = step(model, optimizer, *divided(strategy, *rows(i)))
        np.testing.assert_allclose(loss, losses[i], atol=1e-5)
    assert_equal(arrays(model), want)
    assert int(optimizer.step[...]) == STEPS and int(model.calls[...]) == STEPS
    is_compiled = strategy is not js.get_strategy()
    assert len(traces) == (1 if is_compiled else STEPS)
    kernel = model.layers[0].kernel[...]
    assert kernel.sharding.is_fully_replicated
    assert kernel.sharding.device_set == set(strategy.mesh.devices.flat)


def test_objects_may_stand_anywhere(two):
    model = Net()
    optimizer = adam(model)

    def step(given, *, y):
        model, (optimizer, x) = given["m"]
        return train(model, optimizer, x, y)

    x, y = divided(two, *rows())
    two.run(step, ({"m": [model, (optimizer, x)]},), {"y": y})
    assert_equal(arrays(model), trained_alone(1)[0])


class Tied(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(1))
        self.down.kernel = self.up.kernel

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def test_tied_weights_stay_tied(two):
    ours, theirs = Tied(), Tied()
    optimizers = adam(ours), adam(theirs)
    for i in range(2):
        two.run(train, (ours, optimizers[0], *divided(two, *rows(i))))
        train_alone(theirs, optimizers[1], *rows(i))
    assert ours.up.kernel is ours.down.kernel
    assert_equal(arrays(ours), arrays(theirs))


def test_an_object_given_twice_is_one(two):
    model = Net()

    def step(a, b, part):
        assert a is b and a.norm is part
        a.calls[...] += 1
        b.calls[...] += 1
        part.scale[...] = part.scale[...] * 3
        return a.norm.scale[0]

    assert float(two.run(step, (model, model, model.norm))) == 3
    assert int(model.calls[...]) == 2
    np.testing.assert_array_equal(model.norm.scale[...], np.full(WIDTH, 3))


def test_what_a_step_sets_is_set(two):
    model = Phases()

    def step(model):
        model.eval()
        model.seen += 1
        model.name = "used"

    for n in range(3):
        two.run(step, (model,))
        assert (model.seen, model.name) == (n + 1, "used")
        assert model.dropout.deterministic


def test_phases_are_seen_and_compiled_once_each(two):
    model, traces = Phases(), []
    x = np.ones((2, 32), np.float32)

    @two.run
    def step(model, x):
        traces.append(model.dropout.deterministic)
        return model(x)

    for _ in range(4):
        model.train()
        assert (np.asarray(step(model, *divided(two, x)).stacked) == 0).any()
        model.eval()
        assert (np.asarray(step(model, *divided(two, x)).stacked) == 1).all()
    assert sorted(traces) == [False, True]


def test_another_model_alike_is_not_compiled_again(two):
    tx, traces = optax.adam(1e-2), []

    @two.run
    def step(model, optimizer, x, y):
        traces.append(1)
        return train(model, optimizer, x, y)

    for seed in (0, 1, 0):
        model = Net(seed)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        for _ in range(2):
            step(model, optimizer, *divided(two, *rows()))
    assert len(traces) == 1


def test_a_new_variable_is_refused(two):
    model = Net()

    def step(model):
        model.extra = nnx.Param(jnp.ones(3))

    with pytest.raises(js.errors.ObjectError, match="added `extra`"):
        two.run(step, (model,))
    assert not hasattr(model, "extra")


def test_a_removed_variable_is_refused(two):
    model = Net()

    def step(model):
        del model.norm

    with pytest.raises(js.errors.ObjectError, match=r"removed `norm.bias`, `norm.scal"):
        two.run(step, (model,))
    assert model.norm.scale is not None


def test_tying_in_a_step_is_refused(two):
    model = Net()

    def step(model):
        model.layers[1].kernel = model.layers[0].kernel

    with pytest.raises(js.errors.ObjectError, match=r"layers\[1\]\.kernel"):
        two.run(step, (model,))
    assert model.layers[1].kernel is not model.layers[0].kernel


class Raw(nnx.Module):
    def __init__(self):
        self.table = jnp.ones(3)
        self.host = nnx.data(np.ones(3))
        self.weight = nnx.Param(jnp.ones(3))

    def __call__(self):
        self.weight[...] += self.table + self.host
        return self.weight[...].sum()


def test_an_array_outside_a_variable_is_read(two):
    model, step = Raw(), two.run(Raw.__call__)
    assert float(step(model)) == 9
    model.table = jnp.zeros(3)
    assert float(step(model)) == 12
    np.testing.assert_array_equal(model.table, np.zeros(3))

    def change(model):
        model.table += 1

    with pytest.raises(js.errors.ObjectError, match="changed `table`.*nnx.Variable"):
        two.run(change, (model,))


def test_results_that_are_objects(two):
    model = Net()
    same, part = two.run(lambda m: (m, {"part": m.norm}), (model,))
    assert same is model and part["part"] is model.norm
    same, part = two.run(lambda m: (m, {"part": m.norm}), (model,))
    assert same is model and part["part"] is model.norm

    new = two.run(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    want = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(new.kernel[...], want.kernel[...], atol=1e-6)

    def sharing(model):
        other = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        other.kernel = model.layers[0].kernel
        return other

    with pytest.raises(js.errors.ObjectError, match="new Linear that shares"):
        two.run(sharing, (model,))


def test_a_varying_update_is_refused_and_nothing_is_lost(two):
    model = Net()
    before = arrays(model)

    def step(model, x):
        model.calls[...] += 1
        model.norm.scale[...] += x.sum(0)

    with pytest.raises(js.errors.NotMirroredError) as caught:
        two.run(step, (model, *divided(two, rows()[0])))
    text = str(caught.value)
    assert "`step` leaves `model.norm.scale` different" in text and "x.sum(0)" in text
    assert "all_reduce('mean', grads)" in text
    assert_equal(arrays(model), before, 0)


def test_flaxs_own_batchnorm_is_refused_with_advice(two):
    model, (x, _) = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), rows()
    with pytest.raises(js.errors.NotMirroredError, match=r"jaxstrategy\.flax\.nnx\.Ba"):
        two.run(lambda model, x: mean(model(x).sum()), (model, *divided(two, x)))
    np.testing.assert_array_equal(model.mean[...], np.zeros(WIDTH))


def test_an_error_in_the_step_loses_nothing(two):
    model = Net()
    optimizer = adam(model)
    before = arrays(model, optimizer)

    def step(model, optimizer, x, y, fail):
        model.eval()
        train(model, optimizer, x, y)
        if fail:
            raise KeyError("mine")

    batch = divided(two, *rows())
    with pytest.raises(KeyError, match="mine"):
        two.run(step, (model, optimizer, *batch, True))
    with pytest.raises(TypeError, match="shape"):
        two.run(train, (model, optimizer, batch[0], jnp.ones((3, 9))))
    assert_equal(arrays(model, optimizer), before, 0)
    assert not model.dropout.deterministic
    two.run(step, (model, optimizer, *batch, False))
    assert int(model.calls[...]) == 1


def test_what_python_alone_can_change_is_refused(two):
    model = Net()

    def alias(model):
        model.other = model.norm

    def metadata(model):
        model.norm.scale.set_metadata(note="mine")

    with pytest.raises(js.errors.ObjectError, match="attributes of its objects refer"):
        two.run(alias, (model,))
    with pytest.raises(js.errors.ObjectError, match="metadata of `norm.scale`"):
        two.run(metadata, (model,))
    assert not hasattr(model, "other")
    assert not model.norm.scale.has_metadata("note")


def test_hooks_run_as_often_as_the_step_sets(two):
    set_ = []

    def hook(variable, value):
        set_.append(1)
        return value * 2

    total = nnx.Variable(jnp.ones(()))
    total.set_metadata(on_set_value=hook)
    two.run(lambda: total.set_value(total[...] + 1))
    assert float(total[...]) == 4 and len(set_) == 1


def dropped(model, x):
    return model(x)


def test_each_replica_drops_its_own(four):
    def masks(seed):
        model: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))
        x, key = np.ones((4, 64), np.float32), model.rngs.key.get_value()
        drawn = [
            np.asarray(four.run(dropped, (model, *divided(four, x))).stacked)
            for _ in range(2)
        ]
        assert int(model.rngs.count[...]) == 2
        assert model.rngs.key[...].sharding.is_fully_replicated
        assert (model.rngs.key.get_value() == key).all()
        return np.concatenate(drawn).reshape(8, -1)

    first = masks(0)
    assert len(np.unique(first, axis=0)) == 8
    np.testing.assert_array_equal(first, masks(0))
    assert (first != masks(1)).any()
