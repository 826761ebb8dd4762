"""What reads and changes of a variable do, by its kind and by where the code runs.

|          | outside           | in `run`      | in `merge_call` | in `update`   |
|----------|-------------------|---------------|-----------------|---------------|
| mirrored | the value         | the value     | the value       | the value     |
| changes  | all copies alike  | the aggregate | all alike       | all alike     |
| on read  | copies combined   | own copy      | copies combined | own copy      |
| changes  | a share for each  | own copy      | a share for each| own copy      |

`remote_kinds` has those that are elsewhere. `Access` says where code runs, and holds
what it works on: inside a step one replica's copy, outside all copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context, replica_context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import ReduceOp, VariableAggregation
from jaxstrategy._src.processes import job
from jaxstrategy._src.reductions.operations import OPERATIONS
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.replicas import inner_axes, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import sharding_like, with_inner
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import STACKED, Replicas, sharded_along
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.text import shown
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.variables.access import Access, Cell, NeedsProgram, Side
from jaxstrategy._src.variables.changes import Change, changed
from jaxstrategy._src.variables.initial_value import Start, is_host_array
from jaxstrategy._src.variables.sharding_choice import ShardingChoice

# How those are reduced that are; of the others one counts.
_REDUCED = {
    VariableAggregation[op.name]: op
    for op in ReduceOp
    if op.name in VariableAggregation.__members__
}


def check_aggregation(
    aggregation: VariableAggregation, dtype: np.dtype, name: str
) -> None:
    """Raise unless values of `dtype` can be aggregated so."""
    if aggregation not in _REDUCED or jnp.issubdtype(dtype, jnp.inexact):
        return
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer and not OPERATIONS[_REDUCED[aggregation]].divides:
        return
    advice = "'sum' or " if is_integer else ""
    raise ValueError(
        f"Variable {name!r} holds {dtype.name}, which has no aggregation "
        f"{aggregation.name}. Use {advice}'only_first_replica', or another dtype: "
        "`dtype='float32'`."
    )


class Wanted(NamedTuple):
    """What a new variable asks for; `owner` is its strategy, if it has one."""

    name: str
    aggregation: VariableAggregation
    owner: AbstractStrategy | None = None
    on_read: bool = False
    per_worker: bool = False


class VariableKind:
    """A mirrored variable: whole on each replica, or a part of it on each."""

    describe = "mirrored"
    copies_must_agree = True
    is_readable = True  # by this process, outside of steps
    has_remote_rows = False  # which can be had without the others

    def __init__(self, wanted: Wanted, replicas: Replicas) -> None:
        self.name, self.aggregation, self.owner, *_ = wanted
        self.replicas = replicas
        self.division = LeafSharding(None, "it belongs to no strategy")
        self.sharding = self.sharding_of_value = with_inner(inner_axes.WHOLE, replicas)

    def begin(self, start: Start, choice: ShardingChoice) -> Cell:
        """What holds all copies outside of steps, each of them `start`."""
        inner = choice.inner(start.type, self.replicas)
        self.division = choice.division(start.type, self.replicas)
        if not self.division.is_whole:
            self.describe = f"divided along dimension {self.division.dimension}"
        layout = sharded_along(self.division.dimension)
        self.sharding = self.sharding_of_value = with_inner(
            inner, self.replicas, layout
        )
        return Cell(start.on(self.sharding), is_alone=True)

    def of_one_replica(self, start: Start) -> jax.Array:
        """The content of a step's reference if this replica's copy is `start`."""
        if self.division.is_whole:
            return start.array
        # A trace that makes variables is given up; only its numbers would be others.
        return jnp.zeros(start.type.shape, start.type.dtype)

    @property
    def device(self) -> Device | str:
        """The device that holds the first of the copies."""
        return self.replicas.devices[0]

    @property
    def has_one_value(self) -> bool:
        """Whether the copies have a value together."""
        return True

    def sent(self) -> tuple[object, ...]:
        """What makes the kind of the variable on a worker, and its arguments."""
        raise TypeError(
            f"Variable {self.name!r} is {self.describe}, where workers do not reach "
            "it, and was to be sent to one, as part of the function of a dataset. Make "
            "it in the scope of the ParameterServerStrategy, or let the function refer "
            "to `variable.numpy()`."
        )

    def copies(self, at: Access) -> jax.Array | PerReplica:
        """All copies: a mirrored array or a `PerReplica`."""
        return at.holder[...]

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """The copies, or parts, that this process has, on the host, by replica."""
        return [on_host(copy) for copy in self.replicas.copies(held)]

    def read(self, at: Access) -> jax.Array:
        """The value."""
        return at.holder[...]

    def updated(
        self,
        at: Access,
        fn: Callable[..., jax.Array],
        operands: tuple[Value, ...],
        change: Change,
    ) -> jax.Array | PerReplica:
        """Makes the value what `fn` makes of it; returns the new one."""
        return self.write(at, fn(self.read(at), *operands), change)

    def write(self, at: Access, value: Value, change: Change) -> jax.Array | PerReplica:
        """Changes the value, and returns the new one."""
        holder = at.holder
        shape = holder.shape
        if isinstance(value, (PerReplica, IndexedSlices)):
            value = self._own(at, value, change)
            if is_slices(value):
                if change.is_whole and change.operation != "set":
                    return self._change_rows(at, value, change)
                value = whole(value, shape)
        # The other parts of the copies stay: an aggregate would be one of parts.
        if change.index is not ...:
            given = self._checked_part(value, shape, holder.dtype, change)
            where = sharding_like(given, self.replicas)
        else:
            if at.in_step and self._combines(at):
                value = self._across(value)
            elif not (at.in_step or self.sharding.is_fully_replicated):
                # A large array is divided before it is looked at, on one device.
                is_fitting = is_host_array(value) and value.shape == shape
                if is_fitting and mesh.is_large(value.nbytes):
                    value = mesh.broadcast(np.array(value), self.sharding)
            given = self._checked(value, shape, holder.dtype)
            where = self.sharding
        if not at.in_step:
            given = mesh.broadcast(given, where)
        return self._changed(at, change, given)

    def scatter(
        self, at: Access, rows: IndexedSlices, change: Change
    ) -> jax.Array | PerReplica:
        """Changes some rows of all copies in the same way, and returns the value."""
        return self._change_rows(at, self.rows_for(at, rows, change), change)

    def rows_for(
        self, at: Access, rows: IndexedSlices, change: Change
    ) -> IndexedSlices:
        """Of the rows that were given for a change this replica's, or what all have."""
        if not is_slices(rows):
            raise TypeError(
                f"`{change.method}` of variable {self.name!r} was given {rows!r}, a "
                f"{type(rows).__name__}; `IndexedSlices(values, indices)` were wanted."
            )
        adds = change.operation not in ("min", "max", "set")
        if not adds and self.aggregation in _REDUCED:
            raise NotImplementedError(
                f"`{change.method}` is not defined for variable {self.name!r}, which "
                f"has aggregation {self.aggregation.name}: rows that several replicas "
                "give have no sum there. Make the variable with aggregation 'none' or "
                "'only_first_replica', or reduce the rows and assign."
            )
        return self._own(at, rows, change)

    def combined(self, at: Access, rows: IndexedSlices) -> IndexedSlices:
        """The rows of all replicas that count, where each may have given others."""
        return self._across(rows) if self._combines(at) else rows

    def _own(self, at: Access, value: Value, change: Change) -> Value:
        """`value` with this replica's version of what is a `PerReplica`, in a step."""
        # There everything is one that came through `merge_call`, equal or not; whether
        # the copies stay equal is proved. Outside, the versions differ.
        parts = (value.values, value.indices) if is_slices(value) else (value,)
        if not any(isinstance(part, PerReplica) for part in parts):
            return value
        if at.in_step:
            return replica_context.to_replica(value)
        if len(parts) == 1:
            raise ValueError(
                f"Variable {self.name!r} is mirrored, and was given a PerReplica "
                f"outside `run` by `{change.method}`: its copies would differ. Reduce "
                "it first (`strategy.reduce`), or make the variable with "
                "`synchronization='on_read'`."
            )
        raise ValueError(
            f"Variable {self.name!r} is mirrored, and was given rows that differ "
            "between replicas: its copies would differ. Reduce them first "
            "(`strategy.reduce`)."
        )

    def _combines(self, at: Access) -> bool:
        """Whether the replicas' values are to become one first."""
        in_replica = at.in_step and at.side is Side.REPLICA
        return in_replica and self.aggregation is not VariableAggregation.NONE

    def _across(self, value: Any) -> Any:
        """One value for all from this replica's own, inside a step."""
        reduction = _this_strategy()._reduction
        if self.aggregation in _REDUCED:
            how = HowReduced(_REDUCED[self.aggregation])
            return reduction.reduce_leaves(how, [value])[0]
        return jax.tree.map(reduction.first, value)

    def _change_rows(
        self, at: Access, rows: IndexedSlices, change: Change
    ) -> jax.Array:
        """Change some rows; what goes between replicas is as large as these."""
        shape, dtype = at.holder.shape, at.holder.dtype
        if rows.dense_shape not in (None, shape):
            raise ValueError(
                f"Variable {self.name!r} has shape {shape} and was given rows of "
                f"an array of shape {rows.dense_shape}."
            )
        values = self._checked(rows.values, (len(rows.indices), *shape[1:]), dtype)
        rows = IndexedSlices(values, mesh.array_of(rows.indices))
        rows = self.combined(at, rows)
        if not at.in_step:
            rows = jax.tree.map(
                lambda x: mesh.broadcast(x, sharding_like(x, self.replicas)),
                rows,
            )
        rows = IndexedSlices(rows.values.astype(dtype), rows.indices)
        return self._changed_rows(at, change, rows)

    def _changed(self, at: Access, change: Change, given: jax.Array) -> jax.Array:
        """Makes a change with what was given for it, which fits; the new value."""
        return self._stored(at, change.applied(at.holder[...], given))

    def _changed_rows(
        self, at: Access, change: Change, rows: IndexedSlices
    ) -> jax.Array:
        """Makes a change of rows, which fit; the new value of the whole variable."""
        new = changed(at.holder[...], rows.indices, rows.values, change.operation)
        return self._stored(at, new)

    def _stored(self, at: Access, new: jax.Array) -> jax.Array:
        """Keeps `new`, which lies as the variable does, and returns it."""
        is_open = self.replicas.inner_axes or self.division.dimension is not None
        if is_open and not at.in_step:
            new = mesh.place(new, self.sharding)
        at.holder[...] = new
        return new

    def _checked_part(
        self, value: Value, shape: tuple[int, ...], dtype: np.dtype, change: Change
    ) -> jax.Array:
        """`value` as an array of the shape of what changes; raises as `_checked`."""
        if not change.is_whole:
            shape = change.shape(shape, dtype)
            if np.shape(value) != shape:
                try:
                    value = jnp.broadcast_to(mesh.array_of(value), shape)
                except ValueError:
                    pass  # which `_checked` says in our words
        return self._checked(value, shape, dtype)

    def _checked(
        self, value: Value, shape: tuple[int, ...], dtype: np.dtype
    ) -> jax.Array:
        """`value` as an array that the variable can take."""
        # What assigns is no part of what is differentiated.
        try:
            given = jax.lax.stop_gradient(mesh.array_of(value))
        except mesh.DtypeRangeError:
            raise
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Variable {self.name!r} was given {shown(value)}, a "
                f"{type(value).__name__}; an array or a number was wanted."
            ) from error
        is_alike = fits = given.dtype == dtype
        if not is_alike and not (is_key(given.dtype) or is_key(dtype)):
            # A number of Python has a weak type, and fits narrower dtypes, too.
            fits = jnp.result_type(given, dtype) == dtype
        if not fits:
            raise TypeError(
                f"Variable {self.name!r} holds {dtype.name} and was given "
                f"{given.dtype.name}, which would lose something. Convert it: "
                f"`value.astype({dtype.name!r})`, or make the variable with that dtype."
            )
        if given.shape != shape:
            raise ValueError(
                f"Variable {self.name!r} has shape {shape} and was given {given.shape}."
                " Assign a value of its own shape; `jnp.broadcast_to` repeats one."
            )
        # Random keys have no such attribute.
        is_weak = getattr(given, "weak_type", False)
        return given if is_alike and not is_weak else given.astype(dtype)


@final
class OnReadKind(VariableKind):
    """A copy for each replica: one array `[replica, ...]`, split over them."""

    describe = "on read"
    copies_must_agree = False

    def begin(self, start: Start, choice: ShardingChoice) -> Cell:
        inner = choice.inner(start.type, self.replicas)
        self.division = LeafSharding(None, "each replica has a copy of its own")
        self.sharding = with_inner(inner_axes.of_stacked(inner), self.replicas, STACKED)
        self.sharding_of_value = with_inner(inner, self.replicas)
        array = start.array
        if not self.replicas.are_all_local:  # the processes may have others
            array = mesh.broadcast(array, self.sharding_of_value)
        copies = jnp.broadcast_to(array, (self.replicas.count, *array.shape))
        return Cell(mesh.place(copies, self.sharding), is_alone=True)

    def of_one_replica(self, start: Start) -> jax.Array:
        return start.array[None]

    @property
    def has_one_value(self) -> bool:
        has_aggregation = self.aggregation is not VariableAggregation.NONE
        return has_aggregation or self.replicas.count == 1

    def copies(self, at: Access) -> jax.Array | PerReplica:
        if at.in_step:
            own = at.holder[...][0]
            return per_replica.from_local(own, _this_strategy()._replicas)
        return PerReplica(at.holder[...])

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        return [on_host(version) for version in self.replicas.versions(held)]

    def read(self, at: Access) -> jax.Array:
        if at.side is Side.CROSS:
            return self._combined(at)
        if not at.in_step:
            # `extended.update` works on all copies at once, and here is one of many.
            raise NeedsProgram
        return at.holder[...][0]

    def _combined(self, at: Access) -> jax.Array:
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                "so it has no value outside `run`. Make it with "
                "`aggregation='sum'`, 'mean' or 'only_first_replica', or look at the "
                "copies with `strategy.experimental_local_results(variable)`."
            )
        held = at.holder[...]
        if at.in_step:
            is_alone = self.aggregation is VariableAggregation.NONE
            return held[0] if is_alone else self._across(held[0])
        owner = self.owner
        assert owner is not None, "ordinary variables are mirrored ones"
        with job.exchanging(f"the value of variable {self.name!r}", held):
            if self.aggregation in _REDUCED:
                return owner.reduce(_REDUCED[self.aggregation], PerReplica(held))
            inner = inner_axes.of_versions(inner_axes.inner_spec(held, self.replicas))
            first = mesh.first_entry(held, with_inner(inner, self.replicas))
            # There mirrored variables are, and reduced values.
            return mesh.place(first, with_inner(inner, owner._parameter_replicas))

    def write(self, at: Access, value: Value, change: Change) -> jax.Array | PerReplica:
        """Change this replica's copy, or outside `run` all of them."""
        if not at.in_step and at.side is Side.UPDATE:
            raise NeedsProgram
        old = at.holder[...]
        shape, dtype = old.shape[1:], old.dtype
        value = whole(value, shape)
        if at.in_step:
            if isinstance(value, PerReplica):
                value = per_replica.local_value(value)
            elif at.side is Side.CROSS:
                value = self._checked_part(value, shape, dtype, change)
                is_first = _this_strategy()._replicas.index() == 0
                value = jnp.where(is_first, *self._parts(value, change))
            given = self._checked_part(value, shape, dtype, change)
            new = change.applied(old[0], given)
            at.holder[...] = new[None]
            return new
        each = self.sharding if change.is_whole else self.replicas.sharding(STACKED)
        if isinstance(value, PerReplica):
            wanted = (old.shape[0], *change.shape(shape, dtype))
            given = self._checked(per_replica.contents(value), wanted, dtype)
        else:
            value = self._checked_part(value, shape, dtype, change)
            is_own = change.is_whole
            alike = sharding_like(value, self.replicas)
            where = self.sharding_of_value if is_own else alike
            first, other = self._parts(mesh.broadcast(value, where), change)
            copies = jnp.broadcast_to(other, (self.replicas.count, *other.shape))
            given = mesh.place(copies, each).at[0].set(first)
        given = mesh.place(given, each)
        # Each copy by itself: an index is of the variable, without the first dimension.
        new = mesh.place(jax.vmap(change.applied)(old, given), self.sharding)
        at.holder[...] = new
        return self._combined(at) if self.has_one_value else PerReplica(new)

    def rows_for(
        self, at: Access, rows: IndexedSlices, change: Change
    ) -> IndexedSlices:
        raise NotImplementedError(
            f"`{change.method}` is not defined for variable {self.name!r}, which has a "
            "copy per replica (synchronization ON_READ). In `run` change this "
            "replica's copy: `v.assign(v.value().at[indices].add(values))`."
        )

    def _parts(self, value: jax.Array, change: Change) -> tuple[jax.Array, jax.Array]:
        """The parts of a `value` for all that the first, and each other copy, takes."""
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                f"so `{change.method}` outside `run` does not say which copies should "
                "change. Assign in `run`, or give the variable an aggregation."
            )
        if self.aggregation is not VariableAggregation.SUM:
            return value, value
        if change.operation != "set":
            return value, jnp.zeros_like(value)
        # Together they sum to `value`.
        count = self.replicas.count
        if jnp.issubdtype(value.dtype, jnp.integer):
            each = value // count
            return value - each * (count - 1), each
        each = (value / count).astype(value.dtype)
        return each, each


def on_host(copy: jax.Array) -> np.ndarray:
    """The numbers of one copy; of random keys their data."""
    return np.asarray(jax.random.key_data(copy) if is_key(copy.dtype) else copy)


def _this_strategy() -> AbstractStrategy:
    strategy = context.current().strategy
    assert strategy is not None, "a step has a strategy"
    return strategy


def whole(value: Value, shape: tuple[int, ...]) -> Value:
    """`value`, made dense if it is sparse."""
    if not is_slices(value):
        return value
    return IndexedSlices(value.values, value.indices, shape).to_dense()
