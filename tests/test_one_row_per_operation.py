"""What distinguishes the reduce operations stands in one table."""

import enum
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxstrategy as js
from jaxstrategy.reductions._reduce_operations import OPERATIONS, ReduceOperation

PACKAGE = Path(js.__file__).parent
BRANCH = re.compile(r"(?:\bis |\bis not |[!=]= |\bin \(|\bcase )ReduceOp\.")


def test_each_operation_has_a_row():
    assert list(OPERATIONS) == list(js.ReduceOp)


def test_nobody_else_tells_operations_apart():
    branches = [
        f"{path.name}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if BRANCH.search(line) and ">>>" not in line
    ]
    assert not branches


def test_a_branch_would_be_found():
    for line in ("if op is ReduceOp.SUM:", "op in (ReduceOp.MIN, ReduceOp.MAX)"):
        assert BRANCH.search(line)
    assert not BRANCH.search("replica.all_reduce(ReduceOp.MIN, finite)")


class Other(enum.Enum):
    FARTHEST = "FARTHEST"


def _farthest_here(array, dimensions):
    largest, smallest = jnp.max(array, dimensions), jnp.min(array, dimensions)
    return jnp.where(largest >= -smallest, largest, smallest)


def _farthest(array, axes, axis_index_groups):
    groups = {"axis_index_groups": axis_index_groups}
    largest, smallest = lax.pmax(array, axes, **groups), lax.pmin(array, axes, **groups)
    return jnp.where(largest >= -smallest, largest, smallest)


def test_a_row_is_all_that_an_operation_needs(monkeypatch):
    row = ReduceOperation(_farthest_here, _farthest, takes_complex=False)
    monkeypatch.setitem(OPERATIONS, Other.FARTHEST, row)
    strategy = js.MirroredStrategy(jax.devices()[:3])
    versions = np.float32([[1, 5, -9], [-3, 2, 4], [2, -7, 8]])
    farthest = np.float32([-3, -7, -9])

    def step(x):
        def loss(x):
            (found,) = strategy.reduction.reduce_leaves(Other.FARTHEST, [x])
            return found.sum(), found

        return jax.grad(loss, has_aux=True)(x)

    gradient, found = strategy.run(step, (strategy.per_replica(versions),))
    np.testing.assert_array_equal(found, farthest)
    # Each of three replicas sends 1 to the one that holds it.
    np.testing.assert_array_equal(gradient.stacked, 3.0 * (versions == farthest))
    merged = strategy._values.reduced(
        Other.FARTHEST, strategy.per_replica(versions), 0, None, None, in_step=False
    )
    assert merged == -9
    with pytest.raises(TypeError, match="FARTHEST of a complex64 array"):
        strategy.run(
            lambda: strategy.reduction.reduce_leaves(Other.FARTHEST, [jnp.ones(2) * 1j])
        )
