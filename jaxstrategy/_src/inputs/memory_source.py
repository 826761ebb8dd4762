"""Arrays in memory, cut into batches: `batches`."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import final

import jax
import numpy as np

from jaxstrategy._src.inputs import origins, sources
from jaxstrategy._src.inputs.sources import Source, SourceIterator, State
from jaxstrategy._src.text import whole
from jaxstrategy._src.values import arrays as _arrays, per_replica
from jaxstrategy._src.values.arrays import (
    Leaf,
    PyTree,
    TreeStructure,
    Value,
)
from jaxstrategy._src.values.memory import ALIGNMENT, aligned_empty


def unshared(array: np.ndarray) -> np.ndarray:
    """`array`, or a copy if devices of the host might share memory with a part."""
    # The copy lies where it can be taken over, so that no second one is made. Memory
    # that begins at half of the alignment would be found, too.
    if array.flags.c_contiguous:
        start, step = array.ctypes.data, array.strides[0]
        starts = [start + i * step for i in range(len(array))]
        if all([each % (ALIGNMENT // 2) for each in starts]):
            return array
    made = aligned_empty(array.shape, array.dtype)
    np.copyto(made, array)
    return made


def taken_rows(array: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """`array[numbers]`, where it can be taken over."""
    if array.dtype.hasobject or not array.dtype.itemsize:
        return array[numbers]  # has no bytes of its own
    made = aligned_empty((len(numbers), *array.shape[1:]), array.dtype)
    # With "raise", NumPy makes another array first and copies that.
    return np.take(array, numbers, axis=0, out=made, mode="clip")


def batches(
    arrays: PyTree,
    batch_size: int,
    *,
    shuffle: int | None = None,
    epochs: int | None = 1,
    drop_remainder: bool = False,
) -> ArrayBatches:
    """The rows of `arrays`, `batch_size` at a time: a dataset from data in memory.

    It can be given to `strategy.experimental_distribute_dataset`, looped over as it is,
    and has a `len`. A loop over it is one pass: `epochs` times all rows. With `shuffle`
    each epoch has an order of its own, in the next pass too; order and position come
    from the seed alone, so that every process sees the same and training resumes in the
    middle of an epoch without reading what was before.

    Shapes: arrays `[rows, ...]` -> batches `[batch_size, ...]`. The last batch of an
    epoch has what rows remain; batches do not run over the end of an epoch.

    Args:
      arrays: a pytree of arrays with equally many rows: of NumPy, memory-mapped, of
        JAX, or anything else that NumPy takes for an array. Unshuffled batches are
        views of them.
      batch_size: rows in a (global) batch.
      shuffle: a seed, not negative; None keeps the order.
      epochs: how often a pass goes over the rows; None goes on without end. The next
        pass after an endless one begins with the order of the next epoch.
      drop_remainder: leave out the last batch of an epoch if it is not full. With
        `shuffle`, other rows are left out in each epoch.

    Raises:
      ValueError: there are no arrays or no rows, the arrays differ in their rows, one
        is a scalar, or a number is out of range.
      TypeError: an argument is of a wrong type.

    >>> import jaxstrategy as js
    >>> data = {"x": np.arange(10.0).reshape(5, 2), "y": np.arange(5)}
    >>> for batch in js.batches(data, 2):
    ...     print(batch["y"])
    [0 1]
    [2 3]
    [4]
    >>> len(js.batches(data, 2, shuffle=0, epochs=3, drop_remainder=True))
    6
    """
    return ArrayBatches(arrays, batch_size, shuffle, epochs, drop_remainder)


@final
class ArrayBatches(Source):
    """Batches cut from arrays in memory. Made by `jaxstrategy.batches`."""

    name = "js.batches"

    def __init__(
        self,
        arrays: PyTree,
        batch_size: int,
        shuffle: int | None,
        epochs: int | None,
        drop_remainder: bool,
    ) -> None:
        self._arrays, self._tree, self._rows = _checked(arrays)
        self._batch_size = _whole(batch_size, "batch_size", 1)
        if isinstance(shuffle, bool):
            raise TypeError(
                f"`shuffle` is {shuffle}; it is a seed, so that all processes and a "
                "resumed run shuffle alike. Use `shuffle=0` to shuffle, `shuffle=None` "
                "not to."
            )
        self._seed = None if shuffle is None else _whole(shuffle, "shuffle", 0)
        self._epochs = None if epochs is None else _whole(epochs, "epochs", 1)
        if drop_remainder and self._batch_size > self._rows:
            raise ValueError(
                f"`batch_size` is {self._batch_size} but the arrays have only "
                f"{self._rows} rows, so with `drop_remainder=True` there is no batch "
                "at all. Use a smaller batch size, or keep the remainder."
            )
        self._drop_remainder = bool(drop_remainder)
        full, rest = divmod(self._rows, self._batch_size)
        self._per_epoch = full + (rest > 0 and not drop_remainder)
        self._next_epoch = 0

    def start(self) -> _ArrayPass:
        first = self._next_epoch
        self._next_epoch += self._epochs or 1
        return _ArrayPass(self, first)

    def __iter__(self) -> SourceIterator:
        begun = self.start()
        begun.is_looped_over = True
        return begun

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("Batches with `epochs=None` go on without end: no `len`.")
        return self.length

    def __bool__(self) -> bool:
        return True  # without it, Python asks for the `len`

    @property
    def length(self) -> int | None:
        """The number of batches of a pass; None without end."""
        return None if self._epochs is None else self._epochs * self._per_epoch

    def __repr__(self) -> str:
        shuffled = "" if self._seed is None else f", shuffle={self._seed}"
        epochs = "" if self._epochs == 1 else f", epochs={self._epochs}"
        return f"batches({self._rows} rows, {self._batch_size}{shuffled}{epochs})"

    @functools.cached_property
    def description(self) -> dict[str, State]:
        """The facts that decide which rows a batch has, for JSON."""
        return {
            "rows": self._rows,
            "batch_size": self._batch_size,
            "shuffle": self._seed,
            "drop_remainder": self._drop_remainder,
            "contents": _contents(self._arrays, self._tree, self._rows),
        }

    def check_described(self, state: State) -> None:
        """Raise if `state` was saved with other batches than these."""
        then = state.get("data") if isinstance(state, dict) else None
        if not isinstance(then, dict):
            raise sources.foreign(self.name, state, "what its data are under 'data'")
        differing = [
            f"`{key}` was {then.get(key)!r} and is {now!r}"
            if key != "contents"
            else "the arrays held other numbers, or were of other types"
            for key, now in self.description.items()
            if then.get(key) != now
        ]
        if differing:
            raise ValueError(
                f"The state was saved with other data in {self.name}: "
                f"{', and '.join(differing)}. Other examples would follow. "
                f"{sources.SAME_DATA}"
            )

    def _order(self, epoch: int) -> np.ndarray | None:
        """The rows in the order of `epoch`; None if they come as they are."""
        if self._seed is None:
            return None
        # A named generator: `default_rng` may be another one in a later NumPy.
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return generator.permutation(self._rows)


@final
class _ArrayPass(SourceIterator):
    is_in_memory = True

    def __init__(self, source: ArrayBatches, epoch: int) -> None:
        self._source: ArrayBatches = source
        self.are_own = source._seed is not None  # the others are views
        # By the user's own loop: its batches go to steps as they are.
        self.is_looped_over = False
        self._go_to(epoch, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        """To a batch of an epoch, which belongs to the pass that began with another."""
        epochs = self._source._epochs
        self._first = epoch if epochs is None else epoch - epoch % epochs
        self._end = None if epochs is None else self._first + epochs
        self._epoch, self._batch = epoch, batch
        self._order: np.ndarray | None = None
        self._ordered: int | None = None  # the epoch whose order that is

    def __next__(self) -> PyTree:
        batch = self.part(lambda rows: slice(rows))[1]
        if self.is_looped_over:
            origins.note(batch, None)
        return batch

    def part(self, choose: Callable[[int], slice]) -> tuple[int, PyTree]:
        source = self._source
        epoch, batch = self._epoch, self._batch
        if batch == source._per_epoch:
            epoch, batch = epoch + 1, 0
        if epoch == self._end:
            raise StopIteration
        start = batch * source._batch_size
        rows = min(source._batch_size, source._rows - start)
        begin, end, step = choose(rows).indices(rows)
        chosen = slice(start + begin, start + max(begin, end), step)
        if self._ordered != epoch:
            self._order, self._ordered = source._order(epoch), epoch
        self._epoch, self._batch = epoch, batch + 1
        arrays = source._arrays
        if self._order is None:
            return rows, source._tree.unflatten([array[chosen] for array in arrays])
        numbers = self._order[chosen]
        return rows, source._tree.unflatten([taken_rows(a, numbers) for a in arrays])

    def rows_ahead(self, most: int) -> list[int]:
        source, found = self._source, []
        epoch, batch = self._epoch, self._batch
        while len(found) < most:
            if batch == source._per_epoch:
                epoch, batch = epoch + 1, 0
            if epoch == self._end:
                break
            start = batch * source._batch_size
            found.append(min(source._batch_size, source._rows - start))
            batch += 1
        return found

    def get_state(self) -> State:
        place = {"epoch": self._epoch, "batch": self._batch}
        return {**place, "data": self._source.description}

    def set_state(self, state: State) -> None:
        source = self._source
        epoch = sources.counted(state, "epoch", source.name)
        batch = sources.counted(state, "batch", source.name)
        source.check_described(state)
        if batch > source._per_epoch:
            raise sources.too_few("an epoch", source._per_epoch, batch)
        self._go_to(epoch, batch)
        source._next_epoch = self._first + (source._epochs or 1)


def _checked(arrays: PyTree) -> tuple[list[np.ndarray], TreeStructure, int]:
    """`arrays` as NumPy's, their structure, and how many rows they all have."""
    leaves, structure = jax.tree.flatten_with_path(
        arrays, is_leaf=per_replica.is_per_replica
    )
    if not leaves:
        raise ValueError(
            "`arrays` holds no array. Give one array with the examples along its first "
            "dimension, or a dict or tuple of such arrays."
        )
    named = {f"arrays{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    host = {what: _on_host(leaf, what) for what, leaf in named.items()}
    first, count = next((what, len(array)) for what, array in host.items())
    for what, array in host.items():
        if len(array) != count:
            raise ValueError(
                f"`{what}` has {len(array)} rows but `{first}` has {count}. All arrays "
                "need the same examples along their first dimension."
            )
    if count == 0:
        raise ValueError(f"`{first}` has no rows, so there is nothing to batch.")
    return list(host.values()), structure, count


# Of each array so many rows are looked at, and so many numbers of each row.
_SAMPLED_ROWS, _SAMPLED = 16, 256


def _contents(arrays: Sequence[np.ndarray], structure: TreeStructure, rows: int) -> int:
    """A number that other arrays would hardly have, from a part of them."""
    crc = zlib.crc32(str(structure).encode())
    chosen = np.unique(np.linspace(0, rows - 1, _SAMPLED_ROWS).astype(np.int64))
    for array in arrays:
        crc = zlib.crc32(f"{array.dtype}{array.shape[1:]}".encode(), crc)
        # The bytes of an array of objects are where these lie in memory.
        for row in () if array.dtype.hasobject else chosen:
            crc = zlib.crc32(np.ravel(array[row])[:_SAMPLED].tobytes(), crc)
    return crc


def _on_host(leaf: Leaf, what: str) -> np.ndarray:
    _arrays.check_unmasked(leaf, f"`{what}`")
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise ValueError(
            f"`{what}` is {leaf!r:.100}, which has no rows. Batches are cut from "
            "arrays with the examples along their first dimension; write a list of "
            "numbers as `np.array([...])`."
        )
    return array


def _whole(value: Value, what: str, least: int) -> int:
    number = whole(value)
    if number is None:
        raise TypeError(f"`{what}` is {value!r}; it is to be an int.")
    if number < least:
        raise ValueError(f"`{what}` is {number}; it is to be at least {least}.")
    return number
