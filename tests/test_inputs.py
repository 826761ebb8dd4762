"""Datasets divided over the replicas: what comes, when, and what goes wrong."""

import copy
import functools
import itertools
import json
import re
import threading

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxstrategy as js
from jaxstrategy.cluster.agreement._agreement import (
    AbstractAgreement,
    LoneAgreement,
)
from jaxstrategy.inputs._division import ReplicaRange
from jaxstrategy.inputs._global import GlobalReader
from jaxstrategy.inputs._pipelines import PipelinesReader
from jaxstrategy.inputs._steps import Steps
from jaxstrategy.inputs._transfer import Transfer
from jaxstrategy.inputs.sources._choose import as_source

SECONDS = 20
AT_ONCE = js.InputOptions(experimental_per_replica_buffer_size=0)
PER_REPLICA = js.InputReplicationMode.PER_REPLICA


@functools.cache
def mirrored(n):
    return js.MirroredStrategy(jax.devices()[:n])


def ways():
    """All ways to read ahead."""
    return [
        js.InputOptions(
            experimental_per_replica_buffer_size=depth, experimental_fetch_to_device=to
        )
        for depth in (0, 1, 2)
        for to in (True, False)
    ]


each_way = pytest.mark.parametrize("options", ways(), ids=range(6))


def real(value):
    """Each replica's real rows, as lists."""
    if isinstance(value, jax.Array):  # of one replica
        return [value.tolist()]
    if value.mask is None:  # all are, and it is known
        return [version.tolist() for version in value.values]
    masks = np.asarray(value.mask)
    return [np.asarray(v)[m].tolist() for v, m in zip(value.values, masks, strict=True)]


def divided(n, batches, options=AT_ONCE):
    dataset = mirrored(n).experimental_distribute_dataset(batches, options)
    return [real(batch) for batch in dataset]


def ranged(rows, size):
    return js.batches(np.arange(rows), size)


# Division.


@each_way
def test_batches_are_divided_in_order(options):
    assert divided(4, ranged(16, 8), options) == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
    ]


@pytest.mark.parametrize(
    "n, source, wanted",
    [
        (4, ranged(10, 8), [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [], [], []]]),
        (2, ranged(9, 4), [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]),
        (1, ranged(9, 4), [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8]]]),
        (4, ranged(9, 4), [[[i], [i + 1], [i + 2], [i + 3]] for i in (0, 4)]
         + [[[8], [], [], []]]),
        (4, ranged(6, 6), [[[0, 1], [2, 3], [4, 5], []]]),
        (2, ranged(7, 7), [[[0, 1, 2, 3], [4, 5, 6]]]),
        (4, ranged(7, 7), [[[0, 1], [2, 3], [4, 5], [6]]]),
        (2, ranged(3, 1), [[[0], []], [[1], []], [[2], []]]),
        (4, ranged(3, 8), [[[0], [1], [2], []]]),
        (8, ranged(3, 8), [[[0], [1], [2], [], [], [], [], []]]),
    ],
)  # fmt: skip
def test_batches_that_do_not_divide(n, source, wanted):
    assert divided(n, source) == wanted


def test_rows_that_are_missing_are_copies_of_the_last(four):
    _, batch = four.experimental_distribute_dataset(ranged(10, 8))
    assert batch.stacked.tolist() == [[8, 9], [9, 9], [9, 9], [9, 9]]
    assert batch.mask.tolist() == [[True, True]] + [[False, False]] * 3


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(rows=st.integers(1, 60), size=st.integers(1, 20), n=st.sampled_from([1, 2, 8]))
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


def test_a_batch_from_one_device_is_spread_out(two):
    x = jax.device_put(jnp.arange(4.0), jax.devices()[5])
    (out,) = two.experimental_distribute_dataset([x])
    assert real(out) == [[0, 1], [2, 3]]
    assert [v.devices() for v in out.values] == [{d} for d in two.devices]


# Remainders.


def with_remainder(remainder, n, source):
    options = js.InputOptions(remainder=remainder)
    dataset = mirrored(n).experimental_distribute_dataset(source, options)
    return dataset


def test_a_rest_may_be_dropped():
    dataset = with_remainder("drop", 4, ranged(10, 8))
    assert [real(batch) for batch in dataset] == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    with pytest.raises(TypeError, match="How many steps js.batches has is not known"):
        len(dataset)
    between = [np.arange(4), np.arange(3), np.arange(4)]
    assert len(list(with_remainder("drop", 2, between))) == 2


def test_all_would_be_dropped():
    text = (
        "The first batch has 6 rows, which 4 replicas cannot share equally, so that "
        '`remainder="drop"` would leave out each batch. Use a global batch size '
        "divisible by 4."
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        next(iter(with_remainder("drop", 4, ranged(12, 6))))


def test_a_rest_may_be_an_error():
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


# Options.


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"remainder": "keep"},
         "`remainder` was 'keep'; one of 'pad', 'drop', 'error' was wanted."),
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


def test_options_of_the_wrong_kind(two):
    for function in (
        two.experimental_distribute_dataset,
        two.distribute_datasets_from_function,
    ):
        with pytest.raises(TypeError, match="`options` was 'drop'; an InputOptions"):
            function(lambda *_: [], "drop")


def test_a_dataset_for_each_replica_needs_a_function(two):
    options = js.InputOptions(experimental_replication_mode=PER_REPLICA)
    text = "InputReplicationMode.PER_REPLICA is for input functions: use `strategy.dist"
    with pytest.raises(ValueError, match=text):
        two.experimental_distribute_dataset([np.ones(2)], options)


def test_what_an_input_function_is_told():
    context = js.InputContext(2, 1, 6)
    assert context.get_per_replica_batch_size(12) == 2
    text = "The `global_batch_size` 13 is not divisible by num_replicas_in_sync 6"
    with pytest.raises(ValueError, match=text):
        context.get_per_replica_batch_size(13)
    assert js.InputContext() == js.InputContext(1, 0, 1)


# Batches from functions.


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


def test_groups_of_three_as_in_tensorflow():
    strategy = mirrored(2)
    dataset = strategy.distribute_datasets_from_function(lambda _: ranged(9, 2))
    assert [real(batch) for batch in dataset] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8], []],
    ]
    options = js.InputOptions(remainder="drop")
    dataset = strategy.distribute_datasets_from_function(
        lambda _: ranged(9, 2), options
    )
    assert len(list(dataset)) == 2


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


def test_what_is_no_input_function(two):
    text = r"`dataset_fn` is \[1\], which cannot be called. A function of an `InputCon"
    with pytest.raises(TypeError, match=text):
        two.distribute_datasets_from_function([1])
    with pytest.raises(TypeError, match="The int given as a dataset is not a dataset"):
        two.distribute_datasets_from_function(lambda _: 3)


# Bad batches.

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
    "other rows": (
        {"x": Z((0, 3), np.float32), "y": Z(0, np.int32)}, ValueError,
        "`batch['x']` of batch 2 is float32[rows, 3], but in the first batch it was f",
    ),
    "nothing": ({}, ValueError, "Batch 2 is {}, which has no arrays. A batch is a py"),
    "scalar": (
        {**GOOD, "y": np.int32(3)}, ValueError,
        "`batch['y']` of batch 2 is a scalar, which cannot be divided over the rep",
    ),
    "number": ({**GOOD, "y": 3}, ValueError, "`batch['y']` of batch 2 is a scalar"),
    "objects": (
        {**GOOD, "y": np.array([{}, 1, 2, 3])}, TypeError,
        "`batch['y']` of batch 2 is array([{}, 1, 2, 3], dtype=object), which is not "
        "an array of numbers and cannot be placed on a device. Leave it out",
    ),
    "strings": (
        {**GOOD, "y": np.array(["a"] * 4)}, TypeError,
        "`batch['y']` of batch 2 is array(['a', 'a', 'a', 'a'], dtype='<U1'), which",
    ),
    "text": ({**GOOD, "y": "text"}, TypeError, "`batch['y']` of batch 2 is 'text', wh"),
    "object": ({**GOOD, "y": object()}, TypeError, "`batch['y']` of batch 2 is <obj"),
    "dates": (
        {**GOOD, "y": Z(4, "datetime64[s]")}, TypeError, "`batch['y']` of batch 2 is ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [ways()[0], ways()[4], ways()[5]], ids=range(3))
@pytest.mark.parametrize("bad, error, text", BAD.values(), ids=BAD)
def test_a_bad_batch_is_said_when_it_is_reached(two, options, bad, error, text):
    batches = [{k: v + i for k, v in GOOD.items()} for i in range(2)]
    batches += [bad, GOOD]
    iterator = iter(two.experimental_distribute_dataset(batches, options))
    assert [two.reduce("max", next(iterator)["y"], axis=0) for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(error, match=re.escape(text)):
            next(iterator)


def test_a_batch_that_is_divided_already(two):
    batches = [{"x": two.per_replica([1.0, 2.0])}]
    text = "`batch['x']` of batch 0 is already a PerReplica. Give the dataset global b"
    with pytest.raises(TypeError, match=re.escape(text)):
        next(iter(two.experimental_distribute_dataset(batches)))


@each_way
@pytest.mark.parametrize("make", [list, lambda: iter(()), lambda: lambda: iter(())])
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


# What the source does with its memory.


@each_way
@pytest.mark.parametrize("n", [1, 2, 8])
def test_a_source_may_overwrite_its_arrays(n, options):
    strategy = mirrored(n)

    def source():
        x = np.zeros((16, 4), np.float32)
        for i in range(8):
            x[:] = i
            yield {"x": x, "rest": x[: 16 if i % 3 else 16]}
        x[:] = -1

    batches = list(strategy.experimental_distribute_dataset(source, options))
    for i, batch in enumerate(batches):
        for value in (batch["x"], batch["rest"]):
            assert (np.asarray(value if n == 1 else value.stacked) == i).all()
    assert len(batches) == 8


@pytest.mark.parametrize("start", range(0, 64, 4))
@pytest.mark.parametrize("columns", [1, 2, 4, 16, 17])
def test_wherever_an_array_begins_it_may_be_overwritten(four, start, columns):
    """A device of the host may share memory that begins where it should."""
    memory = np.zeros(8 * 4 * columns + 128, np.uint8)
    start += -memory.ctypes.data % 64
    x = memory[start : start + 8 * 4 * columns].view(np.float32).reshape(8, columns)
    (batch,) = four.experimental_distribute_dataset([x], AT_ONCE)
    x[:] = -1
    assert not np.asarray(batch.stacked).any()


@each_way
def test_a_function_of_replicas_may_overwrite_its_arrays(four, options):
    def source():
        x = np.zeros((2,), np.float32)
        for i in range(10):
            x[:] = i
            yield x
        x[:] = -1

    dataset = four.distribute_datasets_from_function(lambda _: source, options)
    assert [real(batch) for batch in list(dataset)] == [
        [[0, 0], [1, 1], [2, 2], [3, 3]],
        [[4, 4], [5, 5], [6, 6], [7, 7]],
        [[8, 8], [9, 9], [], []],
    ]


@pytest.mark.parametrize("array", [np.array, jnp.array])
@pytest.mark.parametrize("n", [1, 2])
def test_the_arrays_of_a_source_are_left_alone(n, array):
    """Also by steps that overwrite their arguments."""
    strategy = mirrored(n)
    x = array([0, 1, 2, 3])
    step = strategy.run(lambda b: b + 1, options=js.RunOptions(donate_argnums=0))
    functions = {"experimental_distribute_dataset": [x]}
    functions["distribute_datasets_from_function"] = lambda _: [x] * n
    for name, source in functions.items():
        (batch,) = getattr(strategy, name)(source)
        step(batch)
        assert (batch if n == 1 else batch.stacked).is_deleted()
        assert x.tolist() == [0, 1, 2, 3]


# Datasets and iterators in TensorFlow's words.


def test_get_next(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    assert real(iterator.get_next()) == [[0], [1]]
    for _ in range(2):
        with pytest.raises(js.OutOfRangeError, match="The end of the data. Use `for "):
            iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    assert issubclass(js.OutOfRangeError, StopIteration)


def test_get_next_as_optional(two):
    iterator = iter(two.experimental_distribute_dataset([np.arange(2)]))
    first, second = (iterator.get_next_as_optional() for _ in range(2))
    assert first.has_value() and real(first.get_value()) == [[0], [1]]
    assert repr(first) == "Optional(PerReplica(int32[1] on cpu:0, cpu:1))"
    assert not second.has_value() and repr(second) == "Optional.empty()"
    with pytest.raises(ValueError, match="The optional has no value: the data has end"):
        second.get_value()


def test_a_dataset_can_be_iterated_again_and_a_generator_once(two):
    dataset = two.experimental_distribute_dataset([np.arange(2)] * 3)
    assert [len(list(dataset)), len(list(dataset))] == [3, 3]
    iterator = iter(dataset)
    assert iter(iterator) is iterator
    once = two.experimental_distribute_dataset(np.arange(2) for _ in range(3))
    assert len(list(once)) == 3
    with pytest.raises(TypeError, match="Only one pass can read the generator, and on"):
        iter(once)


def test_passes_at_the_same_time(two):
    dataset = two.experimental_distribute_dataset(ranged(6, 2))
    a, b = iter(dataset), iter(dataset)
    found = [real(next(each))[0][0] for each in (a, b, a, a, b, b)]
    assert found == [0, 0, 2, 4, 2, 4]


def test_nothing_is_read_ahead_of_its_turn_if_so_wished(two):
    read = []

    def source():
        for i in range(3):
            read.append(i)
            yield np.array([i, i])

    iterator = iter(two.experimental_distribute_dataset(source, AT_ONCE))
    assert read == []
    assert real(next(iterator)) == [[0], [0]]
    assert read == [0]


def test_lengths(two):
    of = two.experimental_distribute_dataset
    assert len(of([np.arange(2)] * 3)) == 3
    assert len(of(ranged(10, 4))) == 3
    text = "How many steps the generator has is not known. Count them, or give a sour"
    with pytest.raises(TypeError, match=text):
        len(of(np.arange(2) for _ in range(3)))


def test_how_datasets_print(two):
    of = two.experimental_distribute_dataset
    assert repr(of([np.arange(2)] * 3)) == "DistributedDataset(the list, 3 steps)"
    assert repr(of(iter([]))) == "DistributedDataset(the list_iterator)"


def test_reduce(two):
    dataset = two.experimental_distribute_dataset(ranged(7, 4))
    rows = dataset.reduce([], lambda all, batch: all + sum(real(batch), []))
    assert rows == list(range(7))


@pytest.mark.parametrize("of", ["dataset", "iterator"])
@each_way
def test_element_spec(two, options, of):
    read = []

    def source():
        for i in range(3):
            read.append(i)
            yield {"x": np.full((5, 2), i, np.float32)}

    dataset = two.experimental_distribute_dataset(source, options)
    each = dataset if of == "dataset" else iter(dataset)
    spec = each.element_spec
    assert (spec["x"].shape, spec["x"].dtype) == ((3, 2), np.float32)
    assert isinstance(spec["x"], js.PerReplica)
    assert each.element_spec is spec
    explained = two.explain(lambda batch: js.masked_sum(batch["x"]), (spec,))
    assert isinstance(explained, js.Explanation)
    assert [batch["x"].local(0)[0, 0].item() for batch in each] == [0, 1, 2]
    assert read == [0, 1, 2]


def test_element_spec_takes_no_batch_from_the_state(two):
    iterator = iter(two.experimental_distribute_dataset(ranged(6, 2)))
    before = iterator.get_state()
    iterator.element_spec  # noqa: B018 (it reads)
    assert iterator.get_state() == before
    assert real(next(iterator)) == [[0], [1]]


@each_way
def test_element_spec_of_an_iterator_that_has_ended(two, options):
    for end in (list, js.DistributedIterator.close):
        iterator = iter(two.experimental_distribute_dataset(ranged(6, 4), options))
        next(iterator)
        end(iterator)
        assert (iterator.element_spec.shape, iterator.element_spec.dtype) == (
            (2,),
            np.int32,
        )


@each_way
def test_element_spec_of_an_iterator_that_gave_nothing(two, options):
    text = (
        "The iterator has ended without a batch, so that what its batches are like is "
        "not known. Ask before it is closed, or ask the dataset: "
        "`dataset.element_spec`."
    )
    dataset = two.experimental_distribute_dataset(ranged(6, 4), options)
    closed, last, resumed = iter(dataset), iter(dataset), iter(dataset)
    closed.close()
    list(last)
    resumed.set_state(last.get_state())
    for iterator in (closed, resumed):
        with pytest.raises(ValueError, match=re.escape(text)):
            iterator.element_spec  # noqa: B018 (it raises)


def test_a_closed_iterator_has_ended(two):
    closed = []

    def source():
        try:
            for i in range(9):
                yield np.full(2, i)
        finally:
            closed.append(True)

    for options in ways():
        iterator = iter(two.experimental_distribute_dataset(source, options))
        next(iterator)
        iterator.close()
        iterator.close()
        assert list(iterator) == []
        with pytest.raises(js.OutOfRangeError):
            iterator.get_next()
    assert closed == [True] * 6


def test_closing_while_the_source_waits(two):
    release = threading.Event()

    def source():
        yield np.ones(2)
        release.wait(SECONDS)

    iterator = iter(two.experimental_distribute_dataset(source))
    next(iterator)
    iterator.close()
    assert list(iterator) == []
    release.set()


def test_inside_a_step(two):
    for name in (
        "experimental_distribute_dataset",
        "distribute_datasets_from_function",
    ):
        with pytest.raises(js.ContextError, match=name):
            two.run(lambda name=name: getattr(two, name)([np.ones(2)]))


# Resuming.

ROWS = np.arange(23)


def generated():
    for start in range(0, 23, 4):
        yield ROWS[start : start + 4]


RESUMABLE = {
    "list": lambda: [ROWS[i : i + 4] for i in range(0, 23, 4)],
    "function": lambda: generated,
    "batches": lambda: js.batches(ROWS, 4),
    "shuffled": lambda: js.batches(ROWS, 4, shuffle=3, epochs=2),
}


@pytest.mark.parametrize("make", RESUMABLE.values(), ids=RESUMABLE)
@each_way
@pytest.mark.parametrize("used", [0, 2, 5, 6])
def test_a_restart_sees_exactly_what_was_not_seen(two, options, make, used):
    iterator = iter(two.experimental_distribute_dataset(make(), options))
    for _ in range(used):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    wanted = [real(batch) for batch in iterator]
    after = iter(two.experimental_distribute_dataset(make(), options))
    after.set_state(state)
    assert after.get_state() == state
    assert [real(batch) for batch in after] == wanted
    iterator.set_state(state)
    assert [real(batch) for batch in iterator] == wanted


def test_a_resumed_pass_pads_as_the_first(two):
    def of():
        return iter(two.experimental_distribute_dataset([np.arange(8), np.arange(3)]))

    iterator = of()
    next(iterator)
    after = of()
    after.set_state(iterator.get_state())
    batch = next(after)
    assert batch.shape == (4,) and real(batch) == [[0, 1, 2], []]


def test_every_example_is_seen_once_over_restarts(four):
    """Stopped after any step, again and again; each epoch has all rows once."""
    make = functools.partial(js.batches, ROWS, 4, shuffle=1, epochs=3)
    straight = [
        real(batch) for batch in four.experimental_distribute_dataset(make(), AT_ONCE)
    ]
    seen, state = [], None
    for steps in (1, 3, 2, 5, 1, 20):
        iterator = iter(four.experimental_distribute_dataset(make()))
        if state is not None:
            iterator.set_state(json.loads(state))
        seen += [real(batch) for _, batch in zip(range(steps), iterator, strict=False)]
        state = json.dumps(iterator.get_state())
        iterator.close()
    assert seen == straight
    rows = [row for batch in seen for each in batch for row in each]
    for epoch in range(3):
        assert sorted(rows[23 * epoch : 23 * (epoch + 1)]) == ROWS.tolist()


def test_the_state_of_another_dataset(two):
    of = two.experimental_distribute_dataset
    iterator = iter(of([np.arange(4), np.arange(4, 8), np.arange(4)]))
    next(iterator), next(iterator)
    other = iter(of([np.arange(4), np.arange(5, 9), np.arange(4)]))
    text = (
        "The state was saved after 2 batches, but batch 1 of this dataset is another "
        "one than it was then. Only a dataset that gives the same batches in the same "
        "order can be resumed: fix the seed of its shuffling, or use a source that"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        other.set_state(iterator.get_state())
    short = iter(of([np.arange(4)]))
    text = "The state was saved after batch 2, but the list has 1 batch."
    with pytest.raises(ValueError, match=text):
        short.set_state(iterator.get_state())


@pytest.mark.parametrize("state", [None, {}, 3, {"version": 0}, {"steps": 1}])
def test_what_is_no_state(two, state):
    iterator = iter(two.experimental_distribute_dataset(ranged(4, 2)))
    text = f"`set_state` was given {state!r}, which `get_state` of a distributed iter"
    with pytest.raises(ValueError, match=re.escape(text)):
        iterator.set_state(state)


def test_the_state_of_other_pipelines(two):
    options = js.InputOptions(experimental_replication_mode=PER_REPLICA)
    of = two.distribute_datasets_from_function
    state = iter(of(lambda _: ranged(4, 2), options)).get_state()
    text = "The state is of 2 input pipelines, but here are 1."
    with pytest.raises(ValueError, match=text):
        iter(of(lambda _: ranged(4, 2))).set_state(state)


def test_what_can_be_read_only_once_cannot_resume(two):
    iterator = iter(two.experimental_distribute_dataset(iter([np.arange(2)] * 3)))
    next(iterator)
    with pytest.raises(TypeError, match="A pass over the list_iterator cannot resume"):
        iterator.get_state()
    assert len(list(iterator)) == 2


@pytest.mark.parametrize("mode", js.InputReplicationMode)
def test_batches_from_functions_resume(four, mode):
    options = js.InputOptions(experimental_replication_mode=mode)

    def make(context):
        return js.batches(np.arange(9 + 4 * context.input_pipeline_id), 2, shuffle=1)

    def of():
        return iter(four.distribute_datasets_from_function(make, options))

    iterator = of()
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    after = of()
    after.set_state(state)
    assert [real(batch) for batch in after] == [real(batch) for batch in iterator]


def test_grain_and_orbax_save_iterators(four, tmp_path):
    grain = pytest.importorskip("grain")
    ocp = pytest.importorskip("orbax.checkpoint")
    checkpoint = pytest.importorskip("grain.checkpoint")

    def of(source):
        return iter(four.experimental_distribute_dataset(source))

    def sources():
        dataset = grain.MapDataset.range(60).shuffle(seed=2).batch(8)
        return {"grain": dataset, "arrays": js.batches(ROWS, 4, shuffle=1, epochs=3)}

    for name, source in sources().items():
        iterator = of(source)
        next(iterator), next(iterator)
        path = tmp_path / name
        with ocp.CheckpointManager(path) as manager:
            saved = checkpoint.CheckpointSave(iterator)
            manager.save(1, args=ocp.args.Composite(input=saved))
            manager.wait_until_finished()
        wanted = [real(batch) for batch in iterator]
        after = of(sources()[name])
        with ocp.CheckpointManager(path) as manager:
            restored = checkpoint.CheckpointRestore(after)
            manager.restore(1, args=ocp.args.Composite(input=restored))
        assert [real(batch) for batch in after] == wanted
        assert len(wanted) > 3


# Several processes, without processes.


class Meeting:
    """Where threads that stand for processes say something, turn by turn."""

    def __init__(self, count):
        self.said = {}
        self.count = count
        self.left = False
        self.changed = threading.Condition()

    def exchange(self, turn, index, said):
        with self.changed:
            heard = self.said.setdefault(turn, [None] * self.count)
            heard[index] = (json.loads(json.dumps(said)),)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: all(heard) or self.left, SECONDS)
            if not all(heard):
                raise EOFError("another process has left")
        return [each[0] for each in heard]

    def leave(self):
        with self.changed:
            self.left = True
            self.changed.notify_all()


class Talk(AbstractAgreement):
    def __init__(self, meeting, index):
        self._meeting, self._index, self._turn = meeting, index, 0

    def exchange(self, said):
        self._turn += 1
        return self._meeting.exchange(self._turn, self._index, said)


def in_processes(count, local, make, remainder="pad", resumed=None, most=None):
    """What each process feeds: its steps, or what it raised."""
    meeting = Meeting(count)
    found = [None] * count

    def process(index):
        replicas = ReplicaRange(count * local, index * local, local)
        steps = Steps(make(index, replicas), Talk(meeting, index), remainder)
        fed = []
        try:
            if resumed is not None:
                steps.set_state(json.loads(json.dumps(resumed[index])))
            fed.extend(itertools.islice(steps, most))
            found[index] = fed
        except (ValueError, EOFError) as error:
            meeting.leave()
            found[index] = error

    workers = [
        threading.Thread(target=process, args=(i,), daemon=True) for i in range(count)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(SECONDS)
        assert not worker.is_alive(), "a process hangs"
    return found


def of_global(batches):
    def make(index, replicas):
        # Each process has a source of its own.
        return GlobalReader(as_source(copy.copy(batches)).start(), replicas)

    return make


def of_pipelines(lists):
    return lambda index, replicas: PipelinesReader(
        [as_source(lists[index]).start()], replicas
    )


def rows_of(step, index, local):
    """The real rows of a process's replicas."""
    own = step.counts[index * local : (index + 1) * local]
    (array,) = step.arrays
    each = step.counts[0] if len(step.counts) == 1 else step.each  # as it is
    assert array.shape[:2] == (local, each)
    return [part[:count].tolist() for part, count in zip(array, own, strict=True)]


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 50),
    size=st.integers(1, 20),
    count=st.integers(1, 4),
    local=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_each_process_has_its_own_rows_of_global_batches(
    rows, size, count, local, shuffle
):
    shuffled = 5 if shuffle else None
    batches = list(js.batches(np.arange(rows), size, shuffle=shuffled))
    for source in (js.batches(np.arange(rows), size, shuffle=shuffled), batches):
        found = in_processes(count, local, of_global(source))
        assert {len(each) for each in found} == {len(batches)}
        for step, batch in enumerate(batches):
            parts = [rows_of(found[p][step], p, local) for p in range(count)]
            flat = [row for process in parts for part in process for row in part]
            assert flat == batch.tolist()
            counts = {each[step].counts for each in found}
            assert len(counts) == 1 and sum(counts.pop()) == len(batch)


def test_a_process_reads_only_its_own_rows(monkeypatch):
    read = []

    class Watched(np.ndarray):
        def __getitem__(self, index):
            read.append(index)
            return np.asarray(self)[index]

    replicas = ReplicaRange(8, 2, 2)
    source = js.batches(np.arange(32), 16)
    source._arrays = np.arange(32).view(Watched)
    share = GlobalReader(source.start(), replicas).read()
    assert read == [slice(4, 8, 1)]
    assert share.arrays[0].tolist() == [[4, 5], [6, 7]]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    lengths=st.lists(st.integers(2, 17), min_size=1, max_size=4),
    local=st.integers(1, 3),
    size=st.integers(1, 2),
)
def test_processes_with_uneven_pipelines_end_together(lengths, local, size):
    lists = [
        [np.arange(i, min(i + size, n)) + 100 * p for i in range(0, n, size)]
        for p, n in enumerate(lengths)
    ]
    found = in_processes(len(lists), local, of_pipelines(lists))
    steps = max(-(-len(each) // local) for each in lists)
    assert [len(each) for each in found] == [steps] * len(lists)
    for p, batches in enumerate(lists):
        parts = [part for step in found[p] for part in rows_of(step, p, local)]
        wanted = [batch.tolist() for batch in batches]
        assert parts == wanted + [[]] * (steps * local - len(wanted))
    for step in range(steps):
        assert len({each[step].counts for each in found}) == 1


def test_as_tensorflow_with_two_workers():
    """DAT-70: range(8) and range(9) in batches of 2 give 5 steps for both."""
    lists = [list(ranged(8, 2)), list(ranged(9, 2))]
    found = in_processes(2, 1, of_pipelines(lists))
    assert [[rows_of(s, p, 1)[0] for s in each] for p, each in enumerate(found)] == [
        [[0, 1], [2, 3], [4, 5], [6, 7], []],
        [[0, 1], [2, 3], [4, 5], [6, 7], [8]],
    ]
    assert found[0][4].counts == found[1][4].counts == (0, 1)
    dropped = in_processes(2, 1, of_pipelines(lists), "drop")
    assert [len(each) for each in dropped] == [4, 4]


def test_processes_with_different_sizes():
    lists = [list(ranged(8, 2)), list(ranged(9, 3))]
    found = in_processes(2, 2, of_pipelines(lists))
    assert [[rows_of(step, p, 2) for step in found[p]] for p in range(2)] == [
        [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
        [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], []]],
    ]
    assert {step.each for process in found for step in process} == {3}
    states = [process[0].state for process in found]
    states[0] = {**states[0], "rows": 2}
    text = "The replicas' batches have different sizes: 2 in process 0, 3 in process 1"
    errors = in_processes(2, 2, of_pipelines(lists), resumed=states)
    assert all(text in str(error) for error in errors)


def test_a_process_without_batches():
    found = in_processes(2, 1, of_pipelines([list(ranged(4, 2)), []]))
    text = "The input pipeline of this process has no batches, but another one's has."
    assert text in str(found[1])
    found = in_processes(2, 1, of_pipelines([[], []]))
    assert all("The dataset has no batches" in str(error) for error in found)


@pytest.mark.parametrize("used", [1, 2, 3, 4])
def test_processes_resume_even_after_their_own_end(used):
    lists = [list(ranged(4, 2)), list(ranged(10, 2))]
    begun = in_processes(2, 1, of_pipelines(lists), most=used)
    states = [each[-1].state for each in begun]
    rest = in_processes(2, 1, of_pipelines(lists), resumed=states)
    whole = in_processes(2, 1, of_pipelines(lists))
    assert [len(each) for each in rest] == [5 - used] * 2
    for p in range(2):
        assert [rows_of(step, p, 1) for step in rest[p]] == [
            rows_of(step, p, 1) for step in whole[p][used:]
        ]


def test_arrays_of_several_processes_are_copies(four):
    """Placed as with several processes, of which this one has all devices."""
    placing = Transfer(four.replicas, ReplicaRange(4, 0, 3))
    x = np.zeros((64, 16), np.float32)

    def source():
        for i in range(4):
            x[:] = i
            yield {"x": x}
        x[:] = -1

    reader = GlobalReader(as_source(source).start(), ReplicaRange(4, 0, 4))
    steps = Steps(reader, LoneAgreement(), "pad")
    batches = [placing.place(step, reader.kind) for step in steps]
    assert [np.unique(b["x"].stacked).tolist() for b in batches] == [[0], [1], [2], [3]]
    assert batches[0]["x"].stacked.sharding.is_equivalent_to(
        four.per_replica([0] * 4).stacked.sharding, 3
    )
