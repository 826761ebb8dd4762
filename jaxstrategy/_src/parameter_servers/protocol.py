"""What servers and workers are asked, and with what: programs, calls and operations."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    final,
)

import numpy as np

from jaxstrategy._src.errors import ParameterServerLost
from jaxstrategy._src.text.shown import array_type

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


class AbstractHostCode(Protocol):
    """The code of a program that has no exported form, that of ids included."""

    def loaded(self, program: ShippedProgram) -> LoadedCode:
        """What a worker calls; called with its surroundings."""
        ...


@final
@dataclasses.dataclass(frozen=True)
class ShippedProgram:
    """A function traced for one worker, with all that runs it."""

    key: str  # equal of equal programs
    name: str  # of the user's function, for messages
    main: bytes | AbstractHostCode  # in the form of `jax.export`, if it has one
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


class AbstractServer(Protocol):
    """Keeps variables by their numbers; any number of threads may call it at once.

    All methods of one that runs elsewhere raise `ParameterServerLost` when it is gone.
    """

    def create(self, number: int, value: np.ndarray) -> None:
        """Keep a new variable."""

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget variables; those that are not there are none."""

    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """What these hold now; each of them is whole, together they are no snapshot."""
        ...

    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        """Apply operations in their order; whether they count."""
        ...

    def define(self, key: str, exported: bytes) -> None:
        """Keep a program for updates, in the form of `jax.export`."""

    def fence(self, worker: int, incarnation: int) -> None:
        """From now on nothing counts that earlier incarnations of a worker push."""

    def versions(self, numbers: Sequence[int]) -> list[int]:
        """How many operations each variable has seen."""
        ...


SERVER_METHODS = ("create", "drop", "read", "push", "define", "fence", "versions")


Builder = Callable[..., object]
"""Makes a resource of a worker: of its index, and of other resources of it."""


class AbstractWorker(Protocol):
    """One life of a worker: when it is lost, its backend starts another one.

    One thread calls it at a time, except for `kill`. Methods raise `WorkerLost` when it
    is gone, and otherwise what the user's code raised there, with the worker's
    traceback as a note.
    """

    def define(self, program: ShippedProgram) -> None:
        """Get ready to run a program; one that is known already costs nothing."""

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        """Make a resource: a dataset, an iterator over one, a variable of its own."""

    def release(self, resources: Sequence[int]) -> None:
        """Forget resources; those that are not there are none."""

    def call(self, call: Call) -> list[np.ndarray]:
        """The results of a program, once all that it pushes is on the servers."""
        ...

    def own(self, variable: int) -> np.ndarray:
        """What one of the worker's own variables holds."""
        ...

    def kill(self) -> None:
        """End it now, whatever it is doing; callable from any thread."""


WORKER_METHODS = ("define", "build", "release", "call", "own")
"""Those that a coordinator asks another process for."""


class AbstractWorkerBackend(abc.ABC):
    """Starts the workers and servers of one strategy, and ends them."""

    num_workers: int  # lost ones included
    replicas_per_worker: int  # devices of each
    platforms: tuple[str, ...] = ("cpu",)  # of these, as `jax.export` calls them
    servers: Sequence[AbstractServer]
    can_restart_servers = False

    def restart_servers(self, servers: Sequence[int]) -> None:
        """Start lost servers again, which then have nothing."""
        raise ParameterServerLost(
            f"Parameter servers {list(servers)} are lost, and a {type(self).__name__} "
            "cannot start them again."
        )

    @abc.abstractmethod
    def start(self, worker: int, incarnation: int) -> AbstractWorker:
        """Start a worker, or wait for the one that somebody else starts."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all that it has started; may be called twice."""


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


_numbers = itertools.count()


class ServerPool:
    """The servers of a strategy."""

    def __init__(self, servers: Sequence[AbstractServer]) -> None:
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
        number = next(_numbers)
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
