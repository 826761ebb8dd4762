"""Variables that are equal on all replicas: `MirroredKind`."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts import replica_context
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import sharding_like, with_inner
from jaxstrategy._src.replicas.replica_placements import (
    sharded_along,
)
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.variables import aggregation
from jaxstrategy._src.variables.access import Side
from jaxstrategy._src.variables.cell import Holder
from jaxstrategy._src.variables.changes import Change, changed
from jaxstrategy._src.variables.initial_value import Start, is_host_array
from jaxstrategy._src.variables.kinds.kind import (
    VariableKind,
    on_host,
    this_strategy,
    whole,
)
from jaxstrategy._src.variables.sharding_choice import ShardingChoice


class MirroredKind(VariableKind):
    """Equal on all replicas: whole on each of them, or a part of it on each."""

    describe = "mirrored"
    _division = LeafSharding(None, "it belongs to no strategy")

    @property
    def sharding(self) -> NamedSharding:
        """Whole on each replica, or divided over them."""
        lies = sharded_along(self._division.dimension)
        return with_inner(self.inner, self.replicas, lies)

    @property
    def division(self) -> LeafSharding:
        """The dimension that is divided, or why it is whole."""
        return self._division

    def divided(self, leaf: Shaped, choice: ShardingChoice) -> Self:
        """This kind for a variable of the type of `leaf`, divided if that is chosen."""
        twin = super().divided(leaf, choice)
        twin._division = choice.division(leaf, self.replicas)
        if not twin._division.is_whole:
            twin.describe = f"divided along dimension {twin._division.dimension}"
        return twin

    def placed(self, start: Start) -> jax.Array:
        """`start` on all devices."""
        return start.on(self.sharding)

    def of_one_replica(self, start: Start) -> jax.Array:
        """`start`; of one that is divided, only something of its type."""
        if self._division.is_whole:
            return start.array
        # A trace that makes variables is given up; only its numbers would be others.
        return jnp.zeros(start.type.shape, start.type.dtype)

    def copies(self, ref: Holder) -> jax.Array | PerReplica:
        """The value, mirrored."""
        return ref[...]

    @property
    def has_one_value(self) -> bool:
        """True."""
        return True

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """One per replica of this process: the whole value, or its part."""
        return [on_host(copy) for copy in self.replicas.copies(held)]

    def read(self, ref: Holder, side: Side) -> jax.Array:
        """The value."""
        return ref[...]

    def write(self, ref: Holder, side: Side, value: Value, change: Change) -> jax.Array:
        """Change all copies in the same way."""
        value = self._own(value, change)
        if is_slices(value):
            if change.is_whole and change.operation != "set":
                return self._change_rows(ref, side, value, change)
            value = whole(value, ref.shape)
        if change.is_whole and self._is_large_on_host(value, ref):
            # Before it is looked at, which would take all of it to one device.
            value = mesh.broadcast(np.array(value), self.sharding)
        # The other parts of the copies stay: an aggregate would be one of parts.
        if change.is_whole and self._combines(side):
            value = aggregation.across(self.aggregation, value, this_strategy())
        given = self._checked_part(value, ref.shape, ref.dtype, change)
        if not self._in_step():
            is_own = change.is_whole
            where = self.sharding if is_own else sharding_like(given, self.replicas)
            given = mesh.broadcast(given, where)
        return self._changed(ref, change, given)

    def _changed(self, ref: Holder, change: Change, given: jax.Array) -> jax.Array:
        """Makes a change with what was given for it, which fits; the new value."""
        return self._stored(ref, change.applied(ref[...], given))

    def _is_large_on_host(self, value: Value, ref: Holder) -> bool:
        is_divided = not self.sharding.is_fully_replicated
        return (
            is_divided
            and not self._in_step()
            and is_host_array(value)
            and value.shape == ref.shape
            and mesh.is_large(value.nbytes)
        )

    def scatter(
        self, ref: Holder, side: Side, rows: IndexedSlices, change: Change
    ) -> jax.Array:
        """Change some rows of all copies in the same way."""
        return self._change_rows(ref, side, self.rows_for(rows, change), change)

    def rows_for(self, rows: IndexedSlices, change: Change) -> IndexedSlices:
        """This replica's own, or what all have."""
        if not is_slices(rows):
            raise TypeError(
                f"`{change.method}` of variable {self.name!r} was given {rows!r}, a "
                f"{type(rows).__name__}; `IndexedSlices(values, indices)` were wanted."
            )
        adds = change.operation not in ("min", "max", "set")
        if not adds and self.aggregation in aggregation.REDUCED:
            raise NotImplementedError(
                f"`{change.method}` is not defined for variable {self.name!r}, which "
                f"has aggregation {self.aggregation.name}: rows that several replicas "
                "give have no sum there. Make the variable with aggregation 'none' or "
                "'only_first_replica', or reduce the rows and assign."
            )
        return self._own(rows, change)

    def combined(self, rows: IndexedSlices, side: Side) -> IndexedSlices:
        """Those of all replicas, as the aggregation says."""
        if self._combines(side):
            return aggregation.across(self.aggregation, rows, this_strategy())
        return rows

    def _own(self, value: Value, change: Change) -> Value:
        """`value` with this replica's version of what is a `PerReplica`, in a step.

        There everything is one that came through `merge_call`, equal or not; whether
        the copies stay equal is proved. Outside, the versions differ.
        """
        if self._in_step():
            return replica_context.to_replica(value) if _has_versions(value) else value
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable {self.name!r} is mirrored, and was given a PerReplica "
                f"outside `run` by `{change.method}`: its copies would differ. Reduce "
                "it first (`strategy.reduce`), or make the variable with "
                "`synchronization='on_read'`."
            )
        if _has_versions(value):
            raise ValueError(
                f"Variable {self.name!r} is mirrored, and was given rows that differ "
                "between replicas: its copies would differ. Reduce them first "
                "(`strategy.reduce`)."
            )
        return value

    def _combines(self, side: Side) -> bool:
        """Whether the replicas' values are to become one first."""
        in_replica = side is Side.REPLICA and self._in_step()
        return in_replica and self.aggregation is not VariableAggregation.NONE

    def _change_rows(
        self, ref: Holder, side: Side, rows: IndexedSlices, change: Change
    ) -> jax.Array:
        """Change some rows; what goes between replicas is as large as these."""
        if rows.dense_shape not in (None, ref.shape):
            raise ValueError(
                f"Variable {self.name!r} has shape {ref.shape} and was given rows of "
                f"an array of shape {rows.dense_shape}."
            )
        shape = (len(rows.indices), *ref.shape[1:])
        values = self._checked(rows.values, shape, ref.dtype)
        rows = IndexedSlices(values, mesh.array_of(rows.indices))
        rows = self.combined(rows, side)
        if not self._in_step():
            rows = jax.tree.map(
                lambda x: mesh.broadcast(x, sharding_like(x, self.replicas)), rows
            )
        rows = IndexedSlices(rows.values.astype(ref.dtype), rows.indices)
        return self._changed_rows(ref, change, rows)

    def _changed_rows(
        self, ref: Holder, change: Change, rows: IndexedSlices
    ) -> jax.Array:
        """Makes a change of rows, which fit; the new value of the whole variable."""
        new = changed(ref[...], rows.indices, rows.values, change.operation)
        return self._stored(ref, new)

    def _stored(self, ref: Holder, new: jax.Array) -> jax.Array:
        """Keeps `new`, which lies as the variable does, and returns it."""
        is_open = self.replicas.inner_axes or not self._division.is_whole
        if is_open and not self._in_step():
            new = mesh.place(new, self.sharding)
        ref[...] = new
        return new


def _has_versions(value: Value) -> bool:
    parts = (value.values, value.indices) if is_slices(value) else (value,)
    return any(isinstance(part, PerReplica) for part in parts)
