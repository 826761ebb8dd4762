"""Scheduled functions that would be silently wrong if nobody looked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js


@pytest.fixture(scope="module")
def strategy():
    return js.ParameterServerStrategy(workers=1, backend="threads")


@pytest.fixture(scope="module")
def coordinator(strategy):
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        yield coordinator


def call(coordinator, fn, *args):
    return coordinator.schedule(coordinator.function(fn), args).fetch()


def variable(strategy, value):
    with strategy.scope():
        return js.Variable(value, name="v")


# Parts that are assigned in branches: the whole is not assigned there.


def in_branch(change):
    jax.lax.cond(True, change, lambda: None)


def in_loop(change):
    jax.lax.fori_loop(0, 2, lambda _, none: change(), None)


@each_of("within", (in_branch, in_loop))
def test_a_part_assigned_in_a_branch_is_refused(strategy, coordinator, within):
    v = variable(strategy, np.zeros(4, np.float32))

    def function():
        within(lambda: (v[1:3].assign(5.0), None)[1])

    with pytest.raises(ValueError, match=r"variable 'v' in a branch.*\[\.\.\.\]\.ass"):
        call(coordinator, function)
    assert v.numpy().tolist() == [0, 0, 0, 0]


def test_a_part_assigned_before_a_branch_that_adds_is_refused(strategy, coordinator):
    v = variable(strategy, np.zeros(4, np.float32))

    def function():
        v[1:3].assign(5.0)
        in_branch(lambda: (v.assign_add(jnp.ones(4)), None)[1])

    with pytest.raises(ValueError, match=r"\[\.\.\.\]\.assign` once after it"):
        call(coordinator, function)


@each_of("size", (3, 10_000))
def test_arrays_are_taken_as_they_are_when_scheduled(strategy, coordinator, size):
    array = np.zeros(size, np.float32)
    function = coordinator.function(lambda x: x[0].sum())
    results = []
    for i in range(5):
        array[:] = i
        results.append(coordinator.schedule(function, ([array],)))
    array[:] = 100
    assert [float(r.fetch()) for r in results] == [size * i for i in range(5)]


def more(model):
    model.kernel[...] = model.kernel[...] + 1
    return model(jnp.ones((1, 2))).sum()


@each_of("wrap", ("schedule", "run", "run in schedule"))
def test_changed_objects_are_refused(strategy, coordinator, wrap):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with pytest.raises(js.errors.ObjectError, match=r"changes a Linear .* `nnx\.merge"):
        if wrap == "schedule":
            call(coordinator, more, model)
        elif wrap == "run":
            strategy.run(more, (model,))
        else:
            call(coordinator, lambda m: strategy.run(more, (m,)), model)


@each_of("kind", ("coroutine", "async generator"))
def test_async_functions_are_refused(coordinator, kind):
    async def coroutine():
        return 1

    async def generator():
        yield 1

    given = []

    def function():
        given.append(coroutine() if kind == "coroutine" else generator())
        return given[-1]

    with pytest.raises(TypeError, match=r"`async def`.*ordinary function"):
        call(coordinator, function)
    if kind == "coroutine":
        given[-1].close()
