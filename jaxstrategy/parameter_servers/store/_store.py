"""The state of one parameter server: `Store`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import final

import numpy as np

from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._operations import CallNumber, Read, ServerOperation
from jaxstrategy.parameter_servers.store import _operation_checks
from jaxstrategy.parameter_servers.store._pushed_functions import PushedFunctions
from jaxstrategy.parameter_servers.store._stored_variable import StoredVariable, update
from jaxstrategy.parameter_servers.store._update_program import UpdateProgram


@final
class Store(AbstractServer):
    """Variables in the memory of this process.

    Each operation on a variable is atomic. What is given to its methods is copied, or
    no longer used when they return.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the two dicts
        self._variables: dict[int, StoredVariable] = {}
        self._programs: dict[str, UpdateProgram] = {}
        self._functions = PushedFunctions()

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        value = np.asarray(value)
        _operation_checks.check_initial(number, value, is_table)
        variable = StoredVariable(number, value, is_table)
        with self._lock:
            if number in self._variables:
                raise ValueError(f"Variable {number} is on this server already.")
            self._variables[number] = variable

    def drop(self, numbers: Sequence[int]) -> None:
        with self._lock:
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
        functions = self._functions
        turn = contextlib.nullcontext(True) if call is None else functions.turn(call)
        with turn as counts:
            if counts:
                self._apply(operations)
        return counts

    def define(self, key: str, exported: bytes) -> None:
        if key not in self._programs:
            program = UpdateProgram(key, exported)
            with self._lock:
                self._programs.setdefault(key, program)

    def fence(self, worker: int, incarnation: int) -> None:
        self._functions.fence(worker, incarnation)

    def versions(self, numbers: Sequence[int]) -> list[int]:
        return [variable.version for variable in self._found(numbers)]

    def _apply(self, operations: Sequence[ServerOperation]) -> None:
        changed = [self._found(operation.variables) for operation in operations]
        for operation, variables in zip(operations, changed, strict=True):
            _operation_checks.check_operation(operation, variables, self._programs)
        for operation, variables in zip(operations, changed, strict=True):
            if operation.name == "update":
                program = self._programs[operation.program]
                update(program, variables, operation.operands)
            else:
                variables[0].change(operation.name, operation.operands)

    def _found(self, numbers: Sequence[int]) -> list[StoredVariable]:
        with self._lock:
            found = [self._variables.get(number) for number in numbers]
        missing = [n for n, v in zip(numbers, found, strict=True) if v is None]
        if missing:
            raise LookupError(
                f"There is no variable {missing[0]} on this server: it was never "
                "created here, or was dropped."
            )
        return [variable for variable in found if variable is not None]
