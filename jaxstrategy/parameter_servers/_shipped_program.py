"""A function as it is sent to workers: `ShippedProgram`, and one `Call` of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, final

import numpy as np

from jaxstrategy.parameter_servers._operations import CallNumber


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
      updates: programs of the servers: the server, the key, and the program.
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
    updates: tuple[tuple[int, str, bytes], ...]
    homes: tuple[tuple[int, int], ...]
    replicas: int = 1


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
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
