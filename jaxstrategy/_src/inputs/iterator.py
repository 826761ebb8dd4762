"""One pass over a `DistributedDataset`, read ahead in a thread."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar, final

import jax

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import ContextError, OutOfRangeError
from jaxstrategy._src.inputs import origins
from jaxstrategy._src.inputs.batches import HostBatch, Steps, Transfer, copied
from jaxstrategy._src.inputs.input_options import InputOptions
from jaxstrategy._src.inputs.sources import State
from jaxstrategy._src.text import with_noun
from jaxstrategy._src.values.arrays import PyTree, is_traced

_T = TypeVar("_T")

# A thread that waits for a source is left behind at the end of the program.
_PATIENCE_SECONDS = 2.0


@final
class Optional:
    """A batch, or nothing.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> with iter(dataset) as iterator:
    ...     first = iterator.get_next_as_optional()
    ...     second = iterator.get_next_as_optional()
    >>> first.has_value(), second.has_value()
    (True, False)
    """

    def __init__(self, values: tuple[PyTree, ...]) -> None:
        self._values = values

    @classmethod
    def of(cls, value: PyTree) -> Self:
        """One that has a value."""
        return cls((value,))

    @classmethod
    def empty(cls) -> Self:
        """One without."""
        return cls(())

    def has_value(self) -> bool:
        """Whether there is one."""
        return bool(self._values)

    def get_value(self) -> PyTree:
        """The value.

        Raises:
          ValueError: there is none.
        """
        if not self._values:
            raise ValueError(
                "The optional has no value: the data has ended. Ask `has_value()` "
                "first."
            )
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional.empty()"


class AbstractInputIterator(Iterator[PyTree], abc.ABC):
    """Batches, and the position among them, which checkpoints save."""

    @abc.abstractmethod
    def get_state(self) -> State:
        """The position, as JSON can hold it."""

    @abc.abstractmethod
    def set_state(self, state: State) -> None:
        """Goes on after the batch after which `state` was taken."""


@final
class DistributedIterator(AbstractInputIterator):
    """One pass over a dataset, a batch for all replicas at a time.

    Made by `iter(dataset)`. Use it in `for`, with `next`, or through TensorFlow's
    `get_next` and `get_next_as_optional`. Some batches are prepared ahead in a thread,
    which ends with the data, on `close`, and when the iterator is forgotten; those of
    `js.batches` are not on devices of the host, where that would take longer.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)] * 2)
    >>> iterator = iter(dataset)
    >>> iterator.get_next().values
    (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
    >>> iterator.close()
    """

    def __init__(
        self,
        start: Callable[[], Steps],
        transfer: Transfer,
        options: InputOptions,
        steps: Steps,
    ) -> None:
        self._start = start
        self._transfer = transfer
        self._options = options
        self._open(steps)

    def _open(self, steps: Steps) -> None:
        self._steps = steps
        self._number = steps.done  # of the next batch
        self._state = steps.state()
        self._ahead, self._placed = _placed(steps, self._transfer, self._options)
        # Read to know what batches are like, and not yet given to anybody.
        self._begun: list[tuple[PyTree, State | TypeError]] = []
        self._spec: PyTree = None
        self._raised: Exception | None = None
        self._is_closed = False

    def __next__(self) -> PyTree:
        """The next batch; what the source has raised is raised at each further call."""
        if is_traced():
            raise _within_trace()
        batch, self._state = self._begun.pop() if self._begun else self._next()
        return batch

    def _next(self) -> tuple[PyTree, State | TypeError]:
        if self._is_closed:
            raise StopIteration
        if self._raised is not None:
            # A generator that has raised would only say that it has ended.
            raise self._raised
        name = f"batch {self._number} of {self._steps.agreement.topic}"
        try:
            with self._steps.agreement.waiting(name), origins.waiting():
                found = next(self._placed)
        except Exception as error:
            self._raised = error
            raise
        if self._spec is None:  # kept, for who asks when the data has ended
            self._spec = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                found[0],
            )
        origins.note(found[0], name if self._steps.agreement.topic else None)
        self._number += 1
        return found

    def get_next(self) -> PyTree:
        """The next batch.

        Raises:
          OutOfRangeError: there is none. It is a `StopIteration`, too.
          ContextError: inside a function that JAX traces.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                "The end of the data. Use `for batch in dataset`, or "
                "`get_next_as_optional()`, which says whether there is a batch."
            ) from None

    def get_next_as_optional(self) -> Optional:
        """The next batch, or nothing at the end: `optional.has_value()` tells."""
        try:
            return Optional.of(next(self))
        except StopIteration:
            return Optional.empty()

    def get_state(self) -> State:
        """The position in the data, for `set_state` of another iterator over them.

        What was prepared ahead counts as not yet seen.

        Returns:
          What JSON can hold.

        Raises:
          TypeError: the source cannot be resumed; the message says why.
        """
        if isinstance(self._state, TypeError):
            raise self._state
        return _State(self._state)

    def set_state(self, state: State) -> None:
        """Go on after the batch after which `state` was taken.

        Args:
          state: as `get_state` gave it, or as JSON in bytes.

        Raises:
          ValueError: it is the state of something else, or of another dataset.
          TypeError: the source cannot be resumed.
        """
        self.close()
        steps = self._start()
        steps.set_state(json.loads(state) if isinstance(state, bytes) else state)
        self._open(steps)

    def start_prefetch(self) -> None:
        """Begin to read ahead, before the first batch is asked for."""
        if self._ahead is not None and not self._is_closed:
            self._ahead.start()

    @property
    def element_spec(self) -> PyTree:
        """The type of what `next` gives: `jax.ShapeDtypeStruct`s instead of arrays.

        The first batch is read to know it.

        Raises:
          ValueError: the iterator was closed, or resumed at its end, before a batch
            was read.
          ContextError: no batch was read yet, and JAX traces.
        """
        if self._spec is None:
            if is_traced():
                raise _within_trace()
            try:
                self._begun.append(self._next())
            except StopIteration:
                raise ValueError(
                    "The iterator has ended without a batch, so that what its batches "
                    "are like is not known. Ask before it is closed, or ask the "
                    "dataset: `dataset.element_spec`."
                ) from None
        return self._spec

    def close(self) -> None:
        """Stop reading, and close the source."""
        self._is_closed = True
        self._begun.clear()
        # What another thread still reads from cannot be closed.
        if self._ahead is None or self._ahead.close():
            self._steps.close()

    def __repr__(self) -> str:
        given = with_noun(self._number - len(self._begun), "step")
        closed = ", closed" if self._is_closed else ""
        return f"DistributedIterator({given} given{closed})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _State(dict[str, State]):
    """A state that JSON can hold; and bytes, for Grain's handler of Orbax."""

    def decode(self) -> str:
        """It as JSON."""
        return json.dumps(self)


def _placed(
    steps: Steps, transfer: Transfer, options: InputOptions
) -> tuple[Prefetcher | None, Iterator[tuple[PyTree, State | TypeError]]]:
    """Batches with the state after them, and what reads them ahead, if anything."""

    def place(step: HostBatch) -> tuple[PyTree, State | TypeError]:
        return transfer.place(step, steps), step.state

    in_memory = all(each.is_in_memory for each in steps.passes)
    is_alone = steps.agreement.topic is None
    # Of batches at hand nothing is gained by reading ahead.
    if not options.ahead or (in_memory and is_alone and transfer.is_on_host):
        return None, map(place, steps)
    if options.experimental_fetch_to_device:
        ahead = Prefetcher(lambda: place(next(steps)), options.ahead)
        return ahead, ahead

    # Copied, because the source may overwrite its arrays when it is asked for the next.
    def stable() -> HostBatch:
        batch = next(steps)
        if steps.are_own:
            return batch
        return dataclasses.replace(batch, arrays=copied(batch.arrays))

    ahead = Prefetcher(stable, options.ahead)
    return ahead, map(place, ahead)


def _within_trace() -> ContextError:
    """What is read while JAX traces is read once, and compiled."""
    return ContextError(
        "A dataset was read inside a step, or inside another function that JAX "
        "traces (`jax.jit`, `jax.grad`, `jax.lax.scan`). Such a function runs in "
        "Python once, so that each later call would get the same batch again. Read "
        "outside, `for batch in dataset:`, and give the batch to the function as "
        "an argument; for several batches in one call use `strategy.several`."
    )


class _Ahead:
    """What the thread that reads ahead shares with who reads; it refers to neither."""

    def __init__(self, depth: int) -> None:
        # Of this kind because its methods may be interrupted by the collector, which
        # may call `end` in the midst of any of them.
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self.wanted.put(None)
        self.stop = threading.Event()

    def work(self, make: Callable[[], object], worker: object) -> None:
        """Put what `make` returns there, as often as it is wanted, until it raises."""
        while True:
            self.wanted.get()
            if self.stop.is_set():
                return
            try:
                with context.entered(worker=worker):
                    result = make(), None
            except BaseException as error:
                # Of any kind: who waits for the result would otherwise wait for ever.
                result = None, error
            self.results.put(result)
            if result[1] is not None:
                return

    def end(self, thread: threading.Thread) -> None:
        """End the thread; also called at the end of the program."""
        self.stop.set()
        self.wanted.put(None)  # the thread may wait for it
        with contextlib.suppress(queue.Empty):
            while True:
                self.results.get_nowait()
        # Somebody may wait for it in another thread.
        self.results.put((None, StopIteration()))
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE_SECONDS)


class Prefetcher(Iterator[_T]):
    """The results of a function, one after the other, called some calls ahead."""

    def __init__(self, make: Callable[[], _T], depth: int) -> None:
        self._shared = _Ahead(depth)
        self._raised: BaseException | None = None
        self._thread = threading.Thread(
            target=self._shared.work,
            args=(make, context.current().worker),
            name="jaxstrategy input",
            daemon=True,
        )
        self._finalizer = weakref.finalize(self, self._shared.end, self._thread)

    def __next__(self) -> _T:
        if self._raised is not None:
            raise self._raised
        if self._shared.stop.is_set():
            raise StopIteration
        self.start()
        result, error = self._shared.results.get()
        if error is not None:
            self._raised = error
            self.close()
            raise error
        self._shared.wanted.put(None)
        return result

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> bool:
        """End the thread. It may be called twice."""
        self._finalizer()
        return not self._thread.is_alive()
