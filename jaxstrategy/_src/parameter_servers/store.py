"""The state of one parameter server, and all servers; imports no JAX by itself."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jaxstrategy._src.parameter_servers.peer import SessionHost
from jaxstrategy._src.parameter_servers.protocol import (
    OF_ROWS,
    CallNumber,
    Read,
    ServerOperation,
    Type,
    shown,
    types_of,
)
from jaxstrategy._src.values.memory import aligned_empty

if TYPE_CHECKING:  # it would import JAX
    import jax

    from jaxstrategy._src.parameter_servers.programs import UpdateProgram


@final
class StoredVariable:
    """What a variable holds, which nobody sees half changed.

    An array of NumPy until a program of JAX changes it: a server without tables starts
    in 0.3 s and needs 45 MB; JAX is 1 s and 125 MB. Then it stays one of JAX: a step
    that does both would copy it twice.

    Attributes:
      lock: held around all that follows.
      value: what it holds.
      version: how many operations it has seen.
    """

    def __init__(self, number: int, value: np.ndarray) -> None:
        self.number = number
        self.type: Type = (value.shape, value.dtype)
        self.lock = threading.Lock()
        self.value: np.ndarray | jax.Array = aligned_empty(value.shape, value.dtype)
        np.copyto(self.value, value)
        self.version = 0
        self._root: weakref.ref[np.ndarray] | None = None  # of what readers have

    def __str__(self) -> str:
        return f"{self.number}, {shown(self.type)}"

    @property
    def is_held(self) -> bool:
        """Whether a reader still has what it holds, so that it must stay."""
        return self._root is not None and self._root() is not None

    def whole(self) -> np.ndarray:
        """What it holds now, for ever: read-only, and without a copy."""
        value = np.asarray(self.value)
        if not value.size:
            return np.empty_like(value)
        root = self._root() if self._root is not None else None
        if root is None:
            # bfloat16 and its kin have no `memoryview`, bytes have. Each view of these
            # refers to them.
            raw = memoryview(value.reshape(-1).view(np.uint8))
            root = np.frombuffer(raw.toreadonly(), np.uint8)
            self._root = weakref.ref(root)
        return root.view(value.dtype).reshape(value.shape)

    def replace(self, value: np.ndarray | jax.Array) -> None:
        """Hold what somebody has made of it."""
        if value is not self.value:
            self.value, self._root = value, None
        self.version += 1

    def change(self, name: str, operands: Sequence[np.ndarray]) -> None:
        """Do one of `OF_WHOLE` or `OF_ROWS`."""
        old = self.value
        if name in OF_ROWS or not isinstance(old, np.ndarray):
            from jaxstrategy._src.parameter_servers import programs

            self.replace(programs.changed(name, (old, self.is_held), operands))
            return
        # A new 10 MB costs 0.3 ms more than the 0.3 ms of an addition in place; a copy
        # for each reader would cost as much each time.
        new = aligned_empty(old.shape, old.dtype) if self.is_held else old
        with np.errstate(all="ignore"):  # as on a device
            if name == "set":
                np.copyto(new, operands[0])
            else:
                (np.add if name == "add" else np.subtract)(old, operands[0], out=new)
        self.replace(new)


@final
class PushedFunctions:
    """Lets each function push once, although it may be run several times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pushing: dict[int, CallNumber] = {}
        # A bit for each function from `_first` on: while one of them does not end, all
        # later ones must be known, a million in 125 KB.
        self._pushed, self._first = bytearray(), 0
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
            if call.finished > self._finished:
                self._finished = call.finished
                if gone := (call.finished - self._first) >> 3:
                    del self._pushed[:gone]
                    self._first += gone << 3
            if call.function < self._finished or self._is_fenced(call):
                return False
            place, bit = divmod(call.function - self._first, 8)
            if place < len(self._pushed) and self._pushed[place] >> bit & 1:
                return False
            self._pushing[call.function] = call
            return True

    def end(self, call: CallNumber, has_pushed: bool) -> None:
        """The push that began is over; if it has changed nothing, another one may."""
        with self._changed:
            del self._pushing[call.function]
            if has_pushed and call.function >= self._first:
                place, bit = divmod(call.function - self._first, 8)
                if (missing := place + 1 - len(self._pushed)) > 0:
                    self._pushed.extend(bytes(missing))
                self._pushed[place] |= 1 << bit
            self._changed.notify_all()

    def _is_fenced(self, call: CallNumber) -> bool:
        return call.incarnation < self._incarnations.get(call.worker, 0)


@final
class Store:
    """Keeps variables by their numbers; any number of threads may call it at once.

    The requests of one that runs elsewhere raise `ParameterServerLost` when it is gone.
    """

    requests = ("create", "drop", "read", "push", "define", "fence", "versions")

    def __init__(self) -> None:
        # Without a lock of their own: the garbage collector may drop variables in a
        # thread that has it. Each operation on a dict is atomic.
        self._variables: dict[int, StoredVariable] = {}
        self._programs: dict[str, UpdateProgram] = {}
        self._functions = PushedFunctions()

    def create(self, number: int, value: np.ndarray) -> None:
        """Keep a new variable."""
        variable = StoredVariable(number, np.asarray(value))
        if self._variables.setdefault(number, variable) is not variable:
            raise ValueError(f"Variable {number} is on this server already.")

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget variables; those that are not there are none."""
        for number in numbers:
            self._variables.pop(number, None)

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """What these hold now; each of them is whole, together they are no snapshot."""
        found = self._found([read.variable for read in reads])
        for variable, read in zip(found, reads, strict=True):
            if read.rows is not None:
                _check_rows(variable, read.rows)
        values = []
        for variable, read in zip(found, reads, strict=True):
            with variable.lock:
                if read.rows is None:
                    values.append(variable.whole())
                else:
                    values.append(np.asarray(variable.value).take(read.rows, axis=0))
        return values

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        """Apply operations in their order; whether they count."""
        if call is not None and not self._functions.begin(call):
            return False
        has_pushed = False
        try:
            changed = [self._found(each.variables) for each in operations]
            for each, variables in zip(operations, changed, strict=True):
                _check_operation(each, variables, self._programs)
            has_pushed = True
            for each, variables in zip(operations, changed, strict=True):
                self._apply(each, variables)
        finally:
            if call is not None:
                self._functions.end(call, has_pushed)
        return True

    def define(self, key: str, exported: bytes) -> None:
        """Keep a program for updates, in the form of `jax.export`."""
        if key not in self._programs:
            # Only servers with updates need JAX.
            from jaxstrategy._src.parameter_servers.programs import UpdateProgram

            self._programs.setdefault(key, UpdateProgram(key, exported))

    def fence(self, worker: int, incarnation: int) -> None:
        """From now on nothing counts that earlier incarnations of a worker push."""
        self._functions.fence(worker, incarnation)

    def versions(self, numbers: Sequence[int]) -> list[int]:
        """How many operations each variable has seen."""
        return [variable.version for variable in self._found(numbers)]

    def _apply(
        self, operation: ServerOperation, variables: Sequence[StoredVariable]
    ) -> None:
        if operation.name != "update":
            (variable,) = variables
            with variable.lock:
                variable.change(operation.name, operation.operands)
            return
        # Together, so that nobody sees only some of them changed.
        with contextlib.ExitStack() as locks:
            # In this order, or two updates would wait for each other.
            for variable in sorted(variables, key=lambda variable: variable.number):
                locks.enter_context(variable.lock)
            program = self._programs[operation.program]
            held = [(variable.value, variable.is_held) for variable in variables]
            new = program.run(held, operation.operands)
            for variable, value in zip(variables, new, strict=True):
                variable.replace(value)

    def _found(self, numbers: Sequence[int]) -> list[StoredVariable]:
        found = [self._variables.get(number) for number in numbers]
        missing = [n for n, v in zip(numbers, found, strict=True) if v is None]
        if missing:
            raise LookupError(
                f"There is no variable {missing[0]} on this server: it was never "
                "created here, or was dropped."
            )
        return [variable for variable in found if variable is not None]


def _check_operation(
    operation: ServerOperation,
    variables: Sequence[StoredVariable],
    programs: Mapping[str, UpdateProgram],
) -> None:
    """See that an operation can be applied: those before it are, or none."""
    name, operands = operation.name, operation.operands
    if name == "update":
        if operation.program not in programs:
            raise LookupError(
                f"There is no update {operation.program!r} on this server; `define` it."
            )
        types = [variable.type for variable in variables]
        programs[operation.program].check(types, types_of(operands))
        return
    (variable,) = variables
    wanted = variable.type
    if name in OF_ROWS:
        _check_rows(variable, operands[0])
        wanted = (len(operands[0]), *wanted[0][1:]), wanted[1]
    given = operands[-1].shape, operands[-1].dtype
    if given != wanted:
        raise (TypeError if given[1] != wanted[1] else ValueError)(
            f"{name!r} of variable {variable}, takes {shown(wanted)}, not "
            f"{shown(given)}."
        )


def _check_rows(variable: StoredVariable, rows: np.ndarray) -> None:
    """See that a variable has these rows."""
    shape = variable.type[0]
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or not shape:
        raise TypeError(
            f"Rows of variable {variable}, were named by {shown(*types_of([rows]))}; "
            "a vector of whole numbers was wanted."
        )
    if shape[0] >= 1 << 31:
        raise ValueError(
            f"Variable {variable}, has {shape[0]} rows. Only 2**31 - 1 can be changed "
            "each by itself: divide it into several variables."
        )
    # What is below 0 is large without its sign, if the type has as many numbers.
    wide = rows if rows.itemsize >= 4 else rows.astype(np.int32)
    if rows.size and wide.view(wide.dtype.str.replace("i", "u")).max() >= shape[0]:
        bad = rows[(rows < 0) | (rows >= shape[0])][0]
        raise IndexError(
            f"Row {bad} is not in [0, {shape[0]}), the rows of variable {variable}."
        )


_variable_numbers = itertools.count()


class ServerPool:
    """The servers of a strategy."""

    def __init__(self, servers: Sequence[Store]) -> None:
        self.servers = tuple(servers)
        self._turn = 0
        self._lock = threading.Lock()
        self._homes: dict[int, int] = {}
        self._gone: list[int] = []
        self._defined: dict[tuple[int, str], bytes] = {}

    def next(self) -> int:
        """The number of the server whose turn it is; then it is the next one's."""
        with self._lock:
            turn, self._turn = self._turn, (self._turn + 1) % len(self.servers)
        return turn

    def create(self, server: int, value: np.ndarray) -> int:
        """Keep a new variable there, of the shape of `value`; returns its number."""
        self.drop_gone()
        number = next(_variable_numbers)
        self.servers[server].create(number, np.asarray(value))
        self._homes[number] = server
        return number

    def know(self, number: int, server: int) -> None:
        """Take note of a variable that somebody else has made."""
        self._homes[number] = server

    def home(self, number: int) -> int:
        """The number of the server that has a variable."""
        return self._homes[number]

    def forget(self, number: int) -> None:
        """A variable is gone."""
        self._gone.append(number)

    def drop_gone(self) -> None:
        """Tell the servers which variables are gone."""
        by_server: defaultdict[int, list[int]] = defaultdict(list)
        while self._gone:
            number = self._gone.pop()
            by_server[self._homes.pop(number)].append(number)
        for server, numbers in by_server.items():
            self.servers[server].drop(numbers)

    def define(self, server: int, key: str, exported: bytes) -> None:
        """Send a program for updates to a server, once."""
        if (server, key) not in self._defined:
            self.servers[server].define(key, exported)
            self._defined[server, key] = exported

    def define_again(self, server: int) -> None:
        """Send all programs for updates to a server that was started again."""
        for (number, key), exported in list(self._defined.items()):
            if number == server:
                self.servers[server].define(key, exported)


def host_of_server(
    told: Callable[[], Mapping[str, Any]] = dict,
    say: Callable[[str], None] = lambda text: None,
) -> SessionHost:
    """Sessions with parameter servers of this process."""
    return SessionHost(lambda _: Store(), told, True, say)
