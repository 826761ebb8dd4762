"""Variables on a parameter server: `ServerKind`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.parameter_servers import worker
from jaxstrategy._src.parameter_servers.protocol import ServerPool
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
)
from jaxstrategy._src.replicas.replicas import (
    Replicas,
)
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Side
from jaxstrategy._src.variables.cell import AbstractCell, Holder, ServerCell
from jaxstrategy._src.variables.changes import WORDS, Change, changed
from jaxstrategy._src.variables.initial_value import Start
from jaxstrategy._src.variables.kinds.kind import SentKind, VariableKind
from jaxstrategy._src.variables.kinds.mirrored_kind import MirroredKind
from jaxstrategy._src.variables.rows import changed_rows
from jaxstrategy._src.variables.sharding_choice import ShardingChoice

_numbers = itertools.count(1 << 40)


@final
class PendingChange(Handle):
    """A value that a traced function counts up beside a variable; 0 when it begins.

    In branches and loops a trace does not tell which changes a variable will have seen.
    What was added so far, or whether it was assigned, is a value like any other there.

    Args:
      name: for messages.
      like: its shape and dtype.
      replicas: of the function.
    """

    def __init__(
        self, name: str, like: jax.ShapeDtypeStruct, replicas: Replicas
    ) -> None:
        self.number = next(_numbers)
        self._name = name
        self.dtype = np.dtype(like.dtype)
        self._replicas = replicas
        self.cell = _Type(like)

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def is_distributed(self) -> bool:
        """True."""
        return True

    @property
    def copies_must_agree(self) -> bool:
        """True."""
        return True

    @property
    def replicas(self) -> Replicas:
        """Those of the function."""
        return self._replicas

    @property
    def sharding(self) -> NamedSharding:
        """Whole on each replica."""
        return self._replicas.sharding(SAME)

    @property
    def division(self) -> LeafSharding:
        """None."""
        return LeafSharding(None, "a function counts it up")

    def lives_on(self, replicas: Replicas) -> bool:
        """Always: it has no other place."""
        return True

    def value(self) -> jax.Array:
        """What it is when the function begins."""
        return jnp.zeros(self.cell.shape, self.dtype)

    def distributed(self) -> jax.Array:
        """The same."""
        return self.value()


@final
class _Type:
    """The shape and dtype of what a trace needs no array of."""

    def __init__(self, like: jax.ShapeDtypeStruct) -> None:
        self.shape, self.dtype = like.shape, np.dtype(like.dtype)


class ExportedUpdate(NamedTuple):
    """A program of what variables hold and of operands.

    Attributes:
      key: of no other program.
      exported: in the form of `jax.export`, for CPUs.
    """

    key: str
    exported: bytes


def exported_update(
    fn: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct | ArrayLike]
) -> ExportedUpdate:
    """`fn` for operands of these types, for a server."""
    export: Any = jax.export
    jitted = jax.jit(functools.partial(_as_tuple, fn))
    types = jax.eval_shape(lambda *given: given, *operands)
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in types]
    exported = export.export(jitted, platforms=["cpu"])(*types).serialize()
    return ExportedUpdate(hashlib.sha256(exported).hexdigest(), bytes(exported))


def _as_tuple(fn: Callable[..., Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
    made = fn(*operands)
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


PREFIX = "jaxstrategy_server_"
"""An equation's name is this and the name of a `ServerOperation`."""
UPDATE = PREFIX + "update"


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which stands in a trace as one `jit` equation of this name."""

    def marked(*operands: jax.Array) -> Any:
        return fn(*operands)

    marked.__name__ = marked.__qualname__ = name
    return jax.jit(marked)


@functools.cache
def of_whole(operation: str) -> Callable[..., jax.Array]:
    """ "set", "add" or "subtract", of what a variable holds and what is given."""
    change = Change(operation, operation)
    return named(PREFIX + operation, change.applied)


class NotesChanges(Protocol):
    """A function that is traced, to be sent to workers."""

    def note(self, variable: Handle, method: str) -> None:
        """Takes note of a change of the variable that has this `added`."""
        ...


@final
class ServerKind(MirroredKind):
    """On a parameter server; changes of it are operations of the server.

    Args:
      name: the variable's.
      aggregation: of the variable.
      home: the replica that has what the coordinator reads.
      owner: the variable's strategy.
      pool: the servers.
      server: the number of the one that is to have it.
      workers: the replicas of one worker.

    Attributes:
      server: as given.
      added: in a function that is sent to workers, what it has added so far.
      is_assigned: there, whether the variable was assigned.
    """

    added: PendingChange
    is_assigned: PendingChange
    _cell: ServerCell
    has_remote_rows = True

    def __init__(
        self,
        name: str,
        aggregation: VariableAggregation,
        home: Replicas,
        owner: AbstractStrategy | None,
        pool: ServerPool,
        server: int,
        workers: Replicas,
    ) -> None:
        super().__init__(name, aggregation, home, owner)
        self.server = server
        self._pool = pool
        self._workers = workers
        self.describe = f"on parameter server {server}"

    @property
    def device(self) -> str:
        """The name that TensorFlow has for the host's memory of the server."""
        return f"/job:ps/replica:0/task:{self.server}/device:CPU:0"

    def divided(self, leaf: Shaped, choice: ShardingChoice) -> Self:
        """This kind; shards of a variable are variables of their own."""
        if choice.divides:
            raise ValueError(
                f"Variable {self.name!r} was made with `sharding`, which divides it "
                "over replicas; it is on a parameter server. Give the strategy a "
                "`variable_partitioner`, which divides variables over servers."
            )
        like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if is_key(leaf.dtype):
            raise TypeError(
                f"Variable {self.name!r} holds random keys, which parameter servers do "
                "not keep. Keep `jax.random.key_data(key)`, and make the key of it."
            )
        self._begin(like)
        return self

    def _begin(self, like: jax.ShapeDtypeStruct) -> None:
        flag = jax.ShapeDtypeStruct((), np.bool_)
        self.added = PendingChange(self.name, like, self._workers)
        self.is_assigned = PendingChange(self.name, flag, self._workers)

    def cell(self, start: Start) -> ServerCell:
        """What reads and changes it on the server."""
        value = np.asarray(start.array)
        number = self._pool.create(self.server, value)
        like = jax.ShapeDtypeStruct(value.shape, value.dtype)
        server = self._pool.servers[self.server]
        self._cell = ServerCell(server, number, like, self.name, self._pool.forget)
        return self._cell

    def sent(self) -> SentKind:
        """The server and the number there."""
        like = jax.ShapeDtypeStruct(self._cell.shape, self._cell.dtype)
        return _SentServerKind(self.server, self._cell.number, like)

    @classmethod
    def on_worker(
        cls, name: str, aggregation: VariableAggregation, sent: _SentServerKind
    ) -> ServerKind:
        """The kind of a variable that code on a worker reads, with its own cell."""
        surroundings = worker.current()
        assert surroundings is not None, "a worker takes apart what it was sent"
        home, pool = Replicas.alone(), ServerPool(surroundings.servers)
        kind = cls(name, aggregation, home, None, pool, sent.server, home)
        server = pool.servers[sent.server]
        # The coordinator says when the variable is gone.
        kind._cell = ServerCell(server, sent.number, sent.like, name, _nothing)
        return kind

    def of(
        self, owner: AbstractStrategy, pool: ServerPool, workers: Replicas
    ) -> ServerKind:
        """The same variable, of a strategy that traces functions here."""
        kind = ServerKind(
            self.name,
            self.aggregation,
            self.replicas,
            owner,
            pool,
            self.server,
            workers,
        )
        kind._cell = self._cell
        like = jax.ShapeDtypeStruct(self._cell.shape, self._cell.dtype)
        kind._begin(like)
        pool.know(self._cell.number, self.server)
        return kind

    @property
    def pending(self) -> Sequence[PendingChange]:
        """What a function that is traced has of it besides its value."""
        return self.added, self.is_assigned

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """The one."""
        return [np.asarray(held)]

    def read_rows(self, ref: Holder, side: Side, rows: np.ndarray) -> jax.Array:
        """Some rows, without the others."""
        return self._cell.rows(rows)

    def updated(
        self,
        ref: Holder,
        side: Side,
        fn: Callable[..., jax.Array],
        operands: tuple[Value, ...],
        change: Change,
    ) -> jax.Array:
        """Makes the value what `fn` makes of it, as one operation of the server."""
        arrays = [jnp.asarray(operand) for operand in operands]
        whole = self._whole_value(fn, ref)
        if self._in_step():
            # An `assign` of a part leaves the rest, so it is none of the whole.
            part = "" if change.is_whole else "[...]."
            self._note(part + change.method)
            marked = named(UPDATE, whole)
            return self._stored(ref, marked(ref[...], *arrays))
        like = jax.ShapeDtypeStruct(ref.shape, ref.dtype)
        program = exported_update(whole, [like, *arrays])
        self._push_update(program, arrays, ())
        return ref[...]

    def update_with(
        self,
        variables: Sequence[Handle],
        program: ExportedUpdate,
        operands: Sequence[jax.Array],
    ) -> None:
        """Has the server change variables, of which this kind's is the first."""
        cells = [getattr(variable, "cell", None) for variable in variables]
        others = [cell.number for cell in cells[1:] if isinstance(cell, ServerCell)]
        self._push_update(program, operands, others)

    def _push_update(
        self,
        program: ExportedUpdate,
        operands: Sequence[jax.Array],
        others: Sequence[int],
    ) -> None:
        self._pool.define(self.server, program)
        self._cell.push("update", operands, program.key, others)

    def told(self, method: str) -> None:
        """Tells the function that is traced that a method changes the variable."""
        self._note(method)

    def _whole_value(
        self, fn: Callable[..., jax.Array], ref: Holder
    ) -> Callable[..., jax.Array]:
        """`fn`, whose result the variable can take."""

        def checked(old: jax.Array, *operands: jax.Array) -> jax.Array:
            return self._checked(fn(old, *operands), ref.shape, ref.dtype)

        return checked

    def _changed(self, ref: Holder, change: Change, given: jax.Array) -> jax.Array:
        if not change.is_whole:
            return self._changed_part(ref, change, given)
        if not self._in_step():
            self._cell.push(change.operation, (given,))
            return ref[...]
        self._count(change, given)
        marked = of_whole(change.operation)
        return self._stored(ref, marked(ref[...], given))

    def _changed_part(self, ref: Holder, change: Change, given: jax.Array) -> jax.Array:
        if self._in_step() and change.operation in ("add", "subtract"):
            whole = jnp.zeros(ref.shape, ref.dtype)
            return self._changed(
                ref,
                Change(change.method, change.operation),
                changed(whole, change.index, given, "add"),
            )
        return self.updated(
            ref,
            Side.CROSS,
            lambda old, value: changed(old, change.index, value, change.operation),
            (given,),
            change,
        )

    def _count(self, change: Change, given: jax.Array) -> None:
        """Counts a change in case that it is in a branch or a loop."""
        self._note(change.method)
        if change.operation == "set":
            assigned = self._pending(self.is_assigned)
            if assigned is not None:
                assigned[...] = jnp.ones((), np.bool_)
        elif (added := self._pending(self.added)) is not None:
            added[...] = change.applied(added[...], given)

    def _note(self, method: str) -> None:
        """Tells the function that is traced what it does to the variable."""
        function = context.current().function
        if function is not None:
            cast(NotesChanges, function).note(self.added, method)

    def _pending(self, change: PendingChange) -> Holder | None:
        """What the function that is traced has of it; None outside of one."""
        step = access.tracing()
        assert step is not None, "outside of steps the server is told at once"
        return step.reference(change)

    def _changed_rows(
        self, ref: Holder, change: Change, rows: IndexedSlices
    ) -> jax.Array:
        name = WORDS[change.operation]
        if not self._in_step():
            self._cell.push(f"scatter_{name}", (rows.indices, rows.values))
            return ref[...]
        (new,) = changed_rows(name, rows.indices, rows.values, (ref[...],))
        return self.rows_changed(ref, rows, change, new)

    def rows_changed(
        self, ref: Holder, rows: IndexedSlices, change: Change, new: jax.Array
    ) -> jax.Array:
        """Takes the value that a change of the rows has made, which the server makes.

        Of rows beyond those of the variable, nothing is added.
        """
        self._note(f"scatter_{WORDS[change.operation]}")
        added = self._pending(self.added)
        if added is not None and change.operation in ("add", "subtract"):
            added[...] = changed(
                added[...], rows.indices, rows.values, change.operation
            )
        return self._stored(ref, new)


@final
@dataclasses.dataclass(frozen=True)
class _SentServerKind(SentKind):
    server: int
    number: int
    like: jax.ShapeDtypeStruct

    def on_worker(
        self, name: str, aggregation: VariableAggregation
    ) -> tuple[VariableKind, AbstractCell]:
        kind = ServerKind.on_worker(name, aggregation, self)
        return kind, kind._cell


def _nothing(number: int) -> None:
    return None


def server_kind_of(variable: Handle | Replicas | None) -> ServerKind | None:
    """How a variable is kept on its server; None of one that is elsewhere."""
    kind = getattr(variable, "_kind", None)
    return kind if isinstance(kind, ServerKind) else None
