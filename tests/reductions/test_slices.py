"""`IndexedSlices`: rows of an array, reduced without making it dense."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import replica

import jaxstrategy as js


def all_reduced(op, value, **options):
    return replica().all_reduce(op, value, **options)


def documented(i):
    """Rows 0 and i, of 5; TensorFlow's documented example."""
    values = (i + 1.0) * jnp.array([[1.0, 2.0], [3.0, 4.0]])
    return js.IndexedSlices(values, jnp.stack([0 * i, i]).astype(int), (5, 2))


def test_tensorflows_numbers(four):
    ids = four.per_replica([0, 1, 2, 3])
    out = four.run(lambda i: all_reduced("sum", documented(i)), (ids,))
    expected = np.array([[13, 24], [6, 8], [9, 12], [12, 16], [0, 0]])
    assert isinstance(out, js.IndexedSlices)
    assert out.values.shape == (8, 2)
    assert out.indices.tolist() == [0, 0, 0, 1, 0, 2, 0, 3]
    assert (out.to_dense().tolist(), out.dense_shape) == (expected.tolist(), (5, 2))
    assert isinstance(out.values, js.Mirrored) and isinstance(out.indices, js.Mirrored)
    mean = four.run(lambda i: all_reduced("mean", documented(i)), (ids,))
    assert mean.to_dense().tolist() == (expected / 4).tolist()


@pytest.mark.slow
@each_of("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_slices_reduce_like_their_dense_forms(four, dtype):
    draw = np.random.default_rng(0)
    values = draw.integers(-9, 9, (4, 6, 3)).astype(dtype)
    indices = draw.integers(0, 7, (4, 6))  # with repetitions
    slices = js.IndexedSlices(*four.per_replica((values, indices)), (7, 3))

    @four.run
    def step(slices):
        pair = slices, slices.to_dense()
        return {op: [all_reduced(op, each) for each in pair] for op in ("sum", "mean")}

    for op, (sparse, dense) in step(slices).items():
        is_wide = (op, dtype) == ("mean", np.int32)
        assert sparse.dtype == dense.dtype == (jnp.float32 if is_wide else dtype)
        rtol = 5e-2 if dtype == jnp.bfloat16 else 1e-6
        found, exact = np.float32(sparse.to_dense()), np.float32(dense)
        np.testing.assert_allclose(found, exact, rtol=rtol, atol=rtol)


@each_of("ops", [js.NcclAllReduce(2), js.HierarchicalCopyAllReduce(),
            js.ReductionToOneDevice()])  # fmt: skip
def test_slices_with_other_operations(ops):
    four = js.MirroredStrategy(jax.devices()[:4], ops)
    ids = four.per_replica([0, 1, 2, 3])
    out = four.run(lambda i: all_reduced("sum", (documented(i), i)), (ids,))
    assert out[0].to_dense()[0].tolist() == [13, 24] and out[1] == 6


def test_gradients_go_through_the_reduction(four):
    x = four.per_replica([1.0, 2.0, 3.0, 4.0])

    def step(x):
        def loss(x):
            slices = js.IndexedSlices(x[None, None], jnp.array([1]), (3, 1))
            return all_reduced("sum", slices).to_dense()[1, 0] ** 2

        return jax.grad(loss)(x)

    assert four.run(step, (x,)).stacked.tolist() == [80, 80, 80, 80]  # 4 * 2 * 10


def test_a_large_embedding_moves_little():
    rows, touched, units, n = 1_000_000, 512, 64, 8
    strategy = js.MirroredStrategy(jax.devices()[:n])

    def sparse(table, tokens):
        gradient = jax.grad(lambda rows: jnp.sum(rows**2))(table[tokens])
        slices = js.IndexedSlices(gradient, tokens, table.shape)
        return all_reduced("mean", slices).added_to(table)

    table = jax.ShapeDtypeStruct((rows, units), jnp.float32)
    tokens = js.PerReplica(jax.ShapeDtypeStruct((n, touched), jnp.int32))
    found = strategy.explain(sparse, (table, tokens))
    assert found.communicated_bytes == touched * (4 * units + 4)  # 130 KiB
    assert {each.operation for each in found.collectives} == {"all_gather"}
    assert not found.per_replica
    dense = strategy.explain(
        lambda table: all_reduced("sum", table), (table,), compiled=False
    )
    assert dense.communicated_bytes == rows * units * 4


def test_to_dense_adds_repeated_rows():
    slices = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 0]), [3, 2])
    assert slices.to_dense().tolist() == [[1, 1], [2, 2], [0, 0]]
    assert (slices.dtype, slices.shape) == (jnp.float32, (3, 2))
    assert slices.added_to(jnp.ones((3, 2))).tolist() == [[2, 2], [3, 3], [1, 1]]
    flat = js.IndexedSlices(np.float16([1, 2]), np.array([0, 0]), (2,))
    assert flat.to_dense().tolist() == [3, 0] and flat.to_dense().dtype == jnp.float16


def test_slices_are_a_pytree():
    slices = js.IndexedSlices(jnp.ones((3, 2)), jnp.array([1, 1, 0]), (3, 2))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, slices)
    assert doubled.indices.tolist() == [2, 2, 0] and doubled.dense_shape == (3, 2)
    assert jax.jit(lambda s: s.to_dense())(slices).sum() == 6
    assert jax.eval_shape(lambda s: s, slices).values.shape == (3, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        slices.values = 0


@pytest.mark.slow
def test_slices_in_transformed_functions():
    def sliced(x):
        return js.IndexedSlices(x[None], jnp.array([1]), (3, 2))

    x = jnp.arange(8.0).reshape(4, 2)
    many = jax.vmap(sliced)(x)
    assert many.values.shape == (4, 1, 2) and many.indices.shape == (4, 1)
    each_of = jax.lax.scan(lambda c, x: (c, sliced(x)), 0, x)[1]
    for stacked in (many, each_of, jax.tree.map(lambda *v: jnp.stack(v), many, many)):
        assert isinstance(stacked, js.IndexedSlices)
    dense = jax.vmap(js.IndexedSlices.to_dense)(many)
    np.testing.assert_array_equal(dense[:, 1], x)
    gradient = jax.grad(lambda s: jnp.sum(s.to_dense() ** 2), allow_int=True)(
        sliced(x[1])
    )
    assert gradient.values.tolist() == [[4, 6]]


def test_an_unknown_shape():
    slices = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))
    assert slices.shape is None
    with pytest.raises(ValueError, match="no `dense_shape`, so it is not known how"):
        slices.to_dense()
    assert slices.added_to(jnp.zeros((2, 2))).tolist() == [[1, 1], [0, 0]]


@each_of(
    "values, indices, shape",
    [((2, 3), (3,), None), ((2, 3), (2, 1), None), ((), (), None), ((2,), (), None),
     ((2, 3), (2,), (5, 4)), ((2, 3), (2,), (5,)), ((2, 3), (2,), ())])  # fmt: skip
def test_shapes_that_do_not_fit(values, indices, shape):
    with pytest.raises(ValueError, match="`IndexedSlices` was given values of shape"):
        js.IndexedSlices(jnp.ones(values), jnp.ones(indices, int), shape)


def test_reductions_that_are_not_defined(four):
    ids = four.per_replica([0, 1, 2, 3])
    for op in ("min", "max"):
        with pytest.raises(ValueError, match=f"{op.upper()} of IndexedSlices is not d"):
            four.run(lambda i, op=op: all_reduced(op, documented(i)), (ids,))
    with pytest.raises(ValueError, match="`groups` was given for IndexedSlices"):
        four.run(
            lambda i: all_reduced("sum", documented(i), groups=[[0, 1], [2, 3]]), (ids,)
        )
    slices = four.run(documented, (ids,))
    with pytest.raises(TypeError, match="IndexedSlices cannot be reduced along an"):
        four.reduce("sum", slices, axis=0)
    flags = js.IndexedSlices(jnp.array([True]), jnp.array([0]))
    with pytest.raises(TypeError, match="SUM of a bool array"):
        four.reduce("sum", flags)
    with pytest.raises(TypeError, match="MEAN of"):
        four.reduce("mean", js.IndexedSlices("rows", jnp.array([0])))
