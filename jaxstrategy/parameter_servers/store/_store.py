"""The state of one parameter server: `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.store import _operation_checks
from jaxstrategy.parameter_servers.store._pushed_functions import PushedFunctions
from jaxstrategy.parameter_servers.store._stored_variable import StoredVariable, update

if TYPE_CHECKING:
    from jaxstrategy.parameter_servers.store._update_program import UpdateProgram


@final
class Store(AbstractServer):
    """Variables in the memory of this process.

    Each operation on a variable is atomic. What is given to its methods is copied, or
    no longer used when they return.
    """

    def __init__(self) -> None:
        # Without a lock of their own: the garbage collector may drop variables in a
        # thread that has it. Each operation on a dict is atomic.
        self._variables: dict[int, StoredVariable] = {}
        self._programs: dict[str, UpdateProgram] = {}
        self._functions = PushedFunctions()

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        value = np.asarray(value)
        _operation_checks.check_initial(number, value, is_table)
        variable = StoredVariable(number, value, is_table)
        if self._variables.setdefault(number, variable) is not variable:
            raise ValueError(f"Variable {number} is on this server already.")

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._variables.pop(number, None)

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        found = self._found([read.variable for read in reads])
        for variable, read in zip(found, reads, strict=True):
            if read.rows is not None:
                _operation_checks.check_rows(variable, read.rows)
        return [
            variable.read(read.rows)
            for variable, read in zip(found, reads, strict=True)
        ]

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        with self._functions.turn(call) as turn:
            if turn.counts:
                changed = self._checked(operations)
                turn.has_begun = True
                self._apply(operations, changed)
        return turn.counts

    def define(self, key: str, exported: bytes) -> None:
        if key not in self._programs:
            # Only servers with updates need JAX.
            from jaxstrategy.parameter_servers.store import _update_program

            program = _update_program.UpdateProgram(key, exported)
            self._programs.setdefault(key, program)

    def fence(self, worker: int, incarnation: int) -> None:
        self._functions.fence(worker, incarnation)

    def versions(self, numbers: Sequence[int]) -> list[int]:
        return [variable.version for variable in self._found(numbers)]

    def _checked(
        self, operations: Sequence[ServerOperation]
    ) -> list[list[StoredVariable]]:
        """The variables of each operation, all of which can be applied."""
        changed = [self._found(operation.variables) for operation in operations]
        for operation, variables in zip(operations, changed, strict=True):
            _operation_checks.check_operation(operation, variables, self._programs)
        return changed

    def _apply(
        self,
        operations: Sequence[ServerOperation],
        changed: Sequence[Sequence[StoredVariable]],
    ) -> None:
        for operation, variables in zip(operations, changed, strict=True):
            if operation.name == "update":
                program = self._programs[operation.program]
                update(program, variables, operation.operands)
            else:
                variables[0].change(operation.name, operation.operands)

    def _found(self, numbers: Sequence[int]) -> list[StoredVariable]:
        found = [self._variables.get(number) for number in numbers]
        missing = [n for n, v in zip(numbers, found, strict=True) if v is None]
        if missing:
            raise LookupError(
                f"There is no variable {missing[0]} on this server: it was never "
                "created here, or was dropped."
            )
        return [variable for variable in found if variable is not None]
