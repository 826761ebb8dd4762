"""Datasets of other libraries as sources of batches."""

import collections
import gc
import json
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import (
    FakeTfDataset,
    Source,
    assert_resumes,
    assert_same,
    cut,
    taken,
)
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


def test_states_that_grain_cannot_take_or_give(grain):
    one = Source(grain_mixed(grain)).start()
    next(one)
    state = one.get_state()
    text = json.dumps(state)
    next(one)
    assert json.dumps(state) == text != json.dumps(one.get_state())
    one = Source(grain_map(grain)).start()
    with pytest.raises(ValueError, match="not the state of a pass over the Grain Map"):
        one.set_state({"batches": 3})
    with pytest.raises(ValueError, match="a state that Grain takes"):
        one.set_state({"dataset": {"epoch": 3}})
    loader = Source(grain_loader(grain)).start()
    with pytest.raises(ValueError, match="a state that Grain takes"):
        loader.set_state({"data_loader": "{}"})
    one.close(), loader.close()

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


def test_what_hugging_face_datasets_cannot_do_is_told(datasets):
    with pytest.raises(TypeError, match=r'in the form None .*with_format\("numpy"\)'):
        Source(face(datasets).batch(4))
    splits = datasets.DatasetDict({"train": face_table(datasets)})
    with pytest.raises(TypeError, match=r"several datasets: train. .*dataset\['train"):
        Source(splits)
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        Source(face_stream(datasets)).start().set_state({"batches": 1})
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        Source(face_table(datasets)).start().set_state({"stream": {}})
    with pytest.raises(ValueError, match="saved after batch 9, but .* has 3 batches"):
        Source(face_table(datasets)).start().set_state({"batches": 9})
    stream = face(datasets).to_iterable_dataset().shuffle(seed=0, buffer_size=5)
    one = Source(stream.with_format("numpy").batch(4)).start()
    rows = np.concatenate([batch["y"] for batch in one])
    assert sorted(rows.tolist()) == list(range(10))
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.get_state()
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.set_state({})
    source = Source(face_stream(datasets))
    one, other = source.start(), source.start()
    next(one), next(other), next(one)
    for each in (one, other):
        with pytest.raises(TypeError, match="place of this pass is unknown"):
            each.get_state()
    third = source.start()
    next(third)
    assert third.get_state()


@each_of("streamed", [False, True])
def test_hugging_face_without_batches(datasets, streamed):
    single = face(datasets).with_format("numpy")
    single = single.to_iterable_dataset() if streamed else single
    one = Source(single).start()
    with pytest.raises(TypeError, match=r"`batch\['y'\]` .* one example and not a bat"):
        next(one)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def torch_pairs(torch, count=10):
    x = torch.arange(2.0 * count).reshape(count, 2)
    return torch.utils.data.TensorDataset(x, torch.arange(count))


def torch_loader(torch, **options):
    return torch.utils.data.DataLoader(torch_pairs(torch), batch_size=4, **options)


def numpy_pairs(order, size=4):
    order = np.asarray(order)
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    return [(np.stack([2.0 * p, 2.0 * p + 1], 1).astype(np.float32), p) for p in parts]


def test_torch_gives_tuples_of_numpy_and_resumes(torch):
    expected = numpy_pairs(range(10))
    source = Source(torch_loader(torch))
    assert source.length == 3 and source.name == "the PyTorch DataLoader"
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: torch_loader(torch), expected)
    assert_resumes(lambda: torch_loader(torch, drop_last=True), expected[:2])


def test_torch_batches_keep_their_structure(torch):
    Pair = collections.namedtuple("Pair", "x y")
    t = torch.arange(3)
    batch = {"a": [t, (t, [t])], "pair": Pair(t, t)}

    class Dataset(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return batch

    loader = torch.utils.data.DataLoader(Dataset(), batch_size=None)
    one = Source(loader).start()
    first = next(one)
    assert isinstance(first["a"], tuple) and isinstance(first["a"][1][1], tuple)
    assert isinstance(first["pair"], Pair)
    arrays = jax.tree.leaves(first)
    assert len(arrays) == 5
    for leaf in arrays:
        np.testing.assert_array_equal(leaf, [0, 1, 2])
    assert one.get_state() == {"batches": 1, "length": 2}


def test_batches_of_tokenizers_become_dicts(torch):
    t = torch.arange(3)
    batch = collections.UserDict(input_ids=t, mask=collections.UserDict(x=t))
    loader = torch.utils.data.DataLoader(
        [batch], batch_size=None, collate_fn=lambda one: one
    )
    first = next(Source(loader).start())
    assert type(first) is dict and type(first["mask"]) is dict
    np.testing.assert_array_equal(first["mask"]["x"], [0, 1, 2])


def unbatched(torch, tensors):
    return torch.utils.data.DataLoader(
        tensors, batch_size=None, collate_fn=lambda tensor: tensor
    )


def test_a_batch_stays_though_its_tensor_is_used_again(torch):
    tensor = torch.arange(4.0)
    array = next(Source(unbatched(torch, [tensor])).start())
    tensor[0] = 7
    np.testing.assert_array_equal(array, [0, 1, 2, 3])


@each_of("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_dtypes_that_numpy_lacks(torch, name):
    tensor = torch.tensor([0.5, -2.0, 4.0]).to(getattr(torch, name))
    array = next(Source(unbatched(torch, [tensor])).start())
    assert array.dtype == getattr(ml_dtypes, name)
    np.testing.assert_array_equal(array.astype(np.float32), [0.5, -2, 4])


def test_torch_gradients_and_lazy_conjugates_are_resolved(torch):
    given_ = [torch.ones(2, requires_grad=True), torch.tensor([1j]).conj()]
    for tensor, wanted in zip(given_, ([1, 1], [-1j]), strict=True):
        (found,) = taken(Source(unbatched(torch, [tensor])).start())
        np.testing.assert_array_equal(found, wanted)


def test_what_torch_loaders_cannot_do_is_told(torch):
    sparse = torch.eye(2).to_sparse()
    loader = unbatched(torch, [{"x": (torch.ones(1), sparse)}])
    with pytest.raises(TypeError, match=r"`batch\['x'\]\[1\]` is a tensor of .*sparse"):
        next(Source(loader).start())
    generator = torch.Generator().manual_seed(0)
    one = Source(torch_loader(torch, shuffle=True, generator=generator)).start()
    next(one)
    advice = "the order would differ. Use a `torchdata.*StatefulDataLoader`, Grain, or"
    with pytest.raises(TypeError, match=advice):
        one.get_state()
    with pytest.raises(TypeError, match=advice):
        one.set_state({"batches": 1})
    loader = torch.utils.data.DataLoader(
        torch_pairs(torch), batch_sampler=[[3, 1], [2, 0]]
    )
    source = Source(loader)
    assert_same(taken(source.start()), numpy_pairs([3, 1, 2, 0], 2))
    with pytest.raises(TypeError, match="its sampler is not sequential"):
        source.start().get_state()
    with pytest.raises(TypeError, match="is a PyTorch dataset of examples and not of"):
        Source(torch_pairs(torch))


def test_an_iterable_torch_dataset(torch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(5))

        def __len__(self):
            return 4  # a wrong guess

    source = Source(torch.utils.data.DataLoader(Stream(), batch_size=5))
    assert source.length is None
    assert_same(taken(source.start()), [np.arange(5)])
    with pytest.raises(TypeError, match="its dataset is an iterable, which"):
        source.start().get_state()


# Torchdata calls a function that newer versions of PyTorch warn of.
OLD_CALL = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture(scope="module")
def stateful(torch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's own, of a deprecated function
        return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@OLD_CALL
@each_of("shuffle", [False, True])
def test_a_stateful_loader_resumes(torch, stateful, shuffle):
    def make():
        generator = torch.Generator().manual_seed(5)
        return stateful(
            torch_pairs(torch), batch_size=4, shuffle=shuffle, generator=generator
        )

    expected = taken(Source(make()).start())
    rows = np.concatenate([y for _, y in expected])
    assert sorted(rows.tolist()) == list(range(10))
    assert_same(expected, numpy_pairs(rows))
    assert_resumes(make, expected)


@OLD_CALL
def test_a_stateful_loader_resumes_without_a_seed(torch, stateful):
    def make():
        return stateful(torch_pairs(torch, 40), batch_size=4, shuffle=True)

    one = Source(make()).start()
    next(one)
    state = one.get_state()
    left = taken(one)
    source = Source(make())
    other = source.start()
    other.set_state(state)
    assert_same(taken(other), left)
    assert len(taken(source.start())) == 10  # the next pass begins at the beginning


@OLD_CALL
def test_a_stateful_loader_remembers_one_place(torch, stateful):
    source = Source(stateful(torch_pairs(torch), batch_size=4))
    one, other = source.start(), source.start()
    next(one), next(other)
    with pytest.raises(TypeError, match="remembers one place only, and another pass"):
        one.get_state()
    with pytest.raises(ValueError, match="which has its `state_dict`"):
        other.set_state({"batches": 1})


TF_PARTS = [{"x": np.arange(i, i + 3)} for i in range(4)]


def test_tf_data_is_read_by_its_protocol_and_resumes():
    source = Source(FakeTfDataset(TF_PARTS))
    assert source.length == 4 and source.name == "the tf.data dataset"
    assert_same(taken(source.start()), TF_PARTS)
    assert_same(taken(source.start()), TF_PARTS)
    assert_resumes(lambda: FakeTfDataset(TF_PARTS), TF_PARTS)
    with pytest.raises(ValueError, match="after batch 5, but the tf.data dataset has"):
        Source(FakeTfDataset(TF_PARTS)).start().set_state({"batches": 5})


@each_of("count", [-1, -2])
def test_tf_data_without_a_length(count):
    assert Source(FakeTfDataset(TF_PARTS, count)).length is None
