"""Variables that are combined when they are read: `OnReadKind`."""

from __future__ import annotations

from typing import NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.processes import job
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.inner_axes import of_stacked, sharding_like, with_inner
from jaxstrategy._src.replicas.replica_placements import SPLIT
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access, aggregation
from jaxstrategy._src.variables.access import Side
from jaxstrategy._src.variables.cell import Holder
from jaxstrategy._src.variables.changes import Change
from jaxstrategy._src.variables.initial_value import Start
from jaxstrategy._src.variables.kinds.kind import (
    VariableKind,
    on_host,
    this_strategy,
    whole,
)


@final
class OnReadKind(VariableKind):
    """A copy for each replica: one array `[replica, ...]`, split over them."""

    describe = "on read"

    @property
    def sharding(self) -> NamedSharding:
        """Copy i on the devices of replica i."""
        return with_inner(of_stacked(self.inner), self.replicas, SPLIT)

    @property
    def sharding_of_value(self) -> NamedSharding:
        """Whole on each replica."""
        return with_inner(self.inner, self.replicas)

    def placed(self, start: Start) -> jax.Array:
        """`start` once for each replica."""
        array = start.array
        if not self.replicas.are_all_own:  # the processes may have others
            array = mesh.broadcast(array, self.sharding_of_value)
        copies = jnp.broadcast_to(array, (self.replicas.count, *array.shape))
        return mesh.place(copies, self.sharding)

    def of_one_replica(self, start: Start) -> jax.Array:
        """`start`, as the replica's part of all copies."""
        return start.array[None]

    def copies(self, ref: Holder) -> jax.Array | PerReplica:
        """The copies."""
        if self._in_step():
            return per_replica.from_local(ref[...][0], this_strategy()._replicas)
        return PerReplica(ref[...])

    @property
    def has_one_value(self) -> bool:
        """With an aggregation, or with one copy only."""
        return (
            self.aggregation is not VariableAggregation.NONE or self.replicas.count == 1
        )

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """One per replica of this process."""
        return [on_host(version) for version in self.replicas.versions(held)]

    def read(self, ref: Holder, side: Side) -> jax.Array:
        """This replica's copy, or outside `run` what the copies combine to."""
        if side is Side.CROSS:
            return self._combined(ref)
        if not self._in_step():
            # `extended.update` works on all copies at once, and here is one of many.
            raise access.NeedsProgram
        return ref[...][0]

    def _combined(self, ref: Holder) -> jax.Array:
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                "so it has no value outside `run`. Make it with "
                "`aggregation='sum'`, 'mean' or 'only_first_replica', or look at the "
                "copies with `strategy.experimental_local_results(variable)`."
            )
        if self._in_step():
            own = ref[...][0]
            if self.aggregation is VariableAggregation.NONE:  # and there is one replica
                return own
            return aggregation.across(self.aggregation, own, this_strategy())
        assert self.owner is not None, "ordinary variables are mirrored ones"
        with job.exchanging(f"the value of variable {self.name!r}", ref[...]):
            return aggregation.of_copies(self.aggregation, ref[...], self.owner)

    def write(
        self, ref: Holder, side: Side, value: Value, change: Change
    ) -> jax.Array | PerReplica:
        """Change this replica's copy, or outside `run` all of them."""
        if self._in_step():
            return self._write_in_step(ref, side, value, change)
        if side is Side.UPDATE:
            raise access.NeedsProgram
        old = ref[...]
        shape, dtype = old.shape[1:], old.dtype
        value = whole(value, shape)
        if isinstance(value, PerReplica):
            wanted = (old.shape[0], *change.shape(shape, dtype))
            given = self._checked(per_replica.contents(value), wanted, dtype)
        else:
            value = self._checked_part(value, shape, dtype, change)
            is_own = change.is_whole
            where = (
                self.sharding_of_value
                if is_own
                else sharding_like(value, self.replicas)
            )
            value = mesh.broadcast(value, where)
            given = self._to_each(value, change)
        given = mesh.place(given, self._of_each(change))
        # Each copy by itself: an index is of the variable, without the first dimension.
        new = mesh.place(jax.vmap(change.applied)(old, given), self.sharding)
        ref[...] = new
        return self._combined(ref) if self.has_one_value else PerReplica(new)

    def scatter(
        self, ref: Holder, side: Side, rows: IndexedSlices, change: Change
    ) -> jax.Array | PerReplica:
        """Not defined: its copies have no rows together."""
        self.rows_for(rows, change)

    def rows_for(self, rows: IndexedSlices, change: Change) -> NoReturn:
        """Not defined: its copies have no rows together."""
        raise NotImplementedError(
            f"`{change.method}` is not defined for variable {self.name!r}, which has a "
            "copy per replica (synchronization ON_READ). In `run` change this "
            "replica's copy: `v.assign(v.value().at[indices].add(values))`."
        )

    def _write_in_step(
        self, ref: Holder, side: Side, value: Value, change: Change
    ) -> jax.Array:
        shape = ref.shape[1:]
        value = whole(value, shape)
        if isinstance(value, PerReplica):
            value = per_replica.local_value(value)
        elif side is Side.CROSS:
            value = self._checked_part(value, shape, ref.dtype, change)
            first, other = self._parts(value, change)
            is_first = this_strategy()._replicas.index() == 0
            value = jnp.where(is_first, first, other)
        given = self._checked_part(value, shape, ref.dtype, change)
        new = change.applied(ref[...][0], given)
        ref[...] = new[None]
        return new

    def _parts(self, value: jax.Array, change: Change) -> tuple[jax.Array, jax.Array]:
        """The parts of a `value` for all that the first, and each other copy, takes."""
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                f"so `{change.method}` outside `run` does not say which copies should "
                "change. Assign in `run`, or give the variable an aggregation."
            )
        if change.operation == "set":
            return aggregation.shares(self.aggregation, value, self.replicas.count)
        if self.aggregation is VariableAggregation.SUM:
            return value, jnp.zeros_like(value)
        return value, value

    def _to_each(self, value: jax.Array, change: Change) -> jax.Array:
        first, other = self._parts(value, change)
        copies = jnp.broadcast_to(other, (self.replicas.count, *other.shape))
        return mesh.place(copies, self._of_each(change)).at[0].set(first)

    def _of_each(self, change: Change) -> NamedSharding:
        """The placement of what the copies take, one entry for each."""
        return self.sharding if change.is_whole else self.replicas.sharding(SPLIT)
