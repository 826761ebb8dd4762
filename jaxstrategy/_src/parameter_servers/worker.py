"""A worker: its resources, and what it does with a call."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import json
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast, final

import jax
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import OutOfRangeError, ParameterServerLost, WorkerLost
from jaxstrategy._src.parameter_servers.protocol import (
    Call,
    ElementChanged,
    ElementType,
    Input,
    LoadedCode,
    Push,
    Read,
    RecentlyUsed,
    ServerOperation,
    ShippedProgram,
    ShippedTable,
)
from jaxstrategy._src.parameter_servers.store import Store
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import shown
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.memory import aligned_empty
from jaxstrategy._src.values.per_replica import PerReplica


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WorkerContext:
    """What code that builds and reads datasets finds on its worker."""

    index: int
    servers: Sequence[Store]
    replicas: Replicas

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block of code that runs for this worker."""
        return context.entered(worker=self)


def current() -> WorkerContext | None:
    """Those of the code that asks; None of code that runs for no worker's dataset."""
    return cast("WorkerContext | None", context.current().worker)


_numbers = itertools.count()
Builder: TypeAlias = Callable[..., object]
"""Makes a resource of a worker: of its index, and of other resources of it."""


@final
class WorkerResource:
    """A dataset, an iterator or a variable that each worker has by itself."""

    def __init__(
        self,
        builder: Builder,
        uses: tuple[WorkerResource, ...] = (),
        number: int | None = None,
    ) -> None:
        self.number = next(_numbers) if number is None else number
        self.builder = builder
        self.uses = uses

    def when_gone(self, forget: Callable[[int], object]) -> None:
        """Call `forget` with the number when this object is gone; not at exit."""
        weakref.finalize(self, forget, self.number).atexit = False


def is_leaf(node: object) -> bool:
    """Whether a node of an element is looked at as a whole."""
    return isinstance(node, PerReplica)


def structure_of(element: PyTree) -> TreeStructure:
    """The structure of an element, with `PerReplica`s as leaves."""
    return jax.tree.structure(element, is_leaf=is_leaf)


def leaves_of(element: PyTree) -> tuple[list[np.ndarray | jax.Array], ElementType]:
    """The leaves of an element, of the host or the worker's devices, and its type."""
    nodes, structure = jax.tree.flatten(element, is_leaf=is_leaf)
    leaves: list[np.ndarray | jax.Array] = []
    split: list[bool] = []
    masks: list[bool] = []
    for node in nodes:
        is_split = isinstance(node, PerReplica)
        leaves.append(per_replica.contents(node) if is_split else _array(node))
        split.append(is_split)
        masks.append(False)
        # A program is traced for full batches, and another one for those that are not.
        if is_split and node.mask is not None:
            mask = np.asarray(node.mask)
            if not mask.all():
                leaves.append(mask)
                split.append(False)
                masks.append(True)
    types = tuple((tuple(x.shape), str(x.dtype)) for x in leaves)
    return leaves, ElementType(str(structure), types, tuple(split), tuple(masks))


def _array(leaf: Leaf) -> np.ndarray | jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"An element of a dataset holds {shown(leaf)}, which is not an array of "
            "numbers. Leave it out, or encode it as numbers."
        )
    mesh.check_range(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


@final
class LookaheadIterator:
    """An iterator whose next elements can be looked at before they are taken."""

    def __init__(
        self,
        read: Callable[[], tuple[PyTree, Any]],  # an element, and where to go on then
        close: Callable[[], None],
        tells_position: bool,
    ) -> None:
        self._read, self.close = read, close
        self.tells_position = tells_position
        self.position: Any = None
        self._seen: deque[tuple[list[Any], ElementType, Any]] = deque()

    def at(self, turn: int) -> tuple[list[Any], ElementType] | None:
        """The element so many turns from now; None after the end."""
        while len(self._seen) <= turn:
            try:
                element, position = self._read()
            except StopIteration:
                return None
            self._seen.append((*leaves_of(element), position))
        return self._seen[turn][:2]

    def take(self, turns: int) -> None:
        """Go on by so many elements, as far as there are some."""
        for _ in range(min(turns, len(self._seen))):
            *_, self.position = self._seen.popleft()


@final
class Elements:
    """The elements that one call takes of its iterators."""

    def __init__(
        self, iterators: Sequence[LookaheadIterator], program: ShippedProgram
    ) -> None:
        self._iterators = iterators
        self._program = program
        optional = {(i.number, i.turn) for i in program.inputs if i.kind == "present"}
        self._found: dict[tuple[int, int], list[Any] | None] = {}
        for number, wanted in enumerate(program.iterators):
            seen = [iterators[number].at(turn) for turn in range(len(wanted))]
            types = [
                last if each is None else each[1]
                for each, last in zip(seen, wanted, strict=True)
            ]
            if types != list(wanted):
                raise ElementChanged(number, types)
            for turn, each in enumerate(seen):
                if each is None and (number, turn) not in optional:
                    self.take()
                    raise OutOfRangeError(
                        f"`{program.name}` took an element of an iterator that has no "
                        "more on its worker. Schedule as many functions as there are "
                        "elements, repeat the dataset, or ask with "
                        "`get_next_as_optional()`."
                    )
                self._found[number, turn] = None if each is None else each[0]

    def leaf(self, given: Input) -> Any:
        """One leaf of an element, or whether the element is there."""
        leaves = self._found[given.number, given.turn]
        if given.kind == "present":
            return np.bool_(leaves is not None)
        if leaves is not None:
            return leaves[given.leaf]
        element = self._program.iterators[given.number][given.turn]
        shape, dtype = element.types[given.leaf]
        return np.zeros(shape, dtype)

    def take(self) -> None:
        """They are used up now."""
        for iterator, types in zip(
            self._iterators, self._program.iterators, strict=True
        ):
            iterator.take(len(types))

    def positions(self) -> list[np.ndarray]:
        """Where the iterators are that can be resumed: JSON, as bytes of an array."""
        pairs = zip(self._iterators, self._program.iterators, strict=True)
        return [
            np.frombuffer(json.dumps(each.position).encode(), np.uint8)
            for each, types in pairs
            if types and each.tells_position
        ]


@final
class WorkerEngine:
    """One life of a worker: when it is lost, its backend starts another one.

    One thread calls it at a time, except for `kill`. Requests to one that runs
    elsewhere raise `WorkerLost` when it is gone, and otherwise what the user's code
    raised there, with the worker's traceback as a note.
    """

    requests = ("define", "build", "release", "call", "own")

    def __init__(
        self,
        index: int,
        servers: Sequence[Store],
        devices: Sequence[Device],
    ) -> None:
        self.index = index
        self._servers = servers
        self._replicas = Replicas.on(list(devices))
        self._programs: RecentlyUsed[LoadedCode] = RecentlyUsed()
        self._surroundings = WorkerContext(index, servers, self._replicas)
        # Datasets, iterators and variables of its own, by their numbers.
        self._resources: dict[int, Any] = {}
        self._is_killed = threading.Event()

    def define(self, program: ShippedProgram) -> None:
        """Get ready to run a program; one that is known already costs nothing."""
        self._check()
        if self._programs.get(program.key) is not None:
            return
        if program.replicas != self._replicas.count:
            raise ValueError(
                f"`{program.name}` was traced for {program.replicas} devices, and "
                f"worker {self.index} has {self._replicas.count}."
            )
        if isinstance(program.main, bytes):
            ids = program.ids
            code = LoadedCode(
                program,
                _callable(program.main, self._replicas),
                None if ids is None else _callable(ids, self._replicas),
            )
        else:
            with self._surroundings.entered():
                code = program.main.loaded(program)
        self._programs.put(program.key, code)

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        """Make a resource: a dataset, an iterator over one, a variable of its own."""
        self._check()
        others = [self._resources[number] for number in uses]
        with self._surroundings.entered():
            self._resources[resource] = builder(self.index, *others)

    def release(self, resources: Sequence[int]) -> None:
        """Forget resources; those that are not there are none."""
        self._check()
        for number in resources:
            held = self._resources.pop(number, None)
            if isinstance(held, LookaheadIterator):
                held.close()

    def own(self, variable: int) -> np.ndarray:
        """What one of the worker's own variables holds."""
        self._check()
        return np.asarray(self._resources[variable])

    def kill(self) -> None:
        """End it between two steps: in a process of its own, that would end it at once.

        A program that runs goes on, and pushes nothing.
        """
        self._is_killed.set()

    def call(self, call: Call) -> list[np.ndarray]:
        """The results of a program, once all that it pushes is on the servers."""
        self._check()
        code = self._programs.get(call.program)
        assert code is not None, "the coordinator counts in the same way"
        program = code.program
        elements = Elements([self._resources[n] for n in call.iterators], program)
        inputs, ids = self._inputs(code, call, elements)
        elements.take()
        self._check()
        outputs = code.main(*inputs[: program.main_inputs])
        results = [np.asarray(array) for array in outputs[: program.results]]
        pushes = _pushes(program, outputs, ids)
        # A server in this process copies an array that somebody has before it adds.
        del inputs
        self._check()
        for server, operations in pushes.items():
            self._servers[server].push(operations, call.number)
        for number, output in program.own:
            self._resources[number] = np.asarray(outputs[output])
        self._check()
        return [*results, *elements.positions()]

    def _check(self) -> None:
        if self._is_killed.is_set():
            raise WorkerLost(f"Worker {self.index} was killed.")

    def _inputs(
        self, code: LoadedCode, call: Call, elements: Elements
    ) -> tuple[list[Any], list[np.ndarray]]:
        """All inputs of the main program, and which rows its lookups need."""
        program = code.program
        given: dict[Input, Any] = {}
        for each in program.inputs:
            if each.kind == "argument":
                given[each] = call.arguments[each.number]
            elif each.kind == "index":
                given[each] = np.int32(self.index)
            elif each.kind in ("element", "present"):
                given[each] = elements.leaf(each)
            elif each.kind == "own":
                given[each] = self._resources[each.number]
        variables = [each for each in program.inputs if each.kind == "variable"]
        # Mostly everything is read at once.
        is_late = any(program.inputs[i] in variables for i in program.ids_inputs)
        ids, uses = ([], []) if is_late else _used_rows(code, given)
        reads = [*(Read(each.number) for each in variables), *_reads(uses)]
        pulled = iter(self._pulled(program, reads))
        for each in variables:
            given[each] = next(pulled)
        if is_late:
            ids, uses = _used_rows(code, given)
            pulled = iter(self._pulled(program, _reads(uses)))
        for use in uses:
            use.place(given, [next(pulled) for _ in use.reads])
        return [given[each] for each in program.inputs], ids

    def _pulled(
        self, program: ShippedProgram, reads: Sequence[Read]
    ) -> list[np.ndarray]:
        """What the servers have, in the order of `reads`."""
        by_server: defaultdict[int, list[int]] = defaultdict(list)
        for place, read in enumerate(reads):
            by_server[program.homes[read.variable]].append(place)
        found: dict[int, np.ndarray] = {}
        for server, places in by_server.items():
            values = self._servers[server].read([reads[place] for place in places])
            found.update(zip(places, values, strict=True))
        return [found[place] for place in range(len(reads))]


def _used_rows(
    code: LoadedCode, given: Mapping[Input, Any]
) -> tuple[list[np.ndarray], list[_UsedRows]]:
    """The numbers of rows that each lookup needs, and these rows of each table."""
    program = code.program
    if code.ids is None:
        return [], []
    inputs = [given[program.inputs[i]] for i in program.ids_inputs]
    ids = [np.asarray(array) for array in code.ids(*inputs)]
    return ids, [_UsedRows(n, each, ids) for n, each in enumerate(program.tables)]


def _reads(uses: Sequence[_UsedRows]) -> list[Read]:
    return [read for use in uses for read in use.reads]


@final
class _UsedRows:
    """The rows of one table that a call uses."""

    def __init__(
        self, number: int, table: ShippedTable, ids: Sequence[np.ndarray]
    ) -> None:
        self._number = number
        self._table = table
        own = [ids[lookup] for lookup in table.lookups]
        flat = [each.reshape(-1) for each in own]
        joined = flat[0] if len(flat) == 1 else np.concatenate(flat)
        rows, positions = np.unique(joined, return_inverse=True)
        _check_rows(rows, table.starts)
        positions = positions.astype(np.int32)
        sizes = np.cumsum([each.size for each in own])[:-1]
        self._positions = [
            part.reshape(each.shape)
            for part, each in zip(np.split(positions, sizes), own, strict=True)
        ]
        # Those of each shard, as it counts them; they are sorted.
        borders = np.searchsorted(rows, table.starts)
        self.reads = [
            Read(shard, rows[first:last] - start)
            for shard, start, first, last in zip(
                table.shards, table.starts, borders, borders[1:], strict=False
            )
            if last > first
        ]

    def place(self, given: dict[Input, Any], parts: Sequence[np.ndarray]) -> None:
        """Put the rows, and where they are among them, to the other inputs."""
        table = self._table
        # XLA takes memory that is aligned without copying it.
        rows = aligned_empty((table.rows, *table.row), np.dtype(table.dtype))
        first = 0
        for part in parts:
            rows[first : first + len(part)] = part
            first += len(part)
        given[Input("table", self._number)] = rows
        pairs = zip(table.lookups, self._positions, strict=True)
        for lookup, positions in pairs:
            given[Input("positions", lookup)] = positions


def _check_rows(rows: np.ndarray, starts: Sequence[int]) -> None:
    if len(rows) and (rows[0] < 0 or rows[-1] >= starts[-1]):
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise IndexError(
            f"Row {wrong} of a table was looked up or changed, which has the rows "
            f"[0, {starts[-1]})."
        )


def _pushes(
    program: ShippedProgram, outputs: Sequence[Any], ids: Sequence[np.ndarray]
) -> dict[int, list[ServerOperation]]:
    """What to push, for each server in the order of the function."""
    made: dict[int, list[ServerOperation]] = {}
    for push in program.pushes:
        if push.flag is not None and bool(outputs[push.flag]) != push.flag_is:
            continue
        operands = [np.asarray(outputs[i]) for i in push.operands]
        if push.lookup is not None:
            # Every replica names the same rows to change.
            operands = [ids[push.lookup][0], *operands]
        for operation in _operations(push, operands):
            home = program.homes[operation.variables[0]]
            made.setdefault(home, []).append(operation)
    return made


def _operations(push: Push, operands: Sequence[np.ndarray]) -> list[ServerOperation]:
    if not push.starts or len(push.variables) == 1:
        return [
            ServerOperation(push.name, push.variables, tuple(operands), push.program)
        ]
    ids, values = operands
    _check_rows(np.sort(ids), push.starts)
    return [
        ServerOperation(push.name, (shard,), (ids[own] - first, values[own]))
        for shard, first, last in zip(
            push.variables, push.starts, push.starts[1:], strict=False
        )
        for own in [np.flatnonzero((first <= ids) & (ids < last))]
        if len(own)
    ]


def _callable(exported: bytes, replicas: Replicas) -> Callable[..., Any]:
    export: Any = jax.export
    program = export.deserialize(bytearray(exported))

    def called(*given: jax.Array) -> Any:
        return program.call(*given)

    # Both: without arguments only those of results say how many devices there are.
    return jax.jit(
        called,
        in_shardings=tuple(program.in_shardings_jax(replicas.mesh)),
        out_shardings=list(program.out_shardings_jax(replicas.mesh)),
    )


class AbstractWorkerBackend(abc.ABC):
    """Starts the workers and servers of one strategy, and ends them."""

    num_workers: int  # lost ones included
    replicas_per_worker: int  # devices of each
    platforms: tuple[str, ...] = ("cpu",)  # of these, as `jax.export` calls them
    servers: Sequence[Store]  # or those that are elsewhere
    can_restart_servers = False

    def restart_servers(self, servers: Sequence[int]) -> None:
        """Start lost servers again, which then have nothing."""
        raise ParameterServerLost(
            f"Parameter servers {list(servers)} are lost, and a {type(self).__name__} "
            "cannot start them again."
        )

    @abc.abstractmethod
    def start(self, worker: int, incarnation: int) -> WorkerEngine:
        """Start a worker, or wait for the one that somebody else starts."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all that it has started; may be called twice."""
