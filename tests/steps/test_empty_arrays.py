"""Arrays without elements, and complex constants, in every reduction.

XLA ends the process while it compiles some of them: a test that fails here may take
pytest with it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

DTYPES = ["bfloat16", "int8", "complex64"]
SHAPES = [(0,), (0, 3), (3, 0), (2, 0, 3)]


@pytest.fixture
def strategy():
    return js.MirroredStrategy(jax.devices()[:4])


def per_replica(shape, dtype):
    return js.PerReplica(jnp.zeros((4, *shape), dtype))


def mean_dtype(dtype):
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else "float32"


def all_reduced(strategy, op, value):
    return strategy.run(
        lambda x: js.get_replica_context().all_reduce(op, x), args=(value,)
    )


def check(found, shape, dtype):
    assert found.shape == shape and found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found), np.zeros(shape, dtype))


@pytest.mark.slow
@each_of("dtype", DTYPES)
def test_nothing_reduces_to_nothing(strategy, dtype):
    value = {str(shape): per_replica(shape, dtype) for shape in SHAPES}
    for op in ("sum", "mean"):
        result = mean_dtype(dtype) if op == "mean" else dtype
        outside = strategy.reduce(op, value, axis=None)
        inside = all_reduced(strategy, op, value)
        for shape in SHAPES:
            check(outside[str(shape)], shape, result)
            check(inside[str(shape)], shape, result)
            assert inside[str(shape)].is_fully_replicated


@pytest.mark.slow
@each_of("dtype", ("bool", "int8", "complex64"))
def test_nothing_joins_to_nothing(strategy, dtype):
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
    inside = strategy.run(step, args=tuple(values))
    for value, found, (_, axis, wanted) in zip(values, inside, joined, strict=True):
        check(strategy.gather(value, axis), wanted, dtype)
        check(found, wanted, dtype)


IMPLEMENTATIONS = {
    "default": None,
    "ring": js.experimental.CommunicationImplementation.RING,
    "direct": js.experimental.CommunicationImplementation.NCCL,
}


@each_of("op, how", (("sum", "default"), ("mean", "ring"), ("sum", "direct")))
def test_complex_constants_are_reduced(strategy, op, how):
    options = None
    if IMPLEMENTATIONS[how] is not None:
        options = js.experimental.CommunicationOptions(
            implementation=IMPLEMENTATIONS[how]
        )

    def step(x):
        ones = jnp.ones(3, jnp.complex64)
        reduced = js.get_replica_context().all_reduce(op, ones, options=options)
        return reduced, x

    found, _ = strategy.run(step, args=(js.PerReplica(jnp.ones(4)),))
    np.testing.assert_array_equal(found, np.full(3, 4 if op == "sum" else 1, "c8"))


def test_slices_of_no_rows_are_reduced(strategy):
    def step(x):
        slices = js.IndexedSlices(x, jnp.zeros((0,), jnp.int32), (5, 2))
        return js.get_replica_context().all_reduce("sum", slices).to_dense()

    found = strategy.run(step, args=(per_replica((0, 2), "float32"),))
    check(found, (5, 2), "float32")
