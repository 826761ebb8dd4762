"""Datasets of Hugging Face as sources of batches."""

import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import Source, assert_resumes, assert_same, cut, taken


@pytest.fixture(scope="module")
def datasets():
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    return library


def face_data(count=10):
    x = np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)
    return {"x": x, "y": np.arange(count)}


def face(datasets, count=10):
    whole = datasets.Dataset.from_dict({k: v.tolist() for k, v in face_data().items()})
    features = whole.features.copy()
    features["x"] = datasets.List(datasets.Value("float32"))
    return whole.cast(features)


def face_table(datasets):
    return face(datasets).with_format("numpy").batch(4)


def face_stream(datasets):
    streamed = face(datasets).to_iterable_dataset(num_shards=2)
    return streamed.with_format("numpy").batch(4)


def face_generated(datasets):
    def read():
        for i in range(10):
            yield {"x": np.array([2 * i, 2 * i + 1], np.float32), "y": i}

    return datasets.IterableDataset.from_generator(read).with_format("numpy").batch(4)


FACES = [face_table, face_stream, face_generated]


@each_of("make", FACES)
def test_hugging_face_gives_batches_and_resumes(datasets, make):
    expected = cut(face_data(), 4)
    source = Source(make(datasets))
    assert source.length == (3 if make is face_table else None)
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: make(datasets), expected)


def test_a_hugging_face_stream_keeps_its_epoch(datasets):
    def make(epoch):
        whole = face(datasets).to_iterable_dataset(num_shards=5)
        stream = whole.with_format("numpy").batch(2)
        stream.set_epoch(epoch)
        return stream

    first = Source(make(3)).start()
    state = (next(first), first.get_state())[1]
    assert state["stream"]["epoch"] == 3
    left = taken(first)
    other = Source(make(0)).start()
    other.set_state(state)
    assert_same(taken(other), left)


def test_hugging_face_in_another_form(datasets):
    with pytest.raises(TypeError, match=r'in the form None .*with_format\("numpy"\)'):
        Source(face(datasets).batch(4))


@each_of("streamed", [False, True])
def test_hugging_face_without_batches(datasets, streamed):
    single = face(datasets).with_format("numpy")
    single = single.to_iterable_dataset() if streamed else single
    one = Source(single).start()
    with pytest.raises(TypeError, match=r"`batch\['y'\]` .* one example and not a bat"):
        next(one)


def test_a_hugging_face_shuffle_buffer_cannot_resume(datasets):
    stream = face(datasets).to_iterable_dataset().shuffle(seed=0, buffer_size=5)
    one = Source(stream.with_format("numpy").batch(4)).start()
    rows = np.concatenate([batch["y"] for batch in one])
    assert sorted(rows.tolist()) == list(range(10))
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.get_state()
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.set_state({})


def test_hugging_face_refuses_a_foreign_state(datasets):
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        Source(face_stream(datasets)).start().set_state({"batches": 1})
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        Source(face_table(datasets)).start().set_state({"stream": {}})
    with pytest.raises(ValueError, match="saved after batch 9, but .* has 3 batches"):
        Source(face_table(datasets)).start().set_state({"batches": 9})


def test_hugging_face_passes_in_turns_lose_their_place(datasets):
    source = Source(face_stream(datasets))
    one, other = source.start(), source.start()
    next(one), next(other), next(one)
    for each in (one, other):
        with pytest.raises(TypeError, match="place of this pass is unknown"):
            each.get_state()
    third = source.start()
    next(third)
    assert third.get_state()


def test_several_hugging_face_splits(datasets):
    splits = datasets.DatasetDict({"train": face_table(datasets)})
    with pytest.raises(TypeError, match=r"several datasets: train. .*dataset\['train"):
        Source(splits)
