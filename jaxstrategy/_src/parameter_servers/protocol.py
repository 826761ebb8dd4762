"""What servers and workers are asked, and with what: programs, calls and operations."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, final

import numpy as np
from numpy.typing import DTypeLike

from jaxstrategy._src.errors import ClusterError, ParameterServerLost

OF_WHOLE = ("set", "add", "subtract")
"""Operations with one operand of the variable's shape."""
OF_ROWS = tuple(
    f"scatter_{name}" for name in ("add", "sub", "mul", "div", "min", "max", "update")
)
"""Operations of some rows: operands are the rows' numbers and a value for each."""


class Read(NamedTuple):
    """A variable, or some rows of it.

    Attributes:
      variable: its number.
      rows: the numbers of the rows, an int32 or int64 vector; None: all of it.
    """

    variable: int
    rows: np.ndarray | None = None


class CallNumber(NamedTuple):
    """The run of a function to which a push belongs.

    Attributes:
      function: its number; what is pushed twice for one function counts once.
      finished: all functions before this number have ended and push nothing more, so
        that a server need not remember them.
      worker: the worker that runs it.
      incarnation: how often that worker was started before; what an earlier one pushes
        that was given up for lost does not count.
    """

    function: int
    finished: int = 0
    worker: int = -1
    incarnation: int = 0


class ServerOperation(NamedTuple):
    """One change of a variable, which nobody sees half done.

    Attributes:
      name: one of `OF_WHOLE` or `OF_ROWS`; or "update", which calls a program.
      variables: the number of the variable. An update changes several together, which
        are on one server.
      operands: its arrays.
      program: of an update the key of the program, which takes what the variables hold
        and the operands, and returns what they hold afterwards.
    """

    name: str
    variables: tuple[int, ...]
    operands: tuple[np.ndarray, ...]
    program: str = ""


class Input(NamedTuple):
    """Where a worker takes one input of a program from.

    Attributes:
      kind: "argument" of the call; "variable" pulled whole; "table", the rows of one
        that are used; "positions" of looked-up rows in that; "element", a leaf of what
        an iterator gives next; whether one is "present"; "own" variable of the worker;
      the worker's "index".
      number: of the argument, variable, table, lookup or iterator among those.
      turn: of an element how many of this iterator the function has taken before.
      leaf: of an element the number of its leaf.
    """

    kind: Literal[
        "argument",
        "variable",
        "table",
        "positions",
        "element",
        "present",
        "own",
        "index",
    ]
    number: int = 0
    turn: int = 0
    leaf: int = 0


@final
@dataclasses.dataclass(frozen=True)
class ShippedTable:
    """A table, or the shards of one, of which a function uses some rows.

    Attributes:
      shards: the numbers of its variables, in the order of their rows.
      starts: the first row of each shard, and last the number of all rows.
      lookups: which outputs of the program of ids say which rows are used.
      rows: how many rows the main program takes: as many as all lookups together have
        ids. What is not used of them may be anything.
      row: the shape of a row.
      dtype: the name of the dtype.
    """

    shards: tuple[int, ...]
    starts: tuple[int, ...]
    lookups: tuple[int, ...]
    rows: int
    row: tuple[int, ...]
    dtype: str


@final
@dataclasses.dataclass(frozen=True)
class Push:
    """An operation that a function makes when it has ended.

    Attributes:
      name: of the operation.
      variables: their numbers; the shards of a table for an operation of rows.
      operands: which outputs of the program are its operands.
      lookup: of an operation of rows, which output of the program of ids says which
        rows; None: the first operand does.
      starts: as those of `ShippedTable`, for an operation of rows.
      flag: the output that says whether it is made at all; None: always.
      flag_is: what the output must say.
      program: of an update its program on the servers.
    """

    name: str
    variables: tuple[int, ...]
    operands: tuple[int, ...]
    lookup: int | None = None
    starts: tuple[int, ...] = ()
    flag: int | None = None
    flag_is: bool = True
    program: str = ""


class ElementType(NamedTuple):
    """The leaves that each element of an iterator must have.

    Attributes:
      structure: of the element's pytree, as text.
      types: shape and name of the dtype of each leaf.
      split: which leaves have one version for each replica, `[replica, ...]`.
      masks: which leaves say which rows are real of the leaf before,
        `bool[replica, rows]`; of a batch that is full there is none.
    """

    structure: str
    types: tuple[tuple[tuple[int, ...], str], ...]
    split: tuple[bool, ...]
    masks: tuple[bool, ...]


class LoadedCode(NamedTuple):
    """A program that a worker can call."""

    program: ShippedProgram
    main: Callable[..., Any]
    ids: Callable[..., Any] | None


class AbstractHostCode(Protocol):
    """The code of a program that has no exported form."""

    def loaded(self, program: ShippedProgram) -> LoadedCode:
        """What a worker calls; called with its surroundings."""
        ...


@final
@dataclasses.dataclass(frozen=True)
class ShippedProgram:
    """A function traced for one worker, with all that runs it.

    Attributes:
      key: of no other program; equal ones have equal keys.
      name: of the user's function, for messages.
      main: the program, in the form of `jax.export`; or the code of one that has none,
        that of ids included.
      inputs: of the programs, in order.
      main_inputs: how many of the first inputs the main program takes.
      ids: a program of those inputs that `ids_inputs` counts, which returns the rows
        that lookups need; None where there are no tables.
      ids_inputs: numbers of inputs.
      tables: of which some rows are used.
      results: how many of the first outputs are the function's results.
      own: the worker's own variables that change, each with the output that it becomes.
      pushes: in their order.
      iterators: the type of each element that it takes of each iterator.
      homes: the server of each variable that is read or changed.
      replicas: how many replicas the worker has.
    """

    key: str
    name: str
    main: bytes | AbstractHostCode
    inputs: tuple[Input, ...]
    main_inputs: int
    ids: bytes | None
    ids_inputs: tuple[int, ...]
    tables: tuple[ShippedTable, ...]
    results: int
    own: tuple[tuple[int, int], ...]
    pushes: tuple[Push, ...]
    iterators: tuple[tuple[ElementType, ...], ...]
    homes: Mapping[int, int]
    replicas: int = 1


class Call(NamedTuple):
    """One run of a program.

    Attributes:
      number: to which function the run belongs; None: to none, and what it pushes
        counts each time.
      program: the key of its program, which the worker knows.
      arguments: its arrays.
      iterators: the number of the worker's resource for each iterator.
    """

    number: CallNumber | None
    program: str
    arguments: tuple[np.ndarray, ...]
    iterators: tuple[int, ...] = ()


class ElementChanged(Exception):
    """The next element is of another type than the program was traced for."""

    def __init__(self, iterator: int, found: Sequence[ElementType]) -> None:
        super().__init__(iterator, tuple(found))
        self.iterator, self.found = iterator, tuple(found)


class AbstractServer(abc.ABC):
    """Keeps variables by their numbers; any number of threads may call it at once.

    All methods of one that runs elsewhere raise `ParameterServerLost` when it is gone.
    """

    @abc.abstractmethod
    def create(self, number: int, value: np.ndarray, is_table: bool = False) -> None:
        """Keep a new variable."""

    @abc.abstractmethod
    def drop(self, numbers: Sequence[int]) -> None:
        """Forget variables; those that are not there are none."""

    @abc.abstractmethod
    def read(self, reads: Sequence[Read]) -> list[np.ndarray]:
        """What these hold now; each of them is whole, together they are no snapshot."""

    @abc.abstractmethod
    def push(
        self, operations: Sequence[ServerOperation], call: CallNumber | None = None
    ) -> bool:
        """Apply operations in their order; whether they count."""

    @abc.abstractmethod
    def define(self, key: str, exported: bytes) -> None:
        """Keep a program for updates, in the form of `jax.export`."""

    @abc.abstractmethod
    def fence(self, worker: int, incarnation: int) -> None:
        """From now on nothing counts that earlier incarnations of a worker push."""

    @abc.abstractmethod
    def versions(self, numbers: Sequence[int]) -> list[int]:
        """How many operations each variable has seen."""


Builder = Callable[..., object]
"""Makes a resource of a worker: of its index, and of other resources of it."""


class AbstractWorker(abc.ABC):
    """One life of a worker: when it is lost, its backend starts another one.

    One thread calls it at a time, except for `kill`. Methods raise `WorkerLost` when it
    is gone, and otherwise what the user's code raised there, with the worker's
    traceback as a note.
    """

    @abc.abstractmethod
    def define(self, program: ShippedProgram) -> None:
        """Get ready to run a program; one that is known already costs nothing."""

    @abc.abstractmethod
    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        """Make a resource: a dataset, an iterator over one, a variable of its own."""

    @abc.abstractmethod
    def release(self, resources: Sequence[int]) -> None:
        """Forget resources; those that are not there are none."""

    @abc.abstractmethod
    def call(self, call: Call) -> list[np.ndarray]:
        """The results of a program, once all that it pushes is on the servers."""

    @abc.abstractmethod
    def own(self, variable: int) -> np.ndarray:
        """What one of the worker's own variables holds."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it now, whatever it is doing; callable from any thread."""


class AbstractWorkerBackend(abc.ABC):
    """Starts the workers and servers of one strategy, and ends them.

    Attributes:
      num_workers: how many workers there are, lost ones included.
      replicas_per_worker: how many devices each worker has.
      platforms: of these devices, as `jax.export` calls them.
      servers: the parameter servers, in their order.
      can_restart_servers: whether `restart_servers` works.
    """

    num_workers: int
    replicas_per_worker: int
    platforms: tuple[str, ...] = ("cpu",)
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


_Value = TypeVar("_Value")

PROGRAMS = 256
"""How many programs a worker keeps: a function that is defined anew in a loop would
otherwise fill its memory. Who sends programs counts in the same way, so that a program
is sent again that the worker has forgotten."""


@final
class RecentlyUsed(Generic[_Value]):
    """The values that were put or used last, by their keys."""

    def __init__(self, limit: int = PROGRAMS) -> None:
        self._limit = limit
        self._held: OrderedDict[str, _Value] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def put(self, key: str, value: _Value) -> None:
        """Keep a value, and forget the one that was not used for longest."""
        self._held[key] = value
        self._held.move_to_end(key)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def use(self, key: str) -> _Value:
        """A value that is there."""
        self._held.move_to_end(key)
        return self._held[key]


# XLA's. NumPy's own memory begins 16 bytes after such an address if the array is large.
# As an argument of a program 10 MB of it cost 500 us, and aligned ones 7 us; 128 KB
# delay a program by 60 us.
ALIGNMENT = 64


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """An array as `np.empty` makes it, aligned for JAX."""
    empty = np.dtype(dtype)
    count = math.prod(shape)
    memory = np.empty(count * empty.itemsize + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count * empty.itemsize].view(empty).reshape(shape)


def aligned(array: np.ndarray) -> np.ndarray:
    """`array`, or a copy that is aligned for JAX."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0:
        return array
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


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

    def create(self, server: int, value: np.ndarray, is_table: bool = False) -> int:
        """Keep a new variable there, of the shape of `value`; returns its number."""
        self.drop_gone()
        number = next(_numbers)
        self.servers[server].create(number, value, is_table)
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


_PAUSE = 0.05  # between two looks whether a variable is there


@final
class JointPool(ServerPool):
    """The servers of a strategy of which each worker process has one."""

    def __init__(
        self, servers: Sequence[AbstractServer], is_chief: bool, seconds: float = 300.0
    ) -> None:
        super().__init__(servers)
        self._is_chief = is_chief
        self._seconds = seconds
        self._in_order = itertools.count()

    def create(self, server: int, value: np.ndarray, is_table: bool = False) -> int:
        """The number of the next variable, once it is there."""
        number = next(self._in_order)
        if not self._is_chief:
            self._wait_for(server, number)
        elif not self._is_there(server, number):
            self.servers[server].create(number, value, is_table)
        self.know(number, server)
        return number

    def forget(self, number: int) -> None:
        """Nothing: other processes have the variable."""

    def _is_there(self, server: int, number: int) -> bool:
        try:
            self.servers[server].versions([number])
        except LookupError:
            return False
        return True

    def _wait_for(self, server: int, number: int) -> None:
        end = time.monotonic() + self._seconds
        while not self._is_there(server, number):
            if time.monotonic() > end:
                raise ClusterError(
                    f"The chief has not made variable number {number} within "
                    f"{self._seconds:.0f} s. All workers run the same program, which "
                    "makes the same variables in the same order; is the chief (or "
                    "worker 0) running?"
                )
            time.sleep(_PAUSE)
