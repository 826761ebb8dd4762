"""What a trace finds wrong with a step, and the lines of the user's that it names."""

import dataclasses
import functools
import inspect
import linecache
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

import jaxstrategy as js
from jaxstrategy.text import _user_code
from jaxstrategy.tracing.replication._site import Site

AXIS = "replica"
# One replica has nobody to wait for, and nothing differs there.
SEVERAL = pytest.mark.parametrize(
    "strategy", [2, 8], ids="{}-replicas".format, indirect=True
)


def replica():
    return js.get_replica_context()


def ids(strategy):
    """1, 2, ... on the replicas."""
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([float(i + 1) for i in range(count)])


def place(fn, marker):
    """`file:line: code` of the line of `fn` with `marker` in a comment after `# <-`."""
    lines, start = inspect.getsourcelines(fn)
    comments = [text.partition("# <- ")[2].strip().split(", ") for text in lines]
    (found,) = (i for i, markers in enumerate(comments) if marker in markers)
    return f"{__file__}:{start + found}: {lines[found].strip()}"


def diverging(strategy, step, *args, **kwargs):
    """The error that a step raises; it is left in good order."""
    with pytest.raises(js.DivergentCollectiveError) as caught:
        strategy.run(step, args, kwargs)
    assert not js.in_cross_replica_context() and not js.has_strategy()
    return caught.value


# Deadlock. Each case takes what decides, here called `p`, and this replica's `v`. With
# a `p` of 3 it reaches its collective; beside it stands what comes out then.


def in_cond(p, v):
    return lax.cond(  # <- control
        p * 2 > 4,  # <- predicate
        lambda: lax.psum(v, AXIS),  # <- collective
        lambda: v,
    )


def in_the_other_branch(p, v):
    negative = -p  # <- predicate
    return lax.cond(  # <- control
        negative > -3,
        lambda: v,
        lambda: lax.psum(v, AXIS),  # <- collective
    )


def in_switch(p, v):
    index = jnp.int32(p)  # <- predicate
    return lax.switch(  # <- control
        index,
        [
            lambda: v,
            lambda: v,
            lambda: v,
            lambda: replica().all_reduce("sum", v),  # <- collective
        ],
    )


def in_switch_of_two(p, v):
    index = jnp.int32(p)  # <- predicate
    return lax.switch(  # <- control
        index,
        [
            lambda: v,
            lambda: lax.psum(v, AXIS),  # <- collective
        ],
    )


def in_while_body(p, v):
    def more(carry):
        return carry[0] < p  # <- predicate

    def turn(carry):
        return carry[0] + 1, carry[1] + lax.psum(v, AXIS)  # <- collective

    return lax.while_loop(more, turn, (0.0, 0.0))[1]  # <- control


def in_while_condition(p, v):
    def more(done):
        total = lax.psum(v, AXIS)  # <- collective
        return done < jnp.minimum(total * 100, p)  # <- predicate

    return lax.while_loop(more, lambda done: done + 1, 0.0)  # <- control


def in_fori_loop(p, v):
    turns = jnp.int32(p)  # <- predicate

    def turn(i, total):
        return total + lax.psum(v, AXIS)  # <- collective

    return lax.fori_loop(0, turns, turn, 0.0)  # <- control


def in_jit(p, v):
    @jax.jit
    def inner(p, v):
        return lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: lax.psum(v, AXIS),  # <- collective
            lambda: v,
        )

    return inner(3.0, v) - lax.psum(v, AXIS) + inner(p, v)  # traced once


def in_jit_inside_the_branch(p, v):
    @jax.jit
    def total(v):
        return lax.psum(v, AXIS)  # <- collective

    first = total(v)
    later = lax.cond(  # <- control
        p > 2,  # <- predicate
        lambda: total(v),
        lambda: v,
    )
    return first * 0 + later


def in_scan_in_remat_in_jit(p, v):
    def turn(carry, _):
        return lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: carry + lax.psum(v, AXIS),  # <- collective
            lambda: carry,
        ), None

    @jax.jit
    @jax.checkpoint
    def inner(v):
        return lax.scan(turn, 0.0, length=3)[0]

    return inner(v)


def in_custom_vjp_forward(p, v):
    def either(p, v):
        return lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: lax.psum(v, AXIS),  # <- collective
            lambda: v,
        )

    f = jax.custom_vjp(either)
    f.defvjp(lambda p, v: (either(p, v), None), lambda _, g: (0.0, g))
    value, grad = jax.value_and_grad(f, 1)(p, v)
    return value + 0 * grad


def in_custom_vjp_backward(p, v):
    @jax.custom_vjp
    def f(p, v):
        return v

    def backward(p, g):
        return 0.0, lax.cond(p > 2, lambda: lax.psum(g, AXIS), lambda: g)

    f.defvjp(lambda p, v: (v, p), backward)
    # What is in `backward` is put down by JAX to the line that calls `f`.
    return jax.grad(lambda v: f(p, v))(v)  # <- collective, control, predicate


def in_custom_jvp(p, v):
    @jax.custom_jvp
    def f(p, v):
        return v

    @f.defjvp
    def rule(primals, tangents):
        p, v = primals
        return v, lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: lax.psum(tangents[1], AXIS),  # <- collective
            lambda: tangents[1],
        )

    return jax.jvp(f, (p, v), (0.0, v))[1]


def in_grad(p, v):
    def loss(w):
        return lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: lax.psum(w * v, AXIS),  # <- collective
            lambda: w,
        )

    return jax.grad(loss)(1.0)


def in_vmap_over_another_axis(p, v):
    def either(w):
        return lax.cond(  # <- control
            p > 2,  # <- predicate
            lambda: lax.psum(w * v, (AXIS, "rows")),  # <- collective
            lambda: w,
        )

    return jax.vmap(either, axis_name="rows")(jnp.ones(3))[0]


def in_a_cond_that_does_not_vary(p, v):
    return lax.cond(
        lax.pmax(v, AXIS) > 0,
        lambda: in_cond(p, v),
        lambda: v,
    )


def in_a_merge_function(p, v):
    def merged(strategy, v):
        return strategy.reduce("sum", v)  # <- collective

    return lax.cond(  # <- control
        p > 2,  # <- predicate
        lambda: replica().merge_call(merged, (v,)),
        lambda: v,
    )


def in_a_merge_call_without_collectives(p, v):
    def merged(strategy, v):
        return strategy.run(lambda v: v * 2.0, (v,))

    return lax.cond(  # <- control
        p > 2,  # <- predicate
        lambda: replica().merge_call(merged, (v,)),  # <- collective
        lambda: v,
    )


HIDDEN = {
    in_cond: ("psum", "cond", lambda v: v.sum()),
    in_the_other_branch: ("psum", "cond", lambda v: v.sum()),
    in_switch: ("all_reduce", "switch", lambda v: v.sum()),
    in_switch_of_two: ("psum", "switch", lambda v: v.sum()),
    in_while_body: ("psum", "while_loop", lambda v: 3 * v.sum()),
    in_while_condition: ("psum", "while_loop", lambda v: 3.0),
    in_fori_loop: ("psum", "fori_loop", lambda v: 3 * v.sum()),
    in_jit: ("psum", "cond", lambda v: v.sum()),
    in_jit_inside_the_branch: ("psum", "cond", lambda v: v.sum()),
    in_scan_in_remat_in_jit: ("psum", "cond", lambda v: 3 * v.sum()),
    in_custom_vjp_forward: ("psum", "cond", lambda v: v.sum()),
    in_custom_vjp_backward: ("psum", "cond", lambda v: float(len(v))),
    in_custom_jvp: ("psum", "cond", lambda v: v.sum()),
    in_grad: ("psum", "cond", lambda v: len(v) * v),
    in_vmap_over_another_axis: ("psum", "cond", lambda v: 3 * v.sum()),
    in_a_cond_that_does_not_vary: ("psum", "cond", lambda v: v.sum()),
    in_a_merge_function: ("reduce", "cond", lambda v: v.sum()),
    in_a_merge_call_without_collectives: ("merge_call", "cond", lambda v: 2 * v),
}


@SEVERAL
@pytest.mark.parametrize("case", HIDDEN, ids=lambda case: case.__name__)
def test_a_collective_that_only_some_replicas_reach_is_an_error(strategy, case):
    what, control, _ = HIDDEN[case]
    marked = in_cond if case is in_a_cond_that_does_not_vary else case

    def step(p, v):
        return case(p, v)

    error = diverging(strategy, step, ids(strategy), 2.0)
    message = str(error)
    assert re.match(
        rf"(Only s|S)ome replicas of `step` would reach the `{what}`", message
    )
    assert f"it is inside a `{control}` whose " in message
    assert f"\n  the `{what}`: {place(marked, 'collective')}\n" in message
    assert f"\n  the `{control}`: {place(marked, 'control')}\n" in message
    assert f" varies since: {place(marked, 'predicate')}\n" in message
    assert "\n    (from argument `p`, a PerReplica)\n" in message
    assert error.collective_line == place(marked, "collective")
    assert error.predicate_line == place(marked, "predicate")


def test_the_same_code_runs_where_all_replicas_decide_alike(strategy):
    def step(p, own, v):
        deciders = {
            "an argument": p,
            "a constant": jnp.float32(3),
            "reduced": replica().all_reduce("min", own) + 2,
            "gathered": lax.all_gather(own, AXIS)[0] + 2,
        }
        return {
            name: {case.__name__: case(decider, v) for case in HIDDEN}
            for name, decider in deciders.items()
        }

    out = strategy.run(step, (3.0, ids(strategy), ids(strategy)))
    v = np.arange(strategy.num_replicas_in_sync) + 1.0
    for case, (_, _, expected) in HIDDEN.items():
        for name in out:
            for i, one in enumerate(
                strategy.experimental_local_results(out[name][case.__name__])
            ):
                wanted = np.broadcast_to(expected(v), v.shape)[i]
                np.testing.assert_allclose(one, wanted, err_msg=case.__name__)


# Each on a line of its own, with the name that messages have for it.
COLLECTIVES = [
    ("all_reduce", lambda v: replica().all_reduce("sum", v)),
    ("all_reduce", lambda v: replica().all_reduce("mean", v)),
    ("all_reduce", lambda v: replica().all_reduce("max", {"a": v})["a"]),
    ("all_gather", lambda v: replica().all_gather(v, 0)),
    ("psum", lambda v: lax.psum(v, AXIS)),
    ("pmean", lambda v: lax.pmean(v, AXIS)),
    ("pmin", lambda v: lax.pmin(v, AXIS)),
    ("pmax", lambda v: lax.pmax(v, AXIS)),
    ("all_gather", lambda v: lax.all_gather(v, AXIS)),
    ("ppermute", lambda v: lax.ppermute(v, AXIS, [(0, 1), (1, 0)])),
    ("all_to_all", lambda v: lax.all_to_all(v, AXIS, 0, 0)),
    ("psum_scatter", lambda v: lax.psum_scatter(v, AXIS)),
    ("psum", lambda v: lax.psum(v, AXIS, axis_index_groups=[[0], [1]])),
]


@pytest.mark.parametrize("name, collective", COLLECTIVES)
def test_every_collective_counts_and_is_called_by_its_name(two, name, collective):
    def step(x):
        return lax.cond(x > 1, lambda: collective(jnp.ones(2)).sum(), lambda: 0.0)

    error = diverging(two, step, ids(two))
    assert f"would reach the `{name}`" in str(error)
    line = f"{__file__}:{collective.__code__.co_firstlineno}: "
    assert error.collective_line.startswith(line)


def test_a_collective_in_a_library_has_the_line_that_calls_the_library(two):
    net = nn.BatchNorm(use_running_average=False, axis_name=AXIS)
    variables = net.init(jax.random.key(0), jnp.ones((2, 3)))

    def step(x):
        def normalized(y):
            return net.apply(variables, y, mutable=["batch_stats"])[0]  # <- here

        return lax.cond(x > 1, normalized, lambda y: y, x * jnp.ones((2, 3)))

    error = diverging(two, step, ids(two))
    assert error.collective_line == place(step, "here")
    assert "replicas of `step` would reach the `pmean`" in str(error)


def test_the_advice_of_each_error_works(two):
    def cond(x, v):
        predicate = replica().all_reduce("max", x > 1)
        return lax.cond(predicate, lambda: lax.psum(v, AXIS), lambda: v)

    def where(x, v):
        return jnp.where(x > 1, lax.psum(v, AXIS), v)

    def switch(x, v):
        index = replica().all_reduce("max", jnp.int32(x) - 1)
        return lax.switch(index, [lambda: v, lambda: lax.psum(v, AXIS)])

    def while_loop(x, v):
        def more(c):
            return replica().all_reduce("max", c < x)

        return lax.while_loop(more, lambda c: c + lax.pmean(v, AXIS), 0.0)

    def fori_loop(x, v):
        bound = replica().all_reduce("max", jnp.int32(x))
        return lax.fori_loop(0, bound, lambda _, c: c + lax.psum(v, AXIS), 0.0)

    steps = {
        step.__name__: step for step in (cond, where, switch, while_loop, fori_loop)
    }

    def all_of_them(x, v):
        return {name: step(x, v) for name, step in steps.items()}

    out = two.run(all_of_them, (ids(two), 1.0))
    found = {
        name: [float(v) for v in two.experimental_local_results(value)]
        for name, value in out.items()
    }
    assert found == {
        "cond": [2, 2],
        "where": [1, 2],
        "switch": [2, 2],
        "while_loop": [2, 2],
        "fori_loop": [4, 4],
    }
    for case, words in [
        (
            in_cond,
            "reduce('max', predicate)` is true if it is on any replica, 'min' if",
        ),
        (in_cond, "Or move the `psum` out of the `cond`, and choose with `jnp.where`."),
        (
            in_switch,
            "Reduce the index, .*`get_replica_context().all_reduce('max', index)`",
        ),
        (in_while_body, "`get_replica_context().all_reduce('max', condition)` goes on"),
        (
            in_fori_loop,
            "Reduce the bounds, .*`get_replica_context().all_reduce('max', b",
        ),
    ]:
        pattern = re.escape(words).replace(r"\.\*", ".*")
        assert re.search(pattern, str(diverging(two, case, ids(two), 1.0)))


def test_a_loop_is_said_to_be_taken_more_often_not_to_be_left_out(two):
    message = str(diverging(two, in_fori_loop, ids(two), 1.0))
    assert message.startswith(
        "Some replicas of `in_fori_loop` would reach the `psum` more often than "
        "others, and then wait for ever for them: it is inside a `fori_loop` whose "
        "number of turns may differ between replicas."
    )


# Where a predicate began to vary.


def from_the_replica_id(batch):
    mine = replica().replica_id_in_sync_group  # <- predicate
    chosen = mine == 0
    return chosen, None


def from_ppermute(batch):
    other = lax.ppermute(jnp.ones(()), AXIS, [(0, 1)])  # <- predicate
    scaled = other * 2
    return scaled > 1, None


def from_a_random_key(batch):
    key = replica().fold_in(jax.random.key(0))  # <- predicate
    return jax.random.uniform(key) > 0.5, None


def from_many_lines_before(batch):
    def scaled(x):
        return x * 2  # <- predicate

    y = scaled(batch["x"])
    for _ in range(3):
        y = jnp.tanh(y)
    total = lax.psum(1.0, AXIS) + y
    return total > 1, "batch['x']"


def through_a_scan(batch):
    x = batch["x"] + 1  # <- predicate

    def turn(carry, _):
        return (carry[1], carry[1] + 1), None

    (first, _), _ = lax.scan(turn, (0.0, x), length=3)
    return first > 1, "batch['x']"


def born_in_a_scan(batch):
    def turn(carry, _):
        return carry + lax.axis_index(AXIS), None  # <- predicate

    return lax.scan(turn, 0, length=3)[0] > 1, None


def through_jit_and_remat(batch):
    @jax.jit
    @jax.checkpoint
    def inner(x):
        return jnp.sin(x)  # <- predicate

    return inner(batch["x"]) > 0, "batch['x']"


def of_a_sort(batch):
    row = jnp.stack([batch["x"], 0.0])  # <- predicate
    return jnp.sort(row)[0] > 0, "batch['x']"


ORIGINS = [
    from_the_replica_id,
    from_ppermute,
    from_a_random_key,
    from_many_lines_before,
]
ORIGINS += [through_a_scan, born_in_a_scan, through_jit_and_remat, of_a_sort]


@pytest.mark.parametrize("origin", ORIGINS, ids=lambda origin: origin.__name__)
def test_the_line_where_the_predicate_began_to_vary_is_named(two, origin):
    argument = None

    def step(batch):
        nonlocal argument
        predicate, argument = origin(batch)
        return lax.cond(predicate, lambda: lax.pmax(1.0, AXIS), lambda: 1.0)

    error = diverging(two, step, {"x": ids(two)})
    assert error.predicate_line == place(origin, "predicate")
    assert f"its predicate varies since: {error.predicate_line}\n" in str(error)
    from_argument = f"    (from argument `{argument}`, a PerReplica)\n"
    assert (from_argument in str(error)) == (argument is not None)


def test_a_keyword_argument_is_named(two):
    def step(*, flag):
        return lax.cond(flag, lambda: lax.pmax(1.0, AXIS), lambda: 1.0)

    error = diverging(two, step, flag=two.per_replica([True, False]))
    assert "(from argument `flag`, a PerReplica)" in str(error)


def test_a_decorated_step_is_checked_with_its_static_arguments(two):
    @two.run
    def step(x, mode, flag=False):
        if mode == "hangs":
            return in_cond(x, x)
        return lax.psum(x, AXIS)

    for _ in range(2):  # nothing is kept of a failed trace
        with pytest.raises(
            js.DivergentCollectiveError, match="replicas of `step` would"
        ):
            step(ids(two), "hangs", flag=True)
    assert step(ids(two), "works") == 3


@SEVERAL
def test_after_the_error_the_strategy_goes_on(strategy):
    diverging(strategy, in_cond, ids(strategy), 1.0)
    with strategy.scope(), pytest.raises(js.DivergentCollectiveError):
        strategy.run(in_cond, (ids(strategy), 1.0))
    # The same function, and now all decide alike.
    assert strategy.run(in_cond, (3.0, 1.0)) == strategy.num_replicas_in_sync
    diverging(strategy, in_cond, ids(strategy), 1.0)


def test_a_collective_over_another_axis_may_be_left_out(two):
    def step(x):
        def either(row):
            return lax.cond(x > 1, lambda: lax.psum(row, "rows"), lambda: row)

        return jax.vmap(either, axis_name="rows")(jnp.arange(3.0))

    out = two.run(step, (ids(two),))
    np.testing.assert_array_equal(out.local(0), [0, 1, 2])
    np.testing.assert_array_equal(out.local(1), [3, 3, 3])


def test_what_all_replicas_reach_is_fine(two):
    def step(x):
        chosen = jnp.where(x > 1, lax.psum(x, AXIS), 0.0)
        # A vmapped `cond` computes both branches.
        batched = jax.vmap(
            lambda v: lax.cond(v > 1, lambda: lax.psum(v, AXIS), lambda: v)
        )(x * jnp.ones(2))
        branch = lax.cond(x > 1, lambda: x * 2, lambda: x)
        return chosen, batched, lax.psum(branch, AXIS)

    chosen, batched, total = two.run(step, (ids(two),))
    assert [float(v) for v in chosen.values] == [0, 3]
    np.testing.assert_array_equal(batched.stacked, [[1, 1], [3, 3]])
    assert total == 5


def test_a_merge_function_may_decide_by_what_varies(two):
    def merged(strategy, v):
        def own(v):
            return lax.cond(v > 1, lambda: v * 10, lambda: v)

        return strategy.reduce("sum", strategy.run(own, (v,)))

    assert two.run(lambda v: replica().merge_call(merged, (v,)), (ids(two),)) == 21


# Reduced twice. The steps take this replica's `x`, and `s`, the same on all.


def sum_of_sum(x, s):
    g = replica().all_reduce("sum", x)  # <- first
    return replica().all_reduce("sum", g)  # <- again


def sum_of_mean(x, s):
    g = lax.pmean(x, AXIS)  # <- first
    return lax.psum(g, AXIS)  # <- again


def sum_of_max(x, s):
    g = replica().all_reduce("max", x)  # <- first
    return replica().all_reduce("sum", g)  # <- again


def after_arithmetic(x, s):
    g = replica().all_reduce("mean", x)  # <- first
    g = jnp.clip(g * s + 1, 0, 9)
    g = jnp.where(jnp.isfinite(g), g, 0.0)
    return replica().all_reduce("sum", g)  # <- again


def after_an_optimizer(x, s):
    params = {"w": s}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(0.1))
    grads = replica().all_reduce("mean", {"w": x})  # <- first
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    return replica().all_reduce("sum", params)  # <- again


def in_nested_jit(x, s):
    @jax.jit
    def total(v):
        return replica().all_reduce("sum", v)  # <- again

    g = replica().all_reduce("sum", x)  # <- first
    return jax.jit(lambda v: total(v * 2))(g)


def in_a_scan_body(x, s):
    def turn(carry, row):
        g = lax.psum(x + row, AXIS)  # <- first
        return carry + lax.psum(g * 2, AXIS), None  # <- again

    return lax.scan(turn, 0.0, jnp.arange(3.0))[0]


def from_turn_to_turn(x, s):
    def turn(carry, _):
        return lax.psum(carry, AXIS), None  # <- again

    g = lax.pmean(x, AXIS)  # <- first
    return lax.scan(turn, g, length=3)[0]


def through_merge_call(x, s):
    g = replica().all_reduce("mean", x)  # <- first

    def merged(strategy, g):
        return strategy.reduce("sum", g)  # <- again

    return replica().merge_call(merged, (g,))


def scattered(x, s):
    g = lax.psum(x * jnp.ones(2), AXIS)  # <- first
    return lax.psum_scatter(g, AXIS)  # <- again


def in_a_branch(x, s):
    g = lax.psum(x, AXIS)  # <- first
    return lax.cond(
        s > 0,
        lambda: lax.psum(g, AXIS),  # <- again
        lambda: g,
    )


def in_a_differentiated_function(x, s):
    def loss(w):
        g = replica().all_reduce("mean", w * x)  # <- first
        return replica().all_reduce("sum", g)  # <- again

    return jax.value_and_grad(loss)(s)


def one_leaf_of_many(x, s):
    metrics = {"loss": x, "norm": lax.pmean(x, AXIS)}  # <- first
    return replica().all_reduce("sum", metrics)  # <- again


def several_on_one_line(x, s):
    g = lax.pmean(x, AXIS)  # <- first
    return [lax.psum(g * i, AXIS) for i in range(3)]  # <- again


TWICE = [sum_of_sum, sum_of_mean, sum_of_max, after_arithmetic, after_an_optimizer]
TWICE += [in_nested_jit, in_a_scan_body, from_turn_to_turn, through_merge_call]
TWICE += [scattered, in_a_branch, in_a_differentiated_function, one_leaf_of_many]
TWICE += [several_on_one_line]


@pytest.mark.parametrize("step", TWICE, ids=lambda step: step.__name__)
def test_a_sum_of_what_is_reduced_already_warns_once_with_both_lines(two, step):
    with pytest.warns(js.DoubleReductionWarning) as warned:
        two.run(step, (ids(two), 2.0))
        two.run(step, (ids(two), 3.0))  # not traced again
    (record,) = warned
    message = str(record.message)
    assert message.startswith(f"`{step.__name__}` sums over the replicas what is the ")
    assert "equal on all of them: the sum is that times their number." in message
    assert f"\n  reduced first: {place(step, 'first')}\n" in message
    assert f"\n  summed again: {place(step, 'again')}\n" in message
    assert place(step, "again").startswith(f"{record.filename}:{record.lineno}: ")


@SEVERAL
def test_each_pair_of_lines_and_each_trace_warns(strategy):
    def step(x):
        a = lax.pmean(x, AXIS)
        b = lax.pmax(x, AXIS)
        one = lax.psum(a, AXIS)
        same_line = lax.psum(a, AXIS) + lax.psum(a + 1, AXIS)
        other = lax.psum(b, AXIS)
        return one, same_line, other

    rows = strategy.per_replica([jnp.ones(2)] * strategy.num_replicas_in_sync)
    for x in (ids(strategy), rows):
        with pytest.warns(js.DoubleReductionWarning) as warned:
            strategy.run(step, (x,))
        assert len({record.lineno for record in warned}) == len(warned) == 3


def test_a_warning_made_an_error_leaves_the_strategy_in_order(two):
    for _ in range(2):
        with pytest.raises(js.DoubleReductionWarning, match="summed again"):
            two.run(sum_of_sum, (ids(two), 2.0))
    assert two.run(lambda x: lax.psum(x, AXIS), (ids(two),)) == 3


ONCE = {
    "other reductions of a reduced value": lambda x, s: [
        replica().all_reduce(op, replica().all_reduce("sum", x))
        for op in ("mean", "min", "max")
    ],
    "all_gather of a reduced value": lambda x, s: replica().all_gather(
        lax.psum(x, AXIS)[None], 0
    ),
    "pmean of a reduced value": lambda x, s: lax.pmean(lax.psum(x, AXIS), AXIS),
    "pmean of reduced integers": lambda x, s: (
        lax.pmean(lax.psum(jnp.int32(x), AXIS), AXIS),
        replica().all_reduce("mean", lax.psum(jnp.int32(x), AXIS)),
        lax.pmean(lax.psum(x, AXIS).astype(jnp.bfloat16), AXIS),
    ),
    "a mean by hand": lambda x, s: (
        lax.psum(lax.psum(x, AXIS), AXIS) / lax.psum(1, AXIS),
        lax.psum(lax.psum(x, AXIS), AXIS) / lax.axis_size(AXIS),
        lax.psum(lax.psum(x, AXIS), AXIS) * (1 / replica().num_replicas_in_sync),
    ),
    "a constant": lambda x, s: (
        replica().all_reduce("sum", 1),
        replica().all_reduce("sum", jnp.ones_like(lax.psum(x, AXIS))),
        replica().all_reduce("sum", float(lax.psum(x, AXIS).size)),
    ),
    "an argument": lambda x, s: replica().all_reduce("sum", {"lr": s, "x": x}),
    "batch norm": lambda x, s: lax.psum(
        (x - lax.pmean(x, AXIS)) / jnp.sqrt(1 + lax.pmean(x * x, AXIS)), AXIS
    ),
    "softmax": lambda x, s: lax.psum(jnp.exp(x - lax.pmax(x, AXIS)), AXIS),
    "variance": lambda x, s: lax.psum((x - lax.pmean(x, AXIS)) ** 2, AXIS),
    "an equal share": lambda x, s: lax.psum(
        jnp.clip(lax.psum(x, AXIS) * 2, 0, 9) / replica().num_replicas_in_sync, AXIS
    ),
    "the share of one": lambda x, s: lax.psum(
        jnp.where(lax.axis_index(AXIS) == 0, lax.psum(x, AXIS), 0.0), AXIS
    ),
    "counts": lambda x, s: (
        lax.psum(jnp.int32(lax.psum(x, AXIS) > 3), AXIS),
        lax.psum(jnp.isnan(lax.psum(x, AXIS)).astype(float), AXIS),
    ),
    "chosen by a reduced value": lambda x, s: (
        lax.psum(jnp.where(lax.pmax(x, AXIS) > 1, s, 0.0), AXIS)
    ),
    "another axis": lambda x, s: jax.vmap(
        lambda v: lax.psum(lax.psum(x, AXIS) * v, "rows"), axis_name="rows"
    )(jnp.ones(3)),
    "gradient of a squared mean": lambda x, s: replica().all_reduce(
        "sum", jax.grad(lambda w: replica().all_reduce("mean", w * x) ** 2)(s)
    ),
    "gradient of a squared sum": lambda x, s: jax.jit(
        jax.grad(jax.checkpoint(lambda w: replica().all_reduce("sum", w * x) ** 2))
    )(s),
    "gradient through a scan": lambda x, s: jax.grad(
        lambda w: lax.scan(
            lambda h, _: (lax.pmean(h * w * x, AXIS), h), w, length=3)[0] ** 2
    )(s),
    "gradient of a loss of statistics alone": lambda x, s: replica().all_reduce(
        "sum",  # of each replica's share
        jax.grad(
            lambda wb: (lax.pmean(wb[0] * x + wb[1], AXIS) - 3) ** 2
            / replica().num_replicas_in_sync
        )((s, s)),
    ),
    "second derivatives": lambda x, s: (
        jax.hessian(lambda w: lax.pmean(w * x, AXIS) ** 2)(s),
        jax.jvp(jax.grad(lambda w: lax.psum(w * x, AXIS) ** 3), (s,), (s,)),
    ),
    "derivatives of a maximum": lambda x, s: (
        jax.grad(lambda w: replica().all_reduce("max", lax.psum(w * x, AXIS)))(s),
        jax.jvp(lambda v: replica().all_reduce("max", lax.psum(v, AXIS)), (x,), (x,)),
    ),
    "vjp, linearize and linear_transpose": lambda x, s: (
        jax.vjp(lambda v: lax.psum(v, AXIS), x)[1](lax.psum(x, AXIS)),
        jax.linearize(lambda w: lax.pmean(w * x, AXIS) ** 2, s)[1](s),
        jax.linear_transpose(lambda v: lax.psum(v, AXIS), x)(lax.psum(x, AXIS)),
    ),
    "a scan of training steps": lambda x, s: lax.scan(
        lambda w, _: (
            w - 0.1 * replica().all_reduce("mean", jax.grad(lambda w: (w * x) ** 2)(w)),
            replica().all_reduce("sum", jnp.float32(w * x > 1))
            / replica().all_reduce("sum", 1.0),
        ),
        s,
        length=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONCE)
def test_no_false_alarm_for(two, name):
    def step(x, s):
        return ONCE[name](x, s)

    two.run(step, (ids(two), 2.0))  # a warning is an error here


def test_no_false_alarm_for_the_result_of_an_earlier_run(strategy):
    total = strategy.run(lambda x: lax.psum(x, AXIS), (ids(strategy),))
    again = strategy.run(lambda x: lax.psum(x, AXIS), (total,))
    assert again == total * strategy.num_replicas_in_sync


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        x = nn.BatchNorm(use_running_average=False, axis_name=AXIS)(x)
        return nn.Dense(1)(nn.relu(x))


class State(TrainState):
    stats: dict


def train_state(optimizer):
    variables = Net().init(jax.random.key(0), jnp.ones((2, 2)))
    return State.create(
        apply_fn=Net().apply,
        params=variables["params"],
        tx=optimizer,
        stats=variables["batch_stats"],
    )


def training_step(state, x, total):
    """Sums of shares, as in TensorFlow, or means of means."""

    def loss_of(params):
        y, new = state.apply_fn(
            {"params": params, "batch_stats": state.stats}, x, mutable=["batch_stats"]
        )
        decay = 1e-4 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        shares = replica().num_replicas_in_sync if total else 1
        return (jnp.mean(y**2) + decay) / shares, new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    grads = replica().all_reduce("sum" if total else "mean", grads)
    metrics = {
        "loss": replica().all_reduce("sum" if total else "mean", loss),
        "examples": replica().all_reduce("sum", len(x)),
        "norm": jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))),
        "name": "training",
    }
    return state.apply_gradients(grads=grads, stats=stats), metrics, x.sum()


@pytest.mark.parametrize("total", [True, False], ids=["sums", "means"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.adafactor(1e-2),
    ],
    ids=["clipped adam", "adafactor"],
)
def test_real_training_steps_pass_all_checks(two, optimizer, total):
    state = train_state(optimizer)
    entries = state.replace(step=True, params=True, opt_state=True, stats=True)
    options = js.RunOptions(donate_argnums=0, expect_mirrored=(entries, True, False))
    x = two.per_replica([np.ones((2, 2)), np.arange(4.0).reshape(2, 2)])
    for _ in range(2):
        state, metrics, own = two.run(training_step, (state, x, total), options=options)
    assert metrics["name"] == "training" and metrics["examples"] == 4
    assert isinstance(own, js.PerReplica)


# Never reduced.


def forgets(w, x):
    """Forgets to reduce the gradient."""
    residual = w * x  # <- began
    grad = 2 * residual
    new = {"params": {"w": w - grad}, "loss": lax.pmean(residual**2, AXIS)}
    return new, grad


def fails_with(strategy, expected, step=forgets, args=None):
    options = js.RunOptions(expect_mirrored=expected)
    with pytest.raises(js.NotMirroredError) as caught:
        strategy.run(step, args or (1.0, ids(strategy)), options=options)
    assert not js.in_cross_replica_context()
    return caught.value


def about_params(path, leaf):
    assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.shape == ()
    return "params" in jax.tree_util.keystr(path)


@SEVERAL
@pytest.mark.parametrize(
    "expected",
    [
        True,
        (True, True),
        (True, False),
        (True, None),
        ({"params": True, "loss": False}, False),
        ({"params": {"w": True}, "loss": None}, None),
        about_params,
    ],
    ids=lambda entry: entry.__name__ if callable(entry) else str(entry),
)
def test_a_result_that_may_differ_is_named_with_the_line(strategy, expected):
    error = fails_with(strategy, expected)
    began = place(forgets, "began")
    assert error.path == "forgets(...)[0]['params']['w']" and error.line == began
    message = str(error)
    assert message.startswith(
        "`forgets(...)[0]['params']['w']` was expected to be mirrored, but may differ "
        f"between replicas.\n  it varies since: {began}\n"
        "    (from argument `x`, a PerReplica)\n"
        "Something it is computed from was not reduced: use "
        "`get_replica_context().all_reduce('mean', ...)` on the way"
    )


@pytest.mark.parametrize(
    "expected",
    [
        None,
        False,
        (False, False),
        (None, False),
        ({"params": False, "loss": True}, None),
        ({"params": {"w": None}, "loss": True}, False),
        lambda path, leaf: "loss" in jax.tree_util.keystr(path),
    ],
    ids=lambda entry: entry.__name__ if callable(entry) else str(entry),
)
def test_what_is_not_expected_may_differ(two, expected):
    options = js.RunOptions(expect_mirrored=expected)
    new, grad = two.run(forgets, (1.0, ids(two)), options=options)
    assert isinstance(grad, js.PerReplica) and new["loss"] == 2.5


def test_all_results_that_differ_are_told(two):
    error = fails_with(two, True)
    assert error.__notes__[0] == "The same holds for `forgets(...)[1]`."
    error = fails_with(two, True, lambda x: [x] * 6, (ids(two),))
    assert error.__notes__[0] == (
        "The same holds for `<lambda>(...)[1]`, `<lambda>(...)[2]`, "
        "`<lambda>(...)[3]` and 2 more."
    )


def test_an_argument_passed_through_is_named_without_a_line(two):
    error = fails_with(two, True, lambda batch: batch, ({"x": ids(two)},))
    assert "it varies since: argument `batch['x']`, a PerReplica\n" in str(error)
    assert error.line is None and error.path == "<lambda>(...)['x']"


def test_none_and_plain_values_are_no_arrays(two):
    def step(x):
        return {"a": None, "b": lax.psum(x, AXIS), "c": x, "d": "text", "e": 3}

    everything = {"a": True, "b": True, "c": False, "d": True, "e": True}
    for a in (True, False, None):  # None has no leaf, but may have an entry
        options = js.RunOptions(expect_mirrored={**everything, "a": a})
        out = two.run(step, (ids(two),), options=options)
        assert out["d"] == "text" and out["e"] == 3 and out["a"] is None
    error = fails_with(two, {**everything, "c": True}, step, (ids(two),))
    assert error.path == "step(...)['c']"
    error = fails_with(two, True, lambda x: [(None, x), "text"], (ids(two),))
    assert error.path == "<lambda>(...)[0][1]"
    for nothing in (None, "text", ()):
        options = js.RunOptions(expect_mirrored=True)
        assert two.run(lambda x, v=nothing: v, (ids(two),), options=options) == nothing


@pytest.mark.parametrize(
    "expected, shown",
    [
        ((True,), "(True,)"),
        ([True, False], "[True, False]"),
        (({"loss": True}, False), "({'loss': True}, False)"),
        ((True, {"grad": True}), "(True, {'grad': True})"),
        ({}, "{}"),
    ],
)
def test_a_prefix_that_does_not_fit_is_an_error(two, expected, shown):
    message = (
        f"`expect_mirrored` is {shown}, which does not fit what the step returns: "
        "`forgets(...)` is ({'loss': *, 'params': {'w': *}}, *). Give True or False "
        "for all of it, or for each part, in containers like its own."
    )
    options = js.RunOptions(expect_mirrored=expected)
    with pytest.raises(ValueError, match=re.escape(message)):
        two.run(forgets, (1.0, ids(two)), options=options)
    assert not js.in_cross_replica_context()


@pytest.mark.parametrize(
    "expected, entry",
    [
        ("yes", "'yes'"),
        (1.5, "1.5"),
        (1, "1"),
        ({"params": "mirrored"}, "'mirrored'"),
        ((True, [False, 0]), "0"),
        (np.True_, "np.True_"),
        ((True, len), "<built-in function len>"),
    ],
)
def test_a_wrong_type_of_expectation_is_an_error(expected, entry):
    message = (
        f"`expect_mirrored` was {expected!r}, with {entry} where True or False was"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        js.RunOptions(expect_mirrored=expected)


def test_an_error_of_the_function_passes_through(two):
    for error in (ZeroDivisionError, ValueError, TypeError):

        def expected(path, leaf, error=error):
            raise error("the user's own")

        options = js.RunOptions(expect_mirrored=expected)
        with pytest.raises(error, match="the user's own"):
            two.run(forgets, (1.0, ids(two)), options=options)
        assert not js.in_cross_replica_context()


def test_the_function_is_given_each_array_with_its_path_and_type(two):
    seen = {}

    def expected(path, leaf):
        seen[jax.tree_util.keystr(path)] = leaf.shape, leaf.dtype.name
        return False

    def step(x):
        return {"rows": x, "n": jnp.int32(3), "name": "text"}, (None, x.sum())

    x = two.per_replica([np.ones((3, 2))] * 2)
    two.run(step, (x,), options=js.RunOptions(expect_mirrored=expected))
    # Only what may differ is asked about.
    assert seen == {"[0]['rows']": ((3, 2), "float32"), "[1][1]": ((), "float32")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A pytree that can be called, and compares by identity."""

    w: object
    b: object

    def __call__(self, x):
        return self.w * x + self.b


def test_a_model_that_can_be_called_is_a_pytree_all_the_same(two):
    def step(x):
        return Model(w=x, b=lax.psum(x, AXIS))

    options = js.RunOptions(expect_mirrored=Model(False, True))
    assert isinstance(two.run(step, (ids(two),), options=options).w, js.PerReplica)
    error = fails_with(two, Model(True, True), step, (ids(two),))
    assert error.path == "step(...).w"


def test_the_decorator_takes_the_expectation(two):
    @two.run(options=js.RunOptions(expect_mirrored=(True, False)))
    def step(w, x, reduces=True):
        grad = replica().all_reduce("mean", x) if reduces else x
        return w - grad, x

    new, own = step(1.0, ids(two))
    assert new == -0.5 and isinstance(own, js.PerReplica)
    with pytest.raises(
        js.NotMirroredError, match=r"^`step\(\.\.\.\)\[0\]` was expected"
    ):
        step(1.0, ids(two), reduces=False)
    assert step(2.0, ids(two))[0] == 0.5


def test_equal_options_are_equal_and_share_a_program(two, compilations):
    def step(w, x):
        return {"w": w - lax.pmean(x, AXIS)}, x

    def options(w=True):
        return js.RunOptions(donate_argnums=(), expect_mirrored=({"w": w}, False))

    assert options() == options() and hash(options()) == hash(options())
    assert options() != options(False) != js.RunOptions()
    assert js.RunOptions(expect_mirrored=[True]) != js.RunOptions(
        expect_mirrored=(True,)
    )
    assert js.RunOptions(expect_mirrored=Model(True, False)) == js.RunOptions(
        expect_mirrored=Model(True, False)
    )
    assert js.RunOptions(expect_mirrored=len) == js.RunOptions(expect_mirrored=len)
    assert js.RunOptions(expect_mirrored=len) != js.RunOptions(expect_mirrored=sum)
    x = ids(two)
    two.run(step, (1.0, x), options=options())
    compilations()
    for w in (2.0, 3.0):
        two.run(step, (w, x), options=options())
    assert compilations() == 0


def test_options_serve_many_steps(two):
    options = js.RunOptions(expect_mirrored=True)
    for scale in (1.0, 2.0):
        step = functools.partial(
            lambda x, scale: lax.psum(x, AXIS) * scale, scale=scale
        )
        assert two.run(step, (ids(two),), options=options) == 3 * scale
    fails_with(two, True, lambda x: x, (ids(two),))


def test_what_is_donated_is_kept_if_the_promise_is_broken(two):
    options = js.RunOptions(donate_argnums=0, expect_mirrored=True)
    state = two.mirror(jnp.ones(3))
    with pytest.raises(js.NotMirroredError, match=r"\n    \(from argument `x`, a Per"):
        two.run(lambda state, x: state - x, (state, ids(two)), options=options)
    np.testing.assert_array_equal(state, np.ones(3))
    new = two.run(
        lambda state, x: state - lax.psum(x, AXIS), (state, ids(two)), options=options
    )
    np.testing.assert_array_equal(new, np.full(3, -2.0))
    assert state.is_deleted()


# Which line an operation is put down to.


def began(strategy, step, *args):
    """Where the only result of a step began to vary."""
    return fails_with(strategy, True, step, args).line


@jax.jit
def called_twice(x):
    doubled = x * 2  # <- inside
    return doubled


def test_a_line_inside_a_jitted_function_whoever_calls_it(two):
    def step(x):
        first = called_twice(1.0)
        return first + called_twice(x)

    called_twice(jnp.float32(1))
    assert began(two, step, ids(two)) == place(called_twice, "inside")
    assert began(two, lambda x: called_twice(x), ids(two)) == place(
        called_twice, "inside"
    )


def test_the_users_line_that_calls_into_numpy_is_not_an_earlier_ones(two):
    def earlier(x):
        return jnp.clip(x, 0, 9), jnp.linalg.norm(x[None]), jnp.median(x[None])

    def clips(x):
        return jnp.clip(x, 0, 9)  # <- here

    def norms(x):
        return jnp.linalg.norm(x[None] * 1.0)  # <- here

    two.run(earlier, (ids(two),))  # JAX keeps what it traced in there
    assert began(two, clips, ids(two)) == place(clips, "here")
    assert began(two, norms, ids(two)) == place(norms, "here")


def defined_in(filename, source):
    names = {"lax": lax, "jnp": jnp}
    exec(compile(source, filename, "exec"), names)
    return names["step"]


def test_lines_of_a_notebooks_cell(two, monkeypatch):
    source = "def step(x):\n    y = x * 2\n    return y + 1\n"
    name = "<ipython-input-1>"
    entry = (len(source), None, source.splitlines(keepends=True), name)
    monkeypatch.setitem(linecache.cache, name, entry)
    line = began(two, defined_in(name, source), ids(two))
    assert line == "<ipython-input-1>:2: y = x * 2"


def test_a_file_that_is_gone_gives_the_number_of_the_line(two, tmp_path):
    gone = str(tmp_path / "gone.py")
    step = defined_in(gone, "def step(x):\n    return x * 2\n")
    assert began(two, step, ids(two)) == f"{gone}:2"


def test_code_made_on_the_fly_is_put_down_to_the_line_that_calls_it(two):
    generated = defined_in("<string>", "def step(x):\n    return x * 2\n")

    def step(x):
        return generated(x)  # <- here

    assert began(two, step, ids(two)) == place(step, "here")
    assert began(two, generated, ids(two)) == "<string>:2"  # there is no better


def test_a_line_in_a_library_is_put_down_to_the_users_that_calls_it(two):
    net = nn.Dense(2)
    params = net.init(jax.random.key(0), jnp.ones(3))

    def step(params, x):
        return net.apply(params, x * jnp.ones(3))

    def of_params(params, x):
        return net.apply(x, jnp.ones(3))  # <- here

    x = two.per_replica([1.0, 2.0])
    stacked = two.per_replica([params, params])
    assert began(two, of_params, params, stacked) == place(of_params, "here")
    assert began(two, step, params, x).endswith("net.apply(params, x * jnp.ones(3))")


def test_a_step_that_is_a_librarys_has_the_librarys_line(two):
    line = began(two, optax.safe_norm, ids(two), 0.1)
    assert "optax" in line


def test_the_innermost_line_of_the_users_is_preferred():
    here, library, jaxs = __file__, optax.__file__, jax.__file__
    stack = [(jaxs, 1), (library, 2), (here, 3), (library, 4), (here, 5)]
    assert _user_code.innermost(stack) == _user_code.Line(here, 3)
    assert _user_code.innermost(stack[:2]) == _user_code.Line(library, 2)
    assert _user_code.innermost(stack[:2], libraries=False) is None
    assert _user_code.innermost([("<frozen importlib>", 1), (jaxs, 2)]) is None
    assert _user_code.innermost([]) is None
    for installed in (
        "/elsewhere/lib/python3.11/site-packages/flax/linen.py",
        "/usr/lib/python3/dist-packages/flax/linen.py",
    ):
        found = _user_code.innermost([(installed, 1), (here, 2)])
        assert found == _user_code.Line(here, 2)
    assert _user_code.innermost([("<string>", 1), (here, 2)]) == _user_code.Line(
        here, 2
    )
    for name in (
        "<ipython-input-3-ab>",
        "<stdin>",
        "<doctest x[0]>",
        "<python-input-0>",
    ):
        assert _user_code.innermost([(name, 1), (here, 2)]) == _user_code.Line(name, 1)


def test_a_site_knows_its_operation_and_what_is_around_it():
    def turn(carry, _):
        return lax.cond(carry > 1, lambda: lax.sin(carry), lambda: carry), None

    (scan,) = jax.make_jaxpr(lambda x: lax.scan(turn, x, length=3)[0])(1.0).jaxpr.eqns
    (cond,) = (e for e in scan.params["jaxpr"].eqns if e.primitive.name == "cond")
    (sin,) = cond.params["branches"][1].eqns
    site = Site((sin,))
    assert site.primitive == "sin" and not site.in_branch and site.loops == ()
    site = site.within(cond).within(scan)
    assert site.primitive == "sin" and site.in_branch and site.loops == (3,)
    assert str(site.line).startswith(f"{__file__}:") and "lax.sin" in str(site.line)
    assert site.called("sin", "scan") == "sin" and site.called("cos") is None
    assert not site.is_transposed
    grad = jax.make_jaxpr(jax.grad(jnp.sin))(1.0).jaxpr.eqns
    assert [Site((eqn,)).is_transposed for eqn in grad][-1]


# False alarms that were.


def reduced(op, value):
    return js.get_replica_context().all_reduce(op, value)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: reduced(
            "sum", jax.grad(lambda w: (reduced("mean", x) * w - 3) ** 2 / 4)(1.5)
        ),
        lambda x: reduced("sum", reduced("mean", x) * 8) / reduced("sum", 8.0),
        lambda x: reduced(
            "sum", jnp.clip(reduced("sum", x), 0, 9) / reduced("sum", 1.0)
        ),
    ],
    ids=["a gradient of a reduced value", "a weighted mean", "a counted share"],
)
def test_sums_that_are_right_do_not_warn(four, step):
    four.run(lambda x: step(x), (four.per_replica([1.0, 2.0, 3.0, 4.0]),))


def test_a_mean_of_integers_counts_as_reduced(four):
    def step(x):
        return reduced("sum", jax.lax.pmean(x, "replica"))

    with pytest.warns(js.DoubleReductionWarning):
        four.run(step, (four.per_replica([1, 2, 3, 4]),))
