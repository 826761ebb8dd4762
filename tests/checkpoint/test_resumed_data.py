"""A state of one dataset is refused by another: other length, source, seed or data."""

import json
import re

import jax
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

X = np.arange(40.0).reshape(20, 2)


def as_json(state):
    return json.loads(json.dumps(state))


def saved(strategy, source, used=2):
    with iter(strategy.experimental_distribute_dataset(source)) as iterator:
        for _ in range(used):
            next(iterator)
        return as_json(iterator.get_state())


def changed(array):
    array = array.copy()
    array[10:] += 1
    return array


OTHERS = {
    "seed": (js.batches(X, 4, shuffle=5), "`shuffle` was 1 and is 5"),
    "order": (js.batches(X, 4), "`shuffle` was 1 and is None"),
    "size": (js.batches(X, 5, shuffle=1), "`batch_size` was 4 and is 5"),
    "length": (js.batches(X[:16], 4, shuffle=1), "`rows` was 20 and is 16"),
    "remainder": (
        js.batches(X, 4, shuffle=1, drop_remainder=True),
        "`drop_remainder` was False and is True",
    ),
    "numbers": (js.batches(changed(X), 4, shuffle=1), "the arrays held other numbers"),
    "types": (
        js.batches(X.astype("f"), 4, shuffle=1),
        "the arrays held other numbers, or were of other types",
    ),
    "structure": (js.batches({"x": X}, 4, shuffle=1), "the arrays held other numbers"),
}


@each_of("other, words", OTHERS.values())
def test_other_arrays_are_noticed(two, other, words):
    state = saved(two, js.batches(X, 4, shuffle=1))
    text = f"The state was saved with other data in js.batches: .*{re.escape(words)}"
    with pytest.raises(ValueError, match=text):
        iter(two.experimental_distribute_dataset(other)).set_state(state)
    whole = js.batches(X.copy(), 4, shuffle=1)
    iterator = iter(two.experimental_distribute_dataset(whole))
    iterator.set_state(state)
    assert len(list(iterator)) == 3


def test_each_pipeline_is_looked_at(two):
    def dataset(first, second):
        mode = js.InputReplicationMode.PER_REPLICA
        options = js.InputOptions(experimental_replication_mode=mode)
        sources = [first, second]
        return two.distribute_datasets_from_function(
            lambda context: sources[context.input_pipeline_id], options
        )

    one, other = list(X.reshape(5, 4, 2)), list(-X.reshape(5, 4, 2))
    iterator = iter(dataset(one, other))
    next(iterator), next(iterator)
    state = iterator.get_state()
    for sources in ((other, other), (one, one)):
        with pytest.raises(ValueError, match="of this dataset is another one than it"):
            iter(dataset(*sources)).set_state(state)
    iter(dataset(one, other)).set_state(state)


def test_another_kind_of_source_is_noticed(two):
    batches = list(X.reshape(5, 4, 2))
    for source, other in ((js.batches(X, 4), batches), (batches, js.batches(X, 4))):
        state = saved(two, source)
        with pytest.raises(ValueError, match="is not the state of a pass over"):
            iter(two.experimental_distribute_dataset(other)).set_state(state)


def test_grain_of_another_length_is_noticed(two):
    grain = pytest.importorskip("grain")

    def make(rows):
        return grain.MapDataset.source(X[:rows]).batch(4)

    state = saved(two, make(20))
    with pytest.raises(ValueError, match="saved with 5 batches .*, which has 3 now"):
        iter(two.experimental_distribute_dataset(make(12))).set_state(state)
    iterator = iter(two.experimental_distribute_dataset(make(20)))
    iterator.set_state(state)
    assert len(list(iterator)) == 3


def test_objects_in_arrays_play_no_part():
    def make():
        names = np.array([str(i) * 20 for i in range(4)], dtype=object)
        return iter(js.batches({"x": np.arange(4), "name": names}, 2))

    one = make()
    next(one)
    other = make()
    other.set_state(as_json(one.get_state()))
    assert next(other)["x"].tolist() == [2, 3]


def read(strategy, batches, **options):
    options = js.InputOptions(experimental_per_replica_buffer_size=0, **options)
    dataset = strategy.distribute_datasets_from_function(lambda _: batches, options)
    for batch in dataset:
        rows = strategy.experimental_local_results(batch)
        mean = strategy.run(js.masked_mean, (batch,))
        mean = strategy.reduce("mean", mean)
        real = np.concatenate(rows)
        wanted = real.mean(0) if len(real) else np.zeros(real.shape[1:])
        np.testing.assert_allclose(mean, wanted, rtol=1e-6)
        yield [each.tolist() for each in rows]


def test_empty_batches_have_no_real_rows(two):
    none, some = np.zeros((0, 2)), X[:3]
    for batches in ([some, none, none, some], [none, some, some, none, none, none]):
        found = [rows for step in read(two, batches) for rows in step]
        assert found == [batch.tolist() for batch in batches]
    with pytest.raises(ValueError, match="Batch 0 has no rows, and it is the first, s"):
        list(read(two, [none, none, some, some]))


@each_of("n, ahead", [(1, 0), (2, 2), (4, 0)])
def test_empty_global_batches_have_no_real_rows(n, ahead):
    strategy = js.MirroredStrategy(jax.devices()[:n])
    options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
    batches = [X[:8], X[:0], X[8:12], X[:0]]
    dataset = strategy.experimental_distribute_dataset(batches, options)
    found = [strategy.gather(batch) for batch in dataset]
    for rows, batch in zip(found, batches, strict=True):
        np.testing.assert_array_equal(rows, batch)
    with pytest.raises(ValueError, match="Batch 0 has no rows, and it is the first"):
        next(iter(strategy.experimental_distribute_dataset(batches[1:], options)))


def test_scalars_are_each_replicas_own(strategy):
    n = strategy.num_replicas_in_sync
    numbers = [float(i) for i in range(2 * n)]
    for source in (numbers, [np.float32(i) for i in numbers]):
        dataset = strategy.distribute_datasets_from_function(lambda _, s=source: s)
        found = []
        for batch in dataset:
            assert batch.shape == () and batch.dtype == np.float32
            found += strategy.experimental_local_results(batch)
            assert strategy.reduce("sum", batch) == sum(map(float, found[-n:]))
        assert found == numbers


def test_scalars_for_some_replicas_only(four):
    numbers = [1.0, 2.0, 3.0, 4.0, 5.0]
    iterator = iter(four.distribute_datasets_from_function(lambda _: numbers))
    next(iterator)
    text = (
        "In step 1 there is no element for replicas 1, 2, 3, and scalars have no rows"
    )
    with pytest.raises(ValueError, match=text):
        next(iterator)
    options = js.InputOptions(remainder="drop")
    dataset = four.distribute_datasets_from_function(lambda _: numbers, options)
    assert len(list(dataset)) == 1
    dataset = four.distribute_datasets_from_function(
        lambda _: list(np.array(numbers)[:, None])
    )
    assert [float(four.reduce("sum", b, axis=0)) for b in dataset] == [10, 5]
