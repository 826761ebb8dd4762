"""What makes datasets and iterators on workers: `DatasetBuilder`, `IteratorBuilder`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from jaxstrategy.contexts import _context
from jaxstrategy.coordinator._per_worker_reading import WorkerDataset, only_once
from jaxstrategy.inputs._input_options import InputContext
from jaxstrategy.inputs.sources._source import Dataset, State
from jaxstrategy.parameter_servers import _worker_surroundings
from jaxstrategy.parameter_servers.wire import _pickled


@final
class DatasetBuilder:
    """Calls the user's function on a worker.

    Args:
      make: of nothing, or of an `InputContext`; returns a dataset.

    Attributes:
      made: the iterator that it returned to the coordinator, if it was one.
    """

    def __init__(self, make: Callable[..., Dataset]) -> None:
        self._make: Callable[..., Dataset] | None = make
        self._sent: tuple[bytes, Sequence[np.ndarray]] = b"", ()
        self.made: Iterator[Any] | None = None

    def __call__(self, index: int) -> WorkerDataset:
        """The dataset of the worker for which the code runs.

        Raises:
          TypeError: the function takes other arguments, or returns no dataset.
          Exception: what it raises.
        """
        if self._make is None:
            # Not before: what is in it asks which worker it is on.
            self._make = _pickled.loaded(*self._sent)
        return WorkerDataset(self._dataset)

    def _dataset(self) -> Dataset:
        make = self._make
        assert make is not None, "it was loaded before"
        dataset = make(*_arguments(make))
        once = only_once(dataset)
        if once is not None and once is self.made:
            raise ValueError(
                "The function of a per-worker dataset returned an iterator that the "
                "coordinator has made, of which the workers would take elements from "
                "each other. Make it in the function."
            )
        return dataset

    def __getstate__(self) -> dict[str, object]:
        # What refers to the strategy and its variables means the worker's own there.
        with _context.entered(is_shipping=True):
            return {"_make": None, "_sent": _pickled.dumped(self._make), "made": None}


@final
class IteratorBuilder:
    """Begins to read a dataset on a worker.

    Args:
      positions: where to go on, for workers that were there before; None: always from
        the beginning.
    """

    def __init__(self, positions: dict[int, State] | None) -> None:
        self._positions = positions

    def __call__(self, index: int, dataset: WorkerDataset) -> Iterator[Any]:
        """Its elements, read ahead."""
        if self._positions is None:
            return dataset.read()
        return dataset.read_on(self._positions.get(index))

    def __getstate__(self) -> dict[str, object]:
        # A copy, because other workers may go on while this is pickled.
        positions = self._positions
        return {"_positions": None if positions is None else dict(positions)}


def _arguments(make: Callable[..., Dataset]) -> tuple[InputContext, ...]:
    """What the function is called with.

    Raises:
      TypeError: it takes something else.
    """
    try:
        signature = inspect.signature(make)
    except ValueError:  # a builtin without a signature: its call will tell
        return ()
    surroundings = _worker_surroundings.current()
    assert surroundings is not None, "a worker builds it"
    context = InputContext(1, 0, surroundings.replicas.count)
    for arguments in ((), (context,)):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise TypeError(
        f"`{getattr(make, '__name__', make)}{signature}` was given to "
        "`create_per_worker_dataset`; a function without arguments, or of an "
        "`InputContext`, was wanted. `functools.partial` gives others."
    )
