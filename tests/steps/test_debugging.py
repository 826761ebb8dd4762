"""What helps to find mistakes: NaNs by line, prints by replica, leaks of tracers."""

import functools
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each, each_of
from helpers.replicas import ids, replica
from helpers.variables import variable
from jax import lax
from jax.experimental import io_callback

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


def in_a_scan(x):
    def body(c, row):
        mean = replica().all_reduce("mean", c)
        return jnp.log(c - row), mean  # <-

    return lax.scan(body, x + 3, jnp.array([0.1, 4.0]))


def by_its_own_rule(x):
    ruled = jax.custom_vjp(plainly)
    ruled.defvjp(lambda x: (ruled(x), x), lambda x, g: (g,))
    return ruled(x)


HOLDERS = [
    plainly,
    jax.jit(lambda x: plainly(x) * 2),
    jax.checkpoint(plainly),
    by_its_own_rule,
    lambda x: lax.cond(x < 1, plainly, lambda x: x, x),
    lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, plainly(c[1])), (0, x)
    ),
    lambda x: replica().all_reduce("sum", {"y": plainly(x), "x": x}),
]


@each_of("holder", HOLDERS)
def test_the_replica_and_the_line_are_named_wherever_it_arises(four, holder):
    def step(x):
        return holder(x)

    error = found(four, step, numbers(four, 1e3, 2e3, 0.0, 3e3))
    assert error.replicas == (2,) and error.line == line(plainly) and not error.source
    assert str(error).startswith(
        "`step` makes a NaN on replica 2 of 4, of values that are finite:\n"
        f"  {line(plainly)}\n  (the operation `log`, which makes float32"
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


# `jax.debug.print` in a step says which replica printed.

DIVIDED = js.StateSharding("state", min_bytes=0)
STRATEGIES = {
    "mirrored": lambda: js.MirroredStrategy(jax.devices()[:4]),
    "shared": lambda: js.MirroredStrategy(jax.devices()[:2], replicas_per_device=2),
    "one inner axis": lambda: js.MirroredStrategy(logical_axes={"a": 2}),
    "two inner axes, divided": lambda: js.MirroredStrategy(
        logical_axes={"a": 2, "b": 2}, sharding=DIVIDED
    ),
    "none": js.get_strategy,
}


@pytest.fixture(scope="module", params=STRATEGIES)
def printing(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module", params=["mirrored", "shared"])
def few(request):
    return STRATEGIES[request.param]()


@pytest.fixture(scope="module")
def four_printing():
    return STRATEGIES["mirrored"]()


@pytest.fixture
def printed(capsys):
    """What was printed since: its lines, sorted."""

    def lines():
        jax.effects_barrier()
        return sorted(capsys.readouterr().out.splitlines())

    lines()
    return lines


def numbered(strategy, text):
    """The lines of all replicas; `text` is of the number of one."""
    count = strategy.num_replicas_in_sync
    if count == 1:
        return [text(0)]
    return sorted(f"replica {i}: {text(i)}" for i in range(count))


def test_each_line_of_any_text_says_which_replica(four_printing, printed):
    def step(x):
        jax.debug.print("a {}\n\n{{b}} {c}", 2.5, c=x * jnp.eye(2))
        jax.debug.print("here\n")
        jax.debug.print("{} {b}", "text", b=None)
        jax.debug.print("", skip_format_check=True)
        jax.debug.print("follows", 1, skip_format_check=True)

    four_printing.run(step, (ids(four_printing),))
    texts = ("a 2.5", "", "{{b}} [[{i}. 0.]", " [0. {i}.]]")
    texts += ("here", "text None", "", "follows 1")
    wanted = [f"replica {i}: {text.format(i=i)}" for i in range(4) for text in texts]
    # JAX ends each text with a line break.
    assert printed() == sorted([*wanted, *[""] * 4])


@pytest.mark.slow
def test_what_a_step_holds_prints_so_too(printing, printed):
    def square(x):
        jax.debug.print("square {}", x)
        return x * x

    def step(x):
        lax.cond(x > 0, lambda: jax.debug.print("cond {}", x), lambda: None)

        def turn(c):
            jax.debug.print("while {} {}", x, c)
            return c + 1

        lax.while_loop(lambda c: c < x, turn, 0)
        lax.scan(lambda c, k: (square(c) + k, None), x, jnp.ones(1))
        jax.jit(jax.checkpoint(square))(x)
        jax.vmap(lambda k: jax.debug.print("vmap {}", k))(x[None])

    printing.run(step, (ids(printing),))
    found = printed()
    count = printing.num_replicas_in_sync
    label = "replica {}: ".format if count > 1 else lambda i: ""
    wanted = [f"{label(i)}cond {i}.0" for i in range(1, count)]
    wanted += [f"{label(i)}while {i}.0 {c}" for i in range(count) for c in range(i)]
    wanted += [f"{label(i)}square {i}.0" for i in range(count)] * 2
    wanted += [f"{label(i)}vmap {i}.0" for i in range(count)]
    assert found == sorted(wanted)


def test_derivatives_and_their_rules_print_so(few, printed):
    @jax.custom_vjp
    def twice(x):
        return 2 * x

    def forward(x):
        jax.debug.print("forward {}", x)
        return twice(x), x

    def backward(x, g):
        jax.debug.print("backward {} {}", x, g)
        return (2 * g,)

    twice.defvjp(forward, backward)
    results = few.run(lambda x: jax.grad(twice)(x) + x, (ids(few),))
    backwards = numbered(few, lambda i: f"backward {i}.0 1.0")
    assert printed() == sorted([*backwards, *numbered(few, lambda i: f"forward {i}.0")])
    found = few.experimental_local_results(results)
    assert list(map(float, found)) == [i + 2 for i in range(len(found))]


def merged(strategy, total):
    """What a `merge_fn` prints once, at any depth, and what it has replicas do."""
    jax.debug.print("merged {}", total)
    jax.jit(lambda t: jax.debug.print("inner {}", t))(total)
    lax.cond(total > 0, lambda: jax.debug.print("branch {}", total), lambda: None)

    def again(t):
        jax.jit(lambda: jax.debug.print("again {}", t))()

    strategy.run(again, (total,))


@pytest.mark.slow
def test_code_of_all_replicas_prints_once(printing, printed):
    with printing.scope():
        v = js.Variable(jnp.zeros(8))

    def update(v, t):
        jax.debug.print("update {}", t)
        v.assign(v + t)

    def merge(strategy, x):
        total = strategy.reduce("sum", x) + 1
        merged(strategy, total)
        strategy.extended.update(v, update, args=(total,))
        return total

    printing.run(
        lambda x: js.get_replica_context().merge_call(merge, (x,)) * v[0],
        (ids(printing),),
    )
    n = printing.num_replicas_in_sync
    total = float(1 + n * (n - 1) / 2)
    wanted = [f"{each} {total}" for each in ("merged", "inner", "branch")]
    wanted += numbered(printing, lambda _: f"again {total}")
    wanted += numbered(printing, lambda _: f"update {total}")
    assert printed() == sorted(wanted)
    np.testing.assert_array_equal(v, np.full(8, total))


@each_of("loop", ("several", "local_steps"))
def test_several_steps_in_one_call_print_so(few, printed, loop):
    def step(w, x):
        jax.debug.print("x {}", x)
        return w + js.get_replica_context().all_reduce("mean", x)

    getattr(few, loop)(step)(0.0, (ids(few), ids(few, 1.0)))
    both = numbered(few, lambda i: f"x {i}.0") + numbered(few, lambda i: f"x {i + 1}.0")
    assert printed() == sorted(both)


def test_ordered_prints_on_one_device(printed, capsys):
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=3)

    def step(x):
        jax.debug.print("a {}", x, ordered=True)
        jax.debug.print("b {}", x, ordered=True)

    strategy.run(step, (ids(strategy),))
    jax.effects_barrier()
    wanted = [f"replica {i}: {name} {i}.0" for name in "ab" for i in range(3)]
    assert capsys.readouterr().out.splitlines() == wanted


@each_of("name", ("print", "callback"))
def test_ordered_prints_on_several_devices_are_refused(four_printing, name):
    def step(x):
        if name == "print":
            jax.debug.print("x {}", x, ordered=True)
        else:
            jax.debug.callback(print, x, ordered=True)

    message = (
        r"`step` prints with `ordered=True` on 4 devices, .*\n  "
        rf"the `jax\.debug\.{name}`: .*test_debugging\.py:\d+: .*\n"
        r"Leave `ordered=True` out: each line says which replica"
    )
    with pytest.raises(ValueError, match=message):
        four_printing.run(step, (ids(four_printing),))


# `jax.checking_leaks` is silent of what steps use, and not of what they leave.

START = np.linspace(-1, 1, 8, dtype=np.float32)


class Variables:
    def __init__(self, strategy):
        self.shared = variable(strategy, START, aggregation="mean")
        self.own = variable(strategy, np.zeros(8, np.float32), "on_read", "sum")
        self.unused = variable(strategy, START)
        self.scaled = jax.jit(lambda x: self.shared * x)


@pytest.fixture
def of_two(two):
    return Variables(two)


def use_variables(strategy):
    v = Variables(strategy)

    def step(x):
        v.own.assign_add(v.shared * x)
        v.shared.assign_add(v.shared * x)
        return v.shared + x

    with jax.checking_leaks():
        found = strategy.run(step, (2.0,))
    for own in strategy.experimental_local_results(found):
        np.testing.assert_allclose(own, 3 * START + 2, rtol=1e-6)
    np.testing.assert_allclose(v.shared.numpy(), 3 * START, rtol=1e-6)
    total = 2 * strategy.num_replicas_in_sync * START
    np.testing.assert_allclose(v.own.numpy(), total, rtol=1e-6)


def test_steps_that_use_variables():
    for name, make in each(STRATEGIES):
        if name != "none":
            use_variables(make())


def in_merge_call(v, x):
    def merged(strategy, x):
        v.shared.assign_add(v.shared * 0)
        return v.scaled(strategy.reduce("mean", x))

    return replica().merge_call(merged, (x,))


IN_STEPS = [
    in_merge_call,
    lambda v, x: v.scaled(x),
    lambda v, x: (
        lax.scan(
            lambda c, _: (c + v.shared, v.own.assign_add(v.shared)), 0 * START, length=2
        )[0]
        * (x / 2)
    ),
    lambda v, x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + v.shared), (0, 0 * START)
    )[1],
    lambda v, x: lax.cond(x > 1, lambda: v.shared * x, lambda: v.shared + x),
    lambda v, x: js.grad(lambda: (v.shared**2 / 2 * x).sum(), v.shared)(),
    lambda v, x: io_callback(lambda a: a + 0, v.shared, v.shared.value()) * x,
]


@pytest.mark.slow
def test_what_a_step_has_inside(two, of_two):
    with jax.checking_leaks():
        for use in each(IN_STEPS):
            found = two.run(functools.partial(use, of_two), (2.0,))
            for own in two.experimental_local_results(found):
                np.testing.assert_allclose(own, 2 * START, rtol=1e-6)


def test_what_a_step_leaves_is_found(two, of_two):
    left = []

    def step(x):
        left.append(of_two.shared.value())
        return replica().all_reduce("mean", x)

    with (
        jax.checking_leaks(),
        pytest.raises(js.errors.LeakedTracerError, match="`captured l"),
    ):
        two.run(step, (1.0,))


def test_what_only_jax_sees_is_found(two, of_two):
    left = weakref.WeakKeyDictionary()

    def step(x):
        left[step] = x * of_two.shared
        return replica().all_reduce("mean", x)

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
        two.run(step, (1.0,))
    assert list(left)
