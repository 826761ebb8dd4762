"""A value for each worker: `PerWorkerValue`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.coordinator._remote_value import RemoteValue
from jaxstrategy.scheduled._worker_argument import ValueArgument
from jaxstrategy.text._shown import shown
from jaxstrategy.values._types import PyTree


class PerWorkerValue(ValueArgument):
    """One value for each worker, in the order of their indices.

    As an argument of a scheduled function, alone or in a structure, it stands for the
    value of the worker that runs the function. `schedule` waits until the
    first worker's value is there, for which the function is traced; each worker waits
    for its own.

    Args:
      values: a `RemoteValue` for each worker. They need one structure, and the same
        shapes and dtypes.

    Raises:
      AssertionError: something else is among them.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     @coordinator.function
    ...     def ten(index):
    ...         return 10 * index
    ...     tens = [coordinator.schedule(ten, (i,)) for i in range(2)]
    ...     @coordinator.function
    ...     def rest(own):
    ...         return own - 10 * js.coordinator.experimental_get_current_worker_index()
    ...     value = js.coordinator.PerWorkerValue(tens)
    ...     coordinator.schedule(rest, (value,)).fetch()
    np.int32(0)
    """

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        self._values = tuple(values)
        wrong = [each for each in self._values if not isinstance(each, RemoteValue)]
        if wrong:
            raise AssertionError(
                f"A PerWorkerValue was given {shown(wrong[0])}; `RemoteValue`s were "
                "wanted, such as `schedule` returns. What is the same for all workers "
                "is an argument by itself."
            )

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """One for each worker."""
        return self._values

    def of_worker(self, worker: int) -> PyTree:
        """What one worker is given; waits until it is there.

        Raises:
          IndexError: there is none for it.
          BaseException: what the function has raised that was to return it.
        """
        if worker >= len(self._values):
            raise IndexError(
                f"Worker {worker} runs a function that was given a PerWorkerValue of "
                f"{len(self._values)} values. Give one for each worker."
            )
        return self._values[worker].fetch()

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values))})"
