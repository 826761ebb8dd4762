"""Datasets divided over replicas: rows, remainders, options, functions, bad batches."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import cored, drawn
from helpers.inputs import AT_ONCE, PER_REPLICA, each_way, ranged, real, ways
from helpers.replicas import mirrored
from hypothesis import given, settings

import jaxstrategy as js


def divided(n, batches, options=AT_ONCE):
    dataset = mirrored(n).experimental_distribute_dataset(batches, options)
    return [real(batch) for batch in dataset]


def test_rows_that_are_missing_are_copies_of_the_last(four):
    _, batch = four.experimental_distribute_dataset(ranged(10, 8))
    assert batch.stacked.tolist() == [[8, 9], [9, 9], [9, 9], [9, 9]]
    assert batch.mask.tolist() == [[True, True]] + [[False, False]] * 3


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 60), size=st.integers(1, 20), n=st.sampled_from([1, 2, 4, 8])
)
def test_any_division_is_that_of_a_plain_loop(rows, size, n):
    found = divided(n, ranged(rows, size))
    each = -(-min(size, rows) // n)
    wanted = []
    for start in range(0, rows, size):
        batch = list(range(start, min(start + size, rows)))
        wanted.append([batch[i * each : (i + 1) * each] for i in range(n)])
    assert found == wanted


def test_batches_are_pytrees_and_lie_on_the_replicas(strategy):
    n = strategy.num_replicas_in_sync
    batch = {
        "image": np.arange(2 * n * 3.0).reshape(2 * n, 3),
        "label": (jnp.arange(2 * n),),
        "flag": np.arange(2 * n) % 2 == 0,
    }
    (out,) = strategy.experimental_distribute_dataset([batch])
    assert (out["image"].shape, out["image"].dtype) == ((2, 3), jnp.float32)
    assert out["label"][0].shape == (2,)
    assert out["flag"].dtype == jnp.bool_
    image = out["image"]
    assert [v.devices() for v in (image.values if n > 1 else [image])] == [
        {device} for device in strategy.devices
    ]
    np.testing.assert_array_equal(strategy.gather(out["image"]), batch["image"])


def test_random_keys_are_rows(two):
    keys = jax.random.split(jax.random.key(0), 3)
    (out,) = two.experimental_distribute_dataset([{"key": keys}])

    def step(batch):
        return jax.random.key_data(batch["key"]), js.batch_mask(batch["key"])

    found, mask = two.gather(two.run(step, (out,)))
    np.testing.assert_array_equal(found[mask], jax.random.key_data(keys))


def with_remainder(remainder, n, source):
    options = js.InputOptions(remainder=remainder)
    dataset = mirrored(n).experimental_distribute_dataset(source, options)
    return dataset


def test_a_rest_may_be_dropped_or_an_error():
    dataset = with_remainder("drop", 4, ranged(10, 8))
    assert [real(batch) for batch in dataset] == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    with pytest.raises(TypeError, match="How many steps js.batches has is not known"):
        len(dataset)
    between = [np.arange(4), np.arange(3), np.arange(4)]
    assert len(list(with_remainder("drop", 2, between))) == 2
    iterator = iter(with_remainder("error", 4, ranged(10, 8)))
    assert real(next(iterator)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    text = (
        "Step 1 has 2 rows where 8 were wanted, 2 for each of 4 replicas. Use a global "
        "batch size that the replicas can share equally, and leave out an incomplete "
        'last batch; or choose `InputOptions(remainder="pad")` or `"drop"`.'
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(text)):
            next(iterator)


@each_of("remainder, rows", [("drop", 6), ("drop_empty", 3)])
def test_all_would_be_dropped(remainder, rows):
    text = (
        f"The first batch has {rows} rows, which 4 replicas cannot share equally, so "
        f'that `remainder="{remainder}"` would leave out each batch. Use a global '
        "batch size divisible by 4."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        next(iter(with_remainder(remainder, 4, ranged(12, rows))))


@each_of(
    "arguments, text",
    [
        ({"remainder": "keep"},
         "`remainder` was 'keep'; one of 'pad', 'drop', 'drop_empty', 'error' was"),
        ({"experimental_replication_mode": "per replica"},
         "`experimental_replication_mode` was 'per replica'; an InputReplicationMode"),
        ({"experimental_per_replica_buffer_size": -1},
         "`experimental_per_replica_buffer_size` was -1; a whole number of batches"),
        ({"experimental_per_replica_buffer_size": 1.5}, "was 1.5; a whole number"),
        ({"experimental_place_dataset_on_device": True,
          "experimental_fetch_to_device": False},
         "`experimental_place_dataset_on_device=True` says that each replica has a "
         "pipeline on its own device. It needs"),
        ({"experimental_place_dataset_on_device": True,
          "experimental_replication_mode": PER_REPLICA},
         "`experimental_fetch_to_device=False`"),
    ],
)  # fmt: skip
def test_options_without_meaning(arguments, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        js.InputOptions(**arguments)


def test_what_cannot_be_divided_is_refused(two):
    for function in (
        two.experimental_distribute_dataset,
        two.distribute_datasets_from_function,
    ):
        with pytest.raises(TypeError, match="`options` was 'drop'; an InputOptions"):
            function(lambda *_: [], "drop")
    options = js.InputOptions(experimental_replication_mode=PER_REPLICA)
    text = "InputReplicationMode.PER_REPLICA is for input functions: use `strategy.dist"
    with pytest.raises(ValueError, match=text):
        two.experimental_distribute_dataset([np.ones(2)], options)
    text = r"`dataset_fn` is \[1\], which cannot be called. A function of an `InputCon"
    with pytest.raises(TypeError, match=text):
        two.distribute_datasets_from_function([1])
    with pytest.raises(TypeError, match="The int given as a dataset is not a dataset"):
        two.distribute_datasets_from_function(lambda _: 3)
    batches = [{"x": two.per_replica([1.0, 2.0])}]
    text = "`batch['x']` of batch 0 is already a PerReplica. Give the dataset global b"
    with pytest.raises(TypeError, match=re.escape(text)):
        next(iter(two.experimental_distribute_dataset(batches)))


def test_what_an_input_function_is_told():
    context = js.InputContext(2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    text = "The `global_batch_size` 13 is not divisible by num_replicas_in_sync 6"
    with pytest.raises(ValueError, match=text):
        context.get_per_replica_batch_size(13)
    assert js.InputContext() == js.InputContext(1, 0, 1)


@each_way
def test_a_function_makes_batches_for_replicas(four, options):
    told = []

    def make(context):
        told.append(context)
        return ranged(10, context.get_per_replica_batch_size(8))

    dataset = four.distribute_datasets_from_function(make, options)
    assert told == [js.InputContext(1, 0, 4)]
    wanted = [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [], [], []]]
    assert [real(batch) for batch in dataset] == wanted
    assert [real(batch) for batch in dataset] == wanted
    assert len(told) == 1
    assert repr(dataset) == "DistributedDataset(make)"


@each_way
def test_a_pipeline_for_each_replica(four, options):
    told = []
    options = js.InputOptions(
        experimental_replication_mode=PER_REPLICA,
        experimental_per_replica_buffer_size=options.ahead,
        experimental_fetch_to_device=options.experimental_fetch_to_device,
    )

    def make(context):
        told.append(context)
        return ranged(10 * (context.input_pipeline_id + 1), 10)

    dataset = four.distribute_datasets_from_function(make, options)
    assert told == [js.InputContext(4, i, 4) for i in range(4)]
    whole = [list(range(i, i + 10)) for i in range(0, 40, 10)]
    assert [real(batch) for batch in dataset] == [
        [whole[step] if replica >= step else [] for replica in range(4)]
        for step in range(4)
    ]


def test_datasets_that_lie_on_their_devices(two):
    options = js.InputOptions(
        experimental_replication_mode=PER_REPLICA,
        experimental_place_dataset_on_device=True,
        experimental_fetch_to_device=False,
    )

    def make(context):
        device = jax.devices()[context.input_pipeline_id]
        return [jax.device_put(jnp.full(2, context.input_pipeline_id), device)]

    (batch,) = two.distribute_datasets_from_function(make, options)
    assert real(batch) == [[0, 0], [1, 1]]
    assert [v.devices() for v in batch.values] == [{d} for d in jax.devices()[:2]]


def test_a_larger_batch_for_a_replica(two):
    batches = [np.arange(2), np.arange(3)]
    dataset = two.distribute_datasets_from_function(lambda _: batches)
    iterator = iter(dataset)
    assert real(next(iterator)) == [[0, 1], [0, 1, 2]]
    batches = [*batches, np.arange(3), np.arange(4)]
    dataset = two.distribute_datasets_from_function(lambda _: batches)
    text = "Batch 3 has 4 rows, but no batch of the first step had more than 3. Shapes"
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(ValueError, match=text):
        next(iterator)


GOOD = {"x": np.zeros((4, 2), np.float32), "y": np.zeros(4, np.int32)}
Z = np.zeros
BAD = {
    "ragged": (
        {"x": Z((4, 2), np.float32), "y": Z(3, np.int32)}, ValueError,
        "In batch 2, `batch['y']` has 3 rows, but `batch['x']` has 4. All arrays of a",
    ),
    "structure": (
        {"x": Z((4, 2), np.float32)}, ValueError,
        "Batch 2 has another structure than the first: PyTreeDef({'x': *}) instead of "
        "PyTreeDef({'x': *, 'y': *}). All batches of a dataset go through one",
    ),
    "dtype": (
        {**GOOD, "y": Z(4, np.float32)}, ValueError,
        "`batch['y']` of batch 2 is float32[rows], but in the first batch it was "
        "int32[rows]. All batches of a dataset go through one compiled step",
    ),
    "shape": (
        {**GOOD, "x": Z((4, 3), np.float32)}, ValueError,
        "`batch['x']` of batch 2 is float32[rows, 3], but in the first batch it was "
        "float32[rows, 2].",
    ),
    "larger": (
        {"x": Z((5, 2), np.float32), "y": Z(5, np.int32)}, ValueError,
        "Batch 2 has 5 rows, but the batches before had at most 4. Shapes are static",
    ),
    "nothing": ({}, ValueError, "Batch 2 is {}, which has no arrays. A batch is a py"),
    "scalar": (
        {**GOOD, "y": np.int32(3)}, ValueError,
        "`batch['y']` of batch 2 is a scalar, which cannot be divided over the rep",
    ),
    "objects": (
        {**GOOD, "y": np.array([{}, 1, 2, 3])}, TypeError,
        "`batch['y']` of batch 2 is array([{}, 1, 2, 3], dtype=object), which is not "
        "an array of numbers and cannot be placed on a device. Leave it out",
    ),
    "masked": (
        {**GOOD, "y": np.ma.masked_equal(np.arange(4, dtype=np.int32), 2)}, ValueError,
        "`batch['y']` of batch 2 is a masked array of NumPy, and its mask would be lo",
    ),
    "text": ({**GOOD, "y": "text"}, TypeError, "`batch['y']` of batch 2 is 'text', wh"),
}  # fmt: skip


@each_of("bad, error, text", BAD.values())
def test_a_bad_batch_is_said_when_it_is_reached(two, bad, error, text):
    options = ways()[0 if error is TypeError else 5]
    batches = [{k: v + i for k, v in GOOD.items()} for i in range(2)]
    batches += [bad, GOOD]
    iterator = iter(two.experimental_distribute_dataset(batches, options))
    assert [two.reduce("max", next(iterator)["y"], axis=0) for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(error, match=re.escape(text)):
            next(iterator)


@each_way
@each_of("make", [list, lambda: iter(()), lambda: lambda: iter(())])
def test_an_empty_dataset(two, options, make):
    iterator = iter(two.experimental_distribute_dataset(make(), options))
    for _ in range(2):
        with pytest.raises(ValueError, match="The dataset has no batches. A generator"):
            next(iterator)


@each_way
def test_a_source_that_raises(two, options):
    def source():
        for i in range(3):
            yield np.full(2, i)
        raise OSError("the disk is gone")

    iterator = iter(two.experimental_distribute_dataset(source, options))
    assert [next(iterator).local(0).item() for _ in range(3)] == [0, 1, 2]
    for _ in range(3):
        with pytest.raises(OSError, match="the disk is gone"):
            next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        iterator.get_next_as_optional()


# Steps in which a replica would have no row are left out, with `"drop_empty"`.

DROP_EMPTY = js.InputOptions(remainder="drop_empty")


def elements(n, source, options=DROP_EMPTY):
    dataset = mirrored(n).distribute_datasets_from_function(lambda _: source, options)
    return [real(element) for element in dataset]


@each_of(
    "n, count, wanted",
    [
        (2, 4, [[0, 1], [2, 3]]),
        (2, 5, [[0, 1], [2, 3]]),
        (4, 10, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 1, []),
    ],
)
def test_a_last_group_of_scalars_that_is_not_full(n, count, wanted):
    assert elements(n, range(count)) == wanted


def test_a_batch_with_too_few_rows_is_filled_up():
    wanted = [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert elements(2, ranged(7, 2)) == wanted
    assert elements(2, ranged(9, 2)) == wanted[:1] + [[[4, 5], [6, 7]]]


@each_way
def test_global_batches(options):
    options = js.InputOptions(
        remainder="drop_empty",
        experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size,
        experimental_fetch_to_device=options.experimental_fetch_to_device,
    )
    dataset = mirrored(2).experimental_distribute_dataset(ranged(15, 4), options)
    wanted = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14]]]
    assert [real(batch) for batch in dataset] == wanted
    dataset = mirrored(2).experimental_distribute_dataset(ranged(9, 4), options)
    assert [real(batch) for batch in dataset] == wanted[:2]
    with pytest.raises(TypeError, match="How many steps js.batches has is not known"):
        len(dataset)


# Batches for replicas with several devices: each device has the replica's rows.

X = drawn(28, 4)


def batches(size=8):
    return [X[at : at + size] for at in range(0, len(X), size)]


@each_of("sizes", [(4, 2), (2, 4), (1, 8)])
def test_all_devices_of_a_replica_have_its_rows(sizes):
    replicas, cores = sizes
    strategy = cored(replicas, cores)
    dataset = strategy.experimental_distribute_dataset(batches()[:3])
    for batch, wanted in zip(dataset, batches(), strict=False):
        if replicas == 1:
            assert batch.sharding.is_fully_replicated
            np.testing.assert_array_equal(batch, wanted)
            continue
        for i, part in enumerate(np.split(wanted, replicas)):
            of_devices = [
                shard.data
                for shard in batch.stacked.addressable_shards
                if shard.device in jax.devices()[i * cores : (i + 1) * cores]
            ]
            assert len(of_devices) == cores
            for each in of_devices:
                np.testing.assert_array_equal(each[0], part)
