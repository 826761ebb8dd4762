"""Variables that are elsewhere: on a parameter server, or a copy on each worker."""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import ArrayLike

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.parameter_servers import protocol, worker
from jaxstrategy._src.parameter_servers.store import ServerPool, Store
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.reductions.rows import named
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.values.arrays import Value, is_traced
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Access, RemoteCell
from jaxstrategy._src.variables.changes import WORDS, Change, changed
from jaxstrategy._src.variables.initial_value import Start
from jaxstrategy._src.variables.kinds import VariableKind, Wanted
from jaxstrategy._src.variables.rows import changed_rows
from jaxstrategy._src.variables.sharding_choice import ShardingChoice


@final
class ServerCell(RemoteCell):
    """Read and written like a `Cell`, with `[...]`, and by operations of the server."""

    def __init__(
        self,
        server: Store,
        number: int,
        like: jax.ShapeDtypeStruct,
        name: str,
        forget: Callable[[int], object],
    ) -> None:
        super().__init__(
            like,
            f"Variable {name!r} is on a parameter server, and was used in a "
            "function that JAX traces (`jax.jit`, `jax.lax.scan`, `jax.grad`), which "
            "would hold its value of that moment for ever. Schedule the function with "
            "a `ClusterCoordinator`, or pass it `variable.value()`.",
        )
        self.server = server
        self.number = number
        weakref.finalize(self, forget, number).atexit = False

    def __getitem__(self, index: object) -> jax.Array:
        return self.rows(None)

    def __setitem__(self, index: object, value: jax.Array) -> None:
        self.push("set", (value,))

    def rows(self, rows: np.ndarray | None) -> jax.Array:
        """Some rows; raises `IndexError` for those that there are not. None: all."""
        self._check_reachable()
        (value,) = self.server.read([protocol.Read(self.number, rows)])
        with jax.ensure_compile_time_eval():
            return jnp.asarray(value)

    def push(
        self,
        name: str,
        operands: Sequence[jax.Array | np.ndarray],
        program: str = "",
        others: Sequence[int] = (),
    ) -> None:
        """Make one change; see `ServerOperation`."""
        self._check_reachable()
        arrays = tuple(np.asarray(operand) for operand in operands)
        numbers = (self.number, *others)
        self.server.push([protocol.ServerOperation(name, numbers, arrays, program)])

    def _check_reachable(self) -> None:
        """Raise where what is traced now would hold what the server had once."""
        if is_traced() and not context.current().is_initial:
            raise ContextError(self._refusal)


_numbers = itertools.count(1 << 40)


@final
class PendingChange(Handle):
    """A value that a traced function counts up beside a variable; 0 when it begins.

    In branches and loops a trace does not tell which changes a variable will have seen.
    What was added so far, or whether it was assigned, is a value like any other there.
    """

    def __init__(
        self, name: str, like: jax.ShapeDtypeStruct, replicas: Replicas
    ) -> None:
        self.number = next(_numbers)
        self.dtype = np.dtype(like.dtype)
        self.cell = RemoteCell(like, f"{name!r} is nowhere")
        self.sharding: NamedSharding = replicas.sharding(REPLICATED)
        self._name = name
        self._replicas = replicas

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def copies_must_agree(self) -> bool:
        return True

    @property
    def replicas(self) -> Replicas:
        return self._replicas

    @property
    def division(self) -> LeafSharding:
        return LeafSharding(None, "a function counts it up")

    def lives_on(self, replicas: Replicas) -> bool:
        """Always: it has no other place."""
        return True

    def value(self) -> jax.Array:
        return jnp.zeros(self.cell.shape, self.dtype)

    def distributed(self) -> jax.Array:
        return self.value()


class ExportedUpdate(NamedTuple):
    """A program of what variables hold and of operands."""

    key: str  # of no other program
    exported: bytes  # in the form of `jax.export`, for CPUs


def exported_update(
    fn: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct | ArrayLike]
) -> ExportedUpdate:
    """`fn` for operands of these types, for a server."""

    def as_tuple(*operands: jax.Array) -> tuple[jax.Array, ...]:
        made = fn(*operands)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)

    export: Any = jax.export
    types = map(_type_of, jax.eval_shape(lambda *given: given, *operands))
    exported = export.export(jax.jit(as_tuple), platforms=["cpu"])(*types).serialize()
    return ExportedUpdate(hashlib.sha256(exported).hexdigest(), bytes(exported))


PREFIX = "jaxstrategy_server_"
"""An equation's name is this and the name of a `ServerOperation`."""
UPDATE = PREFIX + "update"


# Of what a variable holds and what is given.
_OF_WHOLE = {
    operation: named(PREFIX + operation, Change(operation, operation).applied)
    for operation in ("set", "add", "subtract")
}


@final
class ServerKind(VariableKind):
    """On a parameter server; changes of it are operations of the server."""

    has_remote_rows = True
    cell: ServerCell  # what reads and changes it

    def __init__(
        self,
        wanted: Wanted,
        home: Replicas,  # of what the coordinator reads
        pool: ServerPool,
        server: int,
        workers: Replicas,  # of one of them
    ) -> None:
        super().__init__(wanted, home)
        self.server = server
        self._pool = pool
        self._workers = workers
        self.describe = f"on parameter server {server}"

    @property
    def device(self) -> str:
        # The name that TensorFlow has for the host's memory of the server.
        return f"/job:ps/replica:0/task:{self.server}/device:CPU:0"

    def begin(self, start: Start, choice: ShardingChoice) -> ServerCell:
        if choice.divides:
            raise ValueError(
                f"Variable {self.name!r} was made with `sharding`, which divides it "
                "over replicas; it is on a parameter server. Give the strategy a "
                "`variable_partitioner`, which divides variables over servers."
            )
        _check_no_keys(start, self.name, "parameter servers")
        value, pool = np.asarray(start.array), self._pool
        number, server = pool.create(self.server, value), pool.servers[self.server]
        self.cell = ServerCell(server, number, _type_of(value), self.name, pool.forget)
        self._count_changes()
        return self.cell

    def _count_changes(self) -> None:
        # In a function that is sent to workers.
        flag = jax.ShapeDtypeStruct((), np.bool_)
        self.added = PendingChange(self.name, _type_of(self.cell), self._workers)
        self.is_assigned = PendingChange(self.name, flag, self._workers)

    def sent(self) -> tuple[object, ...]:
        return _on_worker, self.server, self.cell.number, _type_of(self.cell)

    def adopt(
        self, owner: AbstractStrategy, pool: ServerPool, workers: Replicas
    ) -> None:
        """Makes it one of a strategy that traces functions here."""
        self.owner, self._pool, self._workers = owner, pool, workers
        self._count_changes()
        pool.know(self.cell.number, self.server)

    @property
    def pending(self) -> Sequence[PendingChange]:
        """What a function that is traced has of it besides its value."""
        return self.added, self.is_assigned

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        return [np.asarray(held)]

    def updated(
        self,
        at: Access,
        fn: Callable[..., jax.Array],
        operands: tuple[Value, ...],
        change: Change,
    ) -> jax.Array:
        """Makes the value what `fn` makes of it, as one operation of the server."""
        holder, shape, dtype = at.holder, at.holder.shape, at.holder.dtype
        arrays = [jnp.asarray(operand) for operand in operands]

        def checked(old: jax.Array, *operands: jax.Array) -> jax.Array:
            return self._checked(fn(old, *operands), shape, dtype)

        if not at.in_step:
            like = jax.ShapeDtypeStruct(shape, dtype)
            self.push_update(exported_update(checked, [like, *arrays]), arrays)
            return holder[...]
        # An `assign` of a part leaves the rest, so it is none of the whole.
        self.note(change.method if change.is_whole else f"[...].{change.method}")
        # What is changed comes last: JAX puts what `fn` captures before all operands.
        update = named(UPDATE, lambda *given: checked(given[-1], *given[:-1]))
        return self._stored(at, update(*arrays, holder[...]))

    def push_update(
        self,
        program: ExportedUpdate,
        operands: Sequence[jax.Array],
        others: Sequence[int] = (),
    ) -> None:
        """Has the server change the variable, and those of these numbers with it."""
        self._pool.define(self.server, program.key, program.exported)
        self.cell.push("update", operands, program.key, others)

    def _changed(self, at: Access, change: Change, given: jax.Array) -> jax.Array:
        operation = change.operation
        if not change.is_whole and at.in_step and operation in ("add", "subtract"):
            # Of the whole it adds up with others, wherever in the function they are.
            zeros = jnp.zeros(at.holder.shape, at.holder.dtype)
            given = changed(zeros, change.index, given, "add")
            change = change.of_part(...)
        if not change.is_whole:
            return self.updated(at, change.applied, (given,), change)
        if not at.in_step:
            self.cell.push(operation, (given,))
            return at.holder[...]
        # Counted, in case that it is in a branch or a loop.
        self.note(change.method)
        if operation == "set":
            if (assigned := self._pending(self.is_assigned)) is not None:
                assigned[...] = jnp.ones((), np.bool_)
        elif (added := self._pending(self.added)) is not None:
            added[...] = change.applied(added[...], given)
        return self._stored(at, _OF_WHOLE[operation](at.holder[...], given))

    def note(self, method: str) -> None:
        """Tells the function that is traced that a method changes the variable."""
        function: Any = context.current().function
        if function is not None:
            function.note(self.added, method)

    def _pending(self, change: PendingChange) -> access.Holder | None:
        """What the function that is traced has of it; None outside of one."""
        step = access.tracing()
        assert step is not None, "outside of steps the server is told at once"
        return step.reference(change)

    def _changed_rows(
        self, at: Access, change: Change, rows: IndexedSlices
    ) -> jax.Array:
        name = WORDS[change.operation]
        if not at.in_step:
            self.cell.push(f"scatter_{name}", (rows.indices, rows.values))
            return at.holder[...]
        (new,) = changed_rows(name, rows.indices, rows.values, (at.holder[...],))
        return self.rows_changed(at, rows, change, new)

    def rows_changed(
        self, at: Access, rows: IndexedSlices, change: Change, new: jax.Array
    ) -> jax.Array:
        """Takes the value after a change of rows, which the server makes."""
        self.note(f"scatter_{WORDS[change.operation]}")
        added, operation = self._pending(self.added), change.operation
        if added is not None and operation in ("add", "subtract"):
            added[...] = changed(added[...], rows.indices, rows.values, operation)
        return self._stored(at, new)


def _on_worker(
    name: str,
    aggregation: VariableAggregation,
    server: int,
    number: int,
    like: jax.ShapeDtypeStruct,
) -> ServerKind:
    """The kind of a variable that code on a worker reads, with its own cell."""
    surroundings = worker.current()
    assert surroundings is not None, "a worker takes apart what it was sent"
    home, pool = Replicas.alone(), ServerPool(surroundings.servers)
    kind = ServerKind(Wanted(name, aggregation), home, pool, server, home)
    # The coordinator says when the variable is gone.
    kind.cell = ServerCell(pool.servers[server], number, like, name, lambda _: None)
    return kind


def _check_no_keys(start: Start, name: str, where: str) -> None:
    if is_key(start.type.dtype):
        raise TypeError(
            f"Variable {name!r} holds random keys, which {where} do not keep. Keep "
            "`jax.random.key_data(key)`, and make the key of it."
        )


def _type_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def server_kind_of(variable: Handle | Replicas | None) -> ServerKind | None:
    """How a variable is kept on its server; None of one that is elsewhere."""
    kind = getattr(variable, "_kind", None)
    return kind if isinstance(kind, ServerKind) else None


# Variables with a copy on each worker of a coordinator.


ReadCopies = Callable[[WorkerResource], list[np.ndarray]]
"""What each worker has of a resource, in the order of the workers."""


@final
class PerWorkerKind(VariableKind):
    """A copy in the memory of each worker, which its functions read and change."""

    describe = "with a copy on each worker"
    is_readable = False
    cell: RemoteCell
    resource: WorkerResource

    def __init__(
        self,
        wanted: Wanted,
        home: Replicas,
        reader: Callable[[], ReadCopies | None],  # None while there is no coordinator
    ) -> None:
        super().__init__(wanted, home)
        self._reader = reader

    @property
    def device(self) -> str:
        return "/job:worker/device:CPU:0"  # TensorFlow's name for the workers' memory

    def begin(self, start: Start, choice: ShardingChoice) -> RemoteCell:
        """The copies; a worker makes its own when it needs it."""
        if choice.divides:
            raise ValueError(
                f"Variable {self.name!r} was made with `sharding` and with "
                "`per_worker_variable=True`. Leave one of both out: each worker has "
                "all of its copy."
            )
        _check_no_keys(start, self.name, "workers")
        value = np.array(start.array)
        self.resource = WorkerResource(functools.partial(_first_copy, value))
        return self.hold(_type_of(value))

    def hold(self, like: jax.ShapeDtypeStruct) -> RemoteCell:
        """What only functions of a worker read and change."""
        self.cell = RemoteCell(
            like,
            f"Variable {self.name!r} was made with `per_worker_variable=True`, and "
            "was read or changed outside of a scheduled function, where it has no "
            "value: each worker has a copy. `read_all()` reads all of them; functions "
            "that a `ClusterCoordinator` schedules read and change that of their "
            "worker.",
        )
        return self.cell

    def sent(self) -> tuple[object, ...]:
        return _of_worker, self.resource.number, _type_of(self.cell)

    def read_all(self) -> list[jax.Array]:
        """What each worker has."""
        read = self._reader()
        if context.current().function is not None:
            raise ContextError(
                f"`read_all` of variable {self.name!r} was called in a scheduled "
                "function, which sees the copy of its own worker only: `value()`."
            )
        if read is None:
            raise ContextError(
                f"`read_all` of variable {self.name!r} was called before there are "
                "workers that have copies of it. Make the "
                "`coordinator.ClusterCoordinator(strategy)` first."
            )
        return [jnp.asarray(copy) for copy in read(self.resource)]


def _first_copy(value: np.ndarray, index: int) -> np.ndarray:
    """The copy that worker `index` begins with; in processes, this is sent there."""
    return value


def _of_worker(
    name: str,
    aggregation: VariableAggregation,
    number: int,
    like: jax.ShapeDtypeStruct,
) -> PerWorkerKind:
    """The kind of a variable for functions that a worker traces."""
    kind = PerWorkerKind(Wanted(name, aggregation), Replicas.alone(), lambda: None)
    # The worker has built it for the coordinator, who says when it is gone.
    kind.resource = WorkerResource(_refused, number=number)
    kind.hold(like)
    return kind


def _refused(index: int) -> NoReturn:
    raise RuntimeError("The coordinator has this variable built, and no function.")


def per_worker_kind_of(variable: Handle | None) -> PerWorkerKind | None:
    """How a variable is kept that each worker has a copy of; None of others."""
    kind = getattr(variable, "_kind", None)
    return kind if isinstance(kind, PerWorkerKind) else None
