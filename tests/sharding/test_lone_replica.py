"""A single replica of several devices computes what a single device does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope="module")
def lone():
    return js.MirroredStrategy(jax.devices(), logical_axes={"core": 8})


def each_collective(x):
    """All that a replica can do with the others, over an operand that is divided."""
    name = "replica"
    x = lax.with_sharding_constraint(x, P(None, "core"))
    return {
        "sum": lax.psum(x, name),
        "bfloat16": lax.psum(x.astype(jnp.bfloat16), name),
        "bool": lax.psum(x > 3, name),
        "mean": lax.pmean(x, name),
        "largest": lax.pmax(x, name),
        "smallest": lax.pmin(x, name),
        "gathered": lax.all_gather(x, name),
        "second": lax.all_gather(x, name, axis=1),
        "tiled": lax.all_gather(x, name, tiled=True),
        "scattered": lax.psum_scatter(x[None], name),
        "scattered tiled": lax.psum_scatter(x, name, tiled=True),
        "own": lax.ppermute(x, name, [(0, 0)]),
        "nobody's": lax.ppermute(x, name, []),
        "exchanged": lax.all_to_all(x[None], name, 0, 1),
        "exchanged tiled": lax.all_to_all(x, name, 0, 1, tiled=True),
        "index": lax.axis_index(name),
        "grouped": lax.psum(x, name, axis_index_groups=[[0]]),
    }


def test_each_collective_of_one_replica(lone):
    found = jax.tree.map(np.asarray, lone.run(each_collective, (X,)))
    wanted = dict.fromkeys(found, X)
    wanted |= {
        "bool": (X > 3).astype(int),
        "gathered": X[None],
        "second": X[:, None],
        "nobody's": np.zeros_like(X),
        "exchanged": X[:, None],
        "index": np.asarray(0),
    }
    for what, value in wanted.items():
        assert found[what].shape == value.shape, what
        np.testing.assert_array_equal(found[what].astype(value.dtype), value, what)
    assert found["bfloat16"].dtype == jnp.bfloat16


def test_sums_in_loops_and_gradients(lone):
    name = "replica"

    def step(w, x):
        def loss(w):
            y = lax.with_sharding_constraint(x @ w, P(None, "core"))
            return lax.pmean((y**2).mean(), name)

        def turn(w, _):
            grad = js.get_replica_context().all_reduce("mean", jax.grad(loss)(w))
            return w - 0.01 * grad, lax.psum(w.sum(), name)

        return lax.scan(turn, w, None, length=3)

    w = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    found, sums = lone.run(step, (w, X / 10))
    for i in range(3):
        np.testing.assert_allclose(sums[i], w.sum(), rtol=1e-5, atol=1e-6)
        w = w - 0.01 * (2 / 32) * (X / 10).T @ ((X / 10) @ w)
    np.testing.assert_allclose(found, w, rtol=1e-5, atol=1e-6)


def test_methods_outside_of_steps(lone):
    x = lone.per_replica(X[None])
    np.testing.assert_array_equal(lone.reduce("sum", x), X)
    np.testing.assert_array_equal(lone.gather(x, 0), X)
    (local,) = lone.experimental_local_results(x)
    np.testing.assert_array_equal(local, X)
