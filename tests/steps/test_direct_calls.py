"""Later calls of a step go to JAX with the user's own trees, and are as right.

What JAX alone would take in another way, the strategy places, refuses or traces.
"""

import jax
import numpy as np
import pytest
from helpers.cases import each
from helpers.profiled import python_calls

import jaxstrategy as js

OFTEN = 4


def stepping(strategy, leaves=2, **options):
    scale = 2.0  # a variable of the enclosing function

    def step(state, x):
        mean = js.get_replica_context().all_reduce("mean", x.mean() * scale)
        return jax.tree.map(lambda leaf: leaf + mean, state)

    state = strategy.mirror({f"w{i}": np.full(3, i, "f4") for i in range(leaves)})
    return strategy.run(step, options=js.RunOptions(**options)), state


def rows(strategy, *values):
    return strategy.per_replica([np.full(4, value, "f4") for value in values])


# With JAX 0.10 it is looked whether arguments live, and where they lie.
FEW = 6 if jax.__version_info__ >= (0, 12) else 17


def test_a_call_makes_few_calls_of_python_however_many_leaves_there_are(two):
    step, state = stepping(two, leaves=100)
    x = rows(two, 1.0, 3.0)
    for _ in range(OFTEN):
        step(state, x)
    found = python_calls(lambda: step(state, x))
    assert len(found) <= FEW, found
    np.testing.assert_allclose(step(state, x)["w1"], 5.0)


def test_the_masks_of_batches_cost_nothing_once_a_step_asks_for_them(two):
    @two.run
    def step(total, batch):
        mean = js.masked_mean(batch)
        return total + js.get_replica_context().all_reduce("mean", mean)

    data = [np.full(2, i, "f4") for i in range(6)] + [np.ones(1, "f4")]
    total, counts = two.mirror(np.float32(0)), []
    for batch in two.experimental_distribute_dataset(data):

        def call(batch=batch):
            nonlocal total
            total = step(total, batch)

        counts.append(len(python_calls(call)))
    assert float(total) == 16.0
    assert counts[-2] <= FEW + 2


def in_another_structure(step, state, x, strategy):
    return step({**state, "v": state["w0"]}, x)["v"], 4.0


def by_keyword(step, state, x, strategy):
    return step(state=state, x=x)["w1"], 5.0


def with_the_last_dict_for_keywords(step, state, x, strategy):
    """To JAX alone, which is given keywords as a dict, these calls are alike."""

    @strategy.run
    def scaled(x, both=None, by=1.0):
        return x * (by if both is None else 10 * both["by"])

    by = {"by": strategy.mirror(np.float32(2))}
    for _ in range(OFTEN):
        np.testing.assert_array_equal(scaled(state["w1"], by), np.full(3, 20))
    np.testing.assert_array_equal(scaled(state["w1"], **by), np.full(3, 2))
    for _ in range(OFTEN):
        scaled(state["w1"], **by)
    return scaled(state["w1"], by), 20.0


def a_number(step, state, x, strategy):
    return step({**state, "w1": 3}, x)["w1"], 7.0


def of_numpy(step, state, x, strategy):
    return step({**state, "w1": np.full(3, 3.0, "f4")}, x)["w1"], 7.0


def on_one_device(step, state, x, strategy):
    w1 = jax.device_put(np.full(3, 3.0, "f4"), jax.devices()[5])
    return step({**state, "w1": w1}, x)["w1"], 7.0


def of_other_shapes(step, state, x, strategy):
    w1 = strategy.mirror(np.full((2, 3), 3.0, "f4"))
    return step({**state, "w1": w1}, x)["w1"], 7.0


def the_same_for_all(step, state, x, strategy):
    return step(state, strategy.mirror(np.full(4, 3.0, "f4")))["w1"], 7.0


def from_numpy_for_each(step, state, x, strategy):
    return step(state, js.PerReplica(np.full((2, 4), 3.0, "f4")))["w1"], 7.0


OTHERS = [
    in_another_structure,
    by_keyword,
    with_the_last_dict_for_keywords,
    a_number,
    of_numpy,
    on_one_device,
    of_other_shapes,
    the_same_for_all,
    from_numpy_for_each,
]


def test_a_call_with_other_arguments(two):
    step, state = stepping(two)
    x = rows(two, 1.0, 3.0)
    for other in each(OTHERS):
        for _ in range(OFTEN):
            usual = step(state, x)
        for _ in range(OFTEN + 1):  # however often JAX refuses them
            got, wanted = other(step, state, x, two)
            np.testing.assert_allclose(got, np.full_like(got, wanted))
            usual = step(state, x)
        np.testing.assert_allclose(usual["w1"], 5.0)


def deleted(step, state, x, strategy):
    gone = strategy.mirror(np.ones(3, "f4"))
    gone.delete()
    step({**state, "w1": gone}, x)


def divided(step, state, x, strategy):
    w1 = strategy.per_replica([np.ones(3, "f4")] * 2).stacked.reshape(6)
    step({**state, "w1": w1}, x)


def of_four(step, state, x, strategy):
    other = js.MirroredStrategy(jax.devices()[:4])
    step(state, rows(other, 1.0, 3.0, 1.0, 3.0))


def a_list(step, state, x, strategy):
    step({**state, "w1": {1, 2}}, x)


REFUSED = [
    (
        deleted,
        js.errors.DonatedValueError,
        "`state.'w1'.` was donated to an earlier call",
    ),
    (divided, js.errors.PlacementError, "`state.'w1'.` is a plain array that is split"),
    (of_four, js.errors.PlacementError, "`x` is a PerReplica for 4 replicas"),
    (a_list, TypeError, "`state.'w1'.` is {1, 2}, a set: not an array"),
]


def test_a_call_that_is_refused_says_the_same_as_the_first_one(two):
    step, state = stepping(two)
    x = rows(two, 1.0, 3.0)
    for times in (1, OFTEN + 1):
        for other, error, text in each(REFUSED):
            for _ in range(times):
                with pytest.raises(error, match=text):
                    other(step, state, x, two)
        for _ in range(OFTEN):
            usual = step(state, x)
    np.testing.assert_allclose(usual["w1"], 5.0)


def test_what_a_call_raises_itself_is_raised_once(two):
    calls = []

    def callback(x):
        calls.append(1)
        if len(calls) > 2 * OFTEN:
            raise ValueError("of the user's")
        return x

    @two.run
    def step(x):
        return jax.pure_callback(callback, jax.ShapeDtypeStruct((4,), "f4"), x)

    x = rows(two, 1.0, 3.0)
    for _ in range(OFTEN):
        jax.block_until_ready(step(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="of the user's"):
        jax.block_until_ready(step(x))
    assert len(calls) <= 2 * OFTEN + 2


def test_an_error_in_a_later_trace_is_the_users(two):
    @two.run
    def step(x):
        if x.size > 4:
            raise ValueError("too large a batch")
        return x

    for _ in range(OFTEN):
        step(rows(two, 1.0, 3.0))
    with pytest.raises(ValueError, match="too large a batch"):
        step(two.per_replica([np.ones(5, "f4")] * 2))
