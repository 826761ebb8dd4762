"""Objects of Flax NNX that a step captures, directly or through something else."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each
from helpers.objects import (
    Net,
    adam,
    arrays,
    assert_equal,
    divided,
    rows,
    train,
    trained_alone,
)

import jaxstrategy as js

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


def by_wrapper(model, optimizer):
    @functools.wraps(train)
    def step(*args, **kwargs):
        return inner(*args, **kwargs)

    inner = by_closure(model, optimizer)
    return step


def test_captured_objects_are_changed(two):
    want, losses = trained_alone(3)
    for capture in each([by_closure, by_wrapper]):
        model = Net()
        step = two.run(capture(model, adam(model)))
        for i in range(3):
            loss = step(*divided(two, *rows(i)))
            np.testing.assert_allclose(loss, losses[i], atol=1e-5)
        assert_equal(arrays(model), want)


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


def test_what_is_reached_through_something_else_is_changed(two):
    class Holder:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, x, y):
            return train(self.model, self.optimizer, x, y)

        def assign(self, x, y):
            self.model.calls[...] = 5

    model = Net()
    holder = Holder(model, adam(model))
    two.run(holder.step, divided(two, *rows()))
    assert_equal(arrays(model), trained_alone(1)[0])
    two.run(holder.assign, divided(two, *rows()))
    assert int(model.calls[...]) == 5 and holder.model is model


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


def test_a_forgotten_reduction_names_the_result(two):
    offset = jnp.ones(3)
    x = two.per_replica([np.ones(3, np.float32), np.zeros(3, np.float32)])

    def step(state, x):
        return {"w": state["w"] - x * offset}

    with pytest.warns(js.errors.NotMirroredWarning) as caught:
        two.run(step, ({"w": np.ones(3, np.float32)}, x))
    (text,) = (str(each.message) for each in caught)
    assert "`step` was given `state['w']` equal on all replicas" in text
    assert "returns `step(...)['w']`, what takes its place" in text
    assert "(...)[0]" not in text
