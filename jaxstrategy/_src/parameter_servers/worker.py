"""A worker: its resources, and what it does with a call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast, final

import jax
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.errors import OutOfRangeError, WorkerLost
from jaxstrategy._src.parameter_servers.protocol import (
    AbstractServer,
    AbstractWorker,
    Builder,
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
    aligned_empty,
)
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import PerReplica


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WorkerContext:
    """What code that builds and reads datasets finds on its worker."""

    index: int
    servers: Sequence[AbstractServer]
    replicas: Replicas

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block of code that runs for this worker."""
        return context.entered(worker=self)


def current() -> WorkerContext | None:
    """Those of the code that asks; None of code that runs for no worker's dataset."""
    return cast("WorkerContext | None", context.current().worker)


_numbers = itertools.count()


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

    def in_order(self) -> Iterator[WorkerResource]:
        """What it uses, and it itself last."""
        for each in self.uses:
            yield from each.in_order()
        yield self


class ElementLeaf(NamedTuple):
    """One array of an element.

    Attributes:
      array: of the host, or of the worker's devices.
      is_split: whether it has one version for each replica.
      is_mask: whether it says which rows are real of the leaf before.
    """

    array: np.ndarray | jax.Array
    is_split: bool = False
    is_mask: bool = False


def is_leaf(node: object) -> bool:
    """Whether a node of an element is looked at as a whole."""
    return isinstance(node, PerReplica)


def structure_of(element: PyTree) -> TreeStructure:
    """The structure of an element, with `PerReplica`s as leaves."""
    return jax.tree.structure(element, is_leaf=is_leaf)


def leaves_of(element: PyTree) -> tuple[list[np.ndarray | jax.Array], ElementType]:
    """The leaves of an element, and its type."""
    nodes, structure = jax.tree.flatten(element, is_leaf=is_leaf)
    leaves = [leaf for node in nodes for leaf in _leaves(node)]
    types = tuple((tuple(x.array.shape), str(x.array.dtype)) for x in leaves)
    split = tuple(x.is_split for x in leaves)
    masks = tuple(x.is_mask for x in leaves)
    return [x.array for x in leaves], ElementType(str(structure), types, split, masks)


def _leaves(node: Leaf) -> Iterator[ElementLeaf]:
    if not isinstance(node, PerReplica):
        yield ElementLeaf(_array(node))
        return
    yield ElementLeaf(per_replica.contents(node), is_split=True)
    # A program is traced for full batches, and another one for those that are not.
    if node.mask is not None and not np.all(mask := np.asarray(node.mask)):
        yield ElementLeaf(mask, is_mask=True)


def _array(leaf: Leaf) -> np.ndarray | jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"An element of a dataset holds {shown(leaf)}, which is not an array of "
            "numbers. Leave it out, or encode it as numbers."
        )
    mesh.check_held(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


class Positioned(NamedTuple):
    """An element of an iterator that can be resumed."""

    element: PyTree
    position: Any


class _Seen(NamedTuple):
    leaves: list[Any]
    type: ElementType
    position: Any


@final
class LookaheadIterator:
    """An iterator of which some elements were looked at before they are taken."""

    def __init__(self, iterator: Iterator[PyTree]) -> None:
        self._iterator = iterator
        self._seen: deque[_Seen] = deque()
        self.tells_position = bool(getattr(iterator, "tells_position", False))
        self.position: Any = None

    def at(self, turn: int) -> tuple[list[Any], ElementType] | None:
        """The element so many turns from now; None after the end."""
        while len(self._seen) <= turn:
            try:
                element = next(self._iterator)
            except StopIteration:
                return None
            position = None
            if isinstance(element, Positioned):
                element, position = element
            self._seen.append(_Seen(*leaves_of(element), position))
        return self._seen[turn][:2]

    def take(self, turns: int) -> None:
        """Go on by so many elements, as far as there are some."""
        for _ in range(min(turns, len(self._seen))):
            self.position = self._seen.popleft().position

    def close(self) -> None:
        """Stop reading."""
        close = getattr(self._iterator, "close", None)
        if callable(close):
            close()


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
        for number in range(len(program.iterators)):
            for turn, leaves in enumerate(self._of(number)):
                if leaves is None and (number, turn) not in optional:
                    self.take()
                    raise _ended(program.name)
                self._found[number, turn] = leaves

    def _of(self, number: int) -> list[list[Any] | None]:
        """The leaves of each element of one iterator; None after its end."""
        wanted = self._program.iterators[number]
        found = [self._iterators[number].at(turn) for turn in range(len(wanted))]
        types = [
            each[1] if each is not None else last
            for each, last in zip(found, wanted, strict=True)
        ]
        if types != list(wanted):
            raise ElementChanged(number, types)
        return [None if each is None else each[0] for each in found]

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


def _ended(name: str) -> OutOfRangeError:
    return OutOfRangeError(
        f"`{name}` took an element of an iterator that has no more on its worker. "
        "Schedule as many functions as there are elements, repeat the dataset, or ask "
        "with `get_next_as_optional()`."
    )


@final
class WorkerEngine(AbstractWorker):
    """A worker of this process, on some devices; one call at a time."""

    def __init__(
        self,
        index: int,
        servers: Sequence[AbstractServer],
        devices: Sequence[Device],
    ) -> None:
        self.index = index
        self._servers = servers
        self._replicas = Replicas.on(list(devices))
        self._programs: RecentlyUsed[_LoadedProgram] = RecentlyUsed()
        self._surroundings = WorkerContext(index, servers, self._replicas)
        # Datasets, iterators and variables of its own, by their numbers.
        self._resources: dict[int, Any] = {}
        self._is_killed = threading.Event()

    def define(self, program: ShippedProgram) -> None:
        self._check()
        if program.key in self._programs:
            return
        if program.replicas != self._replicas.count:
            raise ValueError(
                f"`{program.name}` was traced for {program.replicas} devices, and "
                f"worker {self.index} has {self._replicas.count}."
            )
        for server, key, exported in program.updates:
            self._servers[server].define(key, exported)
        with self._surroundings.entered():
            code = _loaded(program, self._replicas)
        self._programs.put(program.key, _LoadedProgram(code))

    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        self._check()
        others = [self._resources[number] for number in uses]
        with self._surroundings.entered():
            self._resources[resource] = builder(self.index, *others)

    def release(self, resources: Sequence[int]) -> None:
        self._check()
        for number in resources:
            held = self._resources.pop(number, None)
            if isinstance(held, LookaheadIterator):
                held.close()

    def own(self, variable: int) -> np.ndarray:
        self._check()
        return np.asarray(self._resources[variable])

    def kill(self) -> None:
        """End it between two steps: in a process of its own, that would end it at once.

        A program that runs goes on, and pushes nothing.
        """
        self._is_killed.set()

    def call(self, call: Call) -> list[np.ndarray]:
        self._check()
        loaded = self._programs.use(call.program)
        program = loaded.program
        elements = Elements([self._iterator(n) for n in call.iterators], program)
        values = self._values(loaded, call, elements)
        elements.take()
        self._check()
        outputs = loaded.main(*values.inputs[: program.main_inputs])
        results = [np.asarray(array) for array in outputs[: program.results]]
        pushes = loaded.pushes(outputs, values.ids)
        # A server in this process copies an array that somebody has before it adds.
        del values
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

    def _iterator(self, resource: int) -> LookaheadIterator:
        held = self._resources[resource]
        if not isinstance(held, LookaheadIterator):
            held = self._resources[resource] = LookaheadIterator(iter(held))
        return held

    def _values(
        self, loaded: _LoadedProgram, call: Call, elements: Elements
    ) -> _Values:
        """All inputs of the main program."""
        program = loaded.program
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
        wanted = [each.number for each in program.inputs if each.kind == "variable"]
        ids: list[np.ndarray] = []
        reads: list[Read] = []
        uses: list[_UsedRows] = []
        if loaded.ids is not None and not loaded.ids_need_variables:
            ids, reads, uses = self._rows(loaded, given)
        pulled = self._pulled(loaded, [*(Read(number) for number in wanted), *reads])
        for number, value in zip(wanted, pulled, strict=False):
            given[Input("variable", number)] = value
        rows = pulled[len(wanted) :]
        if loaded.ids is not None and loaded.ids_need_variables:
            ids, reads, uses = self._rows(loaded, given)
            rows = self._pulled(loaded, reads)
        for use in uses:
            use.place(given, [rows.pop(0) for _ in use.reads])
        return _Values([given[each] for each in program.inputs], ids)

    def _rows(
        self, loaded: _LoadedProgram, given: Mapping[Input, Any]
    ) -> tuple[list[np.ndarray], list[Read], list[_UsedRows]]:
        assert loaded.ids is not None
        inputs = [given[loaded.program.inputs[i]] for i in loaded.program.ids_inputs]
        ids = [np.asarray(array) for array in loaded.ids(*inputs)]
        uses = [
            _UsedRows(number, table, ids)
            for number, table in enumerate(loaded.program.tables)
        ]
        return ids, [read for use in uses for read in use.reads], uses

    def _pulled(
        self, loaded: _LoadedProgram, reads: Sequence[Read]
    ) -> list[np.ndarray]:
        """What the servers have, in the order of `reads`."""
        by_server: defaultdict[int, list[int]] = defaultdict(list)
        for place, read in enumerate(reads):
            by_server[loaded.homes[read.variable]].append(place)
        found: dict[int, np.ndarray] = {}
        for server, places in by_server.items():
            values = self._servers[server].read([reads[place] for place in places])
            found.update(zip(places, values, strict=True))
        return [found[place] for place in range(len(reads))]


@final
class _Values:
    def __init__(self, inputs: list[Any], ids: list[np.ndarray]) -> None:
        self.inputs, self.ids = inputs, ids


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
        self.reads = [
            Read(shard, part)
            for shard, part in _by_shard(rows, table.shards, table.starts)
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


def _by_shard(
    rows: np.ndarray, shards: Sequence[int], starts: Sequence[int]
) -> list[tuple[int, np.ndarray]]:
    """The rows of each shard that has some, as it counts them; `rows` are sorted."""
    if len(shards) == 1:
        return [(shards[0], rows)] if len(rows) else []
    borders = np.searchsorted(rows, starts)
    return [
        (shard, rows[borders[i] : borders[i + 1]] - starts[i])
        for i, shard in enumerate(shards)
        if borders[i + 1] > borders[i]
    ]


def _check_rows(rows: np.ndarray, starts: Sequence[int]) -> None:
    if len(rows) and (rows[0] < 0 or rows[-1] >= starts[-1]):
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise IndexError(
            f"Row {wrong} of a table was looked up or changed, which has the rows "
            f"[0, {starts[-1]})."
        )


@final
class _LoadedProgram:
    """A program that can be called."""

    def __init__(self, code: LoadedCode) -> None:
        self.program, self.main, self.ids = code
        program = code.program
        kinds = {program.inputs[i].kind for i in program.ids_inputs}
        self.ids_need_variables = "variable" in kinds
        self.homes = dict(program.homes)

    def pushes(
        self, outputs: Sequence[Any], ids: Sequence[np.ndarray]
    ) -> dict[int, list[ServerOperation]]:
        """What to push, for each server in the order of the function."""
        made: dict[int, list[ServerOperation]] = {}
        for push in self.program.pushes:
            if push.flag is not None and bool(outputs[push.flag]) != push.flag_is:
                continue
            operands = [np.asarray(outputs[i]) for i in push.operands]
            if push.lookup is not None:
                # Every replica names the same rows to change.
                operands = [ids[push.lookup][0], *operands]
            for operation in _operations(push, operands):
                home = self.homes[operation.variables[0]]
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


def _loaded(program: ShippedProgram, replicas: Replicas) -> LoadedCode:
    if not isinstance(program.main, bytes):
        return program.main.loaded(program)
    main = _callable(program.main, replicas)
    ids = None if program.ids is None else _callable(program.ids, replicas)
    return LoadedCode(program, main, ids)


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
