"""`Variable`: a value that changes, and knows how it is replicated."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self, cast, final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxstrategy._src import text as _html
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.parameter_servers import worker
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import local_copy
from jaxstrategy._src.replicas.replicas import REPLICATED, Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.text import array_type, shown, with_noun
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import Index, Leaf, Value
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access, initial_value as _initial
from jaxstrategy._src.variables.access import Access, Side, StepVariables
from jaxstrategy._src.variables.changes import (
    UPDATE,
    Change,
    VariableLike,
    VariablePart,
)
from jaxstrategy._src.variables.kinds import Wanted, check_aggregation
from jaxstrategy._src.variables.policy import ORDINARY, VariablePolicy
from jaxstrategy._src.variables.remote_kinds import per_worker_kind_of, server_kind_of
from jaxstrategy._src.variables.rows import looked_up
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.sharding_choice import ShardingChoice, VariableSharding

_numbers = itertools.count()
_ON_READ = VariableSynchronization.ON_READ


@final
@jax.tree_util.register_pytree_node_class
class Variable(VariableLike, Handle):
    """A value that steps read and change in place, replicated as its strategy says.

    Made inside `strategy.scope()` it belongs to that strategy; made outside any, it
    is one copy on JAX's default device, which steps of every strategy may use. Read
    and assigned by closure or as an argument: in `run` each replica works on its own
    copy, outside on all of them.

    A *mirrored* variable (synchronization AUTO or ON_WRITE) is equal on all replicas.
    What replicas assign to it is first combined as `aggregation` says; with NONE it
    must be equal already, which is proved when the step is traced. An *on-read* one has
    a copy per replica, which the replica changes freely; reading it outside `run`
    combines the copies.

    A step uses the variables that it found when it was traced, as long as these live:
    one that takes another's place is found when the other is gone. A step keeps no
    variable alive; its function may.

    In arithmetic, comparisons and `jnp` functions a variable stands for its value; only
    two variables are equal if they are the same one. `v[1:3]` is the value of a part,
    and `v[1:3].assign(x)` changes it.

    Args:
      initial_value: an array, a number, nested lists of numbers, or a function without
        arguments that returns one. Every copy starts with it.
      trainable: for your own use; on-read variables are not.
      dtype: of the value, by default that of `initial_value`.
      name: for messages; names need not differ.
      synchronization: a `VariableSynchronization` or its name.
      aggregation: a `VariableAggregation` or its name.
      sharding: whether each replica keeps a part of a mirrored variable, instead of all
        of it: the number of the dimension that is divided; a `StateSharding`, which
        says from which size on, and takes the name for the path; a partitioner, as
        `experimental.partitioners` has them; or "whole". By default, with a strategy
        of `StateSharding("state")`, as that says, and else whole: a variable does not
        say whether it is an optimizer's. Steps and their numbers stay what they are.
        A function for `initial_value` is then traced by JAX, so that of a large array
        (over 64 MiB) each device makes its part only; one that looks at numbers is
        called again without. A `PartitionSpec` over the logical axes of the strategy
        says how each replica's devices divide a copy; by default they do as they
        divide `initial_value`.
      per_worker_variable: whether each worker of a `ParameterServerStrategy` has a
        copy in its memory, which only functions scheduled on it read and change;
        `read_all()` reads all copies. A worker that is started again begins with the
        initial value.
      shape: of the value, if you say it. A function for `initial_value` that can make a
        part of it, `partition_shape=` from `partition_offset=` on, need not make all
        if it, and `dtype`, are known before.

    In the scope of a strategy with a partitioner (`variable_partitioner` of a
    `ParameterServerStrategy`) it is an `experimental.ShardedVariable`, of variables
    `NAME/part_0` and so on, if the partitioner wants several shards of its shape.

    Raises:
      ValueError: synchronization NONE, or no such synchronization or aggregation; an
        aggregation that the dtype has not (MEAN of integers); made inside a step that
        was traced before; a dimension that it has not, or that cannot be divided
        equally; `sharding` of an on-read variable.
      TypeError: `initial_value` is not an array or number; `sharding` is no choice.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     total = js.Variable(0.0, name="total", aggregation="sum")
    >>> @strategy.run
    ... def step(x):
    ...     total.assign_add(x)
    >>> step(strategy.per_replica([1.0, 2.0]))
    >>> total
    Variable 'total' float32[] mirrored on 2 replicas: 3.0
    >>> total + 1
    Array(4., dtype=float32)
    >>> with strategy.scope():
    ...     table = js.Variable(lambda: jnp.zeros((6, 2)), name="table", sharding=0)
    >>> table.shape, table.sharding.shard_shape(table.shape)
    ((6, 2), (3, 2))
    """

    # Made before, by `__new__`, if a partitioner has asked for its shape.
    _start: _initial.Start | None = None

    def __new__(
        cls,
        initial_value: _initial.InitialValue = None,
        trainable: bool | None = None,
        dtype: DTypeLike | None = None,
        name: str = "Variable",
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        *,
        sharding: VariableSharding = None,
        per_worker_variable: bool = False,
        shape: Sequence[int] | None = None,
    ) -> Self:
        """A `ShardedVariable`, if the current strategy's partitioner says so."""
        made = object.__new__(cls)
        partitioner = _policy().partitioner
        has_copies = _kept(synchronization, aggregation)[0] is _ON_READ
        has_copies |= per_worker_variable
        is_colocated = context.current().colocated is not None
        if partitioner is None or sharding is not None or has_copies or is_colocated:
            return made
        with context.outside():
            plan = _initial.shard_plan(partitioner, initial_value, shape, dtype, name)
        if isinstance(plan, _initial.Start):
            made._start = plan
            return made
        shards = []
        for number, value in enumerate(plan):
            shard = object.__new__(cls)
            part = f"{name}/part_{number}"
            shard.__init__(value, trainable, dtype, part, synchronization, aggregation)
            shards.append(shard)
        return cast(Self, ShardedVariable(shards, name))

    def __init__(
        self,
        initial_value: _initial.InitialValue,
        trainable: bool | None = None,
        dtype: DTypeLike | None = None,
        name: str = "Variable",
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        *,
        sharding: VariableSharding = None,
        per_worker_variable: bool = False,
        shape: Sequence[int] | None = None,
    ) -> None:
        self._synchronization, self._aggregation = _kept(synchronization, aggregation)
        if self._synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "`synchronization` was NONE, which no strategy can keep. Use ON_WRITE "
                "for a value that is equal on all replicas, ON_READ for one that each "
                "replica has of its own."
            )
        on_read = self._synchronization is _ON_READ
        choice = ShardingChoice(name, sharding)
        if on_read and choice.divides:
            raise ValueError(
                f"Variable {name!r} was made with synchronization ON_READ, a copy for "
                f"each replica, and with `sharding` {shown(sharding)}, which divides "
                "one value over them. Leave one of both out."
            )
        self._name = name
        self._trainable = not on_read if trainable is None else bool(trainable)
        self.number = next(_numbers)
        policy = _policy()
        self._strategy = context.current().strategy if policy.are_owned else None
        said = self._aggregation, self._strategy, on_read, per_worker_variable
        kind = policy.kind(Wanted(name, *said))
        step = access.tracing()
        if step is not None and not step.may_create:
            raise ValueError(
                f"Variable {name!r} was made inside a step that is traced again: a "
                "step may make variables the first time it is traced, and must use the "
                "same ones afterwards. Make it outside the step, or once: "
                "`if self.v is None: self.v = Variable(...)`. "
                "`compat.v1.get_variable(name, ...)` makes it once, too."
            )
        may_divide = not on_read and choice.may_divide(kind.replicas)
        with context.outside():
            start = self._start
            if start is None:
                start = _initial.start_of(initial_value, dtype, name, may_divide)
            _initial.check_shape(shape, start.type, name)
        self._start = None
        # In a step, too: a cell outlives it, and must hold numbers and no tracers.
        with jax.ensure_compile_time_eval(), context.outside():
            self._shape, self._dtype = start.type.shape, start.type.dtype
            check_aggregation(self._aggregation, self._dtype, name)
            self._cell = kind.begin(start, choice)
        self._kind = kind
        if step is not None:
            step.create(self, kind.of_one_replica(start))
        # Last: another thread that traces a step takes whatever is registered.
        access.add(self, self._strategy)

    # What no assignment changes.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The moment at which its copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The operation that makes one value of its copies, or of those assigned."""
        return self._aggregation

    @property
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for ordinary variables."""
        return self._strategy

    # Where it is.

    @property
    def replicas(self) -> Replicas:
        """The replicas that have a copy each; one for an ordinary variable."""
        return self._kind.replicas

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold its copies, in replica order."""
        return self._kind.replicas.devices

    @property
    def device(self) -> Device | str:
        """The device that holds the first of its copies; the name of one elsewhere."""
        return self._kind.device

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that hold its copies."""
        return self._kind.replicas.mesh

    @property
    def sharding(self) -> NamedSharding:
        """The placement of the copies."""
        return self._kind.sharding

    @property
    def sharding_of_value(self) -> NamedSharding:
        """The placement of a value that all copies take."""
        return self._kind.sharding_of_value

    @property
    def division(self) -> LeafSharding:
        """The dimension along which it is divided over the replicas, or why none is."""
        return self._kind.division

    @property
    def copies_must_agree(self) -> bool:
        """Whether it has no copies that may differ."""
        return self._kind.copies_must_agree

    def lives_on(self, replicas: Replicas) -> bool:
        """Whether steps of these replicas can work on it where it is."""
        return self._strategy is not None and self._kind.replicas == replicas

    @property
    def cell(self) -> access.Cell:
        """The holder of all copies, outside of steps."""
        return self._cell

    # Its value.

    def value(self) -> jax.Array:
        """The value: in `run` this replica's, outside that of all replicas.

        It has the shape of the variable.
        In `extended.update` it is that of the copy which is updated.

        Raises:
          ValueError: outside `run`, an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        given = access.value_of(self) if context.current().differentiated else None
        if given is not None:
            return given
        with access.exclusively():
            return self._kind.read(self._access())

    def numpy(self) -> np.ndarray:
        value = self.value()
        if arrays.is_placed(value) and mesh.is_spread(value):
            value = local_copy(value)
            if mesh.is_spread(value):
                value = mesh.place(value, self.replicas.sharding(REPLICATED))
        return np.asarray(value)

    def __getitem__(self, index: Index) -> VariablePart:
        try:
            return VariablePart(self.value()[index], index, self._write)
        except OverflowError:
            raise ValueError(f"The index {mesh.too_large(index)}") from None

    def rows_at(self, ids: jax.Array) -> jax.Array:
        if self._kind.has_remote_rows:
            return looked_up((self,), ids)
        return self.value()[ids]

    def _remote_rows(self, numbers: np.ndarray) -> jax.Array:
        """Some rows of one that is on a server, outside of steps."""
        self._access()
        kind = server_kind_of(self)
        assert kind is not None, "the others are read whole"
        return kind.cell.rows(numbers)

    def distributed(self) -> jax.Array | PerReplica:
        """All copies: a mirrored array `[...]`, or a `PerReplica` if it is on-read.

        Raises:
          ContextError: in another strategy's scope or `run`.
        """
        with access.exclusively():
            return self._kind.copies(self._access())

    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        return self._change_by(self._kind.write, value, change)

    def _change_rows(self, rows: IndexedSlices, change: Change) -> Value:
        return self._change_by(self._kind.scatter, rows, change)

    def update(self, fn: Callable[..., jax.Array], *operands: Value) -> Value:
        """Makes it what `fn` makes of its value, and returns the new value.

        On a parameter server nobody else reads or changes it meanwhile, where reading
        it and assigning what became of it would lose what others do in between.

        Args:
          fn: of the value and the operands; returns an array of the variable's shape.
            It may be traced by JAX, and must change nothing else.
          operands: arrays and numbers.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.

        >>> import jaxstrategy as js
        >>> v = js.Variable([1.0, 2.0])
        >>> v.update(lambda old, factor: factor * old, 3.0)
        Array([3., 6.], dtype=float32)
        """
        return self._change_by(self._kind.updated, fn, operands, UPDATE)

    def _change_by(
        self, make: Callable[..., jax.Array | PerReplica], *given: Value
    ) -> jax.Array | PerReplica:
        now = context.current()
        if now.differentiated and access.value_of(self) is not None:
            raise ValueError(
                f"Variable {self._name!r} was assigned inside the function whose "
                "gradient with respect to it is taken. Assign it afterwards."
            )
        if now.local is not None:
            now.local.assigned[id(self)] = self
        with access.exclusively():
            at = self._access()
            if now.before is not None and not at.in_step:
                access.about_to_change(self._cell, now.before)
            try:
                return make(at, *given)
            except Exception as error:
                access.check_not_mapped(error, self._name)
                raise

    def _access(self) -> Access:
        now = context.current()
        other = now.strategy
        if other is not self._strategy and other is not None:
            if self._strategy is not None and other._variable_policy.are_owned:
                where = "a step" if now.in_step else "the scope"
                raise ContextError(
                    f"Variable {self._name!r} belongs to {self._strategy!r}, but was "
                    f"used in {where} of {other!r}. Make it in the scope of the "
                    "strategy that uses it, or outside of any scope."
                )
        side = Side.UPDATE if now.updated else Side.CROSS
        if now.replica is not None:
            side = Side.REPLICA
        step = now.variables if now.in_step else None
        if step is None:
            return Access(self._cell, side, False)
        holder = cast(StepVariables, step).reference(self)
        assert holder is not None, "variables are made before the step or by it"
        return Access(holder, side, True)

    def read_all(self) -> list[jax.Array]:
        """The present value of the copy of each worker, in the order of the workers.

        Only of a variable made with `per_worker_variable=True`. Each worker is asked
        between two functions; of one that was lost it waits until it is back, with the
        value that the variable began with.

        Returns:
          An array of the variable's shape for each worker.

        Raises:
          TypeError: it is another variable, which has one value.
          ContextError: in a scheduled function, or without a `ClusterCoordinator`.
        """
        kind = per_worker_kind_of(self)
        if kind is None:
            raise TypeError(
                f"`read_all` was called of variable {self.name!r}, of which workers "
                "have no copies of their own: `value()` is its value. With "
                "`per_worker_variable=True`, in the scope of a "
                "ParameterServerStrategy, they have."
            )
        return kind.read_all()

    # How it prints and copies.

    def __repr__(self) -> str:
        kind = "" if self._strategy is None else f" {self._kind.describe}"
        head = f"Variable {self._name!r} {array_type(self._dtype.name, self._shape)}"
        if (eager := context.current().eager) is not None:
            own = per_replica.value_text(np.asarray(self.numpy()))
            return f"<{head}{kind}, on replica {eager.number}: {own}>"
        copies = self._copies_here()
        if copies is None:
            is_traced = access.tracing() is not None or self._kind.is_readable
            return f"<{head}{kind}{', being traced' if is_traced else ''}>"
        if self._strategy is None:
            return f"<{head} {per_replica.value_text(copies[0])}>"
        if self._are_equal(copies):
            number = with_noun(self.replicas.count, "replica")
            text = per_replica.value_text(copies[0])
            gap = "\n" if "\n" in text else " "
            return f"{head}{kind} on {number}:{gap}{text}"
        numbered = zip(self.replicas.local_ids, copies, strict=True)
        lines = (f"  {i}: {per_replica.value_text(copy)}" for i, copy in numbered)
        return f"{head}{kind}, {{\n" + ",\n".join(lines) + "\n}"

    def _are_equal(self, copies: Sequence[np.ndarray]) -> bool:
        """Whether they should be, and are, so that one of them says all."""
        if not self.copies_must_agree or not self.division.is_whole:
            return False
        return len({copy.tobytes() for copy in copies}) == 1

    def _copies_here(self) -> list[np.ndarray] | None:
        """The copies of this process; None in a trace, or if it has none."""
        if access.tracing() is not None or not self._kind.is_readable:
            return None
        with access.one_at_a_time:
            held = self._cell[...]
        return None if isinstance(held, Tracer) else self._kind.host_copies(held)

    def _repr_html_(self) -> str:
        copies, replicas = self._copies_here(), self.replicas
        if copies is None:
            return f"<code>{html.escape(repr(self))}</code>"
        kind = self._kind.describe if self._strategy else "of no strategy"
        type_ = array_type(self._dtype.name, self._shape)
        title = f"Variable `{self._name}` {type_}, {kind}"
        if self._strategy is None or self._are_equal(copies):
            equal = f"equal on {with_noun(replicas.count, 'replica')}, "
            where = f"{equal if replicas.count > 1 else 'on '}{replicas.device_names}"
            text = html.escape(per_replica.value_text(copies[0]))
            value = f'<pre style="margin:.3em 0;color:inherit">{text}</pre>'
            return _html.page(title, [_html.paragraph(where), value])
        rows = [
            (
                number,
                replicas.device_names_of(number),
                per_replica.line_of_value(copy) or array_type(copy.dtype, copy.shape),
            )
            for number, copy in zip(replicas.local_ids, copies, strict=True)
        ]
        return _html.rows_of(title, ("replica", "device", "copy"), rows)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> Value:
        # By identity between two, so that lists and sets of variables find them.
        return self is other if isinstance(other, Variable) else super().__eq__(other)

    def __ne__(self, other: object) -> Value:
        is_variable = isinstance(other, Variable)
        return self is not other if is_variable else super().__ne__(other)

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        if access.tracing() is not None:
            raise ContextError(
                f"Variable {self._name!r} was deep-copied inside a step. Copy it "
                "outside, and use both in the step."
            )
        if isinstance(self._cell, access.RemoteCell):
            raise RuntimeError(
                f"Variable {self._name!r} is {self._kind.describe}, and cannot be "
                "copied with what holds it. Make another one in the scope of its "
                "strategy: `Variable(variable.numpy())`."
            )
        twin = object.__new__(Variable)
        memo[id(self)] = twin
        with access.one_at_a_time, jax.ensure_compile_time_eval():
            vars(twin).update(vars(self))
            # They share the array until one lends it: what was read is copied then.
            twin.number, twin._cell = next(_numbers), access.Cell(self._cell[...])
        access.add(twin, self._strategy)
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        if context.current().is_shipping:
            names = ("_name", "_trainable", "_synchronization", "_aggregation")
            names = (*names, "_shape", "_dtype")
            kept = {name: getattr(self, name) for name in names}
            return _on_worker, (self._name, self._kind.sent(), kept)
        self._cannot_be_pickled()

    def _adopt(self, strategy: AbstractStrategy) -> None:
        """Makes it a variable of a strategy, on a worker that traces functions."""
        self._strategy = strategy
        _policy_of(strategy).adopt(self._kind, strategy)
        access.add(self, strategy)

    # To JAX it is a node around its value, and comes back as that.

    def tree_flatten(self) -> tuple[tuple[jax.Array | PerReplica], None]:
        """The value, for JAX; all copies of a variable that has no one value."""
        now = context.current()
        is_of_all = now.replica is None and not now.updated
        has_one = not is_of_all or self._kind.has_one_value
        return (self.value() if has_one else self.distributed(),), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: tuple[Leaf]) -> Leaf:
        """The array that takes its place in a pytree."""
        return children[0]


def _on_worker(
    name: str, sent: tuple[Any, ...], attributes: dict[str, Any]
) -> Variable:
    """The variable on a worker to which something was sent that refers to it."""
    variable = object.__new__(Variable)
    vars(variable).update(attributes)
    variable.number, variable._strategy = next(_numbers), None
    make, *details = sent
    variable._kind = kind = make(name, variable._aggregation, *details)
    variable._cell = kind.cell
    if (arrived := context.current().unpickled) is not None:
        arrived.append(variable)
    return variable


def _kept(
    synchronization: VariableSynchronization | str,
    aggregation: VariableAggregation | str | None,
) -> tuple[VariableSynchronization, VariableAggregation]:
    """How a variable is kept: as it says, or else as the context says."""
    own = (
        VariableSynchronization(synchronization),
        VariableAggregation("none" if aggregation is None else aggregation),
    )
    around = context.current().new_variables
    is_open = own == (VariableSynchronization.AUTO, VariableAggregation.NONE)
    return around if around is not None and is_open else own


def _policy() -> VariablePolicy:
    """That of the current strategy."""
    if worker.current() is not None:
        raise ValueError(
            "Creating variables in `dataset_fn` is not allowed: workers call it, and "
            "again when they were lost. Make the variable outside, in the scope of the "
            "strategy; the function may read it."
        )
    strategy = context.current().strategy
    return ORDINARY if strategy is None else _policy_of(strategy)


def _policy_of(strategy: AbstractStrategy) -> VariablePolicy:
    policy = strategy._variable_policy
    assert isinstance(policy, VariablePolicy), "which contexts know in part only"
    return policy
