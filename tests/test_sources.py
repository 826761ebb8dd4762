"""The sources of batches: what they give, how they resume, and what they refuse."""

import collections
import functools
import gc
import itertools
import json
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxstrategy as js
from jaxstrategy.inputs.sources._choose import as_source
from jaxstrategy.inputs.sources._memory import batches
from jaxstrategy.inputs.sources._source import Pass, Source


def taken(one_pass, count=None):
    """The batches that are left, or the next `count` of them."""
    found = list(itertools.islice(one_pass, count))
    one_pass.close()
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        for leaf, wanted in zip(
            jax.tree.leaves(one), jax.tree.leaves(other), strict=True
        ):
            assert isinstance(leaf, (np.ndarray, jax.Array))
            assert leaf.dtype == wanted.dtype
            np.testing.assert_array_equal(leaf, wanted)


def assert_resumes(make, expected):
    """From each position, a fresh source goes on exactly as the others did."""
    for position in range(len(expected) + 1):
        first = as_source(make()).start()
        assert_same(list(itertools.islice(first, position)), expected[:position])
        state = json.loads(json.dumps(first.get_state()))
        assert_same(taken(first), expected[position:])
        second = as_source(make()).start()
        before = second.set_state(state)
        if before is not None:
            assert_same([before], [expected[position - 1]])
        assert json.loads(json.dumps(second.get_state())) == state
        assert_same(list(second), expected[position:])
        third = as_source(make()).start()
        third.set_state(json.loads(json.dumps(second.get_state())))  # at the end
        assert_same(taken(third), [])
        second.close()


PAIRS = [(np.full((2, 3), i, np.float32), np.array([i, i + 1])) for i in range(4)]


def read():
    yield from PAIRS


class Loader:
    """Begins anew in each loop and knows its length."""

    def __len__(self):
        return len(PAIRS)

    def __iter__(self):
        return iter(PAIRS)


class Endless:
    def __iter__(self):
        return itertools.cycle(PAIRS)


REPEATABLE = {
    "list": lambda: PAIRS,
    "tuple": lambda: tuple(PAIRS),
    "deque": lambda: collections.deque(PAIRS),
    "object": Loader,
    "generator function": lambda: read,
    "partial": lambda: functools.partial(map, tuple, PAIRS),
    "lambda of a list": lambda: lambda: PAIRS,
}


@pytest.mark.parametrize("make", REPEATABLE.values(), ids=REPEATABLE)
class TestRepeatable:
    def test_each_pass_has_all_batches(self, make):
        source = as_source(make())
        assert_same(taken(source.start()), PAIRS)
        assert_same(taken(source.start()), PAIRS)

    def test_two_passes_do_not_disturb_each_other(self, make):
        source = as_source(make())
        one, other = source.start(), source.start()
        next(one), next(one)
        assert_same([next(other)], PAIRS[:1])
        assert_same(taken(one), PAIRS[2:])
        assert_same(taken(other), PAIRS[1:])

    def test_it_resumes(self, make):
        assert_resumes(make, PAIRS)

    def test_a_used_pass_can_go_back(self, make):
        one = as_source(make()).start()
        next(one), next(one)
        assert_same([one.set_state({"batches": 1})], PAIRS[:1])
        assert_same(taken(one), PAIRS[1:])
        assert one.set_state({"batches": 0}) is None
        assert_same(taken(one), PAIRS)

    def test_fewer_batches_than_the_state_says(self, make):
        with pytest.raises(ValueError, match=r"saved after batch 9, but .* 4 batches"):
            as_source(make()).start().set_state({"batches": 9})

    @pytest.mark.parametrize("state", [{}, None, 3, {"batches": -1}, {"batches": "2"}])
    def test_a_foreign_state(self, make, state):
        with pytest.raises(ValueError, match="is not the state of a pass over the"):
            as_source(make()).start().set_state(state)


def test_plain_states_count_batches():
    one = as_source(read).start()
    next(one)
    assert one.get_state() == {"batches": 1}
    assert one.part(lambda rows: slice(rows)) is None


def test_plain_lengths():
    assert as_source(PAIRS).length == as_source(Loader()).length == 4
    assert as_source(Endless()).length is None
    assert as_source(read).length is None
    assert as_source(iter(PAIRS)).length is None


def test_names_say_what_was_given():
    assert as_source(PAIRS).name == "the list"
    assert as_source(read).name == "the function `read`"
    assert as_source(functools.partial(read)).name == "the function `read`"
    assert as_source(read()).name == "the generator"
    assert as_source(batches(np.zeros(2), 1)).name == "js.batches"


def test_an_endless_iterable_resumes():
    one = as_source(Endless()).start()
    one.set_state({"batches": 6})
    assert_same([next(one)], PAIRS[2:3])


def test_nothing_is_read_before_the_first_batch():
    begun = []

    def noting():
        begun.append(1)
        yield from PAIRS

    one = as_source(noting).start()
    assert not begun
    next(one)
    assert begun == [1]


def test_closing_ends_a_generator_that_we_began():
    ended = []

    def noting():
        try:
            yield from PAIRS
        finally:
            ended.append(1)

    one = as_source(noting).start()
    next(one)
    assert not ended
    one.close()
    one.close()
    assert ended == [1]


def test_batches_are_handed_on_as_they_are():
    given_ = [{"x": jnp.ones(2)}, "anything"]
    found = taken(as_source(given_).start())
    assert found[0] is given_[0] and found[1] is given_[1]


def test_errors_of_a_source_come_through():
    def failing():
        yield PAIRS[0]
        raise OSError("disk")

    one = as_source(failing).start()
    next(one)
    with pytest.raises(OSError, match="disk"):
        next(one)


@pytest.mark.parametrize("once", [read, lambda: iter(PAIRS), lambda: map(id, [1])])
def test_an_iterator_is_read_once(once):
    source = as_source(once())
    assert len(taken(source.start())) in (4, 1)
    with pytest.raises(
        TypeError, match="Only one pass can read the .*, and one did. To read it"
    ):
        source.start()


def test_an_iterator_cannot_resume():
    one = as_source(read()).start()
    advice = r"cannot resume: .* a list of batches, or a function .* `read`"
    with pytest.raises(TypeError, match=advice):
        one.get_state()
    with pytest.raises(TypeError, match=advice):
        one.set_state({"batches": 0})


def test_closing_leaves_the_users_iterator_alone():
    given_ = read()
    one = as_source(given_).start()
    next(one)
    one.close()
    assert_same(list(given_), PAIRS[1:])
    assert list(one) == []


def test_a_function_that_returns_no_iterator():
    one = as_source(lambda: 3).start()
    with pytest.raises(TypeError, match="returned int, which is not an iterator"):
        next(one)


# js.batches


def rows_of(count):
    x = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
    return {"x": x, "y": np.arange(count)}


def cut(data, size, drop=False):
    """The oracle: slices of a dict of arrays, in order."""
    count = len(data["y"])
    starts = range(0, count - size + 1 if drop else count, size)
    return [{k: v[i : i + size] for k, v in data.items()} for i in starts]


@pytest.mark.parametrize("size", [1, 3, 4, 7, 9])
@pytest.mark.parametrize("drop", [False, True])
def test_unshuffled_batches_are_slices(size, drop):
    data = rows_of(7)
    if drop and size > 7:
        return
    source = batches(data, size, drop_remainder=drop)
    assert_same(list(source), cut(data, size, drop))
    assert len(source) == source.length == len(cut(data, size, drop))
    assert_same(list(batches(data, size, epochs=2)), 2 * cut(data, size))


def test_unshuffled_batches_are_views():
    data = rows_of(8)
    for batch in batches(data, 3):
        assert np.shares_memory(batch["x"], data["x"])
    _, part = batches(data, 4).start().part(lambda rows: slice(1, 2))
    assert np.shares_memory(part["x"], data["x"])


def test_what_can_be_batched(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")

    class Lazy:
        def __array__(self, dtype=None, copy=None):
            return np.arange(6)

    for array in (np.arange(6), jnp.arange(6), mapped, Lazy()):
        found = [batch.tolist() for batch in batches(array, 4)]
        assert found == [[0, 1, 2, 3], [4, 5]]
    (x, (y, none)) = next(batches((np.arange(2), [np.arange(2), None]), 2).start())
    assert x.tolist() == y.tolist() == [0, 1] and none is None


def order_of(source):
    return np.concatenate([batch["y"] for batch in source]).tolist()


def test_each_epoch_has_its_own_order_from_the_seed():
    data = rows_of(32)
    source = batches(data, 5, shuffle=7)
    passes = [order_of(source) for _ in range(3)]
    for rows in passes:
        assert sorted(rows) == list(range(32))
    assert len({tuple(rows) for rows in passes}) == 3
    again = batches(data, 8, shuffle=7)  # the batch size does not change the order
    assert [order_of(again) for _ in range(3)] == passes
    assert order_of(batches(data, 5, shuffle=7, epochs=3)) == sum(passes, [])
    assert order_of(batches(data, 5, shuffle=8)) != passes[0]
    two = batches(data, 5, shuffle=7, epochs=2)
    order_of(two)
    assert order_of(two)[:32] == passes[2]


def test_the_order_is_this_on_every_machine():
    # Recorded with NumPy 2.4.
    source = batches(rows_of(8), 8, shuffle=3)
    assert [order_of(source) for _ in range(2)] == RECORDED


RECORDED = [[6, 7, 2, 1, 4, 5, 3, 0], [2, 1, 4, 0, 5, 7, 6, 3]]


def test_the_rows_of_all_arrays_stay_together():
    for batch in batches(rows_of(11), 4, shuffle=1):
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])


def test_without_end():
    source = batches(rows_of(4), 3, shuffle=0, epochs=None)
    assert source.length is None and source
    sizes = [len(b["y"]) for b in itertools.islice(source, 5)]
    assert sizes == [3, 1, 3, 1, 3]
    one = batches(rows_of(4), 4, shuffle=0)
    orders = [order_of(one) for _ in range(3)]
    endless = batches(rows_of(4), 4, shuffle=0, epochs=None)
    assert order_of(itertools.islice(endless, 3)) == sum(orders, [])
    assert order_of(itertools.islice(endless, 2)) == sum(orders[1:], [])
    with pytest.raises(TypeError, match="go on without end: no `len`"):
        len(source)


def test_batches_are_a_source_and_a_plain_iterable():
    source = batches(np.arange(3), 2)
    assert isinstance(source, Source) and as_source(source) is source
    assert isinstance(iter(source), Pass)
    assert repr(source) == "batches(3 rows, 2)"
    shuffled = batches(np.arange(3), 2, shuffle=1, epochs=None)
    assert repr(shuffled) == "batches(3 rows, 2, shuffle=1, epochs=None)"


@st.composite
def resumed(draw):
    rows, size = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    options = {
        "shuffle": draw(st.none() | st.integers(0, 3)),
        "epochs": draw(st.none() | st.integers(1, 3)),
        "drop_remainder": draw(st.booleans()) and size <= rows,
    }
    return rows, size, options, draw(st.integers(0, 2)), draw(st.integers(0, 40))


@settings(deadline=None, max_examples=200)
@given(resumed())
def test_batches_resume_anywhere(case):
    rows, size, options, earlier, position = case
    data, limit = rows_of(rows), 60

    def make():
        return batches(data, size, **options)

    whole = make()
    for _ in range(earlier):
        list(itertools.islice(whole, limit))
    first = whole.start()
    position = len(list(itertools.islice(first, position)))
    state = json.loads(json.dumps(first.get_state()))
    assert set(state) == {"epoch", "batch", "data"}
    left = list(itertools.islice(first, limit))
    fresh = make()
    second = fresh.start()
    assert second.set_state(state) is None
    assert second.get_state() == state
    assert_same(list(itertools.islice(second, limit)), left)
    if options["epochs"] is not None:  # the passes after it too
        assert position + len(left) == len(whole)
        assert_same(list(fresh), list(whole))


def test_the_pass_after_a_restored_one_is_the_next_epoch():
    source = batches(rows_of(9), 2, shuffle=5)
    orders = [order_of(source) for _ in range(4)]
    fresh = batches(rows_of(9), 2, shuffle=5)
    one = fresh.start()
    one.set_state({**one.get_state(), "epoch": 2, "batch": 3})
    assert order_of(one) == orders[2][6:]
    assert order_of(fresh) == orders[3]


@pytest.mark.parametrize("shuffle", [None, 4])
@pytest.mark.parametrize("epochs", [1, 2])
def test_parts_are_the_chosen_rows(shuffle, epochs):
    def make():
        return batches(rows_of(10), 4, shuffle=shuffle, epochs=epochs)

    for choose in (
        lambda rows: slice(rows // 2, rows),
        lambda rows: slice(1, 2),
        lambda rows: slice(0, 0),
        lambda rows: slice(5, 9),
        lambda rows: slice(3, 1),
        lambda rows: slice(None, None, 2),
    ):
        one = make().start()
        for batch in make():
            count, part = one.part(choose)
            assert count == len(batch["y"])
            assert_same([part], [{k: v[choose(count)] for k, v in batch.items()}])
        with pytest.raises(StopIteration):
            one.part(choose)


def test_only_the_chosen_rows_are_read():
    class Counting(np.ndarray):
        read = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            Counting.read += len(found)
            return found

    source = batches(np.arange(12), 6, shuffle=0)
    source._arrays = np.arange(12).view(Counting)
    source.start().part(lambda rows: slice(2, 4))
    assert Counting.read == 2


BAD = {
    "holds no array": ({}, 2),
    r"`arrays\['y'\]` has 3 rows but `arrays\['x'\]` has 4": (
        {"x": np.zeros(4), "y": np.zeros(3)},
        2,
    ),
    r"`arrays\['n'\]` is 3, which has no rows": ({"n": 3, "x": np.zeros(3)}, 2),
    r"`arrays\[0\]` is 1, .*`np.array": ([1, 2, 3], 2),
    "has no rows, so there is nothing": (np.zeros((0, 2)), 2),
    "`batch_size` is 0; it is to be at least 1": (np.zeros(3), 0),
    "`batch_size` is -2; it is to be at least 1": (np.zeros(3), -2),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arrays(message):
    with pytest.raises(ValueError, match=message):
        batches(*BAD[message])


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_a_batch_size_that_is_no_int(size):
    with pytest.raises(TypeError, match="`batch_size` is .*; it is to be an int"):
        batches(np.zeros(3), size)
    assert len(batches(np.zeros(3), np.int64(2))) == 2


def test_bad_options():
    x = np.zeros(3)
    with pytest.raises(ValueError, match="only 3 rows, so with `drop_remainder=True`"):
        batches(x, 4, drop_remainder=True)
    with pytest.raises(TypeError, match="`shuffle` is True; it is a seed"):
        batches(x, 2, shuffle=True)
    with pytest.raises(ValueError, match="`shuffle` is -1; it is to be at least 0"):
        batches(x, 2, shuffle=-1)
    with pytest.raises(ValueError, match="`epochs` is 0; it is to be at least 1"):
        batches(x, 2, epochs=0)
    with pytest.raises(TypeError, match="used as if it were one array"):
        batches(js.PerReplica(np.zeros((2, 3))), 2)


@pytest.mark.parametrize("state", [{"batches": 1}, {"epoch": 0}, None, {"epoch": 0.5},
                                   {"epoch": 0, "batch": 0}])  # fmt: skip
def test_batches_refuse_a_foreign_state(state):
    with pytest.raises(ValueError, match="is not the state of a pass over js.batches"):
        batches(np.zeros(3), 2).start().set_state(state)
    with pytest.raises(ValueError, match="saved after batch 3, but an epoch has 2"):
        one = batches(np.zeros(3), 2).start()
        one.set_state({**one.get_state(), "batch": 3})


# Grain


def no_new_threads(before):
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return not set(threading.enumerate()) - before


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
        18,
        shard_options=sharding.NoSharding(),
        shuffle=True,
        num_epochs=1,
        seed=2,
    )
    return grain.DataLoader(
        data_source=np.arange(18),
        sampler=sampler,
        operations=[transforms.Batch(4)],
        worker_count=0,
    )


GRAIN = [grain_map, grain_iter, grain_mixed, grain_loader]


@pytest.mark.parametrize("make", GRAIN)
def test_grain_gives_its_batches_and_resumes(grain, make):
    own = make(grain)
    expected = list(own.to_iter_dataset() if make is grain_map else own)
    assert len(expected) > 3
    source = as_source(own)
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: make(grain), expected)


@pytest.mark.parametrize("make", GRAIN)
def test_grain_leaves_no_threads(grain, make):
    before = set(threading.enumerate())
    one = as_source(make(grain)).start()
    next(one)
    one.close()
    assert no_new_threads(before)


def test_grain_lengths(grain):
    assert as_source(grain_map(grain)).length == 4
    assert as_source(grain_map(grain).repeat(3)).length == 12
    assert as_source(grain_map(grain).repeat(None)).length is None
    filtered = grain_map(grain).filter(lambda batch: batch[0] > 5)
    assert as_source(filtered.map(lambda batch: batch)).length is None
    assert as_source(grain_iter(grain)).length is None
    assert as_source(grain_mixed(grain)).length is None
    assert as_source(grain_loader(grain)).length is None


def test_grain_names(grain):
    names = [as_source(make(grain)).name for make in GRAIN]
    assert names == [
        "the Grain MapDataset",
        "the Grain IterDataset",
        "the Grain IterDataset",
        "the Grain DataLoader",
    ]


def test_grain_does_not_change_a_state_that_it_gave(grain):
    one = as_source(grain_mixed(grain)).start()
    next(one)
    state = one.get_state()
    text = json.dumps(state)
    next(one)
    assert json.dumps(state) == text != json.dumps(one.get_state())


def test_grain_refuses_a_foreign_state(grain):
    one = as_source(grain_map(grain)).start()
    with pytest.raises(ValueError, match="not the state of a pass over the Grain Map"):
        one.set_state({"batches": 3})
    with pytest.raises(ValueError, match="a state that Grain takes"):
        one.set_state({"dataset": {"epoch": 3}})
    loader = as_source(grain_loader(grain)).start()
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

    one = as_source(Own()).start()
    next(one)
    with pytest.raises(TypeError, match="Own cannot be written as JSON|IterDataset"):
        one.get_state()


def test_grains_worker_processes_want_flags(grain):
    from absl import flags

    class Unparsed(grain.IterDataset):
        def __iter__(self):
            raise flags.UnparsedFlagAccessError("--grain_something")

    with pytest.raises(flags.UnparsedFlagAccessError) as caught:
        next(as_source(Unparsed()).start())
    assert "mark_as_parsed" in caught.value.__notes__[0]


# PyTorch


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
    source = as_source(torch_loader(torch))
    assert source.length == 3 and source.name == "the PyTorch DataLoader"
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: torch_loader(torch), expected)
    assert_resumes(lambda: torch_loader(torch, drop_last=True), expected[:2])


def test_torch_batches_keep_their_structure(torch):
    Pair = collections.namedtuple("Pair", "x y")
    t = torch.arange(3)
    batch = {"a": [t, (t, [t])], "pair": Pair(t, t), "text": "as it is"}

    class Dataset(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return batch

    loader = torch.utils.data.DataLoader(Dataset(), batch_size=None)
    one = as_source(loader).start()
    first = next(one)
    assert isinstance(first["a"], tuple) and isinstance(first["a"][1][1], tuple)
    assert isinstance(first["pair"], Pair) and first["text"] == "as it is"
    arrays = [leaf for leaf in jax.tree.leaves(first) if not isinstance(leaf, str)]
    assert len(arrays) == 5
    for leaf in arrays:
        np.testing.assert_array_equal(leaf, [0, 1, 2])
    assert one.get_state() == {"batches": 1, "length": 2}


def unbatched(torch, tensors):
    return torch.utils.data.DataLoader(
        tensors, batch_size=None, collate_fn=lambda tensor: tensor
    )


def test_torch_tensors_are_not_copied(torch):
    tensor = torch.arange(4.0)
    array = next(as_source(unbatched(torch, [tensor])).start())
    tensor[0] = 7
    assert array[0] == 7


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_dtypes_that_numpy_lacks(torch, name):
    tensor = torch.tensor([0.5, -2.0, 4.0]).to(getattr(torch, name))
    array = next(as_source(unbatched(torch, [tensor])).start())
    assert array.dtype == getattr(ml_dtypes, name)
    np.testing.assert_array_equal(array.astype(np.float32), [0.5, -2, 4])


def test_torch_gradients_and_lazy_conjugates_are_resolved(torch):
    given_ = [torch.ones(2, requires_grad=True), torch.tensor([1j]).conj()]
    found = taken(as_source(unbatched(torch, given_)).start())
    np.testing.assert_array_equal(found[0], [1, 1])
    np.testing.assert_array_equal(found[1], [-1j])


def test_a_torch_tensor_that_numpy_cannot_hold(torch):
    sparse = torch.eye(2).to_sparse()
    loader = unbatched(torch, [{"x": (torch.ones(1), sparse)}])
    with pytest.raises(TypeError, match=r"`batch\['x'\]\[1\]` is a tensor of .*sparse"):
        next(as_source(loader).start())


def test_a_shuffling_torch_loader_cannot_resume(torch):
    generator = torch.Generator().manual_seed(0)
    one = as_source(torch_loader(torch, shuffle=True, generator=generator)).start()
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
    source = as_source(loader)
    assert_same(taken(source.start()), numpy_pairs([3, 1, 2, 0], 2))
    with pytest.raises(TypeError, match="its sampler is not sequential"):
        source.start().get_state()


def test_an_iterable_torch_dataset(torch):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.arange(5))

        def __len__(self):
            return 4  # a wrong guess

    source = as_source(torch.utils.data.DataLoader(Stream(), batch_size=5))
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
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stateful_loader_resumes(torch, stateful, shuffle):
    def make():
        generator = torch.Generator().manual_seed(5)
        return stateful(
            torch_pairs(torch), batch_size=4, shuffle=shuffle, generator=generator
        )

    expected = taken(as_source(make()).start())
    rows = np.concatenate([y for _, y in expected])
    assert sorted(rows.tolist()) == list(range(10))
    assert_same(expected, numpy_pairs(rows))
    assert_resumes(make, expected)


@OLD_CALL
def test_a_stateful_loader_resumes_without_a_seed(torch, stateful):
    def make():
        return stateful(torch_pairs(torch, 40), batch_size=4, shuffle=True)

    one = as_source(make()).start()
    next(one)
    state = one.get_state()
    left = taken(one)
    source = as_source(make())
    other = source.start()
    other.set_state(state)
    assert_same(taken(other), left)
    assert len(taken(source.start())) == 10  # the next pass begins at the beginning


@OLD_CALL
def test_a_stateful_loader_remembers_one_place(torch, stateful):
    source = as_source(stateful(torch_pairs(torch), batch_size=4))
    one, other = source.start(), source.start()
    next(one), next(other)
    with pytest.raises(TypeError, match="remembers one place only, and another pass"):
        one.get_state()
    with pytest.raises(ValueError, match="which has its `state_dict`"):
        other.set_state({"batches": 1})


# tf.data, by its protocol


class FakeTfDataset:
    """What a `tf.data.Dataset` offers to those who only read it."""

    element_spec = "TensorSpec(shape=(None,), dtype=tf.int64, name=None)"

    def __init__(self, parts, count=None):
        self._parts = parts
        self._count = len(parts) if count is None else count

    def __iter__(self):
        raise AssertionError("gives tensors of TensorFlow")

    def cardinality(self):
        return np.asarray(self._count)

    def as_numpy_iterator(self):
        return iter(self._parts() if callable(self._parts) else self._parts)


TF_PARTS = [{"x": np.arange(i, i + 3)} for i in range(4)]


def test_tf_data_is_read_by_its_protocol_and_resumes():
    source = as_source(FakeTfDataset(TF_PARTS))
    assert source.length == 4 and source.name == "the tf.data dataset"
    assert_same(taken(source.start()), TF_PARTS)
    assert_same(taken(source.start()), TF_PARTS)
    assert_resumes(lambda: FakeTfDataset(TF_PARTS), TF_PARTS)


@pytest.mark.parametrize("count", [-1, -2])
def test_tf_data_without_a_length(count):
    assert as_source(FakeTfDataset(TF_PARTS, count)).length is None


def test_tf_data_gives_the_batch_before_so_that_it_can_be_compared():
    one = as_source(FakeTfDataset(TF_PARTS)).start()
    assert_same([one.set_state({"batches": 2})], TF_PARTS[1:2])


def test_tf_data_with_text_resumes():
    parts = [np.array([b"a", b"b"], object), np.array([b"c"], object)]
    one = as_source(FakeTfDataset(parts)).start()
    next(one)
    other = as_source(FakeTfDataset([np.array(p.tolist(), object) for p in parts]))
    second = other.start()
    second.set_state(one.get_state())
    assert next(second).tolist() == [b"c"]


def test_tf_data_with_too_few_batches():
    with pytest.raises(
        ValueError, match="after batch 5, but the tf.data dataset has 4"
    ):
        as_source(FakeTfDataset(TF_PARTS)).start().set_state({"batches": 5})


def test_real_tf_data():
    tf = pytest.importorskip("tensorflow")
    data = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}

    def make():
        return tf.data.Dataset.from_tensor_slices(data).batch(4)

    assert as_source(make()).length == 3
    assert as_source(make().repeat()).length is None
    assert_resumes(make, cut(data, 4))


# Hugging Face


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


@pytest.mark.parametrize("make", FACES)
def test_hugging_face_gives_batches_and_resumes(datasets, make):
    expected = cut(face_data(), 4)
    source = as_source(make(datasets))
    assert source.length == (3 if make is face_table else None)
    assert_same(taken(source.start()), expected)
    assert_same(taken(source.start()), expected)
    assert_resumes(lambda: make(datasets), expected)


@pytest.mark.parametrize("make", FACES)
def test_the_pass_after_a_resumed_one_has_everything(datasets, make):
    source = as_source(make(datasets))
    one = source.start()
    next(one), next(one)
    state = one.get_state()
    one.close()
    resumed = source.start()
    resumed.set_state(state)
    assert len(taken(resumed)) == 1
    assert_same(taken(source.start()), cut(face_data(), 4))


def test_a_hugging_face_stream_keeps_its_epoch(datasets):
    def make(epoch):
        whole = face(datasets).to_iterable_dataset(num_shards=5)
        stream = whole.with_format("numpy").batch(2)
        stream.set_epoch(epoch)
        return stream

    first = as_source(make(3)).start()
    state = (next(first), first.get_state())[1]
    assert state["stream"]["epoch"] == 3
    left = taken(first)
    other = as_source(make(0)).start()
    other.set_state(state)
    assert_same(taken(other), left)


def test_hugging_face_in_another_form(datasets):
    with pytest.raises(TypeError, match=r'in the form None .*with_format\("numpy"\)'):
        as_source(face(datasets).batch(4))


@pytest.mark.parametrize("streamed", [False, True])
def test_hugging_face_without_batches(datasets, streamed):
    single = face(datasets).with_format("numpy")
    single = single.to_iterable_dataset() if streamed else single
    one = as_source(single).start()
    with pytest.raises(TypeError, match=r"`batch\['y'\]` .* one example and not a bat"):
        next(one)


def test_a_hugging_face_shuffle_buffer_cannot_resume(datasets):
    stream = face(datasets).to_iterable_dataset().shuffle(seed=0, buffer_size=5)
    one = as_source(stream.with_format("numpy").batch(4)).start()
    rows = np.concatenate([batch["y"] for batch in one])
    assert sorted(rows.tolist()) == list(range(10))
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.get_state()
    with pytest.raises(TypeError, match="shuffles through a buffer, .* left out"):
        one.set_state({})


def test_hugging_face_refuses_a_foreign_state(datasets):
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        as_source(face_stream(datasets)).start().set_state({"batches": 1})
    with pytest.raises(ValueError, match="is not the state of a pass over the Hugging"):
        as_source(face_table(datasets)).start().set_state({"stream": {}})
    with pytest.raises(ValueError, match="saved after batch 9, but .* has 3 batches"):
        as_source(face_table(datasets)).start().set_state({"batches": 9})


def test_hugging_face_passes_in_turns_lose_their_place(datasets):
    source = as_source(face_stream(datasets))
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
    with pytest.raises(
        TypeError, match=r"several datasets: train. .*dataset\['train'\]"
    ):
        as_source(splits)


# What is no dataset

Batch = collections.namedtuple("Batch", "x y")
DATA = "is arrays without a batch size. Give `js.batches"
REFUSED = [
    ({"x": np.zeros((4, 2))}, DATA),
    (np.zeros((4, 2)), DATA),
    (jnp.zeros((4, 2)), DATA),
    (Batch(np.zeros(2), np.zeros(2)), DATA),
    (
        (np.zeros((4, 2)), np.arange(4)),
        r"The tuple given .* holds float64\[4,2\], int64\[4\]. A list is a list of .*"
        r"a tuple of arrays is one batch. .*put a tuple of them in a list: `\[\(x, y",
    ),
    ((np.zeros((4, 2)), np.ones((4, 2))), "The tuple given .* is one batch. Give"),
    (
        [np.zeros((4, 2)), np.zeros((4, 3))],
        r"The list given .* holds float64\[4,2\], float64\[4,3\], which are not batches"
        r" of one kind. A list is a list of batches, alike but for their rows",
    ),
    ([np.zeros(n) if n % 2 else np.zeros((n, 1)) for n in range(6)], r"\], \.\.\., wh"),
    ("data.npy", r"is the text 'data.npy'. If it names a file, load it"),
    (b"data", r"is the text b'data'"),
    (Loader, r"is the class Loader. Give an instance of it, as in `Loader\(...\)`"),
    (3, r"The int given as a dataset is not a dataset. Give global batches: a list"),
    (None, "The NoneType given as a dataset is not a dataset"),
    (
        js.PerReplica(np.zeros((2, 3))),
        "is a PerReplica, one batch that is already divided",
    ),
    (
        lambda context: [],
        "cannot be called without arguments .*distribute_datasets_from_function",
    ),
]


@pytest.mark.parametrize("dataset, message", REFUSED)
def test_what_is_no_dataset(dataset, message):
    with pytest.raises(TypeError, match=message):
        as_source(dataset)


def test_a_list_of_arrays_of_one_kind_is_batches():
    parts = [np.zeros((4, 2)), np.ones((3, 2))]
    assert_same(taken(as_source(parts).start()), parts)


def test_a_tuple_of_arrays_in_a_list_is_one_batch():
    x, y = np.zeros((4, 2)), np.arange(4)
    (batch,) = taken(as_source([(x, y)]).start())
    assert batch[0] is x and batch[1] is y


def test_a_torch_dataset_of_examples(torch):
    with pytest.raises(TypeError, match="is a PyTorch dataset of examples and not of"):
        as_source(torch_pairs(torch))
