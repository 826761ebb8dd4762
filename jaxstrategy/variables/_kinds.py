"""What the kinds of variables do where: mirrored ones and on-read ones.

A kind is given the reference to work on: inside a step the step's own, of one replica's
copy; outside, the one that holds all copies.
"""

from __future__ import annotations

import abc
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxstrategy import _contexts, _mesh, _replica, _values
from jaxstrategy._contexts import AbstractStrategy
from jaxstrategy._options import VariableAggregation
from jaxstrategy._slices import IndexedSlices, is_slices
from jaxstrategy._values import PerReplica
from jaxstrategy.cluster import _together
from jaxstrategy.variables import _aggregation, _step
from jaxstrategy.variables._changes import Change, changed
from jaxstrategy.variables._step import Side

NONE = VariableAggregation.NONE


class Kind(abc.ABC):
    """How one variable is kept.

    Args:
      name: the variable's.
      aggregation: of the variable.
      mesh: where its copies are.
      owner: the variable's strategy, None for an ordinary variable.
    """

    # How it prints.
    describe: str

    def __init__(
        self,
        name: str,
        aggregation: VariableAggregation,
        mesh: Mesh,
        owner: AbstractStrategy | None,
    ) -> None:
        self.name = name
        self.aggregation = aggregation
        self.mesh = mesh
        self.owner = owner

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding:
        """How the reference to all copies lies."""

    @abc.abstractmethod
    def placed(self, start: jax.Array) -> jax.Array:
        """All copies, each of them `start`, where the reference is to hold them."""

    @abc.abstractmethod
    def of_one_replica(self, start: jax.Array) -> jax.Array:
        """What a step's reference holds if this replica's copy is `start`."""

    @abc.abstractmethod
    def copies(self, ref: Any) -> Any:
        """All copies: a mirrored array or a `PerReplica`."""

    @property
    @abc.abstractmethod
    def has_one_value(self) -> bool:
        """Whether the copies have a value together."""

    @abc.abstractmethod
    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """Those in what the reference holds that this process can see, in order."""

    @abc.abstractmethod
    def read(self, ref: Any, side: Side) -> jax.Array:
        """The value."""

    @abc.abstractmethod
    def write(self, ref: Any, side: Side, value: Any, change: Change) -> Any:
        """Change it, and return the new value."""

    @abc.abstractmethod
    def scatter(self, ref: Any, side: Side, rows: Any, change: Change) -> Any:
        """Change some rows, and return the new value.

        Raises:
          NotImplementedError: the kind, or the aggregation, has no such change.
        """

    def _in_step(self) -> bool:
        return _step.tracing() is not None

    def _checked_part(
        self, value: Any, whole: tuple[int, ...], dtype: Any, change: Change
    ) -> jax.Array:
        """`value` as an array of the shape of what changes.

        Raises: as `_checked`.
        """
        shape = change.shape(whole, dtype)
        if not change.is_whole and np.shape(value) != shape:
            try:
                value = jnp.broadcast_to(jnp.asarray(value), shape)
            except ValueError:
                pass  # which `_checked` says in our words
        return self._checked(value, shape, dtype)

    def _checked(self, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """`value` as an array that the variable can take.

        Raises:
          ValueError: another shape.
          TypeError: no array or number, or a dtype that would lose something.
        """
        # What assigns is no part of what is differentiated.
        try:
            given = jax.lax.stop_gradient(jnp.asarray(value))
        except OverflowError:
            raise ValueError(_mesh.too_large(value)) from None
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Variable {self.name!r} was given {value!r}, a "
                f"{type(value).__name__}; an array or a number was wanted."
            ) from error
        if not _fits(given, dtype):
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
        return given if _aggregation.is_key(dtype) else given.astype(dtype)


def _fits(given: jax.Array, wanted: Any) -> bool:
    """Whether `given` may become the dtype `wanted`."""
    if _aggregation.is_key(given.dtype) or _aggregation.is_key(wanted):
        return given.dtype == wanted
    if given.weak_type and _same_sort(given.dtype, wanted):
        return True
    return jnp.promote_types(given.dtype, wanted) == wanted


def _same_sort(given: Any, wanted: Any) -> bool:
    """Whether a Python number of the one sort may become the other."""
    sorts = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: Any) -> int:
        return next(i for i, sort in enumerate(sorts) if jnp.issubdtype(dtype, sort))

    return rank(given) <= rank(wanted)


def _on_host(copy: jax.Array) -> np.ndarray:
    if _aggregation.is_key(copy.dtype):
        copy = jax.random.key_data(copy)
    return np.asarray(copy)


def _this_strategy() -> AbstractStrategy:
    context = _contexts.current()
    assert context is not None, "a step has a context"
    return context.strategy


@final
class MirroredKind(Kind):
    """Equal on all replicas: whole on each of them."""

    describe = "mirrored"

    @property
    def sharding(self) -> NamedSharding:
        """Whole on each device."""
        return _mesh.replicated(self.mesh)

    def placed(self, start: jax.Array) -> jax.Array:
        """`start`, whole on each device."""
        return _mesh.put_same(start, self.sharding)

    def of_one_replica(self, start: jax.Array) -> jax.Array:
        """`start`."""
        return start

    def copies(self, ref: Any) -> Any:
        """The value, mirrored."""
        return ref[...]

    @property
    def has_one_value(self) -> bool:
        """True."""
        return True

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """One per device."""
        return [_on_host(shard.data) for shard in held.addressable_shards]

    def read(self, ref: Any, side: Side) -> jax.Array:
        """The value."""
        return ref[...]

    def write(self, ref: Any, side: Side, value: Any, change: Change) -> jax.Array:
        """Change all copies in the same way."""
        value = self._own(value, change)
        if is_slices(value):
            if change.is_whole and change.operation != "set":
                return self._change_rows(ref, side, value, change)
            value = _whole(value, ref.shape)
        # The other parts of the copies stay: an aggregate would be one of parts.
        if change.is_whole and self._combines(side):
            value = _aggregation.across(self.aggregation, value, _this_strategy())
        given = self._checked_part(value, ref.shape, ref.dtype, change)
        if not self._in_step():
            given = _mesh.put_same(given, self.sharding)
        return _stored(ref, change.applied(ref[...], given))

    def scatter(self, ref: Any, side: Side, rows: Any, change: Change) -> jax.Array:
        """Change some rows of all copies in the same way."""
        if not is_slices(rows):
            raise TypeError(
                f"`{change.method}` of variable {self.name!r} was given {rows!r}, a "
                f"{type(rows).__name__}; `IndexedSlices(values, indices)` were wanted."
            )
        adds = change.operation not in ("min", "max", "set")
        if not adds and self.aggregation in _aggregation.REDUCED:
            raise NotImplementedError(
                f"`{change.method}` is not defined for variable {self.name!r}, which "
                f"has aggregation {self.aggregation.name}: rows that several replicas "
                "give have no sum there. Make the variable with aggregation 'none' or "
                "'only_first_replica', or reduce the rows and assign."
            )
        return self._change_rows(ref, side, self._own(rows, change), change)

    def _own(self, value: Any, change: Change) -> Any:
        """`value` with this replica's version of what is a `PerReplica`, in a step.

        There everything is one that came through `merge_call`, equal or not; whether
        the copies stay equal is proved. Outside, the versions differ.
        """
        if self._in_step():
            return _replica.own_versions(value) if _has_versions(value) else value
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
        return in_replica and self.aggregation is not NONE

    def _change_rows(
        self, ref: Any, side: Side, rows: Any, change: Change
    ) -> jax.Array:
        """Change some rows; what goes between replicas is as large as these."""
        if rows.dense_shape not in (None, ref.shape):
            raise ValueError(
                f"Variable {self.name!r} has shape {ref.shape} and was given rows of "
                f"an array of shape {rows.dense_shape}."
            )
        shape = (len(rows.indices), *ref.shape[1:])
        values = self._checked(rows.values, shape, ref.dtype)
        rows = IndexedSlices(values, jnp.asarray(rows.indices))
        if self._combines(side):
            rows = _aggregation.across(self.aggregation, rows, _this_strategy())
        if not self._in_step():
            rows = jax.tree.map(lambda x: _mesh.put_same(x, self.sharding), rows)
        values = rows.values.astype(ref.dtype)
        return _stored(ref, changed(ref[...], rows.indices, values, change.operation))


def _stored(ref: Any, new: jax.Array) -> jax.Array:
    ref[...] = new
    return new


def _has_versions(value: Any) -> bool:
    parts = (value.values, value.indices) if is_slices(value) else (value,)
    return any(isinstance(part, PerReplica) for part in parts)


def _whole(value: Any, shape: tuple[int, ...]) -> Any:
    """`value`, made dense if it is sparse."""
    if not is_slices(value):
        return value
    return IndexedSlices(value.values, value.indices, shape).to_dense()


@final
class OnReadKind(Kind):
    """A copy for each replica: one array `[replica, ...]`, split over them."""

    describe = "on read"

    @property
    def sharding(self) -> NamedSharding:
        """Copy i on the device of replica i."""
        return _mesh.split(self.mesh)

    def placed(self, start: jax.Array) -> jax.Array:
        """`start` once for each replica."""
        if not self.sharding.is_fully_addressable:  # the processes may have others
            start = _mesh.put_same(start, _mesh.replicated(self.mesh))
        copies = jnp.broadcast_to(start, (self.mesh.size, *start.shape))
        return _mesh.put(copies, self.sharding)

    def of_one_replica(self, start: jax.Array) -> jax.Array:
        """`start`, as the replica's part of all copies."""
        return start[None]

    def copies(self, ref: Any) -> Any:
        """The copies."""
        if self._in_step():
            (axis_name,) = _this_strategy().mesh.axis_names
            return _values.of_local(ref[...][0], axis_name)
        return PerReplica(ref[...])

    @property
    def has_one_value(self) -> bool:
        """With an aggregation, or with one copy only."""
        return self.aggregation is not NONE or self.mesh.size == 1

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """One per replica."""
        return [_on_host(shard.data)[0] for shard in held.addressable_shards]

    def read(self, ref: Any, side: Side) -> jax.Array:
        """This replica's copy, or outside `run` what the copies combine to."""
        if side is Side.CROSS:
            return self._combined(ref)
        if not self._in_step():
            # `extended.update` works on all copies at once, and here is one of many.
            raise _step.NeedsProgram
        return ref[...][0]

    def _combined(self, ref: Any) -> jax.Array:
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                "so it has no value outside `run`. Make it with "
                "`aggregation='sum'`, 'mean' or 'only_first_replica', or look at the "
                "copies with `strategy.experimental_local_results(variable)`."
            )
        if self._in_step():
            own = ref[...][0]
            if self.aggregation is NONE:  # and there is one replica
                return own
            return _aggregation.across(self.aggregation, own, _this_strategy())
        assert self.owner is not None, "ordinary variables are mirrored ones"
        with _together.exchanging(f"the value of variable {self.name!r}", ref[...]):
            return _aggregation.of_copies(self.aggregation, ref[...], self.owner)

    def write(self, ref: Any, side: Side, value: Any, change: Change) -> Any:
        """Change this replica's copy, or outside `run` all of them."""
        if self._in_step():
            return self._write_in_step(ref, side, value, change)
        if side is Side.UPDATE:
            raise _step.NeedsProgram
        old = ref[...]
        shape, dtype = old.shape[1:], old.dtype
        value = _whole(value, shape)
        if isinstance(value, PerReplica):
            wanted = (old.shape[0], *change.shape(shape, dtype))
            given = self._checked(_values.contents(value), wanted, dtype)
        else:
            value = self._checked_part(value, shape, dtype, change)
            value = _mesh.put_same(value, _mesh.replicated(self.mesh))
            given = self._to_each(value, change)
        given = _mesh.put(given, self.sharding)
        new = _mesh.put(jax.vmap(change.applied)(old, given), self.sharding)
        ref[...] = new
        return self._combined(ref) if self.has_one_value else PerReplica(new)

    def scatter(self, ref: Any, side: Side, rows: Any, change: Change) -> Any:
        """Not defined: its copies have no rows together."""
        raise NotImplementedError(
            f"`{change.method}` is not defined for variable {self.name!r}, which has a "
            "copy per replica (synchronization ON_READ). In `run` change this "
            "replica's copy: `v.assign(v.value().at[indices].add(values))`."
        )

    def _write_in_step(
        self, ref: Any, side: Side, value: Any, change: Change
    ) -> jax.Array:
        shape = ref.shape[1:]
        value = _whole(value, shape)
        if isinstance(value, PerReplica):
            value = _values.to_local(value)
        elif side is Side.CROSS:
            value = self._checked_part(value, shape, ref.dtype, change)
            first, other = self._parts(value, change)
            is_first = jax.lax.axis_index(_this_strategy().mesh.axis_names) == 0
            value = jnp.where(is_first, first, other)
        given = self._checked_part(value, shape, ref.dtype, change)
        new = change.applied(ref[...][0], given)
        ref[...] = new[None]
        return new

    def _parts(self, value: jax.Array, change: Change) -> tuple[jax.Array, jax.Array]:
        """What the first copy, and each other one, takes of a `value` for all."""
        if not self.has_one_value:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                f"so `{change.method}` outside `run` does not say which copies should "
                "change. Assign in `run`, or give the variable an aggregation."
            )
        if change.operation == "set":
            return _aggregation.shares(self.aggregation, value, self.mesh.size)
        if self.aggregation is VariableAggregation.SUM:
            return value, jnp.zeros_like(value)
        return value, value

    def _to_each(self, value: jax.Array, change: Change) -> jax.Array:
        first, other = self._parts(value, change)
        copies = jnp.broadcast_to(other, (self.mesh.size, *other.shape))
        return _mesh.put(copies, self.sharding).at[0].set(first)
