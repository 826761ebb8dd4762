"""Agreement about what all processes are about to do, before any of them begins.

A program of several processes waits for all of them. A process that is in another
program makes them wait for ever, or mixes up what they send: on CPU, Gloo pairs the
collectives of different programs by their order, whatever they carry.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.agreement import _operation
from jaxstrategy.cluster.agreement._agreement import ProcessAgreement, Watch
from jaxstrategy.cluster.agreement._operation import Operation
from jaxstrategy.cluster.board._board import AbstractBoard
from jaxstrategy.cluster.connections._fields import Json
from jaxstrategy.text._array_types import Shaped

# One topic for all: a process that steps meets one that does something else.
_TOPIC = "together"
_OPERATIONS = "All processes must do the same, in the same order."
_EXCHANGES = (
    "All processes must make, change and read together what they share, not only one "
    "of them (`if jax.process_index() == 0`): mirrored values, variables, reductions."
)


@final
class OperationAgreement:
    """Agreement of several processes about what they do next.

    Args:
      board: carries what each says to all.
      watch: is told of the waits.
    """

    def __init__(self, board: AbstractBoard, watch: Watch) -> None:
        self._board = board
        self._watch = watch
        self._agreement = ProcessAgreement(board, watch, _TOPIC)
        self._on_refusal: list[weakref.WeakMethod[Callable[[], None]]] = []

    def on_refusal(self, callback: Callable[[], None]) -> None:
        """Calls a method, as long as its object lives, when all are refused.

        Args:
          callback: a bound method.
        """
        alive = [each for each in self._on_refusal if each() is not None]
        self._on_refusal = [*alive, weakref.WeakMethod(callback)]

    def compare(
        self, operation: Operation, advice: str, said: Json = None
    ) -> list[Json]:
        """Compare an operation with those of the others; get what each says besides.

        Args:
          operation: what this one is about to do.
          advice: what should be the same in all processes.
          said: what JSON can hold; it may differ.

        Raises:
          ClusterError: another process is about to do something else, or has made
            another program of the same step.
        """
        heard = self._agreement.exchange([said, operation.told()])
        done = [Operation(*told) for _, told in heard]
        for index, other in enumerate(done):
            if text := _operation.other_programs(done[0], other, index):
                raise self.refusal(text)
        for index, other in enumerate(done):
            if text := _operation.other_operation(done[0], other, index):
                raise self.refusal(
                    "The processes are about to do different things together:\n"
                    f"{text}\n{advice}"
                )
        return [each_said for each_said, _ in heard]

    def agree(self, what: str, said: Json = None) -> list[Json]:
        """Compare something done outside of steps; get what each process says about it.

        Args:
          what: they do, in words.
          said: what JSON can hold.

        Raises:
          ClusterError: another process is about to do something else.
        """
        operation = Operation(what, _operation.users_line())
        with self._watch.waiting(what):
            return self.compare(operation, _OPERATIONS, said)

    @contextlib.contextmanager
    def exchanging(self, what: str, *arrays: Shaped) -> Iterator[None]:
        """A block in which the processes exchange `arrays`, outside of steps.

        The values may differ, their shapes and dtypes may not.

        Raises:
          ClusterError: another process is about to do something else.
        """
        kinds = [_operation.kind(array) for array in arrays]
        operation = Operation(what, _operation.users_line(), kinds)
        self._watch.step_started(what, operation.where)
        try:
            self.compare(operation, _EXCHANGES)
            yield
        finally:
            self._watch.step_dispatched()

    def refusal(self, text: str) -> ClusterError:
        """An error that each process raises now, by what all of them have heard.

        None of them then takes the end of another one for the reason of its own.
        """
        self._board.common_error = text
        for get in self._on_refusal:
            if (callback := get()) is not None:
                callback()
        return ClusterError(text)
