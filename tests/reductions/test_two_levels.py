"""Reductions in groups of replicas and across them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.reductions import ALGORITHMS, AXIS, OPS, algorithms, on, reduced
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js

# Groups.

PAIRS, ACROSS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


def test_groups_reduce_among_themselves(four):
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    tree = {"x": x, "n": np.arange(8).reshape(4, 2)}
    chosen = {"pairs": PAIRS, "across": ACROSS, "turned": [[3, 0], [2, 1]]}

    @four.run
    def step(tree):
        def of(groups):
            reduce = partial(replica().all_reduce, groups=groups)
            return {op: reduce(op, tree) for op in OPS}

        return {name: of(groups) for name, groups in chosen.items()}

    for name, of_ops in step(four.per_replica(tree)).items():
        for op, out in of_ops.items():
            for key, value in out.items():
                assert isinstance(value, js.PerReplica)
                for group in chosen[name]:
                    exact = getattr(np, op)(tree[key][np.array(group)], axis=0)
                    for i in group:
                        np.testing.assert_allclose(value.values[i], exact, rtol=1e-5)


@algorithms
def test_groups_whatever_the_algorithm(name):
    strategy = on(4, *ALGORITHMS[name])
    x = strategy.per_replica(np.float32([1, 2, 3, 4]))
    out = reduced(strategy, "mean", x, groups=np.array(PAIRS))
    assert out.stacked.tolist() == [1.5, 1.5, 3.5, 3.5]


def test_gradients_of_a_group_are_the_groups(four):
    def step(w, x):
        def loss(w):
            return replica().all_reduce("sum", w * x, groups=PAIRS) ** 2

        return jax.grad(loss)(w)

    x = four.per_replica([1.0, 2.0, 3.0, 4.0])
    # The group's sum is 2 * 3 and 2 * 7; each of its two members sends 2 * sum.
    assert four.run(step, (2.0, x)).stacked.tolist() == [24, 48, 168, 224]


def mirrored(out):
    """Which leaves are; these are checked to be, bit for bit."""
    is_value = {"is_leaf": lambda leaf: isinstance(leaf, js.PerReplica)}
    found = []
    for leaf in jax.tree.leaves(out, **is_value):
        found.append(not isinstance(leaf, js.PerReplica))
        if found[-1]:
            assert (
                len({np.asarray(d.data).tobytes() for d in leaf.addressable_shards})
                == 1
            )
    return found


def inside(x):
    return replica().all_reduce("sum", x, groups=PAIRS)


def across(x):
    return replica().all_reduce("sum", x, groups=ACROSS)


def least(x):
    return replica().all_reduce("min", x, groups=ACROSS)


def in_loop(x, turn, *more):
    return lax.fori_loop(0, 3, lambda _, carry: turn(*carry), (x, *more))


TWO_LEVELS = {
    "two sums": (lambda x, s: across(inside(x)), True),
    "a sum, then a minimum": (lambda x, s: least(inside(x)), True),
    "the same groups twice": (lambda x, s: inside(inside(x)), False),
    "one level": (lambda x, s: inside(x), False),
    "of what is the same": (lambda x, s: inside(s), False),
    "in one group": (lambda x, s: lax.psum((x, s), AXIS, axis_index_groups=ALL), True),
    "gathered from what is the same": (
        lambda x, s: lax.all_gather(s, AXIS, axis_index_groups=PAIRS), True),
    "two of what is the same": (lambda x, s: across(inside(s)), True),
    "arithmetic between": (
        lambda x, s: across(jnp.sin(inside(x) * 2 + s).astype(jnp.float16)[::-1]),
        True),
    "two values of one group": (lambda x, s: across(inside(x) + inside(x**2)), True),
    "values of two groups": (lambda x, s: across(inside(x) + across(x)), False),
    "something of its own between": (lambda x, s: across(inside(x) + x), False),
    "in a function": (lambda x, s: across(jax.jit(jnp.sin)(inside(x))), True),
    "in functions": (lambda x, s: jax.jit(across)(jax.jit(inside)(x)), True),
    "in a checkpoint": (lambda x, s: across(jax.checkpoint(jnp.sin)(inside(x))), True),
    "through a loop": (
        lambda x, s: across(in_loop(inside(x), lambda c: (c * s,))[0]), True),
    "through a loop, changed": (
        lambda x, s: across(in_loop(inside(x), lambda c: (c * x,))[0]), False),
    "exchanged in a loop": (
        lambda x, s: across(in_loop(inside(x), lambda a, b: (b, a), across(x))[0]),
        False),
    "exchanged in a loop in a function": (
        lambda x, s: across(jax.jit(
            lambda a, b: in_loop(a, lambda a, b: (b, a), b)[0])(inside(x), across(x))),
        False),
    "levels in a loop": (
        lambda x, s: in_loop(x, lambda c: (across(inside(c)) / 4,))[0], True),
    "a branch": (
        lambda x, s: across(lax.cond(s[0] > 0, jnp.sin, jnp.cos, inside(x))), True),
    "a branch of two in a function": (
        lambda x, s: across(jax.jit(
            lambda a, b: lax.cond(s[0] < 0, lambda: a, lambda: b))(inside(x), x)),
        False),
    "a branch that a group takes together": (
        lambda x, s: across(lax.cond(inside(x)[0] > 1, lambda: s, lambda: 2 * s)),
        True),
    "a branch that a group takes together, with its own": (
        lambda x, s: across(lax.cond(inside(x)[0] > 1, lambda: x, lambda: x + 1)),
        False),
    "a loop that a group ends together": (
        lambda x, s: across(lax.while_loop(
            lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1] * s), (inside(x), s))[1]),
        True),
    "a loop that a group ends together, with its own": (
        lambda x, s: across(lax.while_loop(
            lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1] * x), (inside(x), s))[1]),
        False),
    "chosen by a group": (lambda x, s: across(jnp.where(inside(x) > 1, s, 0.0)), True),
    "chosen from its own": (
        lambda x, s: across(jnp.where(inside(x) > 1, x, 0.0)), False),
    "joined": (lambda x, s: across(jnp.concatenate([inside(x), s])), True),
    "joined with its own": (
        lambda x, s: across(jnp.concatenate([inside(x), x])), False),
    "parts of a sum": (
        lambda x, s: lax.all_gather(
            across(lax.psum_scatter(x, AXIS, axis_index_groups=PAIRS, tiled=True)),
            AXIS, axis_index_groups=PAIRS),
        True),
    "parts, gathered otherwise": (
        lambda x, s: lax.all_gather(
            across(lax.psum_scatter(x, AXIS, axis_index_groups=PAIRS, tiled=True)),
            AXIS, axis_index_groups=ACROSS),
        False),
    "gathered in two levels": (
        lambda x, s: lax.all_gather(
            lax.all_gather(x, AXIS, axis_index_groups=PAIRS),
            AXIS, axis_index_groups=ACROSS),
        True),
    "gathered in another order": (
        lambda x, s: lax.all_gather(
            lax.all_gather(x, AXIS, axis_index_groups=PAIRS),
            AXIS, axis_index_groups=[[0, 2], [3, 1]]),
        False),
    "groups in another order": (
        lambda x, s: lax.psum(inside(x), AXIS, axis_index_groups=[[0, 2], [3, 1]]),
        False),
    "groups that meet others first": (
        lambda x, s: lax.psum(inside(x), AXIS, axis_index_groups=[[3, 1], [0, 2]]),
        False),
    "exchanged": (
        lambda x, s: across(lax.ppermute(inside(x), AXIS, [(0, 1), (1, 0)])), False),
    "in a reference": (lambda x, s: across(through_reference(inside(x), s)), True),
    "in a reference, with its own": (
        lambda x, s: across(through_reference(inside(x), x)), False),
}  # fmt: skip


def through_reference(a, b):
    ref = jax.new_ref(a)

    @jax.jit
    def write(ref):
        ref[...] = b

    lax.fori_loop(0, 2, lambda i, _: (write(ref), 0)[1], 0)
    return ref[...]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.DoubleReductionWarning")
def test_what_two_levels_prove(four):
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)

    @four.run
    def step(x, s):
        return {name: function(x, s) for name, (function, _) in TWO_LEVELS.items()}

    for name, out in step(four.per_replica(x), jnp.arange(1.0, 5.0)).items():
        assert set(mirrored(out)) == {TWO_LEVELS[name][1]}, name


def test_order_within_groups_counts():
    eight = on(8)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(8, 2000)) * 10 ** draw.normal(size=(8, 2000))
    first = [[0, 7], [1, 6], [2, 5], [3, 4]]

    def step(second, x):
        total = lax.psum(x, AXIS, axis_index_groups=first)
        return lax.psum(total, AXIS, axis_index_groups=second)

    x = eight.per_replica(x.astype(np.float32))
    orders = {
        ((0, 1, 2, 3), (7, 6, 5, 4)): True,
        ((3, 0, 1, 2), (4, 7, 6, 5)): True,
        ((0, 1, 2, 3), (4, 5, 6, 7)): False,  # rounded otherwise
    }
    for second, expected in orders.items():
        assert mirrored(eight.run(partial(step, second), (x,))) == [expected]


def interpreted(lines, a, b, s):
    known = [a, b]
    for operation, first, second, body in lines:
        # The latest values are taken most often.
        pair = known[-1 - first % min(len(known), 2)], known[-1 - second % len(known)]
        held = () if body is None else (partial(_last, body),)
        known.append(operation(*held, *pair, s))
    return known


def _last(body, a, b, s):
    return interpreted(body, a, b, s)[-1]


def test_one_reduced_leaf_of_a_pack_is_warned_of_but_not_in_means(four):
    def step(op, x, y):
        total = replica().all_reduce(op, x)
        return replica().all_reduce(op, {"new": y, "old": total})

    x = four.per_replica(np.ones((4, 3), np.float32))
    with pytest.warns(js.errors.DoubleReductionWarning, match="reduction already"):
        four.run(step, ("sum", x, x))
    assert mirrored(four.run(step, ("mean", x, x))) == [True, True]


def test_operations_that_return_too_few_results_are_an_error():
    class Forgetful(js.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            raise AssertionError("not called")

        def batch_reduce_implementation(self, op, pairs, options):
            return []

    strategy = js.MirroredStrategy(jax.devices()[:2], cross_device_ops=Forgetful())
    with pytest.raises(ValueError, match="Forgetful returned 0 results for 1 values"):
        strategy.reduce("sum", strategy.per_replica([1.0, 2.0]))
