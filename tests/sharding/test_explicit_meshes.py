"""Arrays whose types say how they lie on a mesh, as of `jax.make_mesh`, in `run`."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxstrategy as js

X = np.arange(16, dtype=np.float32).reshape(8, 2)
W = np.array([1.0, 10.0], np.float32)
# Of each row of X: its product with W.
ROWS = X[:, 0] + 10 * X[:, 1]


@pytest.fixture(scope="module")
def strategy():
    return js.MirroredStrategy()


@pytest.fixture(scope="module")
def arrays():
    """Rows that are divided over a mesh, and weights that are whole on it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(X, NamedSharding(mesh, P("data")))
    return rows, jax.device_put(W, NamedSharding(mesh, P()))


def product(x, w):
    return (x * w).sum()


def test_they_are_arguments(strategy, arrays):
    divided = js.MirroredStrategy(sharding=js.StateSharding("state", min_bytes=0))
    for each in (strategy, divided):

        def products(x, w, each=each):
            return each.run(product, args=(js.PerReplica(x), w))

        np.testing.assert_array_equal(jax.jit(products)(*arrays).stacked, ROWS)
        np.testing.assert_array_equal(products(*arrays).stacked, ROWS)


def test_gradients_lie_as_what_they_are_of(strategy, arrays):
    rows, weights = arrays

    def total(w, x):
        products = strategy.run(product, args=(js.PerReplica(x), w))
        return strategy.reduce("sum", products)

    by_weights, by_rows = jax.grad(total, argnums=(0, 1))(weights, rows)
    np.testing.assert_array_equal(by_weights, X.sum(0))
    np.testing.assert_array_equal(by_rows, np.tile(W, (8, 1)))
    assert by_rows.sharding.is_equivalent_to(rows.sharding, 2)
