"""What a source of batches gives, and how it resumes."""

import itertools
import json
import re

import jax
import numpy as np
from helpers.inputs import AT_ONCE

import jaxstrategy as js


class Source:
    """A source as a distributed dataset with one replica gives its batches."""

    def __init__(self, given):
        strategy = js.get_strategy()
        self._data = strategy.experimental_distribute_dataset(given, AT_ONCE)
        told = re.fullmatch(
            r"DistributedDataset\((.*?)(, \d+ steps?)?\)", repr(self._data)
        )
        self.name = told[1]
        self.length = None if told[2] is None else len(self._data)

    def start(self):
        return SourceIterator(iter(self._data))


class SourceIterator:
    """One pass; its state is that of the source alone."""

    def __init__(self, iterator):
        self._iterator = iterator

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._iterator)

    def get_state(self):
        (state,) = self._iterator.get_state()["sources"]
        return state

    def set_state(self, state):
        whole = {"version": 2, "steps": 1, "batches": 1, "rows": None, "replicas": 1}
        self._iterator.set_state({**whole, "prints": [None], "sources": [state]})

    def close(self):
        self._iterator.close()


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
            if isinstance(leaf, jax.Array):  # in its number of bits
                wanted = jax.numpy.asarray(wanted)
            assert leaf.dtype == wanted.dtype
            np.testing.assert_array_equal(leaf, wanted)


def assert_resumes(make, expected):
    """From each position, a fresh source goes on exactly as the others did."""
    for position in range(len(expected) + 1):
        first = Source(make()).start()
        assert_same(list(itertools.islice(first, position)), expected[:position])
        state = json.loads(json.dumps(first.get_state()))
        assert_same(taken(first), expected[position:])
        second = Source(make()).start()
        second.set_state(state)
        assert json.loads(json.dumps(second.get_state())) == state
        assert_same(list(second), expected[position:])
        third = Source(make()).start()
        third.set_state(json.loads(json.dumps(second.get_state())))  # at the end
        assert_same(taken(third), [])
        second.close()


def cut(data, size, drop=False):
    """The oracle: slices of a dict of arrays, in order."""
    count = len(data["y"])
    starts = range(0, count - size + 1 if drop else count, size)
    return [{k: v[i : i + size] for k, v in data.items()} for i in starts]


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
