"""Small arrays are reduced in packs, and no bit changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.reductions import assert_same_bits, collectives, on, ordered, stacked
from helpers.replicas import replica
from jax import lax

import jaxstrategy as js
from jaxstrategy.experimental import CommunicationOptions


@pytest.mark.slow
def test_packs_change_no_bit():
    packed, plain = on(3, js.NcclAllReduce(3)), on(3, js.NcclAllReduce(0))
    tree = stacked(3)

    def step(tree):
        both = [replica().all_reduce(op, tree) for op in ("sum", "mean")]
        few = ordered(tree)
        return both, [replica().all_reduce(op, few) for op in ("min", "max")]

    out = packed.run(step, (packed.per_replica(tree),))
    assert all(isinstance(leaf, js.Mirrored) for leaf in jax.tree.leaves(out))
    assert_same_bits(out, plain.run(step, (plain.per_replica(tree),)))


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


def test_packs_in_transformed_steps(four):
    rows = np.random.default_rng(0).normal(size=(4, 3, 2)).astype(np.float32)
    x = four.per_replica({"x": rows})["x"]
    total = rows.sum(0)

    def both(v):
        return replica().all_reduce("sum", {"a": v, "b": 2 * v[..., 0]})

    def mapped(x):
        return jax.vmap(both)(x)

    def each_of(x):
        return lax.scan(lambda c, v: (c + both(v)["a"], both(v)), jnp.zeros(2), x)

    for options in (None, CommunicationOptions(implementation="ring")):
        strategy = on(4, options=options)
        out = strategy.run(jax.jit(mapped), (x,))
        np.testing.assert_allclose(out["a"], total, rtol=1e-5)
        np.testing.assert_allclose(out["b"], 2 * total[:, 0], rtol=1e-5)
        carry, rest = strategy.run(each_of, (x,))
        np.testing.assert_allclose(carry, total.sum(0), rtol=1e-5)
        np.testing.assert_allclose(rest["a"], total, rtol=1e-5)


@pytest.mark.slow
def test_packs_of_very_many_arrays(four):
    # Each size many times: XLA is not told where those lie.
    sizes = (64, 24, 3) * 10
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
