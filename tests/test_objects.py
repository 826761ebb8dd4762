"""Modules, optimizers and metrics of Flax NNX in `run`.

The oracle is the same model trained with Flax alone on one device, or NumPy.
"""

import dataclasses
import functools
import gc
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.core import Tracer

import jaxstrategy as js

STEPS, ROWS, WIDTH = 20, 8, 4


class Net(nnx.Module):
    """A dense network that counts its calls."""

    def __init__(self, seed=0, rate=0.0):
        rngs = nnx.Rngs(seed)
        self.layers: Any = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]
        )
        self.norm: Any = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dropout: Any = nnx.Dropout(rate, rngs=rngs)
        self.calls: Any = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.dropout(self.norm(x))


def adam(model):
    return nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def rows(seed=0, n=ROWS):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, n, WIDTH)).astype(np.float32)
    return x, y


def squares(model, x, y):
    return ((model(x) - y) ** 2).mean(-1)


def loss_of(model, x, y):
    return squares(model, x, y).mean()


def mean(tree):
    return js.get_replica_context().all_reduce("mean", tree)


def gathered(rows):
    return js.get_replica_context().all_gather(rows, 0)


def train(model, optimizer, x, y):
    """One step on a replica's rows."""
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, mean(grads))
    return mean(loss)


def train_alone(model, optimizer, x, y):
    """The same step on all rows."""
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


@functools.cache
def trained_alone(steps=STEPS):
    """The parameters and losses of a training on one device."""
    model = Net()
    optimizer = adam(model)
    step = nnx.jit(train_alone)
    losses = [float(step(model, optimizer, *rows(i))) for i in range(steps)]
    return arrays(model), losses


def arrays(*objects):
    """All of them by name, on the host."""
    flat = nnx.to_flat_state(nnx.state(list(objects)))
    return {
        path: np.asarray(jax.random.key_data(v) if is_key(v) else v)
        for path, variable in flat
        for v in [variable.get_value()]
    }


def is_key(value):
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def assert_equal(have, want, tolerance=1e-5):
    assert have.keys() == want.keys()
    for path, array in have.items():
        assert array.dtype == want[path].dtype
        np.testing.assert_allclose(array, want[path], rtol=0, atol=tolerance)


def divided(strategy, *batch):
    """The rows of a batch, shared among the replicas."""
    n = strategy.num_replicas_in_sync
    split = [a.reshape(n, -1, *a.shape[1:]) for a in batch]
    return tuple(map(strategy.per_replica, split))


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(js.simulate(8)[:4])


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(js.simulate(8)[:2])


def strategies():
    devices = js.simulate(8)
    yield from (js.MirroredStrategy(devices[:n]) for n in (1, 2, 4, 8))
    yield js.OneDeviceStrategy("CPU:0")
    yield js.experimental.CentralStorageStrategy(devices[:2])
    yield js.get_strategy()


# Training.


@pytest.mark.parametrize("strategy", list(strategies()), ids=repr)
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


def test_objects_are_of_use_afterwards(four):
    strategy = four
    model, x = Net(), rows()[0]
    optimizer = adam(model)
    strategy.run(train, (model, optimizer, *divided(strategy, *rows())))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    copies = jax.tree.map(np.asarray, params), jax.tree.map(jnp.copy, rest)
    again = nnx.merge(graph, *copies)
    np.testing.assert_allclose(model(x), again(x), atol=1e-6)
    assert int(model.calls[...]) == 2
    loss, grads = nnx.value_and_grad(loss_of)(model, *rows())
    optimizer.update(model, grads)  # eagerly, then in a step again
    strategy.run(train, (model, optimizer, *divided(strategy, *rows())))
    assert int(optimizer.step[...]) == 3 and loss.shape == ()
    jitted = nnx.jit(train_alone)
    jitted(model, optimizer, *rows())
    assert int(optimizer.step[...]) == 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    model: Net
    optimizer: nnx.Optimizer
    rows: jax.Array


class Pair:  # not a pytree
    def __init__(self, model):
        self.model = model


def places(model, optimizer, batch):
    """Ways to give two objects and a batch, and how a step finds them."""
    x, y = batch
    yield (
        "dict",
        ({"m": model, "rest": [optimizer, x, y]},),
        {},
        lambda d: (
            d["m"],
            *d["rest"],
        ),
    )
    yield "tuple", ((model, (optimizer, x)), y), {}, lambda t, y: (t[0], *t[1], y)
    yield (
        "dataclass",
        (State(model, optimizer, x), y),
        {},
        lambda s, y: (
            s.model,
            s.optimizer,
            s.rows,
            y,
        ),
    )
    yield (
        "kwargs",
        (x,),
        {"y": y, "model": model, "o": optimizer},
        (lambda x, *, y, model, o: (model, o, x, y)),
    )
    yield "list", ([model, optimizer], x, y), {}, lambda m, x, y: (*m, x, y)


@pytest.mark.parametrize("index", range(5))
def test_objects_may_stand_anywhere(two, index):
    model = Net()
    optimizer = adam(model)
    batch = divided(two, *rows())
    _, args, kwargs, find = list(places(model, optimizer, batch))[index]

    def step(*args, **kwargs):
        return train(*find(*args, **kwargs))

    two.run(step, args, kwargs)
    want, _ = trained_alone(1)
    assert_equal(arrays(model), want)


def test_a_variable_itself_is_changed(two):
    total = nnx.Variable(jnp.zeros(()))

    def step(total, x):
        total[...] += mean(x.sum())

    x, _ = rows()
    two.run(step, (total, *divided(two, x)))
    two.run(step, (total, *divided(two, x)))
    np.testing.assert_allclose(total[...], x.sum(), rtol=1e-5)


def test_random_streams_go_on(two):
    rngs = nnx.Rngs(3)
    drawn = two.run(lambda rngs: rngs.uniform((2,)), (rngs,))
    again = two.run(lambda rngs: rngs.uniform((2,)), (rngs,))
    assert int(rngs.default.count[...]) == 2
    numbers = np.concatenate([drawn.stacked, again.stacked])
    assert len(np.unique(numbers)) == 8
    rngs.uniform()  # eagerly
    assert int(rngs.default.count[...]) == 3


# What is shared stays shared.


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
    for i in range(3):
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


def test_a_part_given_before_its_whole_is_its_part(two):
    model = Net()

    def step(part, model):
        assert model.norm is part
        part.scale[...] += 1
        return model.norm.scale[0]

    assert float(two.run(step, (model.norm, model))) == 2
    assert float(model.norm.scale[0]) == 2


class Trainer(nnx.Module):
    def __init__(self):
        self.model = Net()
        self.optimizer = adam(self.model)
        self.best = self.model.norm


def test_an_object_that_holds_all_others(two):
    trainer = Trainer()

    def step(trainer, x, y):
        return train(trainer.model, trainer.optimizer, x, y)

    two.run(step, (trainer, *divided(two, *rows())))
    assert trainer.best is trainer.model.norm
    want, _ = trained_alone(1)
    assert_equal(arrays(trainer.model), want)


# What is static.


class Phases(nnx.Module):
    def __init__(self):
        self.dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.seen = 0
        self.name = "new"

    def __call__(self, x):
        return self.dropout(x)


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


# What cannot be done is refused.


def test_a_new_variable_is_refused(two):
    model = Net()

    def step(model):
        model.extra = nnx.Param(jnp.ones(3))

    with pytest.raises(js.ObjectError, match="added `extra`"):
        two.run(step, (model,))
    assert not hasattr(model, "extra")


def test_a_removed_variable_is_refused(two):
    model = Net()

    def step(model):
        del model.norm

    with pytest.raises(
        js.ObjectError, match=r"removed `norm.bias`, `norm.scale`.*outside `run`"
    ):
        two.run(step, (model,))
    assert model.norm.scale is not None


def test_tying_in_a_step_is_refused(two):
    model = Net()

    def step(model):
        model.layers[1].kernel = model.layers[0].kernel

    with pytest.raises(js.ObjectError, match=r"layers\[1\]\.kernel"):
        two.run(step, (model,))
    assert model.layers[1].kernel is not model.layers[0].kernel


def test_untying_in_a_step_is_refused(two):
    model = Tied()

    def step(model):
        model.down.kernel = nnx.Param(model.up.kernel[...] * 2)

    with pytest.raises(js.ObjectError, match="which variables"):
        two.run(step, (model,))
    assert model.up.kernel is model.down.kernel


def test_another_variable_in_the_same_place_is_refused_or_right(two):
    model = Net()

    def step(model):
        model.norm.scale = nnx.Param(jnp.full(WIDTH, 7.0))

    two.run(step, (model,))
    np.testing.assert_array_equal(model.norm.scale[...], np.full(WIDTH, 7))


def test_swapped_variables_are_swapped(two):
    model = Net()
    a, b = (np.asarray(layer.kernel[...]) for layer in model.layers)

    def step(model):
        first, second = model.layers
        first.kernel, second.kernel = second.kernel, first.kernel

    two.run(step, (model,))
    np.testing.assert_array_equal(model.layers[0].kernel[...], b)
    np.testing.assert_array_equal(model.layers[1].kernel[...], a)


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_is_sown_is_to_be_taken_away(two):
    class Sower(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "seen", y)
            return y

    model, (x, _) = Sower(), rows()

    def left(model, x):
        model(x)

    def popped(model, x):
        model(x)
        popped: Any = nnx.pop(model, nnx.Intermediate)
        return popped["seen"].get_value()[0]

    with pytest.raises(js.ObjectError, match=r"added `seen.*nnx\.pop"):
        two.run(left, (model, *divided(two, x)))
    seen = two.run(popped, (model, *divided(two, x)))
    want = np.asarray(model.linear(x))
    np.testing.assert_allclose(np.concatenate(seen.stacked), want, atol=1e-6)


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

    with pytest.raises(js.ObjectError, match="changed `table`.*nnx.Variable"):
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

    with pytest.raises(js.ObjectError, match="new Linear that shares"):
        two.run(sharing, (model,))


def test_a_variable_returned_is_the_callers(two):
    model = Net()
    assert two.run(lambda m: m.norm.scale, (model,)) is model.norm.scale


# Errors lose nothing.


def test_a_varying_update_is_refused_and_nothing_is_lost(two):
    model = Net()
    before = arrays(model)

    def step(model, x):
        model.calls[...] += 1
        model.norm.scale[...] += x.sum(0)

    with pytest.raises(js.NotMirroredError) as caught:
        two.run(step, (model, *divided(two, rows()[0])))
    text = str(caught.value)
    assert "`step` leaves `model.norm.scale` different" in text and "x.sum(0)" in text
    assert "all_reduce('mean', grads)" in text
    assert_equal(arrays(model), before, 0)


def test_flaxs_own_batchnorm_is_refused_with_advice(two):
    model, (x, _) = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), rows()
    with pytest.raises(js.NotMirroredError, match=r"jaxstrategy\.flax\.nnx\.BatchNorm"):
        two.run(lambda model, x: mean(model(x).sum()), (model, *divided(two, x)))
    np.testing.assert_array_equal(model.mean[...], np.zeros(WIDTH))


def test_our_batchnorm(four):
    ours = js.flax.nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    theirs = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
    for i in range(3):
        x, _ = rows(i)
        y = four.run(lambda model, x: model(x), (ours, *divided(four, x)))
        np.testing.assert_allclose(np.concatenate(y.stacked), theirs(x), atol=1e-5)
    assert_equal(arrays(ours), arrays(theirs))


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


# Objects that the step captures.


model_of_all = Net()
optimizer_of_all = adam(model_of_all)


def train_globals(x, y):
    return train(model_of_all, optimizer_of_all, x, y)


def helped(x, y):
    return [train_globals(x, y) for _ in range(1)][0]


def test_globals_are_changed_also_by_other_functions(two):
    before = int(optimizer_of_all.step[...])
    two.run(train_globals, divided(two, *rows()))
    two.run(helped, divided(two, *rows()))
    assert int(optimizer_of_all.step[...]) == before + 2


def by_closure(model, optimizer):
    def step(x, y):
        return train(model, optimizer, x, y)

    return step


def by_two_closures(model, optimizer):
    inner = by_closure(model, optimizer)

    def step(x, y):
        def nested():
            return inner(x, y)

        return nested()

    return step


def by_lambda(model, optimizer):
    return lambda x, y: train(model, optimizer, x, y)


def by_default(model, optimizer):
    def step(x, y, *, model=model, optimizer=optimizer):
        return train(model, optimizer, x, y)

    return step


def by_partial(model, optimizer):
    return functools.partial(train, model, optimizer)


def by_wrapper(model, optimizer):
    @functools.wraps(train)
    def step(*args, **kwargs):
        return inner(*args, **kwargs)

    inner = by_closure(model, optimizer)
    return step


CAPTURING = [
    by_closure,
    by_two_closures,
    by_lambda,
    by_default,
    by_partial,
    by_wrapper,
]


@pytest.mark.parametrize("capture", CAPTURING, ids=lambda f: f.__name__)
def test_captured_objects_are_changed(two, capture):
    want, losses = trained_alone()
    model = Net()
    step = two.run(capture(model, adam(model)))
    for i in range(5):
        loss = step(*divided(two, *rows(i)))
        np.testing.assert_allclose(loss, losses[i], atol=1e-5)
    assert_equal(arrays(model), trained_alone(5)[0])


def test_a_captured_model_is_never_stale(two):
    model, x = Net(), rows()[0]
    step = two.run(lambda x: model.norm(x))
    for scale in (1.0, 2.0, 3.0):
        model.norm.scale[...] = jnp.full(WIDTH, scale)
        y = step(*divided(two, x))
        np.testing.assert_allclose(np.concatenate(y.stacked), model.norm(x), atol=1e-5)


def method_step(model):
    class Holder:
        def __init__(self, model):
            self.model = model

        def step(self, x):
            return self.model.norm(x)

    return Holder(model).step


def container_step(model):
    models = {"one": [model]}
    return lambda x: models["one"][0].norm(x)


def field_step(model):
    pair = Pair(Pair(model))
    return lambda x: pair.model.model.norm(x)


def bound_step(model):
    return model.norm.__call__


HOLDING = [method_step, container_step, field_step, bound_step]


@pytest.mark.parametrize("hold", HOLDING, ids=lambda f: f.__name__)
def test_what_is_read_through_something_else_is_never_stale(two, hold):
    model, x = Net(), rows()[0]
    function = hold(model)
    step = two.run(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", js.RecompilationWarning)
        for scale in (1.0, 2.0, 3.0):
            model.norm.scale[...] = jnp.full(WIDTH, scale)
            for _ in range(2):
                y = step(*divided(two, x))
                np.testing.assert_allclose(
                    np.concatenate(y.stacked), model.norm(x), atol=1e-5
                )


@pytest.mark.parametrize("mirrored", [False, True])
def test_what_is_reached_through_something_else_is_changed(two, mirrored):
    class Holder:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, x, y):
            return train(self.model, self.optimizer, x, y)

        def assign(self, x, y):
            self.model.calls[...] = 5

    model = Net()
    if mirrored:
        two.run(lambda m: m.train(), (model,))
    holder = Holder(model, adam(model))
    two.run(holder.step, divided(two, *rows()))
    assert_equal(arrays(model), trained_alone(1)[0])
    two.run(holder.assign, divided(two, *rows()))
    assert int(model.calls[...]) == 5 and holder.model is model


@functools.cache
def model_of_a_cache():
    return Net()


def test_what_is_changed_where_no_name_leads_is_refused(two):
    before = arrays(model_of_a_cache())

    def step(x, y):
        model_of_a_cache().norm.scale[...] += 1

    with pytest.raises(js.ObjectError, match="Pass it as an argument"):
        two.run(step, divided(two, *rows()))
    assert_equal(arrays(model_of_a_cache()), before, 0)


def test_a_model_of_a_cache_that_changes_each_time_is_told_of(two):
    x = rows()[0]
    step = two.run(lambda x: model_of_a_cache().norm(x))
    change = two.run(lambda model: model.norm.scale.set_value(model.norm.scale * 2))
    batch = divided(two, x)
    change(model_of_a_cache())
    step(*batch)
    change(model_of_a_cache())
    step(*batch)
    change(model_of_a_cache())
    with pytest.warns(js.RecompilationWarning, match="Pass it as an argument"):
        step(*batch)


def test_phases_of_what_is_read_through_something_else_are_seen(two):
    class Model(Phases):
        def __init__(self):
            super().__init__()
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return x * self.scale if self.dropout.deterministic else -x * self.scale

    holder, x, traces = Pair(Model()), np.ones((2, 3), np.float32), []

    @two.run
    def step(x):
        traces.append(1)
        return holder.model(x)

    batch = divided(two, x)
    for _ in range(2):
        assert (np.asarray(step(*batch).stacked) == -1).all()
    holder.model.eval()
    for _ in range(2):
        assert (np.asarray(step(*batch).stacked) == 1).all()
    assert len(traces) == 2


def test_names_that_collide(two):
    first, second, third = (nnx.Variable(jnp.zeros(())) for _ in range(3))

    def inner_of(total):
        def inner():
            total[...] += 1

        return inner

    def outer_of(total, inner):
        def step(other, *, total_=total):
            total[...] += 10
            other["total"][...] += 100
            inner()

        return step

    def keyword(*, total):
        total[...] += 1000
        inner()

    inner = inner_of(first)
    two.run(outer_of(second, inner), ({"total": third},))
    two.run(keyword, (), {"total": third})
    assert [float(v[...]) for v in (first, second, third)] == [2, 10, 1100]


even_or_odd = nnx.Variable(jnp.zeros(()))


def even(n):
    even_or_odd[...] += 1
    return True if n == 0 else odd(n - 1)


def odd(n):
    return False if n == 0 else even(n - 1)


def test_functions_that_call_each_other(two):
    before = float(even_or_odd[...])

    def recursive(n):
        even_or_odd[...] += 1
        return recursive(n - 1) if n else even(2)

    assert two.run(lambda: recursive(2)) is True
    assert float(even_or_odd[...]) == before + 5


def test_what_is_set_by_inner_functions_is_seen(two):
    total, count = nnx.Variable(jnp.zeros(())), 0

    def step():
        nonlocal count
        count += 1
        total[...] += 1

    two.run(step)
    assert count == 1 and float(total[...]) == 1


def test_a_module_as_the_step_and_its_methods(two):
    class Counter(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.n[...] += x

        def add(self, x):
            self(x * 2)

        @two.run
        def step(self, x):
            self(x * 3)

    counter = Counter()
    two.run(counter, (1.0,))
    two.run(counter.add, (1.0,))
    counter.step(1.0)
    assert float(counter.n[...]) == 6


def test_a_state_is_passed_as_a_pytree(two):
    model = Net()
    graph, state = nnx.split(model)

    def step(state, x):
        model = nnx.merge(graph, state)
        return model(x), nnx.state(model)

    x, _ = rows()
    y, new = two.run(step, (state, *divided(two, x)))
    assert int(model.calls[...]) == 0 and int(new["calls"].get_value()) == 1
    np.testing.assert_allclose(np.concatenate(y.stacked), model(x), atol=1e-6)


def test_a_variable_in_the_place_of_an_array(two):
    def step(x):
        x = x[...] if isinstance(x, nnx.Variable) else x
        return x + 1

    step = two.run(step)
    assert float(step(jnp.ones(()))) == float(step(jnp.ones(()))) == 2
    assert float(step(nnx.Variable(jnp.full((), 2.0)))) == 3
    assert float(step(jnp.full((), 3.0))) == 4


# Static attributes, once more.


def test_what_is_set_depends_on_the_shape(two):
    model = Phases()

    @two.run
    def step(model, x):
        model.name = f"of {x.shape[0]}"

    for n in (2, 3, 2, 3):
        step(model, jnp.ones(n))
        assert model.name == f"of {n}"


def test_an_attribute_may_be_added_and_removed(two):
    model = Phases()

    def step(model):
        del model.name
        model.added = ("a", 1)

    two.run(step, (model,))
    assert not hasattr(model, "name") and vars(model)["added"] == ("a", 1)


def test_what_python_alone_can_change_is_refused(two):
    model = Net()

    def alias(model):
        model.other = model.norm

    def metadata(model):
        model.norm.scale.set_metadata(note="mine")

    with pytest.raises(js.ObjectError, match="attributes of its objects refer"):
        two.run(alias, (model,))
    with pytest.raises(js.ObjectError, match="metadata of `norm.scale`"):
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


# Random numbers.


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


def test_one_replica_draws_what_flax_draws():
    one = js.MirroredStrategy(js.simulate(8)[:1])
    x = np.ones((4, 16), np.float32)
    ours, theirs = (nnx.Dropout(0.5, rngs=nnx.Rngs(7)) for _ in range(2))
    jitted = nnx.jit(dropped)
    for _ in range(2):
        have = one.run(dropped, (ours, *divided(one, x)))
        np.testing.assert_array_equal(have, jitted(theirs, x))


# Metrics.


def test_metrics_are_exact(four):
    x, y = rows()
    metrics = nnx.MultiMetric(
        loss=nnx.metrics.Average(), spread=nnx.metrics.Welford("values")
    )

    def step(metrics, x, y):
        values = gathered(((x - y) ** 2).mean(-1))
        metrics.update(values=values)

    for i in range(3):
        four.run(step, (metrics, *divided(four, *rows(i))))
    each = np.concatenate([((a - b) ** 2).mean(-1) for a, b in map(rows, range(3))])
    have = metrics.compute()
    np.testing.assert_allclose(have["loss"], each.mean(), rtol=1e-5)
    np.testing.assert_allclose(have["spread"].mean, each.mean(), rtol=1e-5)
    np.testing.assert_allclose(have["spread"].standard_deviation, each.std(), rtol=1e-4)
    four.run(lambda metrics: metrics.reset(), (metrics,))
    four.run(step, (metrics, *divided(four, *rows(5))))
    a, b = rows(5)
    np.testing.assert_allclose(
        metrics.compute()["loss"], ((a - b) ** 2).mean(), rtol=1e-5
    )


# Inside a step.


def test_in_merge_call(two):
    model = Net()

    def merged(strategy, model, x):
        model.calls[...] += 5
        return strategy.reduce("sum", x)

    def step(model, x):
        context = js.get_replica_context()
        total = context.merge_call(merged, (model, x.sum()))
        model.calls[...] += 1
        return total

    x, _ = rows()
    np.testing.assert_allclose(
        two.run(step, (model, *divided(two, x))), x.sum(), rtol=1e-5
    )
    assert int(model.calls[...]) == 6


def test_in_loops_and_remat(two):
    model, theirs = Net(), Net()

    def scanned(model, x):
        @nnx.scan(in_axes=(nnx.Carry, None), out_axes=nnx.Carry, length=3)
        def body(carry, _):
            model, x = carry
            return model, model(x)

        _, x = body((model, x), None)
        return x

    def remat(model, x, y):
        loss, grads = nnx.value_and_grad(lambda model: nnx.remat(loss_of)(model, x, y))(
            model
        )
        return mean(loss), mean(grads)

    x, y = rows()
    have = two.run(scanned, (model, *divided(two, x)))
    np.testing.assert_allclose(
        np.concatenate(have.stacked), scanned(theirs, x), atol=1e-5
    )
    assert int(model.calls[...]) == int(theirs.calls[...]) == 3
    loss, grads = two.run(remat, (model, *divided(two, x, y)))
    want, want_grads = nnx.value_and_grad(loss_of)(theirs, x, y)
    np.testing.assert_allclose(loss, want, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, want_grads
    )
    assert int(model.calls[...]) == 4


def test_in_accumulate(two):
    model, theirs = Net(), Net()
    optimizer, other = adam(model), adam(theirs)

    def step(model, optimizer, x, y):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, x, y):
            return loss_of(nnx.merge(graph, params, rest, copy=True), x, y)

        @two.accumulate(2)
        def grads_of(x, y):
            return jax.grad(loss)(params, x, y)

        optimizer.update(model, mean(grads_of(x, y)))

    two.run(step, (model, optimizer, *divided(two, *rows())))
    train_alone(theirs, other, *rows())
    theirs.calls[...] = model.calls[...]  # the parts counted on copies
    assert_equal(arrays(model), arrays(theirs))


def test_changes_of_an_object_in_accumulate_are_refused(two):
    model = Net()

    def step(model, x, y):
        @two.accumulate(2)
        def losses(x, y):
            return loss_of(model, x, y)

        return mean(losses(x, y))

    with pytest.raises(js.ObjectError, match="inside a function that JAX transforms:"):
        two.run(step, (model, *divided(two, *rows())))
    assert int(model.calls[...]) == 0


# Around a step.


def test_inside_nnx_jit(two):
    model, x = Net(), rows()[0]

    def step(model, x):
        model.calls[...] += 1
        return mean(model.norm(x).sum())

    @nnx.jit
    def around(model, x):
        return two.run(step, (model, two.per_replica(x)))

    for n in range(2):
        around(model, x.reshape(2, -1, WIDTH))
        assert int(model.calls[...]) == n + 1
    assert isinstance(model.calls.get_value(), jax.Array)
    assert not isinstance(model.calls.get_value(), Tracer)


def test_inside_jax_jit(two):
    model = Net()

    def step(model):
        model.calls[...] += 1

    with pytest.raises(js.ObjectError, match=r"nnx\.jit"):
        jax.jit(lambda x: (two.run(step, (model,)), x))(1.0)
    assert not isinstance(model.calls.get_value(), Tracer)
    two.run(step, (model,))
    assert int(model.calls[...]) == 1


def test_two_threads(two):
    models, errors = [Net(), Net()], []
    optimizers = list(map(adam, models))
    step = two.run(train)
    batch = divided(two, *rows())

    def work(model, optimizer):
        try:
            for _ in range(5):
                step(model, optimizer, *batch)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(models, optimizers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert [int(o.step[...]) for o in optimizers] == [5, 5]
    assert_equal(arrays(models[0]), arrays(models[1]))


# Options.


def test_donated_objects_hold_the_new_arrays(two):
    model = Net()
    optimizer = adam(model)
    options = js.RunOptions(donate_argnums=(0, 1))
    step: Any = two.run(options=options)(train)
    step(model, optimizer, *divided(two, *rows(0)))
    old = model.layers[0].kernel[...]
    address = old.addressable_shards[0].data.unsafe_buffer_pointer()
    step(model, optimizer, *divided(two, *rows(1)))
    assert old.is_deleted()
    new = model.layers[0].kernel[...].addressable_shards[0].data
    assert new.unsafe_buffer_pointer() == address
    want, _ = trained_alone(2)
    assert_equal(arrays(model), want)


def test_one_array_in_two_donated_objects_is_refused(two):
    array = jnp.ones(3)
    first, second = (nnx.List([nnx.Param(array)]) for _ in range(2))

    def step(first, second):
        first[0][...] += 1
        second[0][...] *= 3

    options = js.RunOptions(donate_argnums=(0, 1))
    with pytest.raises(js.DonatedValueError, match="are one array"):
        two.run(step, (first, second), options=options)
    two.run(step, (first, second))
    assert float(first[0][0]) == 2 and float(second[0][0]) == 3


def test_a_variable_that_is_a_reference_is_refused(two):
    variable = nnx.Variable(jnp.ones(2), ref=True)
    with pytest.raises(js.ObjectError, match="without `ref=True`"):
        two.run(lambda variable: variable[...], (variable,))


def test_expect_mirrored_means_the_results(two):
    def step(model, x):
        model.calls[...] += 1
        return {"sum": mean(x.sum()), "own": x.sum()}

    def run(expected):
        options = js.RunOptions(expect_mirrored=expected)
        two.run(step, (Net(), *divided(two, rows()[0])), options=options)

    seen = []

    def asked(path, leaf):
        seen.append(jax.tree_util.keystr(path))
        return "sum" in seen[-1]

    run(None)
    run({"sum": True, "own": False})
    run(asked)
    assert seen and set(seen) <= {"['sum']", "['own']"}
    for wrong in (True, {"sum": True, "own": True}, lambda path, leaf: True):
        with pytest.raises(js.NotMirroredError, match=r"`step\(\.\.\.\)\['own'\]`"):
            run(wrong)


# Bound steps, and explanations.


def bind(step: Any, *objects):
    return step.bind(*objects)


def test_a_bound_step_is_the_step(two):
    want, losses = trained_alone()
    model = Net()
    optimizer = adam(model)
    bound = two.run(train).bind(model, optimizer)
    for i in range(STEPS):
        loss = bound(*divided(two, *rows(i)))
        np.testing.assert_allclose(loss, losses[i], atol=1e-5)
    assert_equal(arrays(model), want)
    model.norm.scale[...] = jnp.zeros(WIDTH)  # between two calls
    bound(*divided(two, *rows()))
    assert np.abs(model.norm.scale[...]).max() < 0.1


def test_a_bound_step_with_captured_objects_and_keywords(two):
    model = Net()
    optimizer = adam(model)

    @two.run
    def step(model, x, *, y):
        return train(model, optimizer, x, y)

    x, y = divided(two, *rows())
    bind(step, model)(x, y=y)
    assert_equal(arrays(model), trained_alone(1)[0])
    assert int(optimizer.step[...]) == 1


def test_errors_of_bound_steps(two):
    model = Net()
    before = arrays(model)

    @two.run
    def step(model, x):
        model.norm.scale[...] += x.sum(0)

    with pytest.raises(TypeError, match="`bind` was given no module"):
        bind(step, jnp.ones(3))
    with pytest.raises(
        js.NotMirroredError,
        match=r"leaves `model.norm.scale` different",
    ):
        bind(step, model)(*divided(two, rows()[0]))
    assert_equal(arrays(model), before, 0)


def test_explain_with_objects(two):
    model = Net()
    optimizer = adam(model)
    before = arrays(model, optimizer)
    found = two.explain(train, (model, optimizer, *divided(two, *rows())))
    assert not found.problems
    assert "model.norm.scale" in str(found)
    assert_equal(arrays(model, optimizer), before, 0)


def test_explain_names_what_varies(two):
    def step(model, x):
        model.norm.scale[...] += x.sum(0)

    found = two.explain(step, (Net(), *divided(two, rows()[0])))
    assert any("norm.scale" in str(problem) for problem in found.problems)


# Other models.


def test_a_linen_train_state(two):
    from flax import linen

    net, (x, _) = linen.Dense(WIDTH), rows()
    params = net.init(jax.random.key(0), x)["params"]

    def make():
        return train_state.TrainState.create(
            apply_fn=net.apply, params=params, tx=optax.adam(1e-2)
        )

    def step(state, x, y, reduce):
        def loss(params):
            return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

        return state.apply_gradients(grads=reduce(jax.grad(loss)(state.params)))

    ours: Any = make()
    theirs: Any = make()
    run = two.run(lambda state, x, y: step(state, x, y, mean))
    alone = jax.jit(lambda state, x, y: step(state, x, y, lambda grads: grads))
    for i in range(5):
        ours = run(ours, *divided(two, *rows(i)))
        theirs = alone(theirs, *rows(i))
    np.testing.assert_allclose(
        ours.params["kernel"], theirs.params["kernel"], atol=1e-5
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Line:
    weight: jax.Array
    name: str = dataclasses.field(metadata={"static": True}, default="line")

    def __call__(self, x):
        return x @ self.weight


def equinox_line(weight):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        weight: jax.Array
        name: str = eqx.field(static=True, default="line")

        def __call__(self, x):
            return x @ self.weight

    return Model(weight)


@pytest.mark.parametrize("make", [Line, equinox_line])
def test_other_pytree_models(two, make):
    ours: Any = make(jnp.eye(WIDTH))
    theirs: Any = ours
    tx = optax.sgd(0.1)

    def step(model, x, y, reduce):
        grads = reduce(jax.grad(loss_of)(model, x, y))
        updates, _ = tx.update(grads, tx.init(model))
        return optax.apply_updates(model, updates)

    run = two.run(lambda model, x, y: step(model, x, y, mean))
    for i in range(3):
        ours = run(ours, *divided(two, *rows(i)))
        theirs = step(theirs, *rows(i), lambda grads: grads)
    assert type(ours) is type(theirs) and ours.name == "line"
    np.testing.assert_allclose(ours.weight, theirs.weight, atol=1e-5)


# What lives how long.


def test_objects_are_not_kept_alive(two):
    step = two.run(train)

    def use():
        model = Net()
        optimizer = adam(model)
        start = weakref.ref(model.layers[0].kernel.get_raw_value())
        step(model, optimizer, *divided(two, *rows()))
        gc.collect()
        assert start() is None
        end = weakref.ref(model.layers[0].kernel.get_raw_value())
        return weakref.ref(model), weakref.ref(optimizer), end

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_a_step_is_not_kept_alive(two):
    model = Net()

    def use():
        def step(x):
            model.calls[...] += 1
            return model.norm(x)

        run = two.run(step)
        run(*divided(two, rows()[0]))
        return weakref.ref(step), weakref.ref(run)

    references = use()
    gc.collect()
    assert [reference() for reference in references] == [None] * 2


def test_replaced_variables_are_let_go(two):
    model = Net()
    step = two.run(lambda model: model.norm.scale[...].sum())
    step(model)
    old = weakref.ref(model.norm.scale.get_raw_value())
    model.norm.scale = nnx.Param(jnp.full(WIDTH, 2.0))
    assert float(step(model)) == 2 * WIDTH
    gc.collect()
    assert old() is None


class Touchy:
    """As some libraries have them: asking what it is does something."""

    @property
    def __class__(self):
        raise AssertionError("it was asked what it is")


def test_objects_of_other_libraries_are_not_asked_what_they_are(two):
    touchy = [Touchy()]
    captured = jnp.ones(3)
    out = two.run(lambda x: x * captured, (2.0,))
    np.testing.assert_array_equal(out, [2, 2, 2])
    assert len(touchy) == 1
