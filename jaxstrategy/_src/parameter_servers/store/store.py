"""The state of one parameter server: `Store`; imports no JAX by itself."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jaxstrategy._src.parameter_servers.peer import SessionHost
from jaxstrategy._src.parameter_servers.protocol import (
    OF_ROWS,
    OF_WHOLE,
    SERVER_METHODS,
    AbstractServer,
    CallNumber,
    Read,
    ServerOperation,
    aligned_empty,
)
from jaxstrategy._src.parameter_servers.store.snapshot import (
    Snapshot,
    Type,
    shown,
    types_of,
)

if TYPE_CHECKING:  # it would import JAX
    from jaxstrategy._src.parameter_servers.store.programs import (
        DeviceArray,
        UpdateProgram,
    )


@final
class NumberRanges:
    """Whole numbers, of which it keeps only where they begin and end to be there.

    >>> numbers = NumberRanges()
    >>> for number in (3, 5, 4, 9):
    ...     numbers.add(number)
    >>> 5 in numbers, 6 in numbers, len(numbers)
    (True, False, 2)
    """

    def __init__(self) -> None:
        self._bounds: list[int] = []  # first, end, first, end, ...

    def __len__(self) -> int:
        """How many ranges there are."""
        return len(self._bounds) // 2

    def __contains__(self, number: int) -> bool:
        return bisect.bisect_right(self._bounds, number) % 2 == 1

    def add(self, number: int) -> None:
        """Have a number too."""
        if number in self:
            return
        bounds = self._bounds
        at = bisect.bisect_left(bounds, number)
        # It goes on with the range before, with the one after it, with both or none.
        goes_on = at < len(bounds) and bounds[at] == number
        first = at + goes_on
        comes_before = first < len(bounds) and bounds[first] == number + 1
        bounds[at : first + comes_before] = [
            *([] if goes_on else [number]),
            *([] if comes_before else [number + 1]),
        ]

    def drop_below(self, number: int) -> None:
        """Forget all that are smaller."""
        at = bisect.bisect_right(self._bounds, number)
        self._bounds[:at] = [number] if at % 2 else []


@final
class PushedFunctions:
    """Lets each function push once, although it may be run several times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pushing: dict[int, CallNumber] = {}
        self._pushed = NumberRanges()
        self._finished = 0
        self._incarnations: dict[int, int] = {}

    def fence(self, worker: int, incarnation: int) -> None:
        """Let nothing count that earlier incarnations push; waits for what they do."""
        with self._changed:
            known = self._incarnations.get(worker, 0)
            self._incarnations[worker] = max(known, incarnation)
            self._changed.wait_for(
                lambda: not any(map(self._is_fenced, self._pushing.values()))
            )

    def begin(self, call: CallNumber) -> bool:
        """Whether a push counts; another one of the same function waits for its end."""
        with self._changed:
            self._changed.wait_for(lambda: call.function not in self._pushing)
            self._finished = max(self._finished, call.finished)
            self._pushed.drop_below(self._finished)
            has_ended = call.function < self._finished or call.function in self._pushed
            if has_ended or self._is_fenced(call):
                return False
            self._pushing[call.function] = call
            return True

    def end(self, call: CallNumber, has_pushed: bool) -> None:
        """The push that began is over; if it has changed nothing, another one may."""
        with self._changed:
            del self._pushing[call.function]
            if has_pushed:
                self._pushed.add(call.function)
            self._changed.notify_all()

    def _is_fenced(self, call: CallNumber) -> bool:
        return call.incarnation < self._incarnations.get(call.worker, 0)


def _set(old: np.ndarray, operand: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, operand)


_CHANGES: dict[str, Callable[..., object]] = {
    "set": _set,
    "add": np.add,
    "subtract": np.subtract,
}


@final
class HostArray:
    """What a variable holds; its lock is held around each call."""

    def __init__(self, value: np.ndarray) -> None:
        """Args: value: which is copied."""
        self._value = aligned_empty(value.shape, value.dtype)
        np.copyto(self._value, value)
        self._snapshot = Snapshot()

    @property
    def value(self) -> np.ndarray:
        """What it holds, until the next change."""
        return self._value

    def whole(self) -> np.ndarray:
        """What it holds now, for ever."""
        return self._snapshot.of(self._value)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows, which it has."""
        return self._value.take(rows, axis=0)

    def change(self, name: str, operand: np.ndarray) -> None:
        """Do one of `OF_WHOLE`; in place, unless a reader still has the old value."""
        # A new 10 MB costs 0.3 ms more than the 0.3 ms of an addition in place; a copy
        # for each reader would cost as much each time.
        old = new = self._value
        if self._snapshot.is_held:
            new, self._snapshot = aligned_empty(old.shape, old.dtype), Snapshot()
        with np.errstate(all="ignore"):  # as on a device
            _CHANGES[name](old, operand, out=new)
        self._value = new


@final
class StoredVariable:
    """What a variable holds, which nobody sees half changed."""

    def __init__(self, number: int, value: np.ndarray, is_table: bool) -> None:
        self.number = number
        self.kind: Type = (value.shape, value.dtype)
        self.lock = threading.Lock()
        self.version = 0
        make = _device_array if is_table else HostArray
        self._array: HostArray | DeviceArray = make(value)

    def read(self, rows: np.ndarray | None) -> np.ndarray:
        """All of it, or rows that it has."""
        with self.lock:
            return self._array.whole() if rows is None else self._array.rows(rows)

    def change(self, name: str, operands: Sequence[np.ndarray]) -> None:
        """Do one of `OF_WHOLE` or `OF_ROWS`."""
        with self.lock:
            # An array that programs have changed stays with them: a step that does both
            # would copy it twice.
            array = self.on_device() if name in OF_ROWS else self._array
            array.change(name, *operands)
            self.version += 1

    def on_device(self) -> DeviceArray:
        """What it holds, where programs can change it; its lock is held."""
        if isinstance(self._array, HostArray):
            self._array = _device_array(self._array.value)
        return self._array


def _device_array(value: np.ndarray) -> DeviceArray:
    # A server without tables starts in 0.3 s and needs 45 MB; JAX is 1 s and 125 MB.
    from jaxstrategy._src.parameter_servers.store.programs import DeviceArray

    return DeviceArray(value)


def update(
    program: UpdateProgram,
    variables: Sequence[StoredVariable],
    operands: Sequence[np.ndarray],
) -> None:
    """Change variables together, so that nobody sees only some of them changed."""
    with contextlib.ExitStack() as locks:
        # In this order, or two updates would wait for each other.
        for variable in sorted(variables, key=lambda variable: variable.number):
            locks.enter_context(variable.lock)
        arrays = [variable.on_device() for variable in variables]
        donates = not any(array.is_held for array in arrays)
        new = program.run([array.value for array in arrays], operands, donates)
        for variable, array, value in zip(variables, arrays, new, strict=True):
            array.replace(value)
            variable.version += 1


# What neither JAX nor NumPy computes of booleans.
_NOT_OF_BOOL = (
    *("subtract", "scatter_add", "scatter_sub", "scatter_mul"),
    "scatter_div",
)


def check_initial(number: int, value: np.ndarray, is_table: bool) -> None:
    """See that a variable can hold this."""
    dtype = value.dtype
    # bfloat16 and its kin are of kind V, as what has no number is.
    is_number = dtype.kind in "biufcV" and dtype.type is not np.void
    is_long = dtype in (np.longdouble, np.clongdouble)
    if not is_number or is_long or not dtype.isnative:
        raise TypeError(
            f"Variable {number} cannot hold {shown((value.shape, dtype))}: JAX has "
            "no arrays of this dtype. Random keys are kept as `jax.random.key_data`."
        )
    if is_table:
        _check_table(number, (value.shape, dtype))


def check_rows(variable: StoredVariable, rows: np.ndarray) -> None:
    """See that a variable has these rows."""
    if rows.dtype.kind not in "iu":
        raise TypeError(
            f"Rows of variable {variable.number} are whole numbers, not "
            f"{shown((rows.shape, rows.dtype))}."
        )
    if rows.ndim != 1:
        raise ValueError(
            f"Numbers of rows of variable {variable.number} are a vector, not "
            f"{shown((rows.shape, rows.dtype))}."
        )
    count = _check_table(variable.number, variable.kind)
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        bad = rows[(rows < 0) | (rows >= count)][0]
        raise IndexError(
            f"Row {bad} is not in [0, {count}), the rows of variable "
            f"{variable.number}, {shown(variable.kind)}."
        )


def _check_table(number: int, kind: Type) -> int:
    """How many rows it has."""
    if not kind[0]:
        raise ValueError(f"Variable {number} is a scalar, {shown(kind)}, of no rows.")
    count = kind[0][0]
    if count > np.iinfo(np.int32).max:
        raise ValueError(
            f"Variable {number}, {shown(kind)}, has {count} rows. Only 2**31 - 1 "
            "can be changed each by itself: divide it into several variables."
        )
    return count


def check_operation(
    operation: ServerOperation,
    variables: Sequence[StoredVariable],
    programs: Mapping[str, UpdateProgram],
) -> None:
    """See that an operation can be applied."""
    name, operands = operation.name, operation.operands
    if name == "update":
        _check_update(operation, variables, programs)
        return
    if name not in (*OF_WHOLE, *OF_ROWS):
        raise ValueError(
            f"There is no operation {name!r}; there are "
            f"{', '.join((*OF_WHOLE, *OF_ROWS))} and update."
        )
    wanted = 1 if name in OF_WHOLE else 2
    if len(variables) != 1 or len(operands) != wanted:
        raise ValueError(
            f"{name!r} changes one variable and has {wanted} operands, not "
            f"{len(variables)} and {len(operands)}."
        )
    (variable,) = variables
    shape, dtype = variable.kind
    if dtype.kind == "b" and name in _NOT_OF_BOOL:
        raise TypeError(f"Variable {variable.number} is bool, which has no {name!r}.")
    if name in OF_ROWS:
        check_rows(variable, operands[0])
        shape = (len(operands[0]), *shape[1:])
    _check_operand(name, variable, operands[-1], (shape, dtype))


def _check_operand(
    name: str, variable: StoredVariable, operand: np.ndarray, wanted: Type
) -> None:
    if (operand.shape, operand.dtype) == wanted:
        return
    error = TypeError if operand.dtype != wanted[1] else ValueError
    raise error(
        f"{name!r} of variable {variable.number}, {shown(variable.kind)}, takes "
        f"{shown(wanted)}, not {shown((operand.shape, operand.dtype))}."
    )


def _check_update(
    operation: ServerOperation,
    variables: Sequence[StoredVariable],
    programs: Mapping[str, UpdateProgram],
) -> None:
    program = programs.get(operation.program)
    if program is None:
        raise LookupError(
            f"There is no update {operation.program!r} on this server; `define` it."
        )
    if not variables or len({*operation.variables}) != len(variables):
        raise ValueError(
            "An update changes different variables, at least one, not "
            f"{operation.variables}."
        )
    kinds = [variable.kind for variable in variables]
    program.check(kinds, types_of(operation.operands))


@final
class Store(AbstractServer):
    """Variables in the memory of this process."""

    def __init__(self) -> None:
        # Without a lock of their own: the garbage collector may drop variables in a
        # thread that has it. Each operation on a dict is atomic.
        self._variables: dict[int, StoredVariable] = {}
        self._programs: dict[str, UpdateProgram] = {}
        self._functions = PushedFunctions()

    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        value = np.asarray(value)
        check_initial(number, value, is_table)
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
                check_rows(variable, read.rows)
        return [
            variable.read(read.rows)
            for variable, read in zip(found, reads, strict=True)
        ]

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        if call is None:
            self._apply(operations, self._checked(operations))
            return True
        if not self._functions.begin(call):
            return False
        has_pushed = False
        try:
            changed = self._checked(operations)
            has_pushed = True
            self._apply(operations, changed)
        finally:
            self._functions.end(call, has_pushed)
        return True

    def define(self, key: str, exported: bytes) -> None:
        if key not in self._programs:
            # Only servers with updates need JAX.
            from jaxstrategy._src.parameter_servers.store import programs as _programs

            program = _programs.UpdateProgram(key, exported)
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
            check_operation(operation, variables, self._programs)
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


def host_of_server(
    told: Callable[[], Mapping[str, Any]] = dict,
    say: Callable[[str], None] = lambda text: None,
) -> SessionHost:
    """Sessions with parameter servers of this process."""
    return SessionHost(lambda _: Store(), SERVER_METHODS, told, True, say)
