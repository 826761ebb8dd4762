"""Reductions: in packs, by several algorithms, in chosen dtypes and groups."""

import copy
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationImplementation, CommunicationOptions
from jaxstrategy.reductions._cross_device_ops import DefaultOps, near
from jaxstrategy.reductions._packing import NumberOfPacks, Packing, best_on, in_packs
from jaxstrategy.replicas._replicas import Replicas

AXIS = "replica"
OPS = ["sum", "mean", "min", "max"]


def replica():
    return js.get_replica_context()


def on(n, ops=None, options=None):
    return js.MirroredStrategy(jax.devices()[:n], ops, options)


def stacked(n):
    """A tree of several dtypes and shapes, also empty ones."""
    draw = np.random.default_rng(0)

    def normal(*shape):
        return draw.normal(size=(n, *shape)).astype(np.float32)

    return {
        "a": normal(3, 5),
        "b": (normal(), normal(7)),
        "empty": normal(0, 3),
        "half": normal(4).astype(jnp.bfloat16),
        "large": normal(300, 300),
        "n": draw.integers(-50, 50, (n, 6)),
        "small": draw.integers(0, 9, (n, 2)).astype(np.uint8),
        "z": (normal(3) + 1j * normal(3)).astype(np.complex64),
    }


def ordered(tree):
    """Without the complex numbers, which have no order."""
    return {key: leaf for key, leaf in tree.items() if key != "z"}


def reduced(strategy, op, tree, options=None, groups=None):
    def step(tree):
        return replica().all_reduce(op, tree, options, groups=groups)

    return strategy.run(step, (tree,))


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def collectives(strategy, step, *args):
    """What the step does, in order: (operation, dtypes, bytes)."""
    found = strategy.explain(step, args, compiled=False).collectives
    return [(each.operation, *each.dtypes, each.nbytes) for each in found]


KINDS = ("all-reduce", "reduce-scatter", "all-gather", "collective-permute")


def compiled(strategy, step, *args):
    """How many collectives of each kind there are in the compiled program."""
    lowered = jax.jit(lambda *args: strategy.run(step, args)).lower(*args)
    text = lowered.compile().as_text()
    return [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS]


# Which arrays go together.


@pytest.mark.parametrize(
    "sizes, largest, pack, expected",
    [([1, 2, 3], 4, 8, [[0, 1, 2]]),
     ([4, 4, 4], 4, 8, [[0, 1], [2]]),
     ([5, 1, 9, 1], 4, 8, [[0], [1, 3], [2]]),
     ([3, 3, 3, 1], 4, 8, [[0, 1], [2, 3]]),
     ([0, 4, 0, 4, 0], 4, 8, [[0, 1, 2, 3, 4]]),
     ([8, 9], 16, 8, [[0], [1]]),
     ([1, 1], 0, 0, [[0], [1]]),
     ([], 4, 8, [])],
)  # fmt: skip
def test_small_arrays_are_joined_in_order(sizes, largest, pack, expected):
    assert Packing(largest, pack).buckets(sizes) == expected


SIZES = st.lists(st.integers(0, 30), max_size=12)


@settings(max_examples=200, deadline=None, database=None)
@given(SIZES, st.integers(0, 20), st.integers(0, 40))
def test_packs_hold_each_array_once_and_keep_their_limits(sizes, largest, pack):
    found = Packing(largest, pack).buckets(sizes)
    assert sorted(index for bucket in found for index in bucket) == [*range(len(sizes))]
    assert [bucket[0] for bucket in found] == sorted(bucket[0] for bucket in found)
    for bucket in found:
        assert bucket == sorted(bucket)
        if len(bucket) > 1:
            assert sum(sizes[index] for index in bucket) <= pack
            assert max(sizes[index] for index in bucket) <= largest


@pytest.mark.parametrize(
    "sizes, number, expected",
    [([1, 1, 1, 1], 2, [[0, 1], [2, 3]]),
     ([1, 1, 1, 9], 2, [[0, 1, 2], [3]]),
     ([9, 1, 1, 1], 2, [[0], [1, 2, 3]]),
     ([1, 2, 3], 1, [[0, 1, 2]]),
     ([1, 2, 3], 0, [[0], [1], [2]]),
     ([5, 5], 8, [[0], [1]]),
     ([0, 0], 3, [[0, 1]]),
     ([], 2, [])],
)  # fmt: skip
def test_a_number_of_packs(sizes, number, expected):
    assert NumberOfPacks(number).buckets(sizes) == expected


@settings(max_examples=200, deadline=None, database=None)
@given(SIZES, st.integers(1, 6))
def test_a_number_of_packs_is_never_exceeded(sizes, number):
    found = NumberOfPacks(number).buckets(sizes)
    assert [index for bucket in found for index in bucket] == [*range(len(sizes))]
    assert len(found) <= number


def test_arrays_of_one_dtype_are_joined():
    given = []

    def double(array):
        given.append((array.dtype.name, array.shape))
        return array * 2

    arrays = [jnp.ones((2, 3)), jnp.arange(4), jnp.float32(5), jnp.zeros((0, 2))]
    done = in_packs(double, arrays, Packing(100, 100))
    assert given == [("float32", (7,)), ("int32", (4,))]
    for array, result in zip(arrays, done, strict=True):
        np.testing.assert_array_equal(result, array * 2)


def test_there_are_defaults_everywhere():
    for platform in ("cpu", "gpu", "tpu", "another"):
        for n in (1, 2, 3, 5, 8, 1000):
            packing = best_on(platform, n)
            assert 0 < packing.largest <= packing.pack


# What comes out of packs.

PACKINGS = {
    "default": on,
    "one": partial(on, ops=js.NcclAllReduce()),
    "three": partial(on, ops=js.NcclAllReduce(3)),
    "64 bytes": partial(on, options=CommunicationOptions(bytes_per_pack=64)),
}


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("n", [3, 8])
def test_packs_change_no_bit(name, n):
    packed, plain = PACKINGS[name](n), on(n, js.NcclAllReduce(0))
    tree = stacked(n)

    def step(tree):
        both = [replica().all_reduce(op, tree) for op in ("sum", "mean")]
        few = ordered(tree)
        return both, [replica().all_reduce(op, few) for op in ("min", "max")]

    out = packed.run(step, (packed.per_replica(tree),))
    assert all(isinstance(leaf, js.Mirrored) for leaf in jax.tree.leaves(out))
    assert_same_bits(out, plain.run(step, (plain.per_replica(tree),)))


@pytest.mark.parametrize("op", OPS)
def test_packs_give_numpys_numbers(strategy, op):
    n = strategy.num_replicas_in_sync
    tree = ordered(stacked(n)) if op in ("min", "max") else stacked(n)
    out = reduced(strategy, op, strategy.per_replica(tree))

    def check(found, versions):
        if versions.dtype == jnp.bfloat16:
            versions = versions.astype(np.float32)
        exact = getattr(np, op)(versions, axis=0)
        rtol = 1e-2 if found.dtype == jnp.bfloat16 else 1e-5
        found = np.asarray(found).astype(exact.dtype)
        np.testing.assert_allclose(found, exact, rtol=rtol, atol=1e-5)

    jax.tree.map(check, out, tree)


def test_a_step_reduces_once_for_each_dtype_and_each_large_array(four):
    tree = four.per_replica(stacked(4))

    def step(tree):
        return replica().all_reduce("sum", tree)

    assert collectives(four, step, tree) == [
        ("psum", "float32", 4 * (15 + 1 + 7 + 4)),  # with the bfloat16 ones
        ("psum", "float32", 4 * 300 * 300),
        ("psum", "int32", 4 * 6),
        ("psum", "uint8", 2),
        ("psum", "complex64", 8 * 3),
    ]


def test_the_strategy_or_the_call_says_how_much_is_packed(four):
    tree = four.per_replica({"x": np.ones((4, 10, 8), np.float32)})
    leaves = [tree["x"]] * 6  # of 320 bytes

    def times(strategy, **options):
        def step(leaves):
            chosen = CommunicationOptions(**options) if options else None
            return replica().all_reduce("sum", leaves, chosen)

        return len(collectives(strategy, step, leaves))

    assert times(four) == 1
    assert times(four, bytes_per_pack=640) == 3
    assert times(four, bytes_per_pack=319) == 6
    limited = on(4, options=CommunicationOptions(bytes_per_pack=960))
    assert times(limited) == 2
    assert times(limited, bytes_per_pack=320) == 6
    assert times(limited, reduce_dtype="bfloat16") == 1  # half as much
    assert [times(on(4, js.NcclAllReduce(k))) for k in (0, 1, 2, 9)] == [6, 1, 2, 6]
    assert times(on(4, js.NcclAllReduce(1)), bytes_per_pack=640) == 3


def test_reduce_outside_a_step_packs_too(four):
    x = four.per_replica({"a": np.ones((4, 3)), "b": np.ones((4, 5))})

    def step():
        return replica().merge_call(lambda strategy: strategy.reduce("sum", x))

    out = four.reduce("sum", x, options=CommunicationOptions(bytes_per_pack=4))
    assert_same_bits(out, four.reduce("sum", x))
    inside = four.run(
        lambda x: replica().merge_call(lambda s, x: s.reduce("sum", x), (x,)), (x,)
    )
    assert_same_bits(out, inside)


def test_packs_in_transformed_steps(four):
    rows = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    x = four.per_replica({"x": rows})["x"]
    total = rows.sum(0)

    def both(v):
        return replica().all_reduce("sum", {"a": v, "b": 2 * v[..., 0]})

    def mapped(x):
        return jax.vmap(both)(x)

    def looped(x):
        return lax.scan(lambda c, v: (c + both(v)["a"], both(v)), jnp.zeros(2), x)

    for options in (None, CommunicationOptions(implementation="ring")):
        strategy = on(4, options=options)
        out = strategy.run(jax.jit(mapped), (x,))
        np.testing.assert_allclose(out["a"], total, rtol=1e-5)
        np.testing.assert_allclose(out["b"], 2 * total[:, 0], rtol=1e-5)
        carry, rest = strategy.run(looped, (x,))
        np.testing.assert_allclose(carry, total.sum(0), rtol=1e-5)
        np.testing.assert_allclose(rest["a"], total, rtol=1e-5)


def test_packs_of_very_many_arrays(four):
    sizes = [1 + i % 5 for i in range(100)]  # enough to be cut at unknown places
    draw = np.random.default_rng(0)
    trees = [draw.normal(size=(4, size)).astype(np.float32) for size in sizes]

    def step(tree):
        total, pull = jax.vjp(lambda t: replica().all_reduce("sum", t), tree)
        return total, pull(total)[0]

    total, gradient = four.run(step, (four.per_replica(tuple(trees)),))
    for versions, found, incoming in zip(trees, total, gradient, strict=True):
        assert isinstance(found, js.Mirrored)
        np.testing.assert_allclose(found, versions.sum(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(incoming, 4 * versions.sum(0), rtol=1e-5, atol=1e-5)


# Gradients: local, whatever the algorithm.

RING = CommunicationOptions(implementation="RING")
ALGORITHMS = {
    "default": (None, None),
    "nccl": (js.NcclAllReduce(), None),
    "unpacked": (js.NcclAllReduce(0), None),
    "hierarchical": (js.HierarchicalCopyAllReduce(), None),
    "one device": (js.ReductionToOneDevice(), None),
    "ring": (None, RING),
}
algorithms = pytest.mark.parametrize("name", ALGORITHMS)


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


def test_gradients_of_packed_extremes_are_those_of_single_ones(four):
    tree = ordered(stacked(4))
    tree = four.per_replica({"a": tree["a"], "b": tree["b"]})

    def step(tree, one_by_one):
        def loss(tree):
            if one_by_one:
                out = jax.tree.map(lambda v: replica().all_reduce("max", v), tree)
            else:
                out = replica().all_reduce("max", tree)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(out))

        return jax.grad(loss)(tree)

    together, apart = four.run(step, (tree, False)), four.run(step, (tree, True))
    assert_same_bits(together, apart)


# Dtypes on the way.


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
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


@pytest.mark.parametrize(
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
     ({"reduce_dtype": bool}, TypeError, "whole numbers|Whole numbers")],
)  # fmt: skip
def test_options_that_make_no_sense(given, error, words):
    with pytest.raises(error, match=words):
        CommunicationOptions(**given)


def test_a_timeout_where_there_can_be_none(two):
    options = CommunicationOptions(timeout_seconds=3)
    words = "`timeout_seconds` was 3, which cannot be kept"
    with pytest.raises(ValueError, match=words):
        on(2, options=options)
    with pytest.raises(ValueError, match=words):
        two.run(lambda: replica().all_reduce("sum", 1.0, options))
    with pytest.raises(ValueError, match=words):
        two.reduce("sum", 1.0, options=options)


def test_options_are_made_one_form():
    options = CommunicationOptions(np.int64(8), None, "Ring", "bfloat16")
    assert options == CommunicationOptions(
        8, None, CommunicationImplementation.RING, jnp.bfloat16
    )
    assert type(options.bytes_per_pack) is int
    assert hash(options) == hash(dataclasses.replace(options))
    assert js.experimental.CollectiveHints(50).bytes_per_pack == 50


def test_something_else_than_options(two):
    for give in (
        lambda: two.reduce("sum", 1.0, options=3),
        lambda: two.run(lambda: replica().all_reduce("sum", 1.0, 3)),
        lambda: on(2, options=3),
    ):
        with pytest.raises(TypeError, match="`options` was 3; a `CommunicationOptions"):
            give()


# Algorithms, in the compiled programs and by their numbers.


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


@algorithms
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8])
def test_each_algorithm_gives_numpys_numbers(name, n):
    strategy = on(n, *ALGORITHMS[name])
    draw = np.random.default_rng(0)
    tree = {
        "x": draw.normal(size=(n, 3, 5)).astype(np.float32),
        "scalar": draw.normal(size=n).astype(np.float32),
        "empty": np.zeros((n, 0), np.float32),
        "n": draw.integers(-9, 9, (n, 7)),
    }

    def step(tree):
        return {op: replica().all_reduce(op, tree) for op in OPS}

    out = strategy.run(step, (strategy.per_replica(tree),))
    for op, found in out.items():
        for key, leaf in found.items():
            assert isinstance(leaf, js.Mirrored)
            exact = getattr(np, op)(tree[key], axis=0)
            for shard in leaf.addressable_shards:
                np.testing.assert_allclose(shard.data, exact, rtol=1e-5, atol=1e-5)
        assert found["n"].dtype == (jnp.float32 if op == "mean" else jnp.int32)


def test_groups_of_near_devices():
    def sizes(n):
        groups = near(jax.devices()[:n])
        assert sorted(member for group in groups for member in group) == [*range(n)]
        return [len(group) for group in groups]

    assert [sizes(n) for n in (1, 2, 3, 4, 6, 8)] == [
        [1], [2], [3], [2, 2], [3, 3], [4, 4],
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FarDevice:
    process_index: int
    slice_index: int = 0


@pytest.mark.parametrize(
    "places, expected",
    [([(0, 0), (1, 0), (0, 0), (1, 0)], ((0, 2), (1, 3))),
     ([(0, 0), (0, 1), (0, 0), (0, 1)], ((0, 2), (1, 3))),
     ([(0, 0), (0, 0), (0, 0), (1, 0)], ((0, 1), (2, 3)))],
)  # fmt: skip
def test_devices_of_one_process_are_near(places, expected):
    assert near([FarDevice(*place) for place in places]) == expected


def test_groups_of_a_hierarchy():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(6, 5)).astype(np.float32)
    for groups in (
        [[0, 1, 2, 3, 4, 5]],
        [[0, 2, 4], [5, 3, 1]],
        [[i] for i in range(6)],
    ):
        strategy = on(6, js.HierarchicalCopyAllReduce(groups=groups))
        out = reduced(strategy, "mean", strategy.per_replica(x))
        assert isinstance(out, js.Mirrored)
        np.testing.assert_allclose(out, x.mean(0), rtol=1e-5)


BAD_GROUPS = [
    [[0, 1], [2]], [[0, 1], [1, 2]], [[0, 1], [2, 4]], [[0, 1]], [], [0, 1, 2, 3],
    "ab", 3, [[0, 1], [2, "x"]], [[0, 1], [2, 3.0]], [[-1, 0], [1, 2]],
]  # fmt: skip


@pytest.mark.parametrize("groups", BAD_GROUPS, ids=str)
def test_groups_that_hold_not_each_replica_once(four, groups):
    words = r"`groups` was .*; groups of one size .* replica from 0 to 3 stands once"
    with pytest.raises(ValueError, match=words):
        on(4, js.HierarchicalCopyAllReduce(groups=groups))
    with pytest.raises(ValueError, match=words):
        reduced(four, "sum", 1.0, groups=groups)


@pytest.mark.parametrize("number", [-1, True, 1.0, "1", None])
@pytest.mark.parametrize("ops", [js.NcclAllReduce, js.HierarchicalCopyAllReduce])
def test_numbers_of_packs_that_make_no_sense(ops, number):
    with pytest.raises(ValueError, match="`num_packs` was .*; the number of packs"):
        ops(number)


@pytest.mark.parametrize("given", [3, "nccl", js.NcclAllReduce, lambda: None])
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


def test_operations_of_ones_own(four):
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


def test_operations_of_ones_own_for_a_whole_tree():
    class Counted(js.CrossDeviceOps):
        def reduce_implementation(self, *_):
            raise AssertionError

        def batch_reduce_implementation(self, op, pairs, options):
            return [sum(value.values) * len(pairs) for value, _ in pairs]

    strategy = on(2, Counted())
    out = strategy.reduce("sum", strategy.per_replica({"a": [1, 2], "b": [3, 4]}))
    assert jax.tree.map(int, out) == {"a": 6, "b": 14}


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

    with pytest.raises(js.NotMirroredError, match="lax.axis_index"):
        strategy.run(step, (x,), options=js.RunOptions(expect_mirrored=True))


def test_ours_are_for_strategies():
    with pytest.raises(TypeError, match="NcclAllReduce cannot be called by itself"):
        js.NcclAllReduce().reduce("sum", None, None)


def test_operations_by_hand(two):
    class Both(InOrder):
        def batch_reduce_implementation(self, op, pairs, options):
            out = super().batch_reduce_implementation(op, pairs, options)
            return [self.broadcast(total, None) for total in out]

    ops = Both()

    def merged(strategy, x):
        return ops.reduce("sum", x, None), ops.batch_reduce("mean", [(x, None)])

    def step(x):
        return replica().merge_call(merged, (x,))

    total, (mean,) = two.run(step, (two.per_replica([1.0, 2.0]),))
    assert (total, mean) == (3, 1.5)


@pytest.mark.parametrize("name", [*ALGORITHMS, "own"])
def test_copies_keep_their_operations(name):
    ops, options = ALGORITHMS.get(name, (InOrder(), None))
    strategy = on(4, ops, options)
    twin = copy.deepcopy(strategy)
    x = strategy.per_replica(np.ones((4, 8), np.float32))

    def step(x):
        return replica().all_reduce("sum", x)

    assert collectives(strategy, step, x) == collectives(twin, step, x)


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


def test_the_default_operations_are_the_platforms():
    for n in (2, 8):
        plan = DefaultOps().plan(Replicas.on(jax.devices()[:n]))
        assert plan.packing == best_on("cpu", n)


# Groups.

PAIRS, ACROSS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("groups", [PAIRS, ACROSS, [[3, 0], [2, 1]]], ids=str)
def test_groups_reduce_among_themselves(four, op, groups):
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    tree = {"x": x, "n": np.arange(8).reshape(4, 2)}
    out = reduced(four, op, four.per_replica(tree), groups=groups)
    for key, value in out.items():
        assert isinstance(value, js.PerReplica)
        for group in groups:
            exact = getattr(np, op)(tree[key][np.array(group)], axis=0)
            for member in group:
                np.testing.assert_allclose(value.values[member], exact, rtol=1e-5)


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


# Sums in groups and across them are proved equal.


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


@pytest.mark.filterwarnings("ignore::jaxstrategy.DoubleReductionWarning")
@pytest.mark.parametrize("name", TWO_LEVELS)
def test_what_two_levels_prove(four, name):
    step, expected = TWO_LEVELS[name]
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    out = four.run(lambda x, s: step(x, s), (four.per_replica(x), jnp.arange(1.0, 5.0)))
    assert set(mirrored(out)) == {expected}


@pytest.mark.filterwarnings("ignore::jaxstrategy.RecompilationWarning")
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


FIRST, SECOND, THIRD = PAIRS, ACROSS, [[0, 3], [2, 1]]
GROUPED = [
    lambda a, b, s: lax.psum(a, AXIS, axis_index_groups=FIRST),
    lambda a, b, s: lax.psum(a, AXIS, axis_index_groups=SECOND),
    lambda a, b, s: lax.pmax(b, AXIS, axis_index_groups=THIRD),
    lambda a, b, s: lax.all_gather(a, AXIS, axis_index_groups=SECOND).sum(0),
    lambda a, b, s: jnp.tile(
        lax.psum_scatter(a, AXIS, axis_index_groups=FIRST, tiled=True), 2),
    lambda a, b, s: jnp.sin(a) + b[::-1],
    lambda a, b, s: a * s,
    lambda a, b, s: jnp.where(a > 0.3, b, s),
    lambda a, b, s: lax.cond(a[0] > 0.2, lambda: b, lambda: s + b),
    lambda a, b, s: jnp.concatenate([a[:2], b[2:]]),
]  # fmt: skip
HOLDERS = [
    lambda f, a, b, s: jax.jit(f)(a, b, s),
    lambda f, a, b, s: lax.cond(s[0] > 0.1, f, lambda a, b, s: b, a, b, s),
    lambda f, a, b, s: jax.jit(
        lambda a, b: lax.fori_loop(0, 3, lambda _, c: (c[1], f(*c, s)), (a, b))[0]
    )(a, b),
    lambda f, a, b, s: lax.scan(lambda c, x: (f(c, x, s), c), a, jnp.stack([b, a]))[0],
    lambda f, a, b, s: lax.while_loop(
        lambda c: c[1][0] < 2.0, lambda c: (c[0] * s + b, c[1] + 1.0), (a, b))[0]
    + f(a, b, s),
    lambda f, a, b, s: through_reference(f(a, b, s), b),
    lambda f, a, b, s: jax.grad(lambda v: jnp.sum(jnp.sin(v) * lax.stop_gradient(
        f(a, b, s))))(a),
]  # fmt: skip
PLACE = st.integers(0, 9)
OPERATION = st.sampled_from(2 * GROUPED[:2] + GROUPED)
LINE = st.tuples(OPERATION, PLACE, PLACE, st.none())
BODY = st.lists(LINE, min_size=1, max_size=3)
NESTED = LINE | st.tuples(st.sampled_from(HOLDERS), PLACE, PLACE, BODY)
PROGRAMS = st.lists(NESTED, min_size=3, max_size=9)


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


@pytest.mark.filterwarnings("ignore::jaxstrategy.DoubleReductionWarning")
@pytest.mark.filterwarnings("ignore::jaxstrategy.RecompilationWarning")
def test_random_programs_in_groups_are_never_wrongly_called_mirrored(four):
    draw = np.random.default_rng(0)
    x = four.per_replica(draw.uniform(-0.5, 1, (4, 4)).astype(np.float32))
    outcomes = []

    def programs(lines):
        try:
            out = four.run(
                lambda x, s: interpreted(lines, x, x[::-1], s),
                (x, jnp.linspace(0.2, 0.8, 4)),
            )
        except js.DivergentCollectiveError:
            return
        outcomes.append(any(mirrored(out)))

    settings(max_examples=25, deadline=None, derandomize=True, database=None)(
        given(PROGRAMS)(programs)
    )()
    assert sum(outcomes) > 5


def test_one_reduced_leaf_of_a_pack_is_warned_of(four):
    def step(x, y):
        total = replica().all_reduce("sum", x)
        return replica().all_reduce("sum", {"new": y, "old": total})

    x = four.per_replica(np.ones((4, 3), np.float32))
    with pytest.warns(js.DoubleReductionWarning, match="reduction already"):
        four.run(step, (x, x))


def test_a_mean_of_a_reduced_leaf_in_a_pack_is_not_warned_of(four):
    def step(x, y):
        total = replica().all_reduce("mean", x)
        return replica().all_reduce("mean", {"new": y, "old": total})

    x = four.per_replica(np.ones((4, 3), np.float32))
    assert mirrored(four.run(step, (x, x))) == [True, True]


def test_operations_that_return_too_few_results_are_an_error():
    class Forgetful(js.CrossDeviceOps):
        def reduce_implementation(self, op, value, destinations, options):
            raise AssertionError("not called")

        def batch_reduce_implementation(self, op, pairs, options):
            return []

    strategy = js.MirroredStrategy(jax.devices()[:2], cross_device_ops=Forgetful())
    with pytest.raises(ValueError, match="Forgetful returned 0 results for 1 values"):
        strategy.reduce("sum", strategy.per_replica([1.0, 2.0]))
