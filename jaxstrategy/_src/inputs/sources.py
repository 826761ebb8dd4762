"""Sources of batches: the base class, iterables, generators, `tf.data`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias, final

import jax
import numpy as np

from jaxstrategy._src.text.shown import whole, with_noun
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import PyTree

State: TypeAlias = Any
"""A state that JSON can hold: dicts, lists, text, numbers, None."""

Dataset: TypeAlias = Any
"""A dataset of another library, an iterable, or a function that makes one."""


class Source(abc.ABC):
    """Batches, read from the beginning as often as asked for."""

    @abc.abstractmethod
    def start(self) -> SourceIterator:
        """A new pass over all batches."""

    @property
    def length(self) -> int | None:
        """The number of batches of a pass; None when unknown or without end."""
        return None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""


class SourceIterator(abc.ABC):
    """One pass over a source."""

    are_own = False
    is_in_memory = False

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> PyTree:
        """The next batch."""

    def part(self, choose: Callable[[int], slice]) -> tuple[int, PyTree] | None:
        """Some rows of the next batch, for a source that need not read the others."""
        return None

    def rows_ahead(self, most: int) -> list[int]:
        """The numbers of rows of the next batches, as far as they are sure unread."""
        return []

    @abc.abstractmethod
    def get_state(self) -> State:
        """The place of this pass, for `set_state` of a pass in another process."""

    @abc.abstractmethod
    def set_state(self, state: State) -> PyTree | None:
        """Go on where the pass was whose state it is."""

    def close(self) -> None:  # noqa: B027 (most passes hold nothing)
        """Let go of files and workers. A closed pass is not used again."""


@final
class ReplayIterator(SourceIterator):
    """Batches of an iterator; a later pass gets to the same place by reading again."""

    def __init__(
        self,
        begin: Callable[[], Iterator[PyTree]],
        name: str,
        length: int | None = None,
        in_memory: Sequence[PyTree] = (),
    ) -> None:
        self._begin = begin
        self._in_memory = in_memory
        self._name = name
        self._length = length
        self._iterator: Iterator[PyTree] | None = None  # begun when first needed
        self._batches = 0

    def __next__(self) -> PyTree:
        if self._iterator is None:
            self._iterator = self._begin()
        batch = next(self._iterator)
        self._batches += 1
        return batch

    def rows_ahead(self, most: int) -> list[int]:
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
        return {"batches": self._batches, **of_length(self._length)}

    def set_state(self, state: State) -> PyTree | None:
        wanted = counted(state, "batches", self._name)
        # Of a state beyond the end, `too_few` says more.
        if self._length is None or wanted <= self._length:
            check_length(state, self._length, self._name)
        self.close()
        self._batches, batch = 0, None
        while self._batches < wanted:
            try:
                batch = next(self)
            except StopIteration:
                raise too_few(self._name, self._batches, wanted) from None
        return batch

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        close(iterator)


# A state is asked for so seldom; to resume reads up to so many batches, less one, anew.
_EVERY = 16


class SnapshotIterator(SourceIterator):
    """A pass over a source that has a state of its own, which takes long to ask for."""

    name: str
    _snapshot: dict[str, State] | None = None
    _since = 0

    @abc.abstractmethod
    def _read(self) -> PyTree:
        """The next batch of the source."""

    @abc.abstractmethod
    def _check_place(self) -> None:
        """Raise if the source's state is not that of this pass, or there is none."""

    @abc.abstractmethod
    def _take(self) -> dict[str, State]:
        """The source's own state, copied."""

    @abc.abstractmethod
    def _load(self, state: State) -> None:
        """Go on from a state that `_take` gave."""

    def __next__(self) -> PyTree:
        batch = self._read()
        self._since += 1
        return batch

    def get_state(self) -> State:
        self._check_place()
        if self._snapshot is None or self._since >= _EVERY:
            self._snapshot, self._since = self._take(), 0
        return {**self._snapshot, **({"since": self._since} if self._since else {})}

    def set_state(self, state: State) -> None:
        since = 0
        if isinstance(state, dict) and "since" in state:
            since = counted(state, "since", self.name)
            state = {key: value for key, value in state.items() if key != "since"}
        self._load(state)
        for _ in range(since):
            try:
                self._read()
            except StopIteration:
                raise ValueError(
                    f"{self.name} has fewer batches than when the state was saved. "
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


@final
class Repeatable(Source):
    """An iterable that begins anew whenever it is asked: a list, a loader."""

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._batches = batches

    def start(self) -> SourceIterator:
        batches = self._batches
        in_memory: Sequence[PyTree] = ()
        if isinstance(batches, (list, tuple)) and type(batches) in (list, tuple):
            in_memory = batches
        return ReplayIterator(lambda: iter(batches), self.name, self.length, in_memory)

    @property
    def length(self) -> int | None:
        try:
            return len(self._batches)  # type: ignore[arg-type]  # asked, not known
        except (TypeError, NotImplementedError):
            return None

    @property
    def name(self) -> str:
        return f"the {type(self._batches).__name__}"


@final
class Generated(Source):
    """A function, called for each pass, that returns the iterator of its batches."""

    def __init__(self, read: Callable[[], Iterable[PyTree]]) -> None:
        self._read = read

    def start(self) -> SourceIterator:
        return ReplayIterator(self._begin, self.name)

    def _begin(self) -> Iterator[PyTree]:
        batches: Any = self._read()
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"Called for a pass, {self.name} returned {type(batches).__name__}, "
                "which is not an iterator of batches. A function given as a dataset is "
                "called once for each pass; write it with `yield`, or let it return an "
                "iterator."
            )
        return iter(batches)

    @property
    def name(self) -> str:
        function = getattr(self._read, "func", self._read)  # of a partial
        name = getattr(function, "__name__", type(function).__name__)
        return f"the function `{name}`"


@final
class Once(Source):
    """An iterator, which only one pass can read."""

    def __init__(self, batches: Iterator[PyTree]) -> None:
        self._batches = batches
        self._is_started = False

    def start(self) -> SourceIterator:
        if self._is_started:
            raise TypeError(
                f"Only one pass can read {self.name}, and one did. {_AGAIN}"
            )
        self._is_started = True
        return _OncePass(self._batches, self.name)

    @property
    def name(self) -> str:
        return f"the {type(self._batches).__name__}"


@final
class _OncePass(SourceIterator):
    def __init__(self, batches: Iterator[PyTree], name: str) -> None:
        # Never closed: the iterator is the user's own.
        self._batches: Iterator[PyTree] = batches
        self._name = name

    def __next__(self) -> PyTree:
        return next(self._batches)

    def get_state(self) -> State:
        raise TypeError(self._cannot_resume())

    def set_state(self, state: State) -> PyTree | None:
        raise TypeError(self._cannot_resume())

    def _cannot_resume(self) -> str:
        return (
            f"A pass over {self._name} cannot resume: it can be read only once, and "
            f"what it has given is gone. {_AGAIN}"
        )

    def close(self) -> None:
        self._batches = iter(())


def is_tf_data(dataset: Dataset) -> bool:
    """Whether `dataset` has the methods of a `tf.data.Dataset` that are needed."""
    wanted = ("as_numpy_iterator", "element_spec", "cardinality")
    return all(hasattr(dataset, name) for name in wanted)


@final
class TfDataSource(Source):
    """A `tf.data.Dataset` of batches, read as NumPy arrays."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def start(self) -> SourceIterator:
        return ReplayIterator(
            lambda: iter(self._dataset.as_numpy_iterator()), self.name, self.length
        )

    @property
    def length(self) -> int | None:
        count = int(self._dataset.cardinality())
        return count if count >= 0 else None  # -1: without end, -2: unknown

    @property
    def name(self) -> str:
        return "the tf.data dataset"
