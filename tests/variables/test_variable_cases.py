"""Variables as TensorFlow's own tests use them, with the numbers that these want."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.variables import copies, variable

import jaxstrategy as js


def each(strategy, start=0, step=1):
    """`start + step * r` for replica r."""
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([start + step * i for i in range(n)])


def changed(strategy, v, how, x):
    strategy.run(lambda x: getattr(v, how)(x), (x,))
    return copies(strategy, v)


# Replica r gives r + 1 to a variable that is 10.
@pytest.mark.parametrize("aggregation, n, assigned, added, subtracted", [
    ("sum", 2, 3, 13, 7),
    ("sum", 3, 6, 16, 4),
    ("mean", 2, 1.5, 11.5, 8.5),
    ("mean", 4, 2.5, 12.5, 7.5),
    ("only_first_replica", 2, 1, 11, 9),
])  # fmt: skip
def test_what_replicas_give(aggregation, n, assigned, added, subtracted):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    v, x = variable(strategy, 10.0, aggregation=aggregation), each(strategy, 1.0)
    for how, wanted in (
        ("assign", assigned), ("assign_add", added), ("assign_sub", subtracted),
    ):  # fmt: skip
        v.assign(10.0)
        assert changed(strategy, v, how, x) == [wanted] * n


@pytest.mark.parametrize("aggregation, assigned, added", [
    ("none", 5, 15), ("mean", 5, 15), ("only_first_replica", 5, 15), ("sum", 10, 20),
])  # fmt: skip
def test_a_constant_of_the_step(two, aggregation, assigned, added):
    v = variable(two, 10.0, aggregation=aggregation)
    two.run(lambda: v.assign_add(jnp.float32(5)))
    assert copies(two, v) == [added] * 2
    two.run(lambda: v.assign(jnp.float32(5)))
    assert copies(two, v) == [assigned] * 2


@pytest.mark.filterwarnings("ignore::jaxstrategy.RecompilationWarning")
def test_another_variable_is_assigned(two):
    other = variable(two, 2.0)
    for aggregation, wanted in (("none", 2), ("mean", 2), ("sum", 4)):
        v = variable(two, 0.0, aggregation=aggregation)
        two.run(lambda v=v: v.assign(other), ())
        assert copies(two, v) == [wanted] * 2
        v.assign(other)  # outside of replicas an aggregation plays no part
        assert copies(two, v) == [2, 2]


def test_only_the_first_replica_counts(two):
    v = variable(two, 3.0, aggregation="only_first_replica")
    assert changed(two, v, "assign_add", each(two, 7.0, 7.0)) == [10, 10]
    assert changed(two, v, "assign_add", each(two, 13.0, 13.0)) == [23, 23]
    o = variable(two, 2.0, "on_read", "only_first_replica")
    assert changed(two, o, "assign_add", each(two, 5.0, 5.0)) == [7, 12] and o == 7
    assert changed(two, o, "assign_add", each(two, 11.0, 11.0)) == [18, 34] and o == 18


def test_a_global_step(four):
    step = variable(four, 0, aggregation="only_first_replica")

    def count():
        step.assign_add(1)
        return step.read_value()

    assert four.experimental_local_results(four.run(count))[0] == 1
    assert four.run(count) == 2 and step == 2


def test_whole_numbers_are_summed(two):
    v = variable(two, 1, aggregation="sum")
    assert changed(two, v, "assign_add", each(two, 1)) == [4, 4] and v.dtype == "int32"


def test_on_read_sums_start_where_they_are_told(two):
    o = variable(two, 5.0, "on_read", "sum")
    assert o == 10.0  # the start is not divided
    assert o.assign(6) == 6.0 and copies(two, o) == [3, 3]  # what is assigned is
    for _ in range(3):
        two.run(lambda: o.assign_add(1.0))
    assert copies(two, o) == [6, 6] and o == 12 and o.dtype == "float32"


def test_on_read_copies_of_tensorflows_suite(two):
    total = variable(two, 1.0, "on_read", "sum")
    mean = variable(two, 0.0, "on_read", "mean")

    def step(r):
        total.assign_add(2 + r)
        mean.assign(6 * r)

    two.run(step, (each(two, 0.0),))
    assert copies(two, total) == [3, 4] and total == 7
    assert copies(two, mean) == [0, 6] and mean == 3


def test_gradients_of_on_read_variables_are_local(two):
    o = variable(two, 3.0, "on_read", "sum")
    grads = two.run(lambda x: js.grad(lambda: o**2 * x, o)(), (each(two, 1.0),))
    assert copies(two, grads) == [6, 12]


@pytest.mark.parametrize("aggregation", ["none", "sum"])
def test_updates_of_single_copies(two, aggregation):
    o = variable(two, 10.0, "on_read", aggregation)
    two.extended.update(o, lambda o: o.assign_add(6.0))
    assert copies(two, o) == [16, 16]
    two.extended.update(o, lambda o, x: o.assign_add(x), args=(each(two, 1.0),))
    assert copies(two, o) == [17, 18]
    two.extended.update(o, lambda o: o.assign(5.0))
    assert copies(two, o) == [5, 5] and (aggregation == "none" or o == 10)


def test_a_loop_of_gradient_descent_by_hand(four):
    kernel, x = variable(four, 3.0), each(four, 1.0)
    distance = [2.0]

    @four.run
    def gradient(x):
        return js.grad(lambda: x * (kernel - 1) ** 2, kernel)()

    for _ in range(10):
        grad = four.extended.reduce_to("mean", gradient(x), destinations=kernel)
        four.extended.update(kernel, lambda k, g: k.assign_sub(0.05 * g), args=(grad,))
        distance.append(abs(float(kernel) - 1))
    np.testing.assert_allclose(distance, 2 * 0.75 ** np.arange(11), rtol=1e-5)


def test_what_is_no_value(two):
    v = variable(two, 1.0)
    for nothing in (None, "text", object()):
        with pytest.raises(
            TypeError, match="'Variable' was given .*; an array or a nu"
        ):
            v.assign(nothing)
    assert v == 1.0


def test_a_variable_is_among_the_local_results_of_its_container(two):
    v = variable(two, 2.0)
    container = two.extended.value_container(v)
    assert v in two.experimental_local_results(container)
