"""A sum of what is reduced already is warned of, and nothing else is."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.lines import AXIS, SEVERAL, ids, place
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

# Reduced twice. The steps take this replica's `x`, and `s`, the same on all.


def sum_of_sum(x, s):
    g = replica().all_reduce("sum", x)  # <- first
    return replica().all_reduce("sum", g)  # <- again


def after_an_optimizer(x, s):
    params = {"w": s}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(0.1))
    grads = replica().all_reduce("mean", {"w": x})  # <- first
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    params = optax.apply_updates(params, updates)
    return replica().all_reduce("sum", params)  # <- again


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


def several_on_one_line(x, s):
    g = lax.pmean(x, AXIS)  # <- first
    return [lax.psum(g * i, AXIS) for i in range(3)]  # <- again


TWICE = [
    sum_of_sum, after_an_optimizer, in_a_scan_body, from_turn_to_turn, scattered,
    through_merge_call, in_a_branch, in_a_differentiated_function, several_on_one_line,
]  # fmt: skip


@each_of("step", TWICE)
def test_a_sum_of_what_is_reduced_already_warns_once_with_both_lines(two, step):
    with pytest.warns(js.errors.DoubleReductionWarning) as warned:
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
        with pytest.warns(js.errors.DoubleReductionWarning) as warned:
            strategy.run(step, (x,))
        assert len({record.lineno for record in warned}) == len(warned) == 3


def test_a_warning_made_an_error_leaves_the_strategy_in_order(two):
    for _ in range(2):
        with pytest.raises(js.errors.DoubleReductionWarning, match="summed again"):
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


def test_no_false_alarm(two):
    def step(x, s):
        return {name: each(x, s) for name, each in ONCE.items()}

    two.run(step, (ids(two), 2.0))  # a warning is an error here


# Sums of what is reduced already, in whatever way: each is told, nothing else.

GROUPS = [[0, 1], [2, 3]]


def rows(strategy):
    count = strategy.num_replicas_in_sync
    return strategy.per_replica([np.full(4, i, np.float32) for i in range(count)])


def is_told(strategy, step):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", js.errors.DoubleReductionWarning)
        strategy.run(lambda x: step(x), (rows(strategy),))
    return bool(told)


def in_parts(x):
    part = lax.psum_scatter(x, AXIS, tiled=True)
    return lax.all_gather(part / 4, AXIS, tiled=True)


def in_groups(x):
    first = lax.psum_scatter(x, AXIS, tiled=True, axis_index_groups=GROUPS)
    total = lax.psum(first, AXIS, axis_index_groups=[[0, 2], [1, 3]])
    return lax.all_gather(total, AXIS, tiled=True, axis_index_groups=GROUPS)


ALSO_TWICE = {
    "mean": lambda x: lax.pmean(x, AXIS),
    "mean of integers": lambda x: lax.pmean(jnp.int32(x), AXIS),
    "divided in a jitted function": lambda x: jax.jit(lambda s: s / 4)(
        lax.psum(x, AXIS)
    ),
    "after arithmetic": lambda x: jnp.where(
        jnp.isfinite(mean := replica().all_reduce("mean", x)), mean.clip(0, 9), 0.0
    ),
    "mean over all_gather": lambda x: replica().all_gather(x, 0).mean(0),
    "mean over lax.all_gather": lambda x: lax.all_gather(x, AXIS).mean(0),
    "largest over all_gather": lambda x: lax.all_gather(x, AXIS).max(0),
    "gathered parts of a sum": in_parts,
    "gathered parts of groups": in_groups,
    "sent around": lambda x: lax.ppermute(
        lax.pmean(x, AXIS), AXIS, [(i, (i + 1) % 4) for i in range(4)]
    ),
    "within accumulate": lambda x: js.get_strategy().accumulate(2)(
        lambda part: replica().all_reduce("mean", part.sum())
    )(x),
}


@each_of("name", ALSO_TWICE, anew=True)
def test_a_sum_of_it_is_told(four, name):
    assert is_told(four, lambda x: replica().all_reduce("sum", ALSO_TWICE[name](x)))
    assert not is_told(
        four, lambda x: replica().all_reduce("mean", ALSO_TWICE[name](x))
    )


@each_of("kind", ["RING", "hierarchical"])
def test_a_sum_by_any_algorithm_is_told(four, kind):
    if kind == "RING":
        options = js.experimental.CommunicationOptions(implementation=kind)
        strategy = js.MirroredStrategy(four.devices, communication_options=options)
    else:
        ops = js.HierarchicalCopyAllReduce()
        strategy = js.MirroredStrategy(four.devices, cross_device_ops=ops)
    once = lambda x: replica().all_reduce("sum", x)  # noqa: E731
    assert is_told(strategy, lambda x: once(replica().all_reduce("mean", x)))
    assert not is_told(strategy, once)


def test_a_sum_of_it_is_told_although_it_goes_in_one_pack_with_others(four):
    """The pack differs between replicas; a part of it does not."""

    def step(x):
        mean = replica().all_reduce("mean", x)
        return replica().all_reduce("sum", {"again": mean, "once": x})

    assert is_told(four, step)
    assert not is_told(four, lambda x: replica().all_reduce("sum", {"a": x, "b": x}))


@each_of("size", [3, 24])
def test_a_sum_of_it_is_told_in_a_pack_of_many(four, size):
    """In such a pack short arrays lie in a table, which is joined with the others."""

    def step(x):
        mean = replica().all_reduce("mean", jnp.tile(x[:1], size))
        rest = [jnp.tile(x[:1], 24)] * 20
        return replica().all_reduce("sum", {"again": mean, "once": rest})

    assert is_told(four, step)
    assert not is_told(
        four, lambda x: replica().all_reduce("sum", [jnp.tile(x[:1], 24)] * 20)
    )


ALSO_ONCE = {
    "a mean in another form": lambda x: (
        lax.psum(lax.pmean(x, AXIS), AXIS).reshape(-1) / 4
    ),
    "a mean of another form": lambda x: (
        lax.psum(lax.pmean(x, AXIS), AXIS)[None].T.squeeze() / 4
    ),
    "a check": lambda x: jnp.all(
        lax.psum(lax.pmax(x, AXIS), AXIS) == 4 * lax.pmax(x, AXIS)
    ),
    "what was gathered": lambda x: lax.psum(jnp.sin(lax.all_gather(x, AXIS)), AXIS),
    "along another axis": lambda x: lax.psum(lax.all_gather(x, AXIS).sum(1), AXIS),
    "gathered from some": lambda x: lax.psum(
        lax.all_gather(x, AXIS, axis_index_groups=GROUPS).sum(0), AXIS
    ),
}


@each_of("name", ALSO_ONCE, anew=True)
def test_no_false_alarm_for(four, name):
    assert not is_told(four, ALSO_ONCE[name])


# Values sent on.

RING = [(0, 1), (1, 2), (2, 3), (3, 0)]
