"""A worker from one start to its end, and what it knows by now: `WorkerLife`."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import final

import numpy as np

from jaxstrategy._errors import (
    ClosureInputError,
    OutOfRangeError,
    ParameterServerLost,
    WorkerLost,
)
from jaxstrategy.coordinator._prepared_function import PreparedFunction
from jaxstrategy.coordinator._shard_sums import WideSums
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorker
from jaxstrategy.parameter_servers._element_changed import ElementChanged
from jaxstrategy.parameter_servers._operations import CallNumber
from jaxstrategy.parameter_servers._recently_used import RecentlyUsed
from jaxstrategy.parameter_servers._shipped_program import Call, ShippedProgram
from jaxstrategy.parameter_servers._worker_resource import WorkerResource
from jaxstrategy.values._types import PyTree


@final
class WorkerLife:
    """Gives a worker what it needs before each function. Of one thread, but for `kill`.

    Args:
      worker: just started.
    """

    def __init__(self, worker: AbstractWorker) -> None:
        self._worker = worker
        self._programs: RecentlyUsed[None] = RecentlyUsed()
        self._built: set[int] = set()
        self._failed: dict[int, Exception] = {}

    def call(
        self, prepared: PreparedFunction, number: CallNumber
    ) -> tuple[PreparedFunction, list[np.ndarray]]:
        """What was run, and its results.

        It is another function than that which was given if an iterator of the worker
        has elements of another type by now.

        Raises:
          ClosureInputError: a resource could not be built.
        """
        while True:
            try:
                return prepared, self._call(prepared, number)
            except ElementChanged as changed:
                # The worker keeps the element, so here it has to run.
                again = changed
            prepared = prepared.traced_again(again)

    def call_until_end(
        self, prepared: PreparedFunction, number: CallNumber
    ) -> tuple[PreparedFunction, PyTree]:
        """What was run until its iterator had ended, and the sums of its results.

        Those are None if it did not run at all.

        Raises:
          ValueError: it changes variables, which would count once for all its runs.
          TypeError: a result is no number.
        """
        totals = WideSums()
        with contextlib.suppress(OutOfRangeError):
            while True:
                _check_changes_nothing(prepared.program)
                prepared, results = self.call(prepared, number)
                # Not the arrays: a number of rows may be part of the program.
                totals.add(prepared.rebuild(results))
        return prepared, totals.sums()

    def own(self, variable: WorkerResource) -> np.ndarray:
        """What a variable of the worker's own holds.

        Raises:
          ClosureInputError: it could not be built.
        """
        self.build(variable)
        return self._worker.own(variable.number)

    def build(self, resource: WorkerResource) -> None:
        """Make a resource, and what it uses, if it is not there.

        Raises:
          ClosureInputError: it, or what it uses, could not be built.
        """
        if resource.number not in self._built:
            for each in resource.in_order():
                if each.number not in self._built:
                    self._build(each)

    def look_after(self, gone: deque[int]) -> None:
        """Forget these resources; an error if the worker is lost."""
        numbers = [gone.popleft() for _ in range(len(gone))]
        # A worker that has nothing to do is asked, too: it notices that it is lost.
        self._worker.release([n for n in numbers if n in self._built])
        self._built.difference_update(numbers)
        for number in numbers:
            self._failed.pop(number, None)

    def kill(self) -> None:
        """End the worker now; callable from any thread."""
        self._worker.kill()

    def _call(self, prepared: PreparedFunction, number: CallNumber) -> list[np.ndarray]:
        for resource in prepared.resources:
            self.build(resource)
        program = prepared.program
        if program.key not in self._programs:
            self._worker.define(program)
            self._programs.put(program.key, None)
        self._programs.use(program.key)
        arguments = prepared.arguments_of(number.worker)
        call = Call(number, program.key, arguments, prepared.iterators)
        return prepared.taken(number.worker, self._worker.call(call))

    def _build(self, resource: WorkerResource) -> None:
        number = resource.number
        if number not in self._failed:
            try:
                uses = [each.number for each in resource.uses]
                self._worker.build(number, resource.builder, uses)
                self._built.add(number)
                return
            except (WorkerLost, ParameterServerLost):
                raise
            except Exception as error:
                self._failed[number] = error
        error = self._failed[number]
        raise ClosureInputError(error) from error


def _check_changes_nothing(program: ShippedProgram) -> None:
    if program.pushes or program.own:
        raise ValueError(
            f"`{program.name}` is evaluated on each batch of a dataset, and changes "
            "variables: what a shard is read for again would count again. Return what "
            "is to be added up instead."
        )
