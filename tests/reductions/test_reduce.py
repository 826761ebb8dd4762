"""Reductions and gathers outside of steps, by layout, and of `IndexedSlices`."""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, replica
from jax import lax

import jaxstrategy as js


def squares(strategy):
    base = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    n = strategy.num_replicas_in_sync
    return js.PerReplica(np.stack([base + 10 * i for i in range(n)]))


@each_of("axis, dims", [(None, 0), (0, (0, 1)), ([1], (0, 2)), ((0, -1), (0, 1, 2))])
def test_reduce_gives_numpys_numbers(strategy, axis, dims):
    x = squares(strategy)
    for op in ("sum", "mean", "min", "max"):
        out = strategy.reduce(op.upper(), x, axis)
        expected = getattr(np, op)(np.asarray(x.stacked), axis=dims)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        assert isinstance(out, js.Mirrored)


def test_a_wide_tree_of_rare_and_common_types(two):
    """Those that are rare are not joined: each has a kernel to be cut out."""
    shapes = [(3,)] * 120 + [(k, 2) for k in range(1, 12)]
    draw = np.random.default_rng(0)
    host = [draw.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]
    reduced = two.reduce("sum", [two.per_replica(each) for each in host])
    for found, each in zip(reduced, host, strict=True):
        np.testing.assert_allclose(found, each.sum(0), rtol=1e-5, atol=1e-6)


def test_reduce_of_what_every_replica_holds(strategy):
    n = strategy.num_replicas_in_sync
    mirrored = strategy.run(lambda: jnp.array([1.0, 2.0]))
    for value in (mirrored, np.array([1.0, 2.0]), jnp.array([1.0, 2.0])):
        np.testing.assert_allclose(strategy.reduce("sum", value), [n, 2 * n])
        np.testing.assert_allclose(strategy.reduce("mean", value), [1, 2])
        assert strategy.reduce("sum", value, axis=0) == 3 * n
        assert strategy.reduce("mean", value, axis=0) == 1.5
    assert strategy.reduce("sum", 5.0) == 5.0 * n
    assert strategy.reduce("sum", 0) == 0


def test_reduce_is_the_same_under_jit(four):
    x = ids(four)

    def whole(v, k):
        return four.reduce("sum", v), four.reduce("sum", k), four.reduce("mean", k)

    assert whole(x, 3.0) == jax.jit(whole)(x, 3.0) == (6, 12, 3)


@each_of(
    "axis, error, words",
    [(2, ValueError, "`axis` is 2, out of range for a value with 2 dimensions"),
     (-3, ValueError, "`axis` is -3, out of range"),
     ((0, -2), ValueError, "names one dimension more than once"),
     (0.5, TypeError, "`axis` was 0.5; None, a whole number"),
     (True, TypeError, "`axis` was True")])  # fmt: skip
def test_axes_that_make_no_sense(four, axis, error, words):
    with pytest.raises(error, match=words):
        four.reduce("sum", squares(four), axis)
    with pytest.raises(ValueError, match="every replica's value is a scalar"):
        four.reduce("sum", ids(four), axis=0)


def test_gather(four):
    x = squares(four)
    for axis in (0, 1, -1):
        out = four.gather(x, axis)
        np.testing.assert_array_equal(out, np.concatenate(x.stacked, axis))
        assert isinstance(out, js.Mirrored)
    out = four.gather({"flag": four.per_replica([[True]] * 4), "same": jnp.ones(2)})
    assert out["flag"].tolist() == [True] * 4 and out["same"].tolist() == [1] * 8


def test_local_results_of_mirrored_and_plain_values(four):
    mirrored = four.mirror(2.0)
    results = four.experimental_local_results(mirrored)
    assert [float(v) for v in results] == [2, 2, 2, 2]
    for plain in (3.0, "text", None, np.float32(1.0)):
        assert four.experimental_local_results(plain) == (plain,)
    assert four.experimental_local_results({"a": 1, "b": 2}) == ({"a": 1, "b": 2},) * 4
    assert four.experimental_local_results((1, 2)) == ((1, 2),) * 4
    assert four.experimental_local_results(()) == ((),) * 4


def test_local_results_of_another_strategys_value(two, four):
    with pytest.raises(ValueError, match="PerReplica with 2 versions .* 4 replicas"):
        four.experimental_local_results(ids(two))


def devices(value):
    return sorted(device.id for device in value.devices())


def test_reduce_to_destinations(four):
    x, mirrored = ids(four), four.mirror(0.0)
    on_one = jax.device_put(0.0, jax.devices()[6])
    everywhere = [0, 1, 2, 3]
    for destinations, expected in (
        ("CPU:1", [1]),
        ("/cpu:5", [5]),
        (jax.devices()[2], [2]),
        (["CPU:0", jax.devices()[7]], [0, 7]),
        (x, everywhere),
        (mirrored, everywhere),
        (on_one, [6]),
    ):
        out = four.extended.reduce_to("sum", x, destinations)
        assert (out, devices(out)) == (6, expected)
    assert float(mirrored) == 0.0
    assert isinstance(four.extended.reduce_to("max", x, x), js.Mirrored)


def test_batch_reduce_to(four):
    x = ids(four)
    doubled = four.run(lambda v: 2 * v, (x,))
    out = four.extended.batch_reduce_to("mean", [(x, x), ({"d": doubled}, "CPU:3")])
    assert out[0] == 1.5 and out[1]["d"] == 3.0
    assert devices(out[0]) == [0, 1, 2, 3] and devices(out[1]["d"]) == [3]
    assert four.extended.batch_reduce_to("sum", []) == []


@each_of("pairs", [[1, 2], [(1.0, "CPU:0", 3)], 1.0, [[1.0]]])
def test_pairs_that_are_none(two, pairs):
    with pytest.raises(ValueError, match="should be a tuple of a value and its dest"):
        two.extended.batch_reduce_to("sum", pairs)


@each_of(
    "destinations, error, words",
    [(None, TypeError, "`destinations` was None; a device"),
     (3.5, TypeError, "`destinations` was 3.5"),
     ([], ValueError, "The list of devices is empty"),
     ("CPU:99", ValueError, "Unknown device 'CPU:99'"),
     (["CPU:0", "CPU:0"], ValueError, "No duplicates")])  # fmt: skip
def test_destinations_that_are_none(two, destinations, error, words):
    with pytest.raises(error, match=words):
        two.extended.reduce_to("sum", 1.0, destinations)


def test_reduce_to_takes_communication_options(two):
    options = js.experimental.CommunicationOptions(implementation="ring")
    x = two.per_replica([1.0, 2.0])

    def step(x):
        def merge(strategy, x):
            return strategy.extended.batch_reduce_to("sum", [(x, x)], options)[0]

        return js.get_replica_context().merge_call(merge, (x,))

    kinds = [c.kind for c in two.explain(step, (x,)).collectives]
    assert kinds == ["reduce_scatter", "all_gather"]
    assert float(two.extended.reduce_to("mean", x, x, options)) == 1.5
    with pytest.raises(TypeError, match="a `CommunicationOptions` was wanted"):
        two.extended.reduce_to("mean", x, x, "ring")


# Collectives of replicas that have several devices, or share one; NumPy's numbers.

LAYOUTS = {
    "cores": (8, {"logical_axes": {"core": 2}}),
    "two shared": (2, {"replicas_per_device": 2}),
}
ALL = ["cores", "two shared"]
# Small whole numbers, whose sums each of these holds.
X = np.random.default_rng(0).integers(0, 2, (4, 4, 6))
REAL = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32"]
DTYPES = [*REAL, "complex64"]
GROUPS = [[0, 2], [1, 3]]


def made(layout, **options):
    devices, lie = LAYOUTS[layout]
    return js.MirroredStrategy(jax.devices()[:devices], **lie, **options)


def of(dtype):
    return X.astype(np.float32).astype(jnp.dtype(dtype))


def same(found, wanted, dtype):
    array = np.asarray(found.stacked if isinstance(found, js.PerReplica) else found)
    assert array.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(array.astype(np.complex64), wanted)


@pytest.mark.slow
@each_of("layout", ALL)
def test_collectives_of_every_dtype(layout):
    strategy = made(layout)

    def step(tree):
        def each(x):
            return {
                "sum": lax.psum(x, "replica"),
                "scattered": lax.psum_scatter(x, "replica"),
                "gathered": lax.all_gather(x, "replica"),
                "exchanged": lax.all_to_all(x, "replica", 0, 0),
                "moved": lax.ppermute(
                    x, "replica", [(i, (i + 1) % 4) for i in range(4)]
                ),
                "constant": lax.psum(jnp.full(3, 2, x.dtype), "replica"),
                "loop": lax.scan(
                    lambda c, row: (c + lax.psum(row, "replica"), None),
                    jnp.zeros(6, x.dtype),
                    x,
                )[0],
            }

        return jax.tree.map(each, tree)

    found = strategy.run(step, ({d: strategy.per_replica(of(d)) for d in DTYPES},))
    wanted = {
        "sum": X.sum(0),
        "scattered": X.sum(0),
        "gathered": X,
        "exchanged": X.swapaxes(0, 1),
        "moved": np.roll(X, 1, 0),
        "constant": np.full(3, 8),
        "loop": X.sum((0, 1)),
    }
    for dtype, results in found.items():
        for name, result in results.items():
            same(result, wanted[name], dtype)


@each_of("layout", ALL)
def test_extremes_of_every_dtype(layout):
    strategy = made(layout)
    trees = {d: strategy.per_replica(of(d)) for d in REAL}
    trees["bool"] = strategy.per_replica(X > 0)

    @strategy.run
    def step(tree):
        largest = jax.tree.map(lambda x: lax.pmax(x, "replica"), tree)
        return largest, jax.tree.map(lambda x: lax.pmin(x, "replica"), tree)

    for results, take in zip(step(trees), (np.max, np.min), strict=True):
        for dtype, result in results.items():
            rows = X > 0 if dtype == "bool" else X
            same(result, take(rows, axis=0), dtype)


@each_of("layout", ALL)
def test_reductions_and_gathers_outside_of_steps(layout):
    strategy = made(layout)
    trees = {d: strategy.per_replica(of(d)) for d in DTYPES}
    for dtype, result in strategy.reduce("sum", trees).items():
        same(result, X.sum(0), dtype)
    for dtype, result in strategy.gather(trees).items():
        same(result, X.reshape(-1, 6), dtype)


class Backwards(js.CrossDeviceOps):
    """Operations that a user has written."""

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        versions = per_replica_value.stacked[::-1]
        is_mean = reduce_op == js.ReduceOp.MEAN
        return versions.mean(0) if is_mean else versions.sum(0)


def options(**chosen):
    return {"communication_options": js.experimental.CommunicationOptions(**chosen)}


@pytest.mark.slow
@each_of("layout", ["cores", "two shared"])
@each_of(
    "way",
    [
        {"cross_device_ops": js.NcclAllReduce()},
        {"cross_device_ops": js.HierarchicalCopyAllReduce(groups=GROUPS)},
        {"cross_device_ops": js.ReductionToOneDevice("CPU:1")},
        {"cross_device_ops": Backwards()},
        options(implementation="ring"),
        options(implementation="hierarchical", groups=GROUPS),
        options(implementation="nccl", bytes_per_pack=64, reduce_dtype=jnp.float32),
    ],
)
def test_all_ways_to_reduce_have_one_result(layout, way):
    strategy = made(layout, **way)
    draw = np.random.default_rng(0)
    trees = {
        "wide": draw.normal(size=(4, 300)).astype(np.float32),
        "small": draw.normal(size=(4, 5)).astype(np.float32),
        "number": draw.normal(size=4).astype(np.float32),
        "half": draw.normal(size=(4, 8)).astype(jnp.bfloat16),
    }

    def step(tree):
        context = js.get_replica_context()
        return context.all_reduce("sum", tree), context.all_reduce("mean", tree)

    sums, means = strategy.run(step, (strategy.per_replica(trees),))
    for name, versions in trees.items():
        exact, close = versions.astype(np.float64), 2e-2 if name == "half" else 1e-5
        for found, wanted in ((sums, exact.sum(0)), (means, exact.mean(0))):
            assert found[name].dtype == versions.dtype
            array = np.asarray(found[name]).astype(np.float64)
            np.testing.assert_allclose(array, wanted, rtol=close, atol=close)


def test_a_device_of_each_replica_may_be_where_all_goes():
    ops = js.ReductionToOneDevice("CPU:7")
    strategy = made("cores", cross_device_ops=ops)
    assert strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0])) == 10
    with pytest.raises(ValueError, match="is cpu:3, where no replica is: .* on cpu:0,"):
        made("two shared", cross_device_ops=js.ReductionToOneDevice("CPU:3"))


# `IndexedSlices`: rows of an array, reduced without making it dense.


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


# Arrays without elements, and complex constants, in every reduction.

OF_NOTHING = ["bfloat16", "int8", "complex64"]
SHAPES = [(0,), (0, 3), (3, 0), (2, 0, 3)]


def per_replica(shape, dtype):
    return js.PerReplica(jnp.zeros((4, *shape), dtype))


def mean_dtype(dtype):
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else "float32"


def check(found, shape, dtype):
    assert found.shape == shape and found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), np.zeros(shape, dtype))


@pytest.mark.slow
@each_of("dtype", OF_NOTHING)
def test_nothing_reduces_to_nothing(four, dtype):
    value = {str(shape): per_replica(shape, dtype) for shape in SHAPES}
    for op in ("sum", "mean"):
        result = mean_dtype(dtype) if op == "mean" else dtype
        outside = four.reduce(op, value, axis=None)
        inside = four.run(all_reduced, (op, value))
        for shape in SHAPES:
            check(outside[str(shape)], shape, result)
            check(inside[str(shape)], shape, result)
            assert inside[str(shape)].is_fully_replicated


@pytest.mark.slow
@each_of("dtype", ("bool", "int8", "complex64"))
def test_nothing_joins_to_nothing(four, dtype):
    joined = [
        ((0,), 0, (0,)),
        ((0, 3), 0, (0, 3)),
        ((0, 3), 1, (0, 12)),
        ((3, 0), 0, (12, 0)),
        ((2, 0, 3), -1, (2, 0, 12)),
    ]

    def step(*values):
        gather = js.get_replica_context().all_gather
        return [gather(x, axis) for x, (_, axis, _) in zip(values, joined, strict=True)]

    values = [per_replica(shape, dtype) for shape, _, _ in joined]
    inside = four.run(step, args=tuple(values))
    for value, found, (_, axis, wanted) in zip(values, inside, joined, strict=True):
        check(four.gather(value, axis), wanted, dtype)
        check(found, wanted, dtype)


@each_of("op, how", (("sum", "auto"), ("mean", "ring"), ("sum", "nccl")))
def test_complex_constants_are_reduced(four, op, how):
    options = js.experimental.CommunicationOptions(implementation=how)
    found = four.run(lambda: all_reduced(op, jnp.ones(3, "c8"), options=options))
    np.testing.assert_array_equal(found, np.full(3, 4 if op == "sum" else 1, "c8"))


def test_slices_of_no_rows_are_reduced(four):
    def step(x):
        slices = js.IndexedSlices(x, jnp.zeros((0,), jnp.int32), (5, 2))
        return all_reduced("sum", slices).to_dense()

    found = four.run(step, args=(per_replica((0, 2), "float32"),))
    check(found, (5, 2), "float32")


# A new operation is what `CONTRIBUTING.md` says: a member, and a row of the table.

MEMBER = 'MAX = "MAX"\n'
ROW = "OPERATIONS: Mapping[ReduceOp, ReduceOperation] = {\n"
ADDED = """    ReduceOp.PRODUCT: ReduceOperation(
        jnp.prod,
        lambda x, axes, groups: jnp.prod(
            lax.all_gather(x, axes, axis_index_groups=groups), 0
        ),
    ),
"""
PROGRAM = """
import jax, jaxstrategy as js

for options in ({"replicas_per_device": 1}, {"replicas_per_device": 2}):
    strategy = js.MirroredStrategy(js.simulate(2), **options)
    x = strategy.per_replica([2.0, 3.0, 5.0, 7.0][: strategy.num_replicas_in_sync])

    def step(x):
        reduce = js.get_replica_context().all_reduce
        return reduce("product", x), jax.grad(lambda x: reduce("product", x))(x)

    product, slopes = strategy.run(step, (x,))
    assert isinstance(product, js.Mirrored) and strategy.reduce("product", x) == product
    n, product = strategy.num_replicas_in_sync, float(product)
    assert [float(s) for s in slopes.values] == [
        n * product / float(version) for version in x.values
    ]
    print(product)
"""


@pytest.mark.slow
def test_an_operation_is_added_by_a_member_and_a_row(tmp_path):
    package = Path(js.__file__).parent
    shutil.copytree(package, tmp_path / package.name)
    for file, old, new in (
        ("options.py", MEMBER, f'{MEMBER}    PRODUCT = "PRODUCT"\n'),
        ("reductions/operations.py", ROW, ROW + ADDED),
    ):
        path = tmp_path / package.name / "_src" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["6.0", "210.0"], done.stderr
