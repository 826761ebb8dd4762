"""Steps of replicas with several devices: numbers and checks are those of one each.

The oracle is NumPy, or the same step with one device for each replica.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import COLUMNS, cored, drawn
from helpers.replicas import ids, replica
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js


@each_of("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_to_say_how_a_value_lies_changes_nothing_of_it(dtype):
    """LOG-2: value, gradient and dtype, bit by bit."""
    strategy = cored()
    x = strategy.per_replica([drawn(4, 6, seed=i).astype(dtype) for i in range(4)])
    w = drawn(4, 6, seed=9).astype(dtype)

    def step(divide, w, x):
        def loss(w):
            y = lax.with_sharding_constraint(w, COLUMNS) if divide else w
            return (jnp.sin(y) * x).astype(jnp.float32).sum()

        y = lax.with_sharding_constraint(x, COLUMNS) if divide else x
        return y * 2, jax.grad(loss)(w)

    with_cores, without = (strategy.run(step, (d, w, x)) for d in (True, False))
    for a, b in zip(jax.tree.leaves(with_cores), jax.tree.leaves(without), strict=True):
        assert a.dtype == b.dtype == dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    gradients = np.stack(with_cores[1].values)
    assert len({each.tobytes() for each in gradients}) == 4  # each replica has its own


@each_of("axis", [0, 1])
def test_each_core_has_its_rows_or_columns(axis):
    """LOG-5: divided into four, core k holds row k, or column k."""
    strategy = cored(2, 4)
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    spec = P("core") if axis == 0 else COLUMNS

    def step(x, i):
        return lax.with_sharding_constraint(x + 0 * i, spec)

    found = strategy.run(step, (x, ids(strategy))).stacked
    for shard in found.addressable_shards:
        core = shard.device.id % 4
        np.testing.assert_array_equal(np.squeeze(shard.data), np.take(x, core, axis))


@each_of("cores", [1, 2])
def test_a_branch_that_replicas_take_differently_is_refused(cores):
    """LOG-23."""
    strategy = cored(4, cores)

    def step(x):
        is_first = lax.axis_index("replica") == 0
        return lax.cond(is_first, lambda x: lax.psum(x, "replica"), lambda x: x, x)

    with pytest.raises(js.errors.DivergentCollectiveError, match="lax.psum"):
        strategy.run(step, (ids(strategy),))


def test_a_branch_that_cores_take_differently_is_no_business_of_replicas():
    """LOG-23: inside a nested `shard_map` over the cores."""
    strategy = cored(4, 2)

    def of_core(x):
        is_first = lax.axis_index("core") == 0
        return lax.cond(is_first, lambda x: x * 2, lambda x: x * 3, x)

    def step(x):
        divided = jax.shard_map(
            of_core,
            in_specs=P("core"),
            out_specs=P("core"),
            axis_names={"core"},
            check_vma=False,
        )
        return replica().all_reduce("sum", divided(x))

    x = strategy.per_replica([drawn(4, seed=i) for i in range(4)])
    total = np.sum(np.stack(x.values), 0)
    np.testing.assert_allclose(
        strategy.run(step, (x,)), total * [2, 2, 3, 3], rtol=1e-5, atol=1e-6
    )


def test_advice_for_a_divided_array_counts_replicas_and_not_devices():
    strategy = cored(4, 2)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(drawn(8, 2), jax.sharding.NamedSharding(mesh, P("x")))
    with pytest.raises(js.errors.PlacementError, match=r"`\[4, \.\.\.\]`, entry i for"):
        strategy.run(lambda x: x, (x,))
