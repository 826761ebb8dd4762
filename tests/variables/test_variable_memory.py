"""Variables are updated in place, and their memory is freed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.variables import variable

import jaxstrategy as js

SHAPE = (100_003,)  # of no array of other tests in this process


def live():
    """The bytes of arrays of this shape."""
    gc.collect()
    shapes = (SHAPE, (2, *SHAPE))
    return sum(a.nbytes for a in jax.live_arrays() if a.shape in shapes)


@pytest.mark.slow
@each_of("kind", ["auto", "on_read"])
def test_a_variable_that_is_dropped_frees_its_memory(two, kind):
    before = live()
    v = variable(two, np.ones(SHAPE), kind, "sum")

    def by_argument(v):
        v.assign_add(np.ones(SHAPE))

    def by_closure(v=v):
        v.assign_add(np.ones(SHAPE))

    two.run(by_argument, (v,))
    two.run(by_closure, ())
    assert live() > before and v.value()[0] > 2
    dropped = weakref.ref(v)
    del v, by_closure
    gc.collect()
    # The step that it was an argument of is still there.
    assert dropped() is None and live() == before
    with two.scope():
        w = js.Variable(np.ones(SHAPE))
    two.run(by_argument, (w,))
    assert w.value()[0] == 2


@each_of("kind", ["auto", "on_read"])
def test_steps_update_in_place(two, kind):
    v = variable(two, np.ones(SHAPE), kind, "mean")

    def step():
        v.assign_add(jnp.ones(SHAPE))

    two.run(step)
    memory = live()
    for _ in range(100):
        two.run(step)
    assert live() == memory and v.value()[0] == 102
    found = two.explain(step).memory
    one = 4 * SHAPE[0]
    assert found.arguments == one and found.donated == one and found.temporary < one
    assert v.value()[0] == 102


@each_of("ordinary", [False, True])
def test_a_variable_that_another_one_takes_the_place_of(two, ordinary):
    def new(value):
        value = np.full(SHAPE, value)
        return js.Variable(value) if ordinary else variable(two, value)

    model = {"v": new(1.0)}

    def step():
        return model["v"].assign_add(jnp.ones(SHAPE))[0]

    assert two.run(step) == 2
    before = live()
    model["v"] = new(5.0)
    assert live() == before
    assert two.run(step) == 6 and model["v"].value()[0] == 6
    assert two.run(step) == 7


def test_reading_costs_no_copy(two):
    v = variable(two, np.ones(SHAPE))
    found = two.explain(lambda: jnp.sum(v.value() * 2)).memory
    argument = two.explain(lambda x: jnp.sum(x * 2), (v.value(),)).memory
    assert found.arguments == argument.arguments == found.donated
    assert found.temporary <= argument.temporary
    before = live()
    two.run(lambda: jnp.sum(v.value() * 2))
    assert live() <= before
