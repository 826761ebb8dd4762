"""How long objects of Flax NNX live that steps were given."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.objects import WIDTH, Net, adam, divided, rows, train


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
