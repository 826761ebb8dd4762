"""Sources of batches: the base class, iterables, generators, `tf.data`."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src.text import whole, with_noun
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import PyTree

State: TypeAlias = Any
"""A state that JSON can hold: dicts, lists, text, numbers, None."""

Dataset: TypeAlias = Any
"""A dataset of another library, an iterable, or a function that makes one."""


class Source:
    """Batches, read from the beginning as often as asked for."""

    def __init__(
        self,
        name: str,
        start: Callable[[], SourceIterator],
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.name = name  # in messages
        self._start = start
        self._length = length

    def start(self) -> SourceIterator:
        """A new pass over all batches."""
        return self._start()

    @property
    def length(self) -> int | None:
        """The number of batches of a pass; None when unknown or without end."""
        return self._length()


class SourceIterator(Iterator[PyTree]):
    """One pass over a source; a later one gets to the same place by reading again."""

    are_own = False  # the arrays of a batch stay as they are
    is_in_memory = False
    _iterator: Any = None  # begun when first needed; it may start threads

    def __init__(
        self,
        name: str,
        begin: Callable[[int], Any],  # from a batch on, if it `skips`
        length: int | None = None,
        *,
        in_memory: Sequence[PyTree] = (),
        skips: bool = False,
        refusal: str | None = None,  # why a pass cannot resume
    ) -> None:
        self._name = name
        self._begin = begin
        self._length = length
        self._in_memory = in_memory
        self._skips = skips
        self._refusal = refusal
        self._batches = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = self._begin(self._batches)
        batch = next(self._iterator)
        self._batches += 1
        return batch

    def part(self, choose: Callable[[int], slice]) -> tuple[int, PyTree] | None:
        """Some rows of the next batch, for a source that need not read the others."""
        return None

    def rows_ahead(self, most: int) -> list[int]:
        """The numbers of rows of the next batches, as far as they are sure unread."""
        found: list[int] = []
        for batch in self._in_memory[self._batches : self._batches + most]:
            leaves = jax.tree.leaves(batch, is_leaf=per_replica.is_per_replica)
            if not all(isinstance(leaf, (np.ndarray, jax.Array)) for leaf in leaves):
                break
            rows = {leaf.shape[0] for leaf in leaves if leaf.ndim}
            if len(rows) != 1:
                break
            found += rows
        return found

    def get_state(self) -> State:
        """The place of this pass, for `set_state` of a pass in another process."""
        self._check_resumes()
        return {"batches": self._batches, **of_length(self._length)}

    def set_state(self, state: State) -> PyTree | None:
        """Go on where the pass was whose state it is; the batch before, if it reads."""
        self._check_resumes()
        wanted = counted(state, "batches", self._name)
        is_beyond = self._length is not None and wanted > self._length
        # Of a state beyond the end, `too_few` says more.
        if not is_beyond:
            check_length(state, self._length, self._name)
        elif self._skips:
            raise too_few(self._name, self._length or 0, wanted)
        self.close()
        self._batches, batch = max(wanted - 1, 0) if self._skips else 0, None
        while self._batches < wanted:
            try:
                batch = next(self)
            except StopIteration:
                raise too_few(self._name, self._batches, wanted) from None
        return batch

    def _check_resumes(self) -> None:
        if self._refusal is not None:
            raise TypeError(f"A pass over {self._name} cannot resume: {self._refusal}")

    def close(self) -> None:
        """Let go of files and workers. A closed pass is not used again."""
        iterator, self._iterator = self._iterator, None
        close(iterator)


# A state is asked for so seldom; to resume reads up to so many batches, less one, anew.
_EVERY = 16


class SnapshotIterator(SourceIterator):
    """A pass over a source that has a state of its own, which takes long to ask for.

    Subclasses define `_start`, `_take` and `_load`.
    """

    _snapshot: dict[str, State] | None = None
    _since = 0

    def __init__(
        self,
        dataset: Dataset,
        name: str,
        order: ReadingOrder | None = None,
        length: int | None = None,
    ) -> None:
        super().__init__(name, lambda _: self._start(), length)
        self._dataset = dataset
        self._order = order

    def _begun(self, start: Callable[[], Any] | None = None) -> Any:
        """The iterator, which begins, as `start` says, if it has not."""
        if self._iterator is None:
            if self._order is not None:
                self._order.begin(self)
            self._iterator = (start or self._start)()
        return self._iterator

    @abc.abstractmethod
    def _start(self) -> Any:
        """A new iterator of the dataset."""

    @abc.abstractmethod
    def _take(self) -> dict[str, State]:
        """The source's own state, copied."""

    @abc.abstractmethod
    def _load(self, state: State) -> None:
        """Go on from a state that `_take` gave."""

    def _read(self) -> PyTree:
        """The next batch of the source."""
        iterator = self._begun()
        if self._order is not None:
            self._order.take(self)
        return next(iterator)

    def __next__(self) -> PyTree:
        batch = self._read()
        self._since += 1
        return batch

    def get_state(self) -> State:
        self._begun()
        if self._order is not None:
            self._order.check(self, self._name)
        if self._snapshot is None or self._since >= _EVERY:
            self._snapshot, self._since = self._take(), 0
        return {**self._snapshot, **({"since": self._since} if self._since else {})}

    def set_state(self, state: State) -> None:
        since = 0
        if isinstance(state, dict) and "since" in state:
            since = counted(state, "since", self._name)
            state = {key: state[key] for key in state if key != "since"}
        self._load(state)
        for _ in range(since):
            try:
                self._read()
            except StopIteration:
                raise ValueError(
                    f"{self._name} has fewer batches than when the state was saved. "
                    f"{SAME_DATA}"
                ) from None
        self._snapshot, self._since = state, since


def close(iterator: Any) -> None:
    """Close what can be closed: a generator, an iterator with workers."""
    closing = getattr(iterator, "close", None)
    if callable(closing):
        closing()


def counted(state: State, key: str, name: str) -> int:
    """The number of batches or epochs that `state` holds under `key`."""
    count = whole(state.get(key)) if isinstance(state, dict) else None
    if count is None or count < 0:
        raise foreign(name, state, f"a number under {key!r}")
    return count


def of_length(length: int | None) -> dict[str, int]:
    """The part of a state that says how many batches there are, if that is known."""
    return {} if length is None else {"length": length}


def check_length(state: State, length: int | None, name: str) -> None:
    """Raise if the data is known to have had another length when `state` was saved."""
    then = state.get("length")
    if then is not None and length is not None and then != length:
        raise ValueError(
            f"The state was saved with {then} batches in {name}, which has {length} "
            f"now, so that other examples would follow. {SAME_DATA}"
        )


SAME_DATA = (
    "Resume with the dataset, the batch size and the options that the state was saved "
    "with, or begin anew."
)


def foreign(name: str, state: State, wanted: str) -> ValueError:
    """The error for a state that another kind of source gave."""
    return ValueError(
        f"{state!r:.200} is not the state of a pass over {name}, which has {wanted}. "
        "Give the state that `get_state` of an iterator over the same dataset returned."
    )


def too_few(name: str, count: int, wanted: int) -> ValueError:
    """The error for a state beyond the end."""
    return ValueError(
        f"The state was saved after batch {wanted}, but {name} has "
        f"{with_noun(count, 'batch')}. {SAME_DATA}"
    )


@final
class ReadingOrder:
    """Notices when two passes read in turns, so that no wrong state is given away."""

    def __init__(self) -> None:
        self._latest: SourceIterator | None = None
        self._is_mixed = False

    def begin(self, reader: SourceIterator) -> None:
        """`reader` begins to read, and those before it are expected to be done."""
        self._latest, self._is_mixed = reader, False

    def take(self, reader: SourceIterator) -> None:
        """`reader`, which has begun, reads on."""
        self._is_mixed |= reader is not self._latest

    def check(self, reader: SourceIterator, name: str) -> None:
        """Raise unless the dataset's place is that of `reader`."""
        if self._is_mixed or reader is not self._latest:
            raise TypeError(
                f"The place of this pass is unknown: {name} remembers one place only, "
                "and another pass over it has begun. Finish one pass before the next, "
                "or give each its own dataset."
            )


_AGAIN = (
    "To read it more than once or resume it, give a list of batches, or a function "
    "without arguments that returns a new iterator: the generator function itself, "
    "`read`, and not `read()`."
)


def repeatable(batches: Iterable[PyTree]) -> Source:
    """An iterable that begins anew whenever it is asked: a list, a loader."""
    name = f"the {type(batches).__name__}"
    in_memory: Any = batches if type(batches) in (list, tuple) else ()

    def start() -> SourceIterator:
        length = length_of(batches)
        return SourceIterator(
            name, lambda _: iter(batches), length, in_memory=in_memory
        )

    return Source(name, start, lambda: length_of(batches))


def length_of(dataset: Any) -> int | None:
    """Its `len`, None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def generated(read: Callable[[], Iterable[PyTree]]) -> Source:
    """A function, called for each pass, that returns the iterator of its batches."""
    function = getattr(read, "func", read)  # of a partial
    name = getattr(function, "__name__", type(function).__name__)
    name = f"the function `{name}`"

    def begin(_: int) -> Iterator[PyTree]:
        batches: Any = read()
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"Called for a pass, {name} returned {type(batches).__name__}, "
                "which is not an iterator of batches. A function given as a dataset is "
                "called once for each pass; write it with `yield`, or let it return an "
                "iterator."
            )
        return iter(batches)

    return Source(name, lambda: SourceIterator(name, begin))


def once(batches: Iterator[PyTree]) -> Source:
    """An iterator, which only one pass can read."""
    name = f"the {type(batches).__name__}"
    refusal = f"it can be read only once, and what it has given is gone. {_AGAIN}"
    is_started = False

    def start() -> SourceIterator:
        nonlocal is_started
        if is_started:
            raise TypeError(f"Only one pass can read {name}, and one did. {_AGAIN}")
        is_started = True
        # Never closed, as a chain cannot be: the iterator is the user's own.
        chain = itertools.chain(batches)
        return SourceIterator(name, lambda _: chain, refusal=refusal)

    return Source(name, start)


def is_tf_data(dataset: Dataset) -> bool:
    """Whether `dataset` has the methods of a `tf.data.Dataset` that are needed."""
    wanted = ("as_numpy_iterator", "element_spec", "cardinality")
    return all(hasattr(dataset, name) for name in wanted)


def tf_data(dataset: Dataset) -> Source:
    """A `tf.data.Dataset` of batches, read as NumPy arrays."""
    name = "the tf.data dataset"

    def length() -> int | None:
        count = int(dataset.cardinality())
        return count if count >= 0 else None  # -1: without end, -2: unknown

    def start() -> SourceIterator:
        begin = dataset.as_numpy_iterator
        return SourceIterator(name, lambda _: iter(begin()), length())

    return Source(name, start, length)
