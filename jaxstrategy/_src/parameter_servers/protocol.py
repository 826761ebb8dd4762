"""What servers and workers are asked, and with what: programs, calls and operations."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, final

import numpy as np

from jaxstrategy._src.text import array_type

OF_WHOLE = ("set", "add", "subtract")
"""Operations with one operand of the variable's shape."""
OF_ROWS = tuple(
    f"scatter_{name}" for name in ("add", "sub", "mul", "div", "min", "max", "update")
)
"""Operations of some rows: operands are the rows' numbers and a value for each."""


class Read(NamedTuple):
    """A variable, or some rows of it."""

    variable: int
    rows: np.ndarray | None = None  # numbers, an int32 or int64 vector; None: all


class CallNumber(NamedTuple):
    """The run of a function to which a push belongs."""

    function: int  # what is pushed twice for one function counts once
    finished: int = 0  # all functions before this one have ended: servers forget them
    worker: int = -1  # that runs it
    incarnation: int = 0  # of the worker; what an earlier one pushes does not count


class ServerOperation(NamedTuple):
    """One change of a variable, which nobody sees half done."""

    name: str  # one of `OF_WHOLE` or `OF_ROWS`; or "update", which calls a program
    variables: tuple[int, ...]  # one; an update changes several of one server together
    operands: tuple[np.ndarray, ...]
    # Of an update: takes what the variables hold and the operands, and returns what
    # they hold afterwards.
    program: str = ""


class Input(NamedTuple):
    """Where a worker takes one input of a program from."""

    kind: Literal[
        "argument",  # of the call
        "variable",  # pulled whole
        "table",  # the rows of one that are used
        "positions",  # of looked-up rows in that
        "element",  # a leaf of what an iterator gives next
        "present",  # whether there is an element
        "own",  # variable of the worker
        "index",  # of the worker
    ]
    number: int = 0  # of the argument, variable, table, lookup or iterator
    turn: int = 0  # of an element: how many the function has taken before
    leaf: int = 0  # of an element


class ShippedTable(NamedTuple):
    """A table, or its shards, that a function uses some rows of."""

    shards: tuple[int, ...]  # its variables, in the order of their rows
    starts: tuple[int, ...]  # the first row of each shard, and last that of all rows
    lookups: tuple[int, ...]  # the outputs of the program of ids that are its rows
    rows: int  # that the main program takes: as many as all lookups have ids
    row: tuple[int, ...]  # the shape of one
    dtype: str


class Push(NamedTuple):
    """An operation that a function makes when it has ended."""

    name: str
    variables: tuple[int, ...]  # the shards of a table for an operation of rows
    operands: tuple[int, ...]  # outputs of the program
    lookup: int | None = None  # the output of the program of ids with the rows, if any
    starts: tuple[int, ...] = ()  # as those of `ShippedTable`
    flag: int | None = None  # the output that says whether it is made; None: it is
    flag_is: bool = True  # what that output must say
    program: str = ""  # of an update


class ElementType(NamedTuple):
    """The leaves that each element of an iterator must have."""

    structure: str  # of its pytree, as text
    types: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each leaf
    split: tuple[bool, ...]  # which have one version for each replica
    # Which say what rows are real of the leaf before, `bool[replica, rows]`; a batch
    # that is full has none.
    masks: tuple[bool, ...]


class LoadedCode(NamedTuple):
    """A program that a worker can call."""

    program: ShippedProgram
    main: Callable[..., Any]
    ids: Callable[..., Any] | None


@final
@dataclasses.dataclass(frozen=True)
class ShippedProgram:
    """A function traced for one worker, with all that runs it."""

    key: str  # equal of equal programs
    name: str  # of the user's function, for messages
    # In the form of `jax.export`; or else what has `loaded`, the `LoadedCode`.
    main: Any
    inputs: tuple[Input, ...]  # of both programs
    main_inputs: int  # how many of the first inputs the main program takes
    ids: bytes | None  # returns the rows that lookups need, if there are tables
    ids_inputs: tuple[int, ...]  # the numbers of its inputs
    tables: tuple[ShippedTable, ...]
    results: int  # how many of the first outputs are the function's results
    own: tuple[tuple[int, int], ...]  # variables of the worker, and their new values
    pushes: tuple[Push, ...]  # in their order
    iterators: tuple[tuple[ElementType, ...], ...]  # the elements taken of each one
    homes: Mapping[int, int]  # the server of each variable
    replicas: int = 1  # of the worker


class Call(NamedTuple):
    """One run of a program."""

    number: CallNumber | None  # None: of no function; its pushes count each time
    program: str  # the key, which the worker knows
    arguments: tuple[np.ndarray, ...]
    iterators: tuple[int, ...] = ()  # the worker's resources


class ElementChanged(Exception):
    """The next element is of another type than the program was traced for."""

    def __init__(self, iterator: int, found: Sequence[ElementType]) -> None:
        super().__init__(iterator, tuple(found))
        self.iterator, self.found = iterator, tuple(found)


Type: TypeAlias = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""


def types_of(arrays: Iterable[Any]) -> tuple[Type, ...]:
    """Shape and dtype of each."""
    return tuple((array.shape, array.dtype) for array in arrays)


def shown(*types: Type) -> str:
    """Types in messages.

    >>> shown(((2, 3), np.dtype("int32")), ((), np.dtype("bool")))
    'int32[2,3], bool[]'
    """
    return ", ".join(array_type(dtype, shape) for shape, dtype in types)


_Value = TypeVar("_Value")

PROGRAMS = 256
"""How many programs a worker keeps: a function that is defined anew in a loop would
otherwise fill its memory. Who sends programs counts in the same way, so that a program
is sent again that the worker has forgotten."""


@final
class RecentlyUsed(Generic[_Value]):
    """The values that were put or used last, by their keys; for any thread."""

    def __init__(self, limit: int = PROGRAMS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: OrderedDict[Hashable, _Value] = OrderedDict()

    def put(self, key: Hashable, value: _Value) -> None:
        """Keep a value, and forget the one that was not used for longest."""
        with self._lock:
            self._held[key] = value
            self._held.move_to_end(key)
            if len(self._held) > self._limit:
                self._held.popitem(last=False)

    def get(self, key: Hashable) -> _Value | None:
        """A value, if it is there."""
        with self._lock:
            value = self._held.get(key)
            if value is not None:
                self._held.move_to_end(key)
            return value
