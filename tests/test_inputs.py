"""A dataset of global batches, divided over the replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js


def versions(value):
    return [np.asarray(v).tolist() for v in value.values]


def test_batches_are_divided_in_order(four):
    batches = [np.arange(8), np.arange(8, 16)]
    out = list(four.experimental_distribute_dataset(batches))
    assert [versions(batch) for batch in out] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
    ]


def test_batches_are_pytrees_and_lie_on_the_replicas(strategy):
    n = strategy.num_replicas_in_sync
    batch = {
        "image": np.arange(2 * n * 3.0).reshape(2 * n, 3),
        "label": (jnp.arange(n),),
        "flag": np.arange(n) % 2 == 0,
    }
    (out,) = strategy.experimental_distribute_dataset([batch])
    assert (out["image"].shape, out["image"].dtype) == ((2, 3), jnp.float32)
    assert out["label"][0].shape == (1,)
    assert out["flag"].dtype == jnp.bool_
    assert [v.devices() for v in out["image"].values] == [
        {device} for device in strategy.devices
    ]
    total = strategy.run(
        lambda b: js.get_replica_context().all_reduce("sum", b["image"].sum()), (out,)
    )
    assert total == batch["image"].sum()


def test_a_list_can_be_iterated_again_and_a_generator_once(two):
    dataset = two.experimental_distribute_dataset([np.arange(2)] * 3)
    assert [len(list(dataset)), len(list(dataset))] == [3, 3]
    once = two.experimental_distribute_dataset(np.arange(2) for _ in range(3))
    assert [len(list(once)), len(list(once))] == [3, 0]
    assert repr(dataset) == "DistributedDataset(list)"


def test_nothing_is_read_ahead_of_its_turn(two):
    read = []

    def source():
        for i in range(3):
            read.append(i)
            yield np.array([i, i])

    iterator = iter(two.experimental_distribute_dataset(source()))
    assert read == []
    assert versions(next(iterator)) == [[0], [0]]
    assert read == [0]
    assert iter(iterator) is iterator
    next(iterator), next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_indivisible_batch(four):
    batches = [{"x": np.zeros((8, 2))}, {"x": np.zeros((6, 2))}]
    iterator = iter(four.experimental_distribute_dataset(batches))
    next(iterator)
    words = r"`batch\['x'\]` has 6 rows, which 4 replicas cannot share.*such as 4"
    with pytest.raises(ValueError, match=words):
        next(iterator)


@pytest.mark.parametrize(
    "batch, error, words",
    [(np.float32(1.0), ValueError, "`batch` is a scalar"),
     ({"n": 3}, ValueError, r"`batch\['n'\]` is a scalar"),
     ([np.array(["a", "b"])], TypeError, r"`batch\[0\]` is array.*not an array or a"),
     ("text", TypeError, "`batch` is 'text', which is not an array")],
)  # fmt: skip
def test_batches_that_cannot_be_divided(two, batch, error, words):
    with pytest.raises(error, match=words):
        next(iter(two.experimental_distribute_dataset([batch])))


def test_a_batch_that_is_divided_already(two):
    x = two.per_replica([1, 2])
    with pytest.raises(TypeError, match="is already a PerReplica"):
        next(iter(two.experimental_distribute_dataset([{"x": x}])))


def test_what_is_no_dataset(two):
    with pytest.raises(TypeError, match="`dataset` is 3, which cannot be iterated"):
        two.experimental_distribute_dataset(3)


def test_a_batch_from_one_device_is_spread_out(two):
    x = jax.device_put(jnp.arange(4.0), jax.devices()[5])
    (out,) = two.experimental_distribute_dataset([x])
    assert versions(out) == [[0, 1], [2, 3]]
    assert [v.devices() for v in out.values] == [{d} for d in two.devices]
