"""Splitting a replica's values over its devices changes only where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js


@pytest.fixture(scope="module")
def pairs():
    return js.TPUStrategy(cores_per_replica=2)


@pytest.fixture
def fours():
    return js.TPUStrategy(cores_per_replica=4)


def total(x):
    return js.get_replica_context().all_reduce("sum", x)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tiles_of(array):
    """What each device has of an array, by its id."""
    return {s.device.id: np.asarray(s.data) for s in array.addressable_shards}


def test_values_gradients_and_dtypes_stay(pairs):
    # Products and sums of small whole numbers are exact in whatever order.
    x = np.random.default_rng(0).integers(-8, 8, (4, 4, 6)).astype(np.float32)

    def step(split):
        def step(x):
            def loss(x):
                y = split(3 * x) + jnp.ones_like(x)
                return (y * split(x) ** 2).sum()

            return loss(x), jax.grad(loss)(x), split(x.astype(jnp.bfloat16) * 3)

        return step

    given = (pairs.per_replica(list(x)),)
    plain = pairs.run(step(lambda x: x), given)
    splitting = [
        lambda x: pairs.experimental_split_to_logical_devices(x, [1, 2]),
        lambda x: pairs.experimental_split_to_logical_devices(x, [2, 1]),
        pairs.experimental_replicate_to_logical_devices,
    ]
    for split in splitting:
        found = pairs.run(step(split), given)
        for one, other in zip(found, plain, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(
                one.stacked.astype(np.float32), other.stacked.astype(np.float32)
            )
    np.testing.assert_array_equal(plain[0].stacked, (3 * x**3 + x**2).sum((1, 2)))
    np.testing.assert_array_equal(plain[1].stacked, 9 * x**2 + 2 * x)
    np.testing.assert_array_equal(plain[2].stacked, 3 * x)


@each_of(
    ("splits", "text"),
    [
        ([2], "Length of `partition_dimensions` must equal.*it was .2., and the shape"),
        ([2, 2], r"Dimension 0 of `tensor` must be divisible.*\(3, 4\)"),
        ([1, 4], r"product of `partition_dimensions` must be.* 2: it was \[1, 4\]"),
        ([1, 1], "the product 1"),
        ([0, 2], "a dimension has 1 part or more"),
    ],
)
def test_splits_that_cannot_be_are_refused(pairs, splits, text):
    x = numbers(3, 4)
    split = pairs.experimental_split_to_logical_devices
    for value in (x, pairs.per_replica(np.stack([x] * 4))):
        with pytest.raises(ValueError, match=text):
            split(value, splits)
        with pytest.raises(ValueError, match=text):
            pairs.run(lambda x: split(x, splits), (value,))


def test_splits_that_are_no_numbers_are_refused(pairs):
    for splits in (2, [1.0, 2], None):
        with pytest.raises(TypeError, match="`partition_dimensions` was .*; a list of"):
            pairs.experimental_split_to_logical_devices(numbers(3, 4), splits)
    with pytest.raises(TypeError, match="tensor"):
        pairs.experimental_split_to_logical_devices("text", [2])
    with pytest.raises(TypeError, match="tensor"):
        pairs.experimental_replicate_to_logical_devices({"a": 1.0})


@each_of(
    ("splits", "tile"),
    [
        ([4, 1], lambda x, core: x[core : core + 1]),
        ([1, 4], lambda x, core: x[:, core : core + 1]),
        ([2, 2], lambda x, core: x[core // 2 * 2 :][:2, core % 2 * 2 :][:, :2]),
    ],
    anew=True,
)
def test_tiles_lie_in_row_major_order(fours, splits, tile):
    x = numbers(4, 4)
    split = fours.experimental_split_to_logical_devices
    for device, data in tiles_of(split(x, splits)).items():
        np.testing.assert_array_equal(data, tile(x, device % 4))
    versions = np.stack([x, 2 * x])
    outside = split(fours.per_replica(versions), splits)
    in_step = fours.run(lambda x: split(x * 1, splits), (fours.per_replica(versions),))
    for found in (outside, in_step):
        for device, data in tiles_of(found.stacked).items():
            wanted = tile(versions[device // 4], device % 4)
            np.testing.assert_array_equal(data[0], wanted)


def test_a_batch_keeps_its_mask(pairs):
    (batch,) = pairs.experimental_distribute_dataset(js.batches(numbers(6, 4), 8))
    split = pairs.experimental_split_to_logical_devices(batch, [1, 2])
    np.testing.assert_array_equal(split.mask, batch.mask)
    np.testing.assert_array_equal(split.stacked, batch.stacked)


def test_splitting_in_loops_branches_and_transformations(pairs):
    split = pairs.experimental_split_to_logical_devices

    def step(x):
        def turn(carry, _):
            carry = split(carry + 1, [2, 1])
            return carry, total(carry)

        carried, sums = jax.lax.scan(jax.checkpoint(turn), x, None, length=2)
        branch = jax.lax.cond(
            total(x).sum() > 0, lambda x: split(2 * x, [1, 2]), lambda x: x, x
        )
        rows = jax.vmap(lambda row: split(row, [2]) - 1)(x)
        inner = jax.jit(lambda x: split(x, [1, 2]) * 3)(x)
        return {"scan": carried, "cond": branch, "vmap": rows, "jit": inner}, sums

    x = np.arange(96, dtype=np.float32).reshape(4, 4, 6)
    found, sums = pairs.run(step, (pairs.per_replica(x),))
    wanted = {"scan": x + 2, "cond": 2 * x, "vmap": x - 1, "jit": 3 * x}
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name].stacked, value, name)
    np.testing.assert_array_equal(sums, [(x + 1).sum(0), (x + 2).sum(0)])
