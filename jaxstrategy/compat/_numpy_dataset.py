"""The rows of arrays as a dataset: what `experimental_make_numpy_dataset` returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, final

import jax
import numpy as np

from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import Leaf, PyTree, Value

Rows: TypeAlias = int | np.integer | np.ndarray
"""The rows of an element: a number, or of a batch an array of them."""


def numpy_dataset(numpy_input: PyTree) -> NumpyDataset:
    """The rows of a nest of arrays, one after the other.

    Args:
      numpy_input: arrays with equally many rows, in tuples and dicts. A list is one
        array: of arrays of equal shapes, which are stacked, or of numbers.

    Raises:
      ValueError: there are no arrays, one has no rows, or they differ in their rows; or
        what a list holds differs in shape.

    >>> dataset = numpy_dataset({"x": np.arange(6.0).reshape(3, 2), "y": np.arange(3)})
    >>> for batch in dataset.batch(2):
    ...     print(batch["x"].tolist(), batch["y"])
    [[0.0, 1.0], [2.0, 3.0]] [0 1]
    [[4.0, 5.0]] [2]
    """
    leaves, treedef = jax.tree.flatten(numpy_input, is_leaf=_is_list)
    arrays = [_array(leaf) for leaf in leaves]
    if not arrays:
        raise ValueError(
            f"`numpy_input` is {shown(numpy_input)}, which holds no array. Give one "
            "array with the examples along its first dimension, or a tuple or dict of "
            "such arrays."
        )
    rows = sorted({len(array) for array in arrays})
    if len(rows) > 1:
        raise ValueError(
            f"The arrays of `numpy_input` have {' and '.join(map(str, rows))} rows. "
            "All need the same examples along their first dimension."
        )
    tree = jax.tree.unflatten(treedef, arrays)
    return NumpyDataset(tree, lambda _: iter(range(rows[0])), rows[0])


@final
class NumpyDataset(Iterable[PyTree]):
    """Rows of arrays, or batches of them. Each `iter` begins a new pass.

    Made by `experimental_make_numpy_dataset`. Its methods return other datasets, and
    copy no array.

    Args:
      arrays: a pytree of arrays.
      rows: makes what is read in a pass, given its number: the rows of each element.
      length: how many elements there are; None without end.
    """

    def __init__(
        self, arrays: PyTree, rows: Callable[[int], Iterator[Rows]], length: int | None
    ) -> None:
        self._arrays = arrays
        self._rows = rows
        self._length = length
        self._passes = itertools.count()

    def __iter__(self) -> Iterator[PyTree]:
        return map(self._element, self._rows(next(self._passes)))

    def _element(self, rows: Rows) -> PyTree:
        return jax.tree.map(lambda array: array[rows], self._arrays)

    def __len__(self) -> int:
        """The number of elements.

        Raises:
          TypeError: there is no end of them.
        """
        if self._length is None:
            raise TypeError("A dataset that is repeated without end has no `len`.")
        return self._length

    def __bool__(self) -> bool:
        return True  # without it, Python asks for the `len`

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """So many elements at a time, along a new first dimension.

        Args:
          batch_size: how many.
          drop_remainder: leave out the last batch if it is not full.

        Raises:
          TypeError: `batch_size` is no whole number.
          ValueError: it is less than 1.
        """
        size = _count(batch_size, "batch_size", 1)

        def rows(number: int) -> Iterator[Rows]:
            elements = self._rows(number)
            while chosen := list(itertools.islice(elements, size)):
                if len(chosen) < size and drop_remainder:
                    return
                yield _stacked(chosen)

        length = self._length
        if length is not None:
            length = length // size if drop_remainder else -(-length // size)
        return NumpyDataset(self._arrays, rows, length)

    def repeat(self, count: int | None = None) -> NumpyDataset:
        """All elements so many times, one pass after the other.

        Args:
          count: how often; None or -1 without end.

        Raises:
          TypeError: `count` is no whole number.
          ValueError: it is less than -1.
        """
        times = None if count is None else _count(count, "count", -1)
        if times == -1:
            times = None

        def rows(number: int) -> Iterator[Rows]:
            each = itertools.count() if times is None else range(times)
            first = number * (times or 1)
            return itertools.chain.from_iterable(self._rows(first + i) for i in each)

        length = None
        if times is not None and self._length is not None:
            length = self._length * times
        return NumpyDataset(self._arrays, rows, length)

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Every `num_shards`-th element, beginning with number `index`.

        Raises:
          TypeError: an argument is no whole number.
          ValueError: `index` is not one of 0 to `num_shards - 1`.
        """
        n, i = _count(num_shards, "num_shards", 1), _count(index, "index", 0)
        if i >= n:
            raise ValueError(f"`index` is {i}; it is to be less than {n} shards.")

        def rows(number: int) -> Iterator[Rows]:
            return itertools.islice(self._rows(number), i, None, n)

        length = None if self._length is None else -(-max(self._length - i, 0) // n)
        return NumpyDataset(self._arrays, rows, length)

    def shuffle(self, buffer_size: int, seed: int | None = None) -> NumpyDataset:
        """The elements in another order, another one in each pass.

        Args:
          buffer_size: of so many elements that come next, one is chosen by chance.
          seed: decides the order. Each process of a job reads the data, and all must
            read the same, so that there is no default.

        Raises:
          TypeError: an argument is no whole number.
          ValueError: `buffer_size` is less than 1, `seed` is missing or negative.
        """
        size = _count(buffer_size, "buffer_size", 1)
        if seed is None:
            raise ValueError(
                "`shuffle` was given no seed, so that each process of a job, and each "
                "run of it, would have another order: `shuffle(buffer_size, seed=0)`."
            )
        start = _count(seed, "seed", 0)

        def rows(number: int) -> Iterator[Rows]:
            # A named generator: `default_rng` may be another one in a later NumPy.
            generator = np.random.Generator(np.random.PCG64([start, number]))
            return _shuffled(self._rows(number), size, generator)

        return NumpyDataset(self._arrays, rows, self._length)

    def __repr__(self) -> str:
        count = "without end" if self._length is None else f"{self._length} elements"
        return f"NumpyDataset({count})"


def _shuffled(
    elements: Iterator[Rows], size: int, generator: np.random.Generator
) -> Iterator[Rows]:
    buffer = list(itertools.islice(elements, size))
    for element in elements:
        place = int(generator.integers(size))
        buffer[place], element = element, buffer[place]
        yield element
    for place in generator.permutation(len(buffer)):
        yield buffer[place]


def _stacked(elements: list[Rows]) -> np.ndarray:
    shapes = {np.shape(element) for element in elements}
    if len(shapes) > 1:
        raise ValueError(
            "Batches of batches were asked for, but the last inner one has fewer rows. "
            "Use `batch(n, drop_remainder=True)` for these."
        )
    return np.array(elements)


def _is_list(node: object) -> bool:
    return isinstance(node, list)


def _array(leaf: Leaf) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except ValueError as error:
        raise ValueError(
            f"A list in `numpy_input` is one array, but what this one holds differs in "
            f"shape: {shown(leaf)} ({error}). Give a tuple for several arrays."
        ) from None
    if array.ndim == 0:
        raise ValueError(
            f"`numpy_input` holds {shown(leaf)}, which has no rows. Give arrays with "
            "the examples along their first dimension."
        )
    return array


def _count(value: Value, what: str, least: int) -> int:
    number = whole(value)
    if number is None:
        raise TypeError(f"`{what}` is {shown(value)}; it is to be an int.")
    if number < least:
        raise ValueError(f"`{what}` is {number}; it is to be at least {least}.")
    return number
