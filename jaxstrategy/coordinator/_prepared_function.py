"""What turns a user's function into what a worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._shipped_program import ShippedProgram
from jaxstrategy.parameter_servers._worker_resource import WorkerResource
from jaxstrategy.values._types import PyTree


class PreparedFunction(Protocol):
    """A function with its arguments, ready for any worker.

    Attributes:
      program: what the worker runs; what it needs on the servers is there.
      iterators: the numbers of its iterators, which are among the resources.
      resources: what the worker must have built before; those that are used by others
        need not be among them.
      trace_seconds: how long the function was traced; None if it had been before.
    """

    @property
    def program(self) -> ShippedProgram: ...

    @property
    def iterators(self) -> tuple[int, ...]: ...

    @property
    def resources(self) -> Sequence[WorkerResource]: ...

    @property
    def trace_seconds(self) -> float | None: ...

    def arguments_of(self, worker: int, /) -> tuple[np.ndarray, ...]:
        """The arguments of the program on this worker.

        Raises:
          IndexError: one has no version for it.
        """
        ...

    def taken(self, worker: int, arrays: Sequence[np.ndarray], /) -> list[np.ndarray]:
        """The program's results of all that a worker has sent for it."""
        ...

    def rebuild(self, arrays: Sequence[np.ndarray], /) -> PyTree:
        """What the function returned, of the results of its program."""
        ...

    def traced_again(self, changed: ElementChanged, /) -> PreparedFunction:
        """The same for elements of another type.

        Raises:
          BaseException: what the user's function raises.
        """
        ...


class FunctionPreparer(Protocol):
    """Traces the functions of one strategy, each once for each kind of arguments."""

    def prepare(
        self, fn: Any, args: Sequence[PyTree], kwargs: dict[str, PyTree], /
    ) -> PreparedFunction:
        """A function with its arguments, traced in this thread if need be.

        Args:
          fn: what the user wants to schedule.
          args: its arguments.
          kwargs: its arguments by name.

        Raises:
          TypeError: it cannot be scheduled, such as a plain function.
          BaseException: what the user's function raises.
        """
        ...
