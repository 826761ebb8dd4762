"""Datasets of Grain as sources of batches."""

import gc
import json

import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import Source, assert_resumes, assert_same, taken
from helpers.threads import Started, until

import jaxstrategy as js


@pytest.fixture(scope="module")
def grain():
    return pytest.importorskip("grain")


def grain_map(grain):
    return grain.MapDataset.source(np.arange(14)).shuffle(seed=3).batch(4)


def grain_iter(grain):
    whole = grain.MapDataset.source(np.arange(30)).shuffle(seed=1).to_iter_dataset()
    return whole.filter(lambda x: x % 3 > 0).map(lambda x: {"x": x}).batch(3)


def grain_mixed(grain):
    parts = [grain.MapDataset.range(i, i + 12).to_iter_dataset() for i in (0, 20)]
    return grain.IterDataset.mix(parts, [0.25, 0.75]).batch(4)


def grain_loader(grain):
    from grain import samplers, sharding, transforms

    sampler = samplers.IndexSampler(
        18, shard_options=sharding.NoSharding(), shuffle=True, num_epochs=1, seed=2
    )
    return grain.DataLoader(
        data_source=np.arange(18),
        sampler=sampler,
        operations=[transforms.Batch(4)],
        worker_count=0,
    )


GRAIN = [grain_map, grain_iter, grain_mixed, grain_loader]


@pytest.mark.slow
@each_of("make", GRAIN)
def test_grain_gives_its_batches_and_resumes(grain, make):
    own = make(grain)
    expected = list(own.to_iter_dataset() if make is grain_map else own)
    assert len(expected) > 3
    source = Source(own)
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: make(grain), expected)


@each_of("make", GRAIN)
def test_grain_leaves_no_threads(grain, make):
    threads = Started()
    one = Source(make(grain)).start()
    next(one)
    one.close()
    until(lambda: gc.collect() >= 0 and not threads())


def test_grain_lengths(grain):
    assert Source(grain_map(grain)).length == 4
    assert Source(grain_map(grain).repeat(3)).length == 12
    assert Source(grain_map(grain).repeat(None)).length is None
    filtered = grain_map(grain).filter(lambda batch: batch[0] > 5)
    assert Source(filtered.map(lambda batch: batch)).length is None
    assert Source(grain_iter(grain)).length is None
    assert Source(grain_mixed(grain)).length is None
    assert Source(grain_loader(grain)).length is None


def test_grain_does_not_change_a_state_that_it_gave(grain):
    one = Source(grain_mixed(grain)).start()
    next(one)
    state = one.get_state()
    text = json.dumps(state)
    next(one)
    assert json.dumps(state) == text != json.dumps(one.get_state())


def test_grain_refuses_a_foreign_state(grain):
    one = Source(grain_map(grain)).start()
    with pytest.raises(ValueError, match="not the state of a pass over the Grain Map"):
        one.set_state({"batches": 3})
    with pytest.raises(ValueError, match="a state that Grain takes"):
        one.set_state({"dataset": {"epoch": 3}})
    loader = Source(grain_loader(grain)).start()
    with pytest.raises(ValueError, match="a state that Grain takes"):
        loader.set_state({"data_loader": "{}"})
    one.close(), loader.close()


def test_a_grain_state_that_json_cannot_hold(grain):
    class Iterator(grain.DatasetIterator):
        def __next__(self):
            return np.arange(2)

        def get_state(self):
            return {"generator": object()}

        def set_state(self, state):
            raise AssertionError

    class Own(grain.IterDataset):
        def __iter__(self):
            return Iterator()

    one = Source(Own()).start()
    next(one)
    with pytest.raises(TypeError, match="Own cannot be written as JSON|IterDataset"):
        one.get_state()


def test_grains_worker_processes_want_flags(grain):
    from absl import flags

    class Unparsed(grain.IterDataset):
        def __iter__(self):
            raise flags.UnparsedFlagAccessError("--grain_something")

    with pytest.raises(flags.UnparsedFlagAccessError) as caught:
        next(Source(Unparsed()).start())
    assert "mark_as_parsed" in caught.value.__notes__[0]


@pytest.mark.slow
def test_a_source_is_seldom_asked_for_its_place_and_each_batch_knows_its_own(grain):
    asked = []

    class Iterator(grain.DatasetIterator):
        def __init__(self):
            super().__init__()
            self.place = 0

        def __next__(self):
            if self.place == 50:
                raise StopIteration
            self.place += 1
            return np.full(2, self.place - 1)

        def get_state(self):
            asked.append(self.place)
            return {"place": self.place}

        def set_state(self, state):
            self.place = state["place"]

    class Counted(grain.IterDataset):
        def __iter__(self):
            return Iterator()

    strategy = js.MirroredStrategy(js.simulate(8)[:2])
    for depth in (0, 2):
        asked.clear()
        options = js.InputOptions(experimental_per_replica_buffer_size=depth)
        data = strategy.experimental_distribute_dataset(Counted(), options)
        iterator = iter(data)
        states = [iterator.get_state()]
        for number, batch in enumerate(iterator):
            assert int(batch.stacked[0, 0]) == number
            states.append(json.loads(json.dumps(iterator.get_state())))
        assert number == 49 and len(asked) <= 5, asked
        for used in (0, 1, 15, 16, 17, 31, 49, 50):
            resumed = iter(data)
            resumed.set_state(states[used])
            assert resumed.get_state() == states[used]
            left = [int(batch.stacked[0, 0]) for batch in resumed]
            assert left == list(range(used, 50)), (depth, used)
    short = iter(strategy.experimental_distribute_dataset(grain_map(grain)))
    (source,) = short.get_state()["sources"]
    with pytest.raises(ValueError, match="fewer batches than when the state was sav"):
        short.set_state({**states[0], "sources": [{**source, "since": 9}]})
    short.close()
