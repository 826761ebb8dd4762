"""Iterators that go on where a saved state says."""

import json
import re

import numpy as np
import pytest
from helpers.cases import each_of
from helpers.inputs import PER_REPLICA, ranged, real, ways

import jaxstrategy as js

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


@each_of("make", RESUMABLE.values())
@each_of("options", ways()[::2])
@each_of("used", [0, 2, 6])
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


@each_of("state", [None, {}, 3, {"version": 0}, {"steps": 1}])
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


@each_of("mode", js.InputReplicationMode)
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
