"""The sources of batches: what they give, how they resume, and what they refuse."""

import collections
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import Source, assert_resumes, assert_same, taken
from hypothesis import given, settings, strategies as st

import jaxstrategy as js
from jaxstrategy import batches

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


@each_of("make", REPEATABLE.values())
def test_what_can_be_read_again_is_and_resumes(make):
    source = Source(make())
    one, other = source.start(), source.start()
    assert_same([next(one), next(one)], PAIRS[:2])
    assert_same([next(other)], PAIRS[:1])
    assert_same(taken(one), PAIRS[2:])
    assert_same(taken(other), PAIRS[1:])
    assert_resumes(make, PAIRS)
    used = source.start()
    next(used), next(used)
    for place in (1, 0):
        used.set_state({"batches": place})
        assert_same(taken(used), PAIRS[place:])
    with pytest.raises(ValueError, match=r"saved after batch 9, but .* 4 batches"):
        source.start().set_state({"batches": 9})
    for state in ({}, None, 3, {"batches": -1}, {"batches": "2"}):
        with pytest.raises(ValueError, match="is not the state of a pass over the"):
            source.start().set_state(state)


def test_lengths_and_names_say_what_was_given():
    assert Source(PAIRS).length == Source(Loader()).length == 4
    assert Source(Endless()).length is None
    assert Source(read).length is None
    assert Source(iter(PAIRS)).length is None
    assert Source(PAIRS).name == "the list"
    assert Source(read).name == "the function `read`"
    assert Source(functools.partial(read)).name == "the function `read`"
    assert Source(read()).name == "the generator"
    assert Source(batches(np.zeros(2), 1)).name == "js.batches"


def test_an_endless_iterable_resumes():
    one = Source(Endless()).start()
    one.set_state({"batches": 6})
    assert_same([next(one)], PAIRS[2:3])


def test_nothing_is_read_before_the_first_batch():
    begun = []

    def noting():
        begun.append(1)
        yield from PAIRS

    one = Source(noting).start()
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

    one = Source(noting).start()
    next(one)
    assert not ended
    one.close()
    one.close()
    assert ended == [1]


@each_of("once", [read, lambda: iter(PAIRS)])
def test_an_iterator_is_read_once(once):
    source = Source(once())
    assert len(taken(source.start())) == 4
    with pytest.raises(TypeError, match="Only one pass can read the .*, and one did"):
        source.start()


def test_an_iterator_cannot_resume_and_is_left_alone():
    one = Source(read()).start()
    advice = r"cannot resume: .* a list of batches, or a function .* `read`"
    with pytest.raises(TypeError, match=advice):
        one.get_state()
    with pytest.raises(TypeError, match="Only one pass can read the generator"):
        one.set_state({"batches": 0})
    given_ = read()
    one = Source(given_).start()
    next(one)
    one.close()
    assert_same(list(given_), PAIRS[1:])
    assert list(one) == []


def test_a_function_that_returns_no_iterator():
    one = Source(lambda: 3).start()
    with pytest.raises(TypeError, match="returned int, which is not an iterator"):
        next(one)


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


@each_of("dataset, message", REFUSED)
def test_what_is_no_dataset(dataset, message):
    with pytest.raises(TypeError, match=message):
        Source(dataset)


# `js.batches`: batches of arrays in memory, shuffled, chosen and resumed.


def rows_of(count):
    x = np.arange(count * 2, dtype=np.float32).reshape(count, 2)
    return {"x": x, "y": np.arange(count)}


def test_batches_are_views_and_shuffled_rows_are_copied_once():
    data = rows_of(8)
    for batch in batches(data, 3):
        assert np.shares_memory(batch["x"], data["x"])
    _, part = batches(data, 4).start().part(lambda rows: slice(1, 2))
    assert np.shares_memory(part["x"], data["x"])
    array = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    (batch,) = batches(array, 64, shuffle=3)
    placed = jax.device_put(batch, jax.devices("cpu")[0])
    assert placed.unsafe_buffer_pointer() == batch.ctypes.data


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
    assert [batch.tolist() for batch in source] == [[0, 1], [2]]
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


@settings(deadline=None, max_examples=60)
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


@each_of("shuffle", [None, 4])
@each_of("epochs", [1, 2])
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


BAD = {
    "holds no array": ({}, 2),
    r"`arrays\['y'\]` has 3 rows but `arrays\['x'\]` has 4": (
        {"x": np.zeros(4), "y": np.zeros(3)},
        2,
    ),
    r"`arrays\['n'\]` is 3, which has no rows": ({"n": 3, "x": np.zeros(3)}, 2),
    r"`arrays\[0\]` is 1, .*`np.array": ([1, 2, 3], 2),
    r"`arrays\['x'\]` is a masked array": ({"x": np.ma.masked_less([1, 2], 2)}, 1),
    "has no rows, so there is nothing": (np.zeros((0, 2)), 2),
    "`batch_size` is 0; it is to be at least 1": (np.zeros(3), 0),
    "`batch_size` is -2; it is to be at least 1": (np.zeros(3), -2),
}


@each_of("message", BAD)
def test_bad_arrays(message):
    with pytest.raises(ValueError, match=message):
        batches(*BAD[message])


@each_of("size", [2.0, "2", None, True])
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


@each_of("state", [{"batches": 1}, {"epoch": 0}, None, {"epoch": 0.5},
                                   {"epoch": 0, "batch": 0}])  # fmt: skip
def test_batches_refuse_a_foreign_state(state):
    with pytest.raises(ValueError, match="is not the state of a pass over js.batches"):
        batches(np.zeros(3), 2).start().set_state(state)
    with pytest.raises(ValueError, match="saved after batch 3, but an epoch has 2"):
        one = batches(np.zeros(3), 2).start()
        one.set_state({**one.get_state(), "batch": 3})
