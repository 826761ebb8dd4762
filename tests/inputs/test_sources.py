"""The sources of batches: what they give, how they resume, and what they refuse."""

import collections
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sources import assert_resumes, assert_same, taken

import jaxstrategy as js
from jaxstrategy import batches
from jaxstrategy.inputs.sources._choose import as_source

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
