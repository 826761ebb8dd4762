"""What waits in the queue: scheduled functions, and tasks for one worker."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, final

from jaxstrategy.coordinator._closure_queue import AbstractClosure
from jaxstrategy.coordinator._function_names import function_line, function_name
from jaxstrategy.coordinator._function_numbers import FunctionNumbers
from jaxstrategy.coordinator._prepared_function import PreparedFunction
from jaxstrategy.coordinator._remote_value import RemoteValue
from jaxstrategy.coordinator._worker_life import WorkerLife
from jaxstrategy.parameter_servers._operations import CallNumber
from jaxstrategy.values._types import PyTree


class WorkerClosure(AbstractClosure):
    """What one worker does.

    Attributes:
      value: what it will return.
      deaths: how many workers were lost while they did it.
      is_of_one_worker: whether no other worker may do it.
    """

    is_of_one_worker: bool

    def __init__(self, value: RemoteValue) -> None:
        self.value = value
        self.deaths = 0

    @abc.abstractmethod
    def run(self, life: WorkerLife, worker: int, incarnation: int) -> object:
        """Its results, of a worker that is the caller's alone meanwhile."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What it is called in messages."""

    @abc.abstractmethod
    def described(self) -> str:
        """Its name and the line of the user's code that it is from."""

    def renumber(self) -> None:
        """What it has pushed before was undone."""

    def fail(self, error: BaseException) -> None:
        """It has raised this, or can have no results because of this."""
        self.value.set_error(error)


@final
class ScheduledClosure(WorkerClosure):
    """A function with its arguments.

    Args:
      number: of no other function.
      fn: the user's.
      prepared: what is to run.
      value: what it will return.
      numbers: of all functions.
      until_end: whether it runs until its iterator has ended, for the sums of its
        results.
    """

    is_of_one_worker = False

    def __init__(
        self,
        number: int,
        fn: Any,
        prepared: PreparedFunction,
        value: RemoteValue,
        numbers: FunctionNumbers,
        until_end: bool = False,
    ) -> None:
        super().__init__(value)
        self._number = number
        self._has_run = False
        self._fn = fn
        self._prepared = prepared
        self._numbers = numbers
        self._until_end = until_end

    @property
    def name(self) -> str:
        """The function's."""
        return function_name(self._fn)

    def described(self) -> str:
        """The function's name, and where it is defined."""
        line = function_line(self._fn)
        return f"`{self.name}`" if line is None else f"`{self.name}` ({line})"

    def run(self, life: WorkerLife, worker: int, incarnation: int) -> object:
        """Its arrays; traced again if the worker has elements of another type."""
        self._has_run = True
        number = CallNumber(self._number, self._numbers.finished, worker, incarnation)
        call = life.call_until_end if self._until_end else life.call
        self._prepared, results = call(self._prepared, number)
        return results

    def renumber(self) -> None:
        """What it has pushed before was undone, and does not count as pushed."""
        if self._has_run:
            self._numbers.end(self._number)
            self._number = self._numbers.begin()

    def succeed(self, results: Any) -> None:
        """It has returned these arrays; or they are its sums already."""
        build = functools.partial(self._prepared.rebuild, results)
        self.value.set_results((lambda: results) if self._until_end else build)
        self._numbers.end(self._number)

    def fail(self, error: BaseException) -> None:
        """It has raised this, or can have no results because of this."""
        super().fail(error)
        self._numbers.end(self._number)


@final
class WorkerTask(WorkerClosure):
    """Something that one worker does besides functions, such as reading its variable.

    Args:
      name: of it, in messages.
      task: what is done with the worker.
      value: what it will return.
    """

    is_of_one_worker = True

    def __init__(
        self, name: str, task: Callable[[WorkerLife], PyTree], value: RemoteValue
    ) -> None:
        super().__init__(value)
        self._name = name
        self._task = task

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self._name

    def described(self) -> str:
        """Its name."""
        return self._name

    def run(self, life: WorkerLife, worker: int, incarnation: int) -> object:
        """What the task returns."""
        return self._task(life)

    def succeed(self, results: object) -> None:
        """It has returned this."""
        self.value.set_results(lambda: results)
