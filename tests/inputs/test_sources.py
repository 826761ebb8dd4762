"""The sources of batches: what they give, how they resume, and what they refuse."""

import collections
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sources import Source, assert_resumes, assert_same, taken

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


def test_plain_lengths():
    assert Source(PAIRS).length == Source(Loader()).length == 4
    assert Source(Endless()).length is None
    assert Source(read).length is None
    assert Source(iter(PAIRS)).length is None


def test_names_say_what_was_given():
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


def test_an_iterator_cannot_resume():
    one = Source(read()).start()
    advice = r"cannot resume: .* a list of batches, or a function .* `read`"
    with pytest.raises(TypeError, match=advice):
        one.get_state()
    with pytest.raises(TypeError, match="Only one pass can read the generator"):
        one.set_state({"batches": 0})


def test_closing_leaves_the_users_iterator_alone():
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
