"""Objects of Flax NNX inside and around transformed, bound and explained steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.objects import (
    Net,
    adam,
    arrays,
    assert_equal,
    divided,
    loss_of,
    mean,
    rows,
    train,
    trained_alone,
)

import jaxstrategy as js


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


def test_one_array_in_two_donated_objects_is_refused(two):
    array = jnp.ones(3)
    first, second = (nnx.List([nnx.Param(array)]) for _ in range(2))

    def step(first, second):
        first[0][...] += 1
        second[0][...] *= 3

    options = js.RunOptions(donate_argnums=(0, 1))
    with pytest.raises(js.errors.DonatedValueError, match="are one array"):
        two.run(step, (first, second), options=options)
    two.run(step, (first, second))
    assert float(first[0][0]) == 2 and float(second[0][0]) == 3


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
        with pytest.raises(
            js.errors.NotMirroredError, match=r"`step\(\.\.\.\)\['own'\]`"
        ):
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
