"""Loaders of PyTorch as sources of batches."""

import collections
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import Source, assert_resumes, assert_same, taken


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


def test_a_torch_tensor_that_numpy_cannot_hold(torch):
    sparse = torch.eye(2).to_sparse()
    loader = unbatched(torch, [{"x": (torch.ones(1), sparse)}])
    with pytest.raises(TypeError, match=r"`batch\['x'\]\[1\]` is a tensor of .*sparse"):
        next(Source(loader).start())


def test_a_shuffling_torch_loader_cannot_resume(torch):
    generator = torch.Generator().manual_seed(0)
    one = Source(torch_loader(torch, shuffle=True, generator=generator)).start()
    next(one)
    advice = "the order would differ. Use a `torchdata.*StatefulDataLoader`, Grain, or"
    with pytest.raises(TypeError, match=advice):
        one.get_state()
    with pytest.raises(TypeError, match=advice):
        one.set_state({"batches": 1})


def test_a_torch_batch_sampler_of_ones_own_is_not_taken_for_sequential(torch):
    loader = torch.utils.data.DataLoader(
        torch_pairs(torch), batch_sampler=[[3, 1], [2, 0]]
    )
    source = Source(loader)
    assert_same(taken(source.start()), numpy_pairs([3, 1, 2, 0], 2))
    with pytest.raises(TypeError, match="its sampler is not sequential"):
        source.start().get_state()


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


def test_a_torch_dataset_of_examples(torch):
    with pytest.raises(TypeError, match="is a PyTorch dataset of examples and not of"):
        Source(torch_pairs(torch))
