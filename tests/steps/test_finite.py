"""A NaN or Inf is reported with the replica, the line, the argument it came in by."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

CHECKED = js.RunOptions(check_finite=True)
ONLY_NAN = js.RunOptions(check_finite="nan")


def line(fn, marker="# <-"):
    """`file:line: code` of the line of `fn` with `marker`."""
    lines, start = inspect.getsourcelines(fn)
    (found,) = (i for i, text in enumerate(lines) if marker in text)
    return f"{__file__}:{start + found}: {lines[found].strip()}"


def found(strategy, step, *args, options=CHECKED):
    with pytest.raises(js.NonFiniteError) as caught:
        strategy.run(step, args, options=options)
    assert not js.has_strategy() and isinstance(caught.value, FloatingPointError)
    return caught.value


def numbers(strategy, *values):
    return strategy.per_replica([np.float32(value) for value in values])


def plainly(x):
    y = x - 1
    return jnp.log(y)  # <-


def before_a_sum(x):
    y = jnp.log(x - 1)  # <-
    return replica().all_reduce("sum", {"y": y, "x": x})


def in_a_jitted_function(x):
    return jax.jit(lambda y: jnp.log(y - 1) * 2)(x)  # <-


def in_a_branch(x):
    return lax.cond(x < 1, lambda: jnp.log(x - 1), lambda: x)  # <-


def in_a_scan(x):
    def body(c, row):
        mean = replica().all_reduce("mean", c)
        return jnp.log(c - row), mean  # <-

    return lax.scan(body, x + 3, jnp.array([0.1, 4.0]))


def in_a_while_loop(x):
    def body(carry):
        i, c = carry
        return i + 1, jnp.log(c - 1)  # <-

    return lax.while_loop(lambda c: c[0] < 3, body, (0, x))


def in_a_rematerialized_function(x):
    return jax.checkpoint(lambda y: jnp.log(y - 1))(x)  # <-


def in_a_function_with_a_rule_of_its_own(x):
    @jax.custom_vjp
    def f(x):
        return jnp.log(x - 1)  # <-

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g,))
    return f(x)


EVERYWHERE = (
    plainly,
    before_a_sum,
    in_a_jitted_function,
    in_a_branch,
    in_a_while_loop,
    in_a_rematerialized_function,
    in_a_function_with_a_rule_of_its_own,
)


@each_of("step", EVERYWHERE)
def test_the_replica_and_the_line_are_named_wherever_it_arises(four, step):
    error = found(four, step, numbers(four, 1e3, 2e3, 0.0, 3e3))
    assert error.replicas == (2,) and error.line == line(step) and not error.source
    assert str(error).startswith(
        f"`{step.__name__}` makes a NaN on replica 2 of 4, of values that are finite:\n"
        f"  {line(step)}\n  (the operation `log`, which makes float32"
    )


def test_what_came_from_another_replica_in_an_earlier_turn_is_not_told(four):
    # 3 - 0.1 is fine, its logarithm less 4 is not, on any replica but the last.
    error = found(four, in_a_scan, numbers(four, 0, 0, 0, 1e30))
    assert error.replicas == (0, 1, 2) and error.line == line(in_a_scan)


def test_it_is_found_at_any_call_not_only_at_the_first(two):
    step = two.run(options=CHECKED)(plainly)
    step(numbers(two, 2, 3))
    with pytest.raises(js.NonFiniteError, match="on replica 1 of 2"):
        step(numbers(two, 2, 0))
    step(numbers(two, 2, 3))
    wide = two.per_replica(np.array([[2, 2], [-1, 2]], np.float32))
    with pytest.raises(js.NonFiniteError, match=r"which makes float32\[2\]"):
        step(wide)


def test_without_the_option_nothing_is_looked_at(two):
    result = two.run(plainly, (numbers(two, 2, 0),))
    assert np.isnan(result.stacked[1])


@each_of("value, what", ((np.nan, "a NaN"), (-np.inf, "an Inf")))
def test_an_argument_is_named_by_its_path(four, value, what):
    def step(params, batch):
        return params["w"] * batch["x"]

    params = {"w": np.ones(2, np.float32)}
    batch = {"x": four.per_replica(np.array([[1, 2], [3, 4], [5, value], [7, 8]], "f"))}
    error = found(four, step, params, batch)
    assert error.replicas == (2,) and error.source == "batch['x']" and not error.line
    start = f"argument `batch['x']` holds {what} on replica 2 of 4 when `step` begins."
    assert str(error).startswith(start)
    error = found(four, step, {"w": np.float32([1, value])}, batch)
    assert error.source == "params['w']" and error.replicas == (0, 1, 2, 3)


def test_a_variable_is_named_when_it_comes_in_and_where_it_is_made(two):
    with two.scope():
        total = js.Variable(0.0, name="total")
        seen = js.Variable(
            1.0, synchronization="on_read", aggregation="sum", name="seen"
        )

    def step(x):
        seen.assign_add(x)
        total.assign(replica().all_reduce("sum", jnp.sqrt(x)))  # <-

    error = found(two, step, numbers(two, 1, -1))
    assert error.replicas == (1,) and error.line == line(step)
    total.assign(np.nan)
    error = found(two, step, numbers(two, 1, 1))
    assert error.source == "variable 'total'" and "variable 'total' holds a NaN" in str(
        error
    )


def test_donated_arguments_are_what_they_were_before(two):
    options = js.RunOptions(donate_argnums=0, check_finite=True)

    @two.run(options=options)
    def step(state, x):
        return state + replica().all_reduce("sum", jnp.log(x))

    state = two.mirror(np.float32([5, 7]))
    with pytest.raises(js.NonFiniteError):
        step(state, numbers(two, 1, -1))
    np.testing.assert_array_equal(state, [5, 7])
    np.testing.assert_array_equal(step(state, numbers(two, 1, 1)), [5, 7])


@each_of("where", ["arrays", "references", "central storage"])
def test_variables_hold_what_they_held_before(two, where):
    strategy = two
    if where == "central storage":
        strategy = js.experimental.CentralStorageStrategy(two.devices, "CPU:3")
    with strategy.scope():
        total = js.Variable(5.0)
        seen = js.Variable(1.0, synchronization="on_read", aggregation="sum")
        count = js.Variable(2, aggregation="sum")
    if where == "references":
        # What a traced function of the user's has used is one from then on.
        jax.jit(lambda: two.run(lambda: total.value() + seen.value()))()

    @strategy.run(options=CHECKED)
    def step(x):
        count.assign_add(1)
        seen.assign_add(x)
        total.assign_sub(replica().all_reduce("sum", jnp.log(x)))

    def held():
        return float(total), float(seen.value()), int(count)

    for calls in (0, 1):
        with pytest.raises(js.NonFiniteError):
            step(numbers(strategy, 1, -1))
        assert held() == (5.0, 2.0 + 2 * calls, 2 + 2 * calls)
        step(numbers(strategy, 1, 1))
        assert held() == (5.0, 4.0 + 2 * calls, 4 + 2 * calls)


def test_captured_arrays_may_be_infinite_but_not_nan(two):
    mask = jnp.array([0.0, -jnp.inf])
    hole = jnp.array([0.0, jnp.nan])
    x = numbers(two, 1, 2)
    kept = two.run(lambda x: jax.nn.softmax(x + mask), (x,), options=CHECKED)
    np.testing.assert_array_equal(kept.stacked, [[1, 0], [1, 0]])
    error = found(two, lambda x: x + hole, x)
    assert "an array that it captured holds a NaN" in str(error)


def attention(x):
    scores = jnp.where(jnp.arange(3) < 1, x, -jnp.inf)
    return jax.nn.softmax(scores), jax.nn.logsumexp(scores)


def drawn(x):
    key = replica().fold_in(jax.random.key(0))
    return jax.random.normal(key, (9,)), jax.random.gumbel(key, (9,)), x


def test_usual_operations_are_finite(two):
    for step in (attention, drawn):
        two.run(step, (numbers(two, 1, 2),), options=CHECKED)


def test_infinity_can_be_left_out(two):
    def step(x):
        return 1 / x

    x = numbers(two, 1, 0)
    assert found(two, step, x).replicas == (1,)
    result = two.run(step, (x,), options=ONLY_NAN)
    np.testing.assert_array_equal(result.stacked, [1, np.inf])
    assert found(two, lambda x: step(x) * 0, x, options=ONLY_NAN).replicas == (1,)
    two.run(step, (numbers(two, np.inf, 1),), options=ONLY_NAN)


def test_an_nnx_object_keeps_what_it_had(two):
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...])

    def step(model, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.log(m(x)).mean())(model)  # <-
        model.kernel[...] -= replica().all_reduce("mean", grads["kernel"][...])

    x = two.per_replica(np.stack([np.ones((1, 2), "f"), -np.ones((1, 2), "f")]))
    assert found(two, step, model, x).line == line(step)
    np.testing.assert_array_equal(model.kernel[...], before)
    model.kernel[...] = jnp.full((2, 1), jnp.nan)
    assert found(two, step, model, x).source == "model.kernel"


def test_inside_a_function_that_jax_traces_it_is_refused(two):
    step = two.run(options=CHECKED)(plainly)
    with pytest.raises(js.errors.ContextError, match="`plainly` is to be checked"):
        jax.jit(step)(numbers(two, 2, 3))


def test_another_value_of_the_option_is_refused():
    for wrong in ("inf", None, 1.5):
        with pytest.raises(
            ValueError, match=f"`check_finite` was {wrong!r}; True, Fal"
        ):
            js.RunOptions(check_finite=wrong)


def test_jax_debug_nans_tells_the_same(four):
    x = numbers(four, 5, 7, 0, 3)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(js.NonFiniteError) as caught:
                four.run(before_a_sum, (x,))
            assert caught.value.replicas == (2,)
            assert caught.value.line == line(before_a_sum)
        four.run(before_a_sum, (numbers(four, 5, 7, 2, 3),))
