"""What turns a user's function into something that a worker runs: `FunctionTracer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxstrategy.coordinator._worker_resource import WorkerResource
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._shipped_program import ShippedProgram
from jaxstrategy.values._types import PyTree


class Prepared(Protocol):
    """A function with its arguments, ready for any worker.

    Attributes:
      program: what the worker runs; what it needs on the servers is there.
      arguments: of the program.
      iterators: the numbers of its iterators, which are among the resources.
      resources: what the worker must have built before; those that are used by others
        need not be among them.
      trace_seconds: how long the function was traced; None if it had been before.
    """

    @property
    def program(self) -> ShippedProgram: ...

    @property
    def arguments(self) -> tuple[np.ndarray, ...]: ...

    @property
    def iterators(self) -> tuple[int, ...]: ...

    @property
    def resources(self) -> Sequence[WorkerResource]: ...

    @property
    def trace_seconds(self) -> float | None: ...

    def rebuild(self, arrays: Sequence[np.ndarray]) -> PyTree:
        """What the function returned, of the results of its program."""
        ...

    def traced_again(self, changed: ElementChanged) -> Prepared:
        """The same for elements of another type.

        Raises:
          BaseException: what the user's function raises.
        """
        ...


class FunctionTracer(Protocol):
    """Traces the functions of one strategy, each once for each kind of arguments."""

    def prepare(
        self, fn: Any, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Prepared:
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
