"""Reductions by several algorithms, in chosen dtypes, in groups and across them."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.reductions import (
    ALGORITHMS,
    AXIS,
    OPS,
    RING,
    algorithms,
    assert_same_bits,
    collectives,
    on,
    reduced,
    stacked,
)
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationImplementation, CommunicationOptions

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute")


def compiled(strategy, step, *args):
    """How many collectives of each kind there are in the compiled program."""
    lowered = jax.jit(lambda *args: strategy.run(step, args)).lower(*args)
    text = lowered.compile().as_text()
    return [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS]


@algorithms
def test_gradients_are_the_sums_of_the_incoming_ones(name):
    n = 4
    strategy = on(n, *ALGORITHMS[name])
    draw = np.random.default_rng(0)
    tree = {"a": draw.normal(size=(n, 3)), "b": draw.normal(size=(n, 2, 2))}
    weights = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape), tree)
    tree, weights = jax.tree.map(np.float32, (tree, weights))

    def step(tree, weights):
        def loss(tree, op):
            out = replica().all_reduce(op, tree)
            terms = jax.tree.map(lambda w, x: jnp.sum(w * jnp.sin(x)), weights, out)
            return sum(jax.tree.leaves(terms))

        return [jax.grad(loss)(tree, op) for op in ("sum", "mean")]

    by_sum, by_mean = strategy.run(step, strategy.per_replica((tree, weights)))

    def check(found, leaf, weight, divisor):
        incoming = (weight * np.cos(leaf.sum(0) / divisor)).sum(0) / divisor
        for version in strategy.experimental_local_results(found):
            np.testing.assert_allclose(version, incoming, rtol=1e-4, atol=1e-5)

    is_value = {"is_leaf": lambda leaf: isinstance(leaf, js.PerReplica)}
    jax.tree.map(partial(check, divisor=1), by_sum, tree, weights, **is_value)
    jax.tree.map(partial(check, divisor=n), by_mean, tree, weights, **is_value)


def test_sums_in_another_dtype(four):
    x = np.random.default_rng(0).normal(size=(4, 100)).astype(np.float32)
    values = four.per_replica({"x": x, "n": np.arange(8).reshape(4, 2)})
    options = CommunicationOptions(reduce_dtype=jnp.bfloat16)

    def step(values):
        return replica().all_reduce("sum", values, options)

    assert collectives(four, step, values) == [
        ("psum", "int32", 8),
        ("psum", "bfloat16", 200),
    ]
    text = jax.jit(lambda v: four.run(step, (v,))).lower(values).as_text()
    assert re.search(r"all_reduce.*?tensor<100xbf16>", text, re.S)
    out = four.run(step, (values,))
    assert (out["x"].dtype, out["n"].dtype) == (jnp.float32, jnp.int32)
    error = np.abs(out["x"] - x.sum(0))
    assert 1e-4 < error.max() < 0.1
    assert out["n"].tolist() == [12, 16]
    on_strategy = on(4, options=options)
    assert_same_bits(out, reduced(on_strategy, "sum", values))
    assert out["x"].dtype == reduced(on_strategy, "mean", values["x"]).dtype


@each_of("dtype", [jnp.bfloat16, jnp.float16])
def test_short_numbers_are_summed_in_float32(dtype):
    eight = on(8)
    # Each 1 is lost when it is added to 4096 in either dtype.
    x = eight.per_replica([jnp.asarray([4096.0], dtype)] + [jnp.ones(1, dtype)] * 7)

    def step(x):
        return replica().all_reduce("sum", x)

    exact = eight.run(step, (x,))
    assert exact.dtype == dtype and exact[0] == jnp.asarray(4103.0, dtype)
    ((_, wide, _),) = collectives(eight, step, x)
    assert wide == "float32"
    told = CommunicationOptions(reduce_dtype=dtype)
    ((_, narrow, _),) = collectives(eight, partial(all_reduced, told), x)
    assert narrow == jnp.dtype(dtype).name
    mean = reduced(eight, "mean", x)
    assert mean.dtype == dtype and mean[0] == jnp.asarray(4103 / 8, dtype)
    assert reduced(eight, "max", x).dtype == dtype


def all_reduced(options, x):
    return replica().all_reduce("sum", x, options)


def test_options_follow_each_other(four):
    x = four.per_replica(np.ones((4, 2), np.float32))
    strategy = on(4, options=CommunicationOptions(reduce_dtype="float16"))
    ring = CommunicationOptions(implementation="ring")
    assert collectives(strategy, partial(all_reduced, ring), x) == [
        ("reduce_scatter", "float16", 8),
        ("all_gather", "float16", 2),
    ]
    nccl = CommunicationOptions(implementation=CommunicationImplementation.NCCL)
    ringing = on(4, options=ring)
    ((operation, *_),) = collectives(ringing, partial(all_reduced, nccl), x)
    assert operation == "psum"


@each_of(
    "given, error, words",
    [({"bytes_per_pack": -1}, ValueError, "`bytes_per_pack` was -1; a number of byte"),
     ({"bytes_per_pack": True}, ValueError, "`bytes_per_pack` was True"),
     ({"bytes_per_pack": "1k"}, TypeError, "`bytes_per_pack` was '1k'; a number of"),
     ({"bytes_per_pack": 1.5}, TypeError, "`bytes_per_pack` was 1.5"),
     ({"timeout_seconds": 0}, ValueError, "`timeout_seconds` was 0; a positive num"),
     ({"implementation": "fast"}, ValueError,
      "`implementation` was 'fast'; a CommunicationImplementation or one of 'auto', "),
     ({"implementation": None}, ValueError, "`implementation` was None"),
     ({"reduce_dtype": int}, TypeError, "`reduce_dtype` was .*; a floating-point dty"),
     ({"reduce_dtype": "float33"}, TypeError, "`reduce_dtype` was 'float33'"),
     ({"reduce_dtype": 3}, TypeError, "`reduce_dtype` was 3"),
     ({"reduce_dtype": bool}, TypeError, "whole numbers|Whole numbers")])  # fmt: skip
def test_options_that_make_no_sense(given, error, words):
    with pytest.raises(error, match=words):
        CommunicationOptions(**given)


def test_options_that_a_strategy_cannot_keep(two):
    def uses(options):
        yield lambda: on(2, options=options)
        yield lambda: two.run(lambda: replica().all_reduce("sum", 1.0, options))
        yield lambda: two.reduce("sum", 1.0, options=options)

    for use in uses(CommunicationOptions(timeout_seconds=3)):
        with pytest.raises(ValueError, match="`timeout_seconds` was 3, which cannot"):
            use()
    for use in uses(3):
        with pytest.raises(TypeError, match="`options` was 3; a `CommunicationOptions"):
            use()


def test_options_are_made_one_form():
    options = CommunicationOptions(np.int64(8), None, "Ring", "bfloat16")
    assert options == CommunicationOptions(
        8, None, CommunicationImplementation.RING, jnp.bfloat16
    )
    assert type(options.bytes_per_pack) is int
    across = CommunicationOptions(
        implementation="HIERARCHICAL", groups=np.array([[0, 2], [1, 3]])
    )
    assert across == HIERARCHICAL_ACROSS and hash(across) == hash(HIERARCHICAL_ACROSS)
    assert hash(options) == hash(dataclasses.replace(options))
    assert js.experimental.CollectiveHints(50).bytes_per_pack == 50


def test_each_algorithm_is_another_program():
    n = 8
    x = on(n).per_replica({"x": np.ones((n, 16), np.float32)})["x"]

    def found(ops=None, options=None, op="sum"):
        strategy = on(n, ops, options)
        return compiled(strategy, lambda x: replica().all_reduce(op, x), x)

    assert found() == [1, 0, 0, 0]
    assert found(js.NcclAllReduce()) == [1, 0, 0, 0]
    assert found(js.HierarchicalCopyAllReduce()) == [1, 1, 1, 0]
    assert found(js.ReductionToOneDevice()) == [1, 0, 0, n - 1]
    assert found(None, RING) == [0, 1, 1, 0]
    assert found(js.HierarchicalCopyAllReduce(), RING) == [0, 1, 1, 0]
    assert found(js.ReductionToOneDevice(), op="max") == [1, 0, 0, 0]


BAD_GROUPS = [
    [[0, 1], [2]], [[0, 1], [1, 2]], [[0, 1], [2, 4]], [[0, 1]], [], [0, 1, 2, 3],
    "ab", 3, [[0, 1], [2, "x"]], [[0, 1], [2, 3.0]], [[-1, 0], [1, 2]],
]  # fmt: skip


@each_of("groups", BAD_GROUPS)
def test_groups_that_hold_not_each_replica_once(four, groups):
    words = r"`groups` was .*; groups of one size .* replica from 0 to 3 stands once"
    with pytest.raises(ValueError, match=words):
        on(4, js.HierarchicalCopyAllReduce(groups=groups))
    with pytest.raises(ValueError, match=words):
        reduced(four, "sum", 1.0, groups=groups)


@each_of("number", [-1, True, 1.0, "1", None])
@each_of("ops", [js.NcclAllReduce, js.HierarchicalCopyAllReduce])
def test_numbers_of_packs_that_make_no_sense(ops, number):
    with pytest.raises(ValueError, match="`num_packs` was .*; the number of packs"):
        ops(number)


@each_of("given", [3, "nccl", js.NcclAllReduce, lambda: None])
def test_something_else_than_operations(given):
    with pytest.raises(TypeError, match="`cross_device_ops` was .*; an object of a"):
        on(2, given)


def test_reduction_to_a_chosen_device():
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    for device in (None, "CPU:2", jax.devices()[3]):
        strategy = on(4, js.ReductionToOneDevice(device))
        root = 0 if device is None else int(str(getattr(device, "id", device))[-1])
        values = strategy.per_replica(x)

        def step(values):
            return replica().all_reduce("sum", values)

        assert reduced(strategy, "sum", values).tolist() == [12, 16]
        lowered = jax.jit(lambda v, s=strategy: s.run(step, (v,))).lower(values)
        text = lowered.compile().as_text()
        pairs = re.findall(r"source_target_pairs=\{\{(\d+),(\d+)\}\}", text)
        senders = {i for i in range(4) if i != root}
        assert {(int(a), int(b)) for a, b in pairs} == {(i, root) for i in senders}


def test_a_device_without_a_replica():
    with pytest.raises(ValueError, match="is cpu:6, where no replica is: .* cpu:0..3"):
        on(4, js.ReductionToOneDevice("CPU:6"))
    with pytest.raises(ValueError, match="Unknown device 'CPU:77'"):
        on(4, js.ReductionToOneDevice("CPU:77"))


def test_an_accumulation_of_ones_own():
    def largest(versions):
        assert len(versions) == 4
        return jnp.stack(versions).max(0)

    def last_less_first(versions):
        return versions[-1] - versions[0]

    x = np.float32([[3, 1], [9, 2], [0, 5], [4, 4]])
    strategy = on(4, js.ReductionToOneDevice(accumulation_fn=largest))
    values = strategy.per_replica(x)
    assert reduced(strategy, "sum", values).tolist() == [9, 5]
    assert reduced(strategy, "mean", values).tolist() == [9 / 4, 5 / 4]
    assert reduced(strategy, "min", values).tolist() == [0, 1]
    strategy = on(4, js.ReductionToOneDevice("CPU:1", last_less_first))
    out = reduced(strategy, "sum", values)
    assert out.tolist() == [1, 3] and isinstance(out, js.Mirrored)


class InOrder(js.CrossDeviceOps):
    """The sum from the first replica to the last."""

    def __init__(self):
        self.seen = []

    def reduce_implementation(self, op, value, destinations, options):
        assert js.in_cross_replica_context()
        self.seen.append((op, value.num_replicas, destinations, options))
        if op is js.ReduceOp.MAX:
            return jnp.stack(value.values).max(0)
        total = sum(value.values)
        return total / value.num_replicas if op is js.ReduceOp.MEAN else total


def test_operations_of_ones_own():
    ops = InOrder()
    strategy = on(4, ops)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    values = strategy.per_replica({"x": x, "half": x.astype(np.float16)})
    out = reduced(strategy, "sum", values)
    assert all(isinstance(leaf, js.Mirrored) for leaf in out.values())
    assert np.asarray(out["x"]).tobytes() == (((x[0] + x[1]) + x[2]) + x[3]).tobytes()
    options = CommunicationOptions(bytes_per_pack=8)
    mean = strategy.reduce("mean", values["x"], options=options)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6)
    default = CommunicationOptions()
    assert ops.seen == [
        (js.ReduceOp.SUM, 4, strategy, default),
        (js.ReduceOp.SUM, 4, strategy, default),
        (js.ReduceOp.MEAN, 4, strategy, options),
    ]
    with pytest.raises(TypeError, match="SUM of a bool array is not defined"):
        reduced(strategy, "sum", True)
    with pytest.raises(ValueError, match="but InOrder reduces over all replicas"):
        reduced(strategy, "sum", values, groups=[[0, 1], [2, 3]])


def test_what_operations_of_ones_own_leave_different_is_called_so():
    class Forgets(js.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            return lax.psum(jnp.ones(()), AXIS) + lax.axis_index(AXIS)

    strategy = on(2, Forgets())
    x = strategy.per_replica([1.0, 2.0])
    out = strategy.reduce("sum", x)
    assert isinstance(out, js.PerReplica) and out.stacked.tolist() == [2, 3]

    def step(x):
        return replica().all_reduce("sum", x)

    with pytest.raises(js.errors.NotMirroredError, match="lax.axis_index"):
        strategy.run(step, (x,), options=js.RunOptions(expect_mirrored=True))


def test_ours_are_for_strategies():
    with pytest.raises(TypeError, match="NcclAllReduce cannot be called by itself"):
        js.NcclAllReduce().reduce("sum", None, None)


def test_strategies_of_one_replica():
    options = CommunicationOptions(bytes_per_pack=4, implementation="ring")
    one = js.OneDeviceStrategy("CPU:1")
    tree = {"a": jnp.arange(3.0), "b": 2}

    def step(tree):
        return replica().all_reduce("mean", tree, options, groups=[[0]])

    out = one.run(step, (tree,))
    assert out["a"].tolist() == [0, 1, 2] and out["b"] == 2
    assert compiled(one, step, tree)[1:] == [0, 0, 0]
    for ops, options in ALGORITHMS.values():
        alone = on(1, ops, options)
        assert compiled(alone, lambda x: replica().all_reduce("sum", x), 1.0)[1:] == [
            0, 0, 0,
        ]  # fmt: skip
    out = step(tree)  # no strategy at all
    assert out["a"].tolist() == [0, 1, 2] and out["b"].dtype == jnp.float32


# Reductions in groups of replicas and across them.

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
    "one level": (lambda x, s: inside(x), False),
    "of what is the same": (lambda x, s: inside(s), False),
    "in one group": (lambda x, s: lax.psum((x, s), AXIS, axis_index_groups=ALL), True),
    "gathered from what is the same": (
        lambda x, s: lax.all_gather(s, AXIS, axis_index_groups=PAIRS), True),
    "two of what is the same": (lambda x, s: across(inside(s)), True),
    "arithmetic between": (
        lambda x, s: across(jnp.sin(inside(x) * 2 + s).astype(jnp.float16)[::-1]),
        True),
    "values of two groups": (lambda x, s: across(inside(x) + across(x)), False),
    "something of its own between": (lambda x, s: across(inside(x) + x), False),
    "in a function": (lambda x, s: across(jax.jit(jnp.sin)(inside(x))), True),
    "through a loop": (
        lambda x, s: across(in_loop(inside(x), lambda c: (c * s,))[0]), True),
    "through a loop, changed": (
        lambda x, s: across(in_loop(inside(x), lambda c: (c * x,))[0]), False),
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


@pytest.mark.filterwarnings("ignore::jaxstrategy.errors.RecompilationWarning")
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


def test_operations_that_return_too_few_results_are_an_error():
    class Forgetful(js.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            raise AssertionError("not called")

        def batch_reduce_implementation(self, op, pairs, options):
            return []

    strategy = js.MirroredStrategy(jax.devices()[:2], cross_device_ops=Forgetful())
    with pytest.raises(ValueError, match="Forgetful returned 0 results for 1 values"):
        strategy.reduce("sum", strategy.per_replica([1.0, 2.0]))


# Sums in two levels, chosen by `CommunicationOptions`.

LEVELS = CommunicationOptions(implementation="hierarchical")
HIERARCHICAL_ACROSS = CommunicationOptions(
    implementation="hierarchical", groups=[[0, 2], [1, 3]]
)


def levels(found):
    """What of each kind goes where: the kind, the size of its groups, and bytes."""
    return [(each.kind, each.group, each.nbytes) for each in found.collectives]


def test_they_are_those_of_the_cross_device_operations(four):
    tree = stacked(4)
    ops = js.HierarchicalCopyAllReduce(groups=[[0, 2], [1, 3]])
    other = on(4, ops)
    have = reduced(four, "sum", four.per_replica(tree), HIERARCHICAL_ACROSS)
    want = reduced(other, "sum", other.per_replica(tree))
    assert_same_bits(have, want)
    of_strategy = reduced(
        on(4, options=HIERARCHICAL_ACROSS), "sum", four.per_replica(tree)
    )
    assert_same_bits(of_strategy, want)


def test_one_part_of_each_array_goes_between_the_groups(four):
    x = four.per_replica(np.ones((4, 64, 64), np.float32))

    def step(x):
        return js.get_replica_context().all_reduce("mean", x, LEVELS)

    found = four.explain(step, (x,), compiled=False)
    whole = 4 * 64 * 64
    assert levels(found) == [
        ("reduce_scatter", 2, whole),
        ("all_reduce", 2, whole // 2),
        ("all_gather", 2, whole // 2),
    ]
    (line,) = {each.line for each in found.collectives}
    assert line.file == __file__


def test_wrong_groups_are_refused(four):
    message = "`groups` was .*; groups of replica ids, all of one size, were wanted"
    for wrong in (3, [], [[]], [[0, 1], [2]], [[0, "1"]], [0, 1], "01"):
        with pytest.raises(ValueError, match=message):
            CommunicationOptions(implementation="hierarchical", groups=wrong)
    with pytest.raises(ValueError, match="'hierarchical'` has, and .* is AUTO"):
        CommunicationOptions(groups=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="each replica from 0 to 1 stands once"):
        on(2, options=HIERARCHICAL_ACROSS)
    options = CommunicationOptions(implementation="hierarchical", groups=[[0, 1]])
    with pytest.raises(ValueError, match="each replica from 0 to 3 stands once"):
        reduced(four, "sum", four.per_replica(np.ones((4, 3), np.float32)), options)
