"""Objects of Flax NNX, and models that are pytrees, in steps."""

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js

STEPS, ROWS, WIDTH = 5, 8, 4


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


class Phases(nnx.Module):
    def __init__(self):
        self.dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.seen = 0
        self.name = "new"

    def __call__(self, x):
        return self.dropout(x)


# Objects of Flax NNX, and models that are pytrees, in steps.


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


def add(model):
    model.extra = nnx.Param(jnp.ones(3))


def remove(model):
    del model.norm


def tie(model):
    model.layers[1].kernel = model.layers[0].kernel


@each_of(
    "change, text",
    [
        (add, "added `extra`"),
        (remove, r"removed `norm.bias`, `norm.scal"),
        (tie, r"layers\[1\]\.kernel"),
    ],
)
def test_another_structure_is_refused_and_the_object_left_as_it_was(two, change, text):
    model = Net()
    with pytest.raises(js.errors.ObjectError, match=text):
        two.run(change, (model,))
    assert nnx.graphdef(model) == nnx.graphdef(Net())


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


# Objects of Flax NNX inside and around transformed, bound and explained steps.


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


def test_changes_of_an_object_in_accumulate_are_refused(two):
    model = Net()

    def step(model, x, y):
        @two.accumulate(2)
        def losses(x, y):
            return loss_of(model, x, y)

        return mean(losses(x, y))

    with pytest.raises(js.errors.ObjectError, match="inside a function that JAX"):
        two.run(step, (model, *divided(two, *rows())))
    assert int(model.calls[...]) == 0


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


def test_a_variable_that_is_a_reference_is_refused(two):
    variable = nnx.Variable(jnp.ones(2), ref=True)
    with pytest.raises(js.errors.ObjectError, match="without `ref=True`"):
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
    for wrong in (True, lambda path, leaf: True):
        with pytest.raises(js.errors.NotMirroredError, match=r"`step\(\.\.\.\)\['own'"):
            run(wrong)
    told = r"is \(True, False\), which does not fit .* `step\(...\)` is \{'own': \*"
    with pytest.raises(ValueError, match=told):
        run((True, False))


def bind(step: Any, *objects):
    return step.bind(*objects)


def test_errors_of_bound_steps(two):
    model = Net()
    before = arrays(model)

    @two.run
    def step(model, x):
        model.norm.scale[...] += x.sum(0)

    with pytest.raises(TypeError, match="`bind` was given no module"):
        bind(step, jnp.ones(3))
    with pytest.raises(js.errors.NotMirroredError, match=r"leaves `model.norm.scale"):
        bind(step, model)(*divided(two, rows()[0]))
    assert_equal(arrays(model), before, 0)


# Objects of Flax NNX that a step captures, directly or through something else.


def test_objects_are_captured_by_defaults_partials_and_functions_within(two):
    total = nnx.Variable(jnp.zeros(()))

    def by_default(x, *, total=total):
        total[...] += x

    def by_partial(total, x):
        total[...] += x

    def within(x):
        def inner():
            return [by_default(x) for _ in range(1)]

        return inner()

    for step in (by_default, functools.partial(by_partial, total), within):
        two.run(step, (1.0,))
    assert float(total[...]) == 3


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


# How long objects of Flax NNX live that steps were given.


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


def test_replaced_variables_are_let_go(two):
    model = Net()
    step = two.run(lambda model: model.norm.scale[...].sum())
    step(model)
    old = weakref.ref(model.norm.scale.get_raw_value())
    model.norm.scale = nnx.Param(jnp.full(WIDTH, 2.0))
    assert float(step(model)) == 2 * WIDTH
    gc.collect()
    assert old() is None


# Models of other libraries, which are pytrees.


def equinox_line(weight):
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        weight: jax.Array
        name: str = eqx.field(static=True, default="line")

        def __call__(self, x):
            return x @ self.weight

    return Model(weight)


def test_other_pytree_models(two):
    ours: Any = equinox_line(jnp.eye(WIDTH))
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
