"""Input functions of older generations: datasets, iterators and rows of arrays."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src.errors import OutOfRangeError
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.input_options import InputOptions
from jaxstrategy._src.inputs.iterator import (
    AbstractInputIterator,
    DistributedIterator,
    Optional,
)
from jaxstrategy._src.inputs.sources import Dataset, Source, State
from jaxstrategy._src.text.shown import at_least, shown
from jaxstrategy._src.values.arrays import Leaf, PyTree


@final
class InputIterator(AbstractInputIterator):
    """The batches of all replicas, one pass after the other.

    The first pass begins by itself. TensorFlow's `session.run` of what `initialize()`
    returns is not needed: it is an empty list.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> iterator = strategy.make_dataset_iterator([np.arange(4)])
    >>> iterator.get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    >>> iterator.get_next_as_optional().has_value()
    False
    >>> iterator.initialize()
    []
    >>> len(list(iterator))
    1
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None
        self._is_read = False

    def initialize(self) -> list[Any]:
        """Starts again at the first batch."""
        if self._is_read:
            self.close()
            self._iterator = None
            self._is_read = False
            self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """The list that `initialize()` returns; asking for it calls that."""
        return self.initialize()

    def __next__(self) -> PyTree:
        return next(self._reading())

    def get_next(self, name: str | None = None) -> PyTree:
        """The next batch, with a `PerReplica` for each array."""
        try:
            return next(self._reading())
        except StopIteration:
            raise OutOfRangeError(
                "The end of the data. Call `iterator.initialize()` for another pass, "
                "or `iterator.get_next_as_optional()`, which says whether there is a "
                "batch."
            ) from None

    def get_next_as_optional(self, name: str | None = None) -> Optional:
        """The next batch, or nothing at the end: `optional.has_value()` tells."""
        return self._reading().get_next_as_optional()

    def get_state(self) -> State:
        """The position in the data, for `set_state`; checkpoints save it."""
        return self._begun().get_state()

    def set_state(self, state: State) -> None:
        """Goes on after the batch after which `state` was taken."""
        self._reading().set_state(state)

    @property
    def element_spec(self) -> PyTree:
        """The type of a batch, `jax.ShapeDtypeStruct`s instead of arrays."""
        return self._begun().element_spec

    def close(self) -> None:
        """Stops reading."""
        if self._iterator is not None:
            self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"InputIterator({self._dataset!r})"

    def _begun(self) -> DistributedIterator:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    def _reading(self) -> DistributedIterator:
        self._is_read = True
        return self._begun()


class OlderDataset(DistributedDataset):
    """Today's `dataset`, with the methods by which it was read before it was iterable.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import v1
    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> dataset.make_one_shot_iterator().get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        super().__init__(
            dataset._start,
            dataset._transfer,
            dataset._options,
            dataset._name,
            dataset._sized,
        )

    def make_one_shot_iterator(self) -> InputIterator:
        """An iterator over the elements, from the first on."""
        return InputIterator(self)

    def make_initializable_iterator(
        self, shared_name: str | None = None
    ) -> InputIterator:
        """An iterator that begins again whenever its `initializer` is asked for.

        The first pass begins by itself.
        """
        return InputIterator(self)


@final
class PerDeviceDataset(OlderDataset):
    """Elements for all towers: each is for one tower, in turn.

    Made by `distribute_dataset` of a `DistributionStrategy`. Elements are not divided.
    At the end, elements that are fewer than the towers are left out.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.distribute_dataset(lambda: range(5))
    >>> [[int(x) for x in element.values] for element in dataset]
    [[0, 1], [2, 3]]
    """


# A batch for one replica with too few rows is filled up, as everywhere; a last group of
# batches that is not full has no step.
OF_GROUPS = InputOptions(remainder="drop_empty")


class GetsNext(Protocol):
    """What steps read from: an `InputIterator`, or one of the core's."""

    def get_next(self) -> PyTree:
        """The next batch."""
        ...


def require_iterator(iterator: Any) -> GetsNext:
    """`iterator`, if it is one that elements can be asked of."""
    if not callable(getattr(iterator, "get_next", None)):
        raise TypeError(
            f"{shown(iterator)} was given as the iterator, but has no `get_next`. Give "
            "what `make_dataset_iterator(dataset)` or `make_input_fn_iterator(fn)` of "
            "the strategy returns."
        )
    return iterator


def as_dataset(given: Any) -> Dataset:
    """What an input function returned, as the core takes datasets."""
    is_dataset = isinstance(given, (Source, Iterable, type))
    if is_dataset or not callable(given) or inspect.isgeneratorfunction(given):
        return given
    next_element: Callable[[], PyTree] = given
    return lambda: _called(next_element)


def _called(next_element: Callable[[], PyTree]) -> Iterator[PyTree]:
    """The elements that a function returns one by one, or of the pass it returns."""
    try:
        first = next_element()
        if isinstance(first, Iterator):
            yield from first
            return
        yield first
        while True:
            yield next_element()
    except StopIteration:  # OutOfRangeError is one
        return


Rows: TypeAlias = int | np.integer | np.ndarray
"""The rows of an element: a number, or of a batch an array of them."""


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
        for rows in self._rows(next(self._passes)):
            yield jax.tree.map(lambda array, rows=rows: array[rows], self._arrays)

    def __len__(self) -> int:
        """The number of elements."""
        if self._length is None:
            raise TypeError("A dataset that is repeated without end has no `len`.")
        return self._length

    def __bool__(self) -> bool:
        return True  # without it, Python asks for the `len`

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """So many elements at a time, along a new first dimension."""
        size = at_least(1, "batch_size", batch_size)

        def rows(number: int) -> Iterator[Rows]:
            elements = self._rows(number)
            while chosen := list(itertools.islice(elements, size)):
                if len(chosen) < size and drop_remainder:
                    return
                if len({np.shape(element) for element in chosen}) > 1:
                    raise ValueError(
                        "Batches of batches were asked for, but the last inner one has "
                        "fewer rows. Use `batch(n, drop_remainder=True)` for these."
                    )
                yield np.array(chosen)

        length = self._length
        if length is not None:
            length = length // size if drop_remainder else -(-length // size)
        return NumpyDataset(self._arrays, rows, length)

    def repeat(self, count: int | None = None) -> NumpyDataset:
        """All elements so many times, one pass after the other."""
        times = -1 if count is None else at_least(-1, "count", count)

        def rows(number: int) -> Iterator[Rows]:
            each = itertools.count() if times < 0 else range(times)
            first = number * abs(times)
            return itertools.chain.from_iterable(self._rows(first + i) for i in each)

        length = self._length
        if length is not None:
            length = None if times < 0 else length * times
        return NumpyDataset(self._arrays, rows, length)

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Every `num_shards`-th element, beginning with number `index`."""
        n, i = at_least(1, "num_shards", num_shards), at_least(0, "index", index)
        if i >= n:
            raise ValueError(f"`index` is {i}; it is to be less than {n} shards.")

        def rows(number: int) -> Iterator[Rows]:
            return itertools.islice(self._rows(number), i, None, n)

        length = None if self._length is None else -(-max(self._length - i, 0) // n)
        return NumpyDataset(self._arrays, rows, length)

    def shuffle(self, buffer_size: int, seed: int | None = None) -> NumpyDataset:
        """The elements in another order, another one in each pass."""
        size = at_least(1, "buffer_size", buffer_size)
        if seed is None:
            raise ValueError(
                "`shuffle` was given no seed, so that each process of a job, and each "
                "run of it, would have another order: `shuffle(buffer_size, seed=0)`."
            )
        start = at_least(0, "seed", seed)

        def rows(number: int) -> Iterator[Rows]:
            # A named generator: `default_rng` may be another one in a later NumPy.
            generator = np.random.Generator(np.random.PCG64([start, number]))
            elements = self._rows(number)
            buffer = list(itertools.islice(elements, size))
            for element in elements:
                place = int(generator.integers(size))
                buffer[place], element = element, buffer[place]
                yield element
            for place in generator.permutation(len(buffer)):
                yield buffer[place]

        return NumpyDataset(self._arrays, rows, self._length)

    def __repr__(self) -> str:
        count = "without end" if self._length is None else f"{self._length} elements"
        return f"NumpyDataset({count})"


def numpy_dataset(numpy_input: PyTree) -> NumpyDataset:
    """The rows of a nest of arrays, one after the other."""
    tree = jax.tree.map(
        _array, numpy_input, is_leaf=lambda node: isinstance(node, list)
    )
    rows = sorted({len(array) for array in jax.tree.leaves(tree)})
    if not rows:
        raise ValueError(
            f"`numpy_input` is {shown(numpy_input)}, which holds no array. Give one "
            "array with the examples along its first dimension, or a tuple or dict of "
            "such arrays."
        )
    if len(rows) > 1:
        raise ValueError(
            f"The arrays of `numpy_input` have {' and '.join(map(str, rows))} rows. "
            "All need the same examples along their first dimension."
        )
    return NumpyDataset(tree, lambda _: iter(range(rows[0])), rows[0])


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
