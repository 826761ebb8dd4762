"""Small arrays are reduced in packs, and no bit changes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import slow
from helpers.reductions import (
    OPS,
    assert_same_bits,
    collectives,
    on,
    ordered,
    reduced,
    stacked,
)
from helpers.replicas import replica
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions
from jaxstrategy.reductions._packing import NumberOfPacks, Packing, best_on, in_packs

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


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_joined_arrays_of_any_size_come_back(dtype):
    """Short ones lie along the columns of a table if there are many; see `_ROWS`."""
    sizes = [24, 64, 65, 3, 8, 256, 72, 1, 128, 16] * 7
    given = [(np.arange(size) % 100 + i).astype(dtype) for i, size in enumerate(sizes)]
    seen = []

    def added(pack):
        seen.append(pack.shape)
        return pack + 1

    arrays = [jnp.asarray(x.reshape(-1, 1, 2) if x.size % 2 == 0 else x) for x in given]
    done = in_packs(added, arrays, NumberOfPacks(2))
    assert len(seen) == 2 and sum(size for (size,) in seen) == sum(sizes)
    for x, array, result in zip(given, arrays, done, strict=True):
        assert result.dtype == dtype and result.shape == array.shape
        np.testing.assert_array_equal(np.ravel(result), x + dtype(1))


def test_there_are_defaults_everywhere():
    for n in (2, 3, 5, 8, 1000):
        packing = best_on("cpu", n)
        assert 0 < packing.largest <= packing.pack
    assert best_on("cpu", 1).buckets([1, 2, 3]) == [[0], [1], [2]]
    for n in (1, 2, 8):
        for platform in ("gpu", "tpu", "another"):  # where XLA joins
            assert best_on(platform, n).buckets([1, 2, 3]) == [[0], [1], [2]]


# What comes out of packs.

PACKINGS = {
    "default": on,
    "one": partial(on, ops=js.NcclAllReduce()),
    "three": partial(on, ops=js.NcclAllReduce(3)),
    "64 bytes": partial(on, options=CommunicationOptions(bytes_per_pack=64)),
}


@pytest.mark.parametrize("name", ["default", "three", *slow("one", "64 bytes")])
@pytest.mark.parametrize("n", [3, pytest.param(8, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("different", [range(1, 6), (64, 24, 3)])
@pytest.mark.parametrize("number", [30, *slow(100)])
def test_packs_of_very_many_arrays(four, number, different):
    # Each many times: XLA is not told where those lie.
    sizes = [different[i % len(different)] for i in range(number)]
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


def _kernels(text):
    """The different fused computations of a compiled program, without names."""
    found = set()
    for computation in text.split("\n\n"):
        first, *lines = computation.split("\n")
        if first.startswith("%") and "fus" in first.split(" ")[0]:
            plain = re.sub(r", metadata=\{[^}]*\}", "", "\n".join(lines))
            found.add(re.sub(r"%[\w.\-]+", "%x", plain))
    return found


def test_parts_of_one_size_are_cut_by_one_kernel(four):
    def kernels(number):
        shapes = [(4, 8, 8), (4, 8)] * number
        tree = four.per_replica(tuple(np.ones(shape, np.float32) for shape in shapes))

        def step(tree):
            means = replica().all_reduce("mean", tree)
            return [2 * mean + 1 for mean in means]

        whole = jax.jit(lambda tree: four.run(step, (tree,)))
        return _kernels(whole.lower(tree).compile().as_text())

    few, many = kernels(6), kernels(12)
    assert len(few) < 6  # not one for each array
    assert len(many) == len(few)
