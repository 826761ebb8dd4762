"""Outputs of several steps of TensorFlow 1, set on a context while they run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.older import each_kind, of_kind, versions

import jaxstrategy as js
from jaxstrategy.compat import v1


def numbers(strategy, rows=16, size=4, dtype=int):
    return strategy.make_dataset_iterator(
        js.batches(np.arange(rows, dtype=dtype), size)
    )


def run_steps(strategy, fn, iterator, *args, **kwargs):
    extended = strategy.extended
    return extended.experimental_run_steps_on_iterator(fn, iterator, *args, **kwargs)


def setting_sums(strategy):
    """A function that sets the sum of an element, in three ways."""

    def fn(context, x):
        y = strategy.extended.call_for_each_replica(jnp.sum, (x,))
        context.set_last_step_output("sum", y, v1.ReduceOp.SUM)
        context.set_last_step_output("mean", y, "mean")
        context.set_last_step_output("raw", y)

    return fn


def outputs(strategy, context):
    found = context.last_step_outputs
    raw = versions(strategy, found["raw"])
    return float(found["sum"]), float(found["mean"]), raw


def test_one_step_by_default_and_those_before_the_end_are_taken():
    strategy = of_kind("mirrored", 2)
    iterator, taken = numbers(strategy, rows=8), []
    run_steps(strategy, lambda context, x: taken.append(1), iterator)
    with pytest.raises(js.OutOfRangeError):
        run_steps(strategy, lambda context, x: taken.append(2), iterator, 5)
    assert taken == [1, 2]


def set_in_step(context, x):
    context.set_last_step_output("loss", x.sum(), v1.ReduceOp.MEAN)
    context.set_last_step_output("total", {"sum": x.sum()}, "SUM")
    context.set_non_tensor_output("foo", "bar")
    return x.sum()


def by_argument(strategy, context, x):
    return strategy.extended.call_for_each_replica(set_in_step, args=(context, x))


def by_closure(strategy, context, x):
    return strategy.run(lambda x: set_in_step(context, x), (x,))


class Model:
    def __init__(self, context):
        self.context = context

    def step(self, x):
        return set_in_step(self.context, x)


def by_attribute(strategy, context, x):
    return strategy.run(Model(context).step, (x,))


WAYS = [by_argument, by_closure, by_attribute]


@each_kind
def test_outputs_of_a_step(kind, n):
    strategy = of_kind(kind, n)
    results = []

    def fn(context, x):
        results.append(by_argument(strategy, context, x))

    context = run_steps(strategy, fn, numbers(strategy), 3)
    found = context.last_step_outputs
    assert float(found["loss"]) == 38 / n
    assert float(found["total"]["sum"]) == 38
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert context.non_tensor_outputs == {"foo": ("bar",)}
    assert float(strategy.reduce("sum", results[-1])) == 38  # what the step returns


@pytest.mark.parametrize("way", WAYS)
def test_ten_calls_compile_a_step_once(way, compilations):
    strategy = of_kind("mirrored", 2)
    iterator = numbers(strategy, rows=80)
    found = []

    def run_once():
        def fn(context, x):
            way(strategy, context, x)

        return run_steps(strategy, fn, iterator, 2).last_step_outputs["loss"]

    compilations()
    found.append(float(run_once()))
    assert compilations() >= 1
    found += [float(run_once()) for _ in range(9)]
    assert compilations() == 0
    assert found == [11 + 16 * i for i in range(10)]


def test_no_steps_leave_the_initial_values():
    strategy = of_kind("mirrored", 2)
    fn, iterator = setting_sums(strategy), numbers(strategy)
    context = run_steps(strategy, fn, iterator, 0, {"sum": 3.0})
    assert context.last_step_outputs == {"sum": 3.0}
    assert run_steps(strategy, fn, iterator, iterations=0).last_step_outputs == {}
    with pytest.raises(ValueError, match=r"`initial_loop_values` is \[3.0\]"):
        run_steps(strategy, fn, iterator, 0, [3.0])
    # As TensorFlow wants them: flat, in the order of sorted names.
    context = run_steps(strategy, fn, iterator, 1, [0.0, 0.0, 0.0])
    assert outputs(strategy, context) == (6, 3, [1, 5])


def step_fn(strategy, step):
    return lambda context, x: strategy.run(step, (context, x))


def by_grad(c, x):
    def loss(x):
        c.set_last_step_output("l", x.sum(), "mean")
        return x.sum()

    return jax.grad(loss)(x)


CONTEXT = js.errors.ContextError
NOT_REDUCED = (
    "The output 'l' was set in a replica context without saying how the replicas' "
    "values are reduced. Give `reduce_op=ReduceOp.MEAN`, or return the value"
)


def test_what_cannot_be_an_output():
    strategy = of_kind("mirrored", 2)
    for step, error, text in [
        (lambda c, x: c.set_last_step_output("l", x), ValueError, NOT_REDUCED),
        (
            by_grad,
            CONTEXT,
            "`ctx.set_last_step_output` was called inside a function th",
        ),
        (
            lambda c, x: jax.jit(lambda x: c.set_non_tensor_output("l", x.sum()))(x),
            CONTEXT,
            "`ctx.set_non_tensor_output` was called inside a function",
        ),
        (lambda c, x: c.last_step_outputs, CONTEXT, "`ctx.last_step_outputs` was read"),
        (lambda c, x: c.non_tensor_outputs, CONTEXT, "`ctx.non_tensor_outputs` was re"),
        (lambda c, x: c.set_last_step_output("l", x, "middle"), ValueError, "middle"),
    ]:
        check_refused(strategy, step_fn(strategy, step), error, text)
    for fn, error, text in [
        (
            lambda c, x: jax.jit(lambda x: c.set_last_step_output("l", x))(x.values[0]),
            CONTEXT,
            "`ctx.set_last_step_output` was called inside a function",
        ),
        (
            lambda c, x: c.set_last_step_output(3, x),
            TypeError,
            "The name of an output was 3; a text was wanted.",
        ),
    ]:
        check_refused(strategy, fn, error, text)


def check_refused(strategy, fn, error, text):
    with pytest.raises(error, match=re.escape(text)):
        run_steps(strategy, fn, numbers(strategy, dtype=np.float32))
    assert not v1.has_strategy()


def test_where_steps_cannot_be_run():
    strategy = of_kind("mirrored", 2)

    def step():
        run_steps(strategy, lambda c, x: None, numbers(strategy))

    with pytest.raises(js.errors.ContextError):
        strategy.run(step)
    with pytest.raises(TypeError, match="was given as the iterator, but has no"):
        run_steps(strategy, lambda c, x: None, [1, 2])
