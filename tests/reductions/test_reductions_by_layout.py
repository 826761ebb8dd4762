"""Collectives of replicas that have several devices, or share one; NumPy's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

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


@pytest.fixture(params=["cores", "two shared"])
def laid_out(request):
    return made(request.param)


@pytest.fixture
def cores():
    return made("cores")


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


def test_a_device_of_each_replica_may_be_where_all_goes(cores):
    ops = js.ReductionToOneDevice("CPU:7")
    strategy = made("cores", cross_device_ops=ops)
    assert strategy.reduce("sum", strategy.per_replica([1.0, 2.0, 3.0, 4.0])) == 10
    with pytest.raises(ValueError, match="is cpu:3, where no replica is: .* on cpu:0,"):
        made("two shared", cross_device_ops=js.ReductionToOneDevice("CPU:3"))


@pytest.mark.slow
def test_gradients_from_outside_of_steps_of_sixteen_bits(laid_out):
    x = laid_out.per_replica(of("bfloat16")[:, 0])
    w = jnp.ones(6, jnp.bfloat16)

    def summed(w, x):
        return lax.psum((w * x).sum(), "replica")

    def gathered(w, x):
        return lax.all_gather(w * x, "replica").sum()

    def loss(step, w):
        return laid_out.run(step, (w, x)).astype(jnp.float32)

    total = X[:, 0].sum(0)
    for step in (summed, gathered):
        for gradient in (
            jax.grad(loss, 1),
            jax.jit(jax.grad(loss, 1), static_argnums=0),
        ):
            same(gradient(step, w), total, "bfloat16")


def test_sums_over_the_devices_of_a_replica(cores):
    def step(x):
        inside = jax.shard_map(
            lambda half: lax.psum(half, "core"),
            in_specs=P("core"),
            out_specs=P(),
            axis_names={"core"},
            check_vma=False,
        )
        return lax.psum(inside(x), "replica")

    for dtype in ("bfloat16", "float32"):
        found = cores.run(step, (cores.per_replica(of(dtype)),))
        same(found, X.sum(0).reshape(2, 2, 6).sum(0), dtype)
