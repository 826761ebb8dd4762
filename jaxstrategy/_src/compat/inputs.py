"""Data of older generations, and several steps with an element for each."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, Self, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src.compat.adapters import delegated
from jaxstrategy._src.contexts import context as _context, replica_context
from jaxstrategy._src.errors import ContextError, OutOfRangeError
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.input_options import InputOptions
from jaxstrategy._src.inputs.iterator import (
    AbstractInputIterator,
    DistributedIterator,
    Optional,
)
from jaxstrategy._src.inputs.sources import Dataset, Source
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.strategies.current import get_replica_context, get_strategy
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import at_least, shown
from jaxstrategy._src.values.arrays import Leaf, PyTree


@final
class InputIterator(AbstractInputIterator):
    """The batches of all replicas, one pass after the other.

    The first pass begins by itself. TensorFlow's `session.run` of what `initialize()`
    returns is not needed: it is an empty list. What has the name of a member of
    `jaxstrategy.DistributedIterator` does the same.

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

    @property
    def _core(self) -> DistributedIterator:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator

    @property
    def _reading(self) -> DistributedIterator:
        self._is_read = True
        return self._core

    element_spec: PyTree = delegated(DistributedIterator.element_spec)
    get_state: Any = delegated(DistributedIterator.get_state)
    set_state: Any = delegated(DistributedIterator.set_state, "_reading")

    def initialize(self) -> list[Any]:
        """Starts again at the first batch."""
        if self._is_read:
            self.close()
            self._iterator, self._is_read = None, False
            self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[Any]:
        """The list that `initialize()` returns; asking for it calls that."""
        return self.initialize()

    def __next__(self) -> PyTree:
        return next(self._reading)

    def get_next(self, name: str | None = None) -> PyTree:
        """The next batch, with a `PerReplica` for each array."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The end of the data. Call `iterator.initialize()` for another pass, "
                "or `iterator.get_next_as_optional()`, which says whether there is a "
                "batch."
            ) from None

    def get_next_as_optional(self, name: str | None = None) -> Optional:
        """The next batch, or nothing at the end: `optional.has_value()` tells."""
        return self._reading.get_next_as_optional()

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


class OlderDataset(DistributedDataset):
    """Today's `dataset`, with the methods by which it was read before it was iterable.

    >>> strategy = v1.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> dataset.make_one_shot_iterator().get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        vars(self).update(vars(dataset))

    def make_one_shot_iterator(self) -> InputIterator:
        """An iterator over the elements, from the first on."""
        return InputIterator(self)

    def make_initializable_iterator(
        self, shared_name: str | None = None
    ) -> InputIterator:
        """An iterator that begins again whenever its `initializer` is asked for."""
        return InputIterator(self)


@final
class PerDeviceDataset(OlderDataset):
    """Elements for all towers: each is for one tower, in turn.

    Made by `distribute_dataset` of a `DistributionStrategy`. Elements are not divided.
    At the end, elements that are fewer than the towers are left out.

    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.distribute_dataset(lambda: range(5))
    >>> [[int(x) for x in element.values] for element in dataset]
    [[0, 1], [2, 3]]
    """


# A batch for one replica with too few rows is filled up, as everywhere; a last group of
# batches that is not full has no step.
WHOLE_GROUPS = InputOptions(remainder="drop_empty")


class GetsNext(Protocol):
    """What steps read from: an `InputIterator`, or one of the core's."""

    def get_next(self) -> PyTree: ...


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

    def _then(
        self, rows: Callable[[int], Iterator[Rows]], length: Callable[[int], int | None]
    ) -> NumpyDataset:
        known = None if self._length is None else length(self._length)
        return NumpyDataset(self._arrays, rows, known)

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

        rest = 0 if drop_remainder else size - 1
        return self._then(rows, lambda n: (n + rest) // size)

    def repeat(self, count: int | None = None) -> NumpyDataset:
        """All elements so many times, one pass after the other."""
        times = -1 if count is None else at_least(-1, "count", count)

        def rows(number: int) -> Iterator[Rows]:
            each = itertools.count() if times < 0 else range(times)
            first = number * abs(times)
            return itertools.chain.from_iterable(self._rows(first + i) for i in each)

        return self._then(rows, lambda n: None if times < 0 else n * times)

    def shard(self, num_shards: int, index: int) -> NumpyDataset:
        """Every `num_shards`-th element, beginning with number `index`."""
        n, i = at_least(1, "num_shards", num_shards), at_least(0, "index", index)
        if i >= n:
            raise ValueError(f"`index` is {i}; it is to be less than {n} shards.")

        def rows(number: int) -> Iterator[Rows]:
            return itertools.islice(self._rows(number), i, None, n)

        return self._then(rows, lambda length: max(length - i + n - 1, 0) // n)

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

        return self._then(rows, lambda n: n)

    def __repr__(self) -> str:
        count = "without end" if self._length is None else f"{self._length} elements"
        return f"NumpyDataset({count})"


def numpy_dataset(numpy_input: PyTree) -> NumpyDataset:
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


class MultiStepContext(_context.Sender):
    """Named outputs of the last of several steps, set while the steps run.

    Made by `experimental_run_steps_on_iterator`, which passes it to the function first.
    Outside of steps what is set is there at once; what a step of `run` sets is there
    when the step was started.

    >>> context = v1.MultiStepContext()
    >>> context.last_step_outputs, context.non_tensor_outputs, context.run_op
    ({}, {}, None)
    """

    # How the argument with the operation is written in this generation, and what the
    # different values of the replicas are in.
    _operation_example: ClassVar[str] = "`reduce_op=ReduceOp.MEAN`"
    _several: ClassVar[type[tuple[Any, ...]] | type[list[Any]]] = tuple

    def __init__(self) -> None:
        self._outputs: dict[str, dict[str, PyTree]] = {"last": {}, "other": {}}

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """The outputs by name."""
        return self._read("last_step_outputs", "last")

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs that are no arrays, by name."""
        return self._read("non_tensor_outputs", "other")

    @property
    def run_op(self) -> None:
        """The operation that a session would have to run: none."""

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Sets an output of this step; those of the last one stay."""
        op = None if reduce_op is None else ReduceOp(reduce_op)
        self._set_output(name, output, op)

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Sets an output that is no array."""
        self._check("set_non_tensor_output", name)
        of_replicas = get_replica_context() is not None
        self._emit("set_non_tensor_output", ("other", of_replicas, name, output))

    def run_steps(
        self,
        core: Strategy,
        fn: Callable[[Any, Any], object],
        iterator: Any,
        iterations: int,
        initial_loop_values: Any,
    ) -> Self:
        """Calls `fn(self, element)` so many times, in cross-replica context."""
        source = require_iterator(iterator)
        count = at_least(0, "iterations", iterations)
        if count == 0 and initial_loop_values is not None:
            if not isinstance(initial_loop_values, Mapping):
                raise ValueError(
                    f"`initial_loop_values` is {shown(initial_loop_values)} and "
                    "`iterations` is 0, so that these values are the outputs, but they "
                    "have no names. Give a dict by name."
                )
            self._outputs["last"].update(initial_loop_values)

        def receive(message: tuple[str, bool, str, PyTree]) -> None:
            kind, of_replicas, name, value = message
            if of_replicas:
                value = self._several(core.experimental_local_results(value))
            self._outputs[kind][name] = value

        def loop(_: object) -> None:
            with _context.StepOutputs(self, receive).opened():
                for _ in range(count):
                    fn(self, source.get_next())

        in_cross_replica(core, loop)
        return self

    def _set_output(self, name: str, output: PyTree, op: ReduceOp | None) -> None:
        """Sets an output, reduced with `op` over the replicas if there is one."""
        self._check("set_last_step_output", name)
        replica = get_replica_context()
        if replica is None:
            if op is not None:
                output = get_strategy().reduce(op, output)
        elif op is None:
            raise ValueError(
                f"The output {name!r} was set in a replica context without saying how "
                "the replicas' values are reduced. Give "
                f"{self._operation_example}, or return the value from the step and set "
                "the output outside."
            )
        else:
            output = replica.merge_call(lambda s, x: s.reduce(op, x), (output,))
        self._emit("set_last_step_output", ("last", False, name, output))

    def _check(self, method: str, name: Any) -> None:
        _context.require_open(self, f"ctx.{method}")
        if not isinstance(name, str):
            raise TypeError(
                f"The name of an output was {shown(name)}; a text was wanted."
            )

    def _emit(self, method: str, message: tuple[str, bool, str, PyTree]) -> None:
        if _context.in_step() and get_replica_context() is None:  # in `merge_call`
            message = replica_context.to_replica(message)
        _context.emit(message, f"ctx.{method}")

    def _read(self, name: str, kind: str) -> dict[str, Any]:
        if _context.in_step():
            raise ContextError(
                f"`ctx.{name}` was read inside a step, which is compiled once, so that "
                "each later step would have the values of now. Read it outside of "
                "`run`, and pass what the step needs as an argument."
            )
        return self._outputs[kind]


def in_cross_replica(core: Strategy, fn: Callable[[Any], object]) -> None:
    """Calls `fn(strategy)` in the scope of a strategy, the default one's too."""
    with core.scope():
        replica = get_replica_context()
        if replica is None:
            fn(core)
        else:  # the default strategy's scope changes nothing
            replica.merge_call(fn)
