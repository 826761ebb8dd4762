"""What the kinds of variables do where: mirrored ones and on-read ones.

A kind is given the reference to work on: inside a step the step's own, of one replica's
copy; outside, the one that holds all copies.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxstrategy import _contexts, _mesh, _values
from jaxstrategy._contexts import AbstractStrategy
from jaxstrategy._options import VariableAggregation
from jaxstrategy._slices import IndexedSlices, is_slices
from jaxstrategy._values import PerReplica
from jaxstrategy.cluster import _together
from jaxstrategy.variables import _aggregation, _step
from jaxstrategy.variables._step import Side

NONE = VariableAggregation.NONE


class Kind(abc.ABC):
    """How one variable is kept.

    Args:
      name: the variable's.
      aggregation: of the variable.
      mesh: where its copies are.
    """

    # How it prints.
    describe: str

    def __init__(self, name: str, aggregation: VariableAggregation, mesh: Mesh) -> None:
        self.name = name
        self.aggregation = aggregation
        self.mesh = mesh

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
    def write(self, ref: Any, side: Side, value: Any, how: str) -> Any:
        """Change it, and return the new value."""

    def _in_step(self) -> bool:
        return _step.tracing() is not None

    def _checked(self, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """`value` as an array that the variable can take.

        Raises:
          ValueError: another shape.
          TypeError: no array or number, or a dtype that would lose something.
        """
        # What assigns is no part of what is differentiated.
        given = jax.lax.stop_gradient(jnp.asarray(value))
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


def _changed(old: jax.Array, value: jax.Array, how: str) -> jax.Array:
    match how:
        case "assign":
            return value
        case "assign_add":
            return old + value
        case _:
            return old - value


def _this_strategy() -> AbstractStrategy:
    context = _contexts.current()
    assert context is not None, "a step has a context"
    return context.strategy


def _axes() -> tuple[str, ...]:
    return tuple(_this_strategy().mesh.axis_names)


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

    def write(self, ref: Any, side: Side, value: Any, how: str) -> jax.Array:
        """Change all copies in the same way."""
        if isinstance(value, PerReplica):
            raise ValueError(
                f"Variable {self.name!r} is mirrored, and was given a PerReplica "
                f"outside `run` by `{how}`: its copies would differ. Reduce it first "
                "(`strategy.reduce`), or make the variable with "
                "`synchronization='on_read'`."
            )
        if is_slices(value):
            if how != "assign":
                return self._add_rows(ref, side, value, how)
            value = _whole(value, ref.shape)
        if self._combines(side):
            value = _aggregation.across(self.aggregation, value, _axes())
        given = self._checked(value, ref.shape, ref.dtype)
        if not self._in_step():
            given = _mesh.put_same(given, self.sharding)
        new = _changed(ref[...], given, how) if how != "assign" else given
        ref[...] = new
        return new

    def _combines(self, side: Side) -> bool:
        """Whether the replicas' values are to become one first."""
        in_replica = side is Side.REPLICA and self._in_step()
        return in_replica and self.aggregation is not NONE

    def _add_rows(self, ref: Any, side: Side, rows: Any, how: str) -> jax.Array:
        """Change some rows; what goes between replicas is as large as these."""
        if isinstance(rows.values, PerReplica):
            raise ValueError(
                f"Variable {self.name!r} is mirrored, and was given rows that differ "
                "between replicas: its copies would differ. Reduce them first "
                "(`strategy.reduce`)."
            )
        if rows.dense_shape not in (None, ref.shape):
            raise ValueError(
                f"Variable {self.name!r} has shape {ref.shape} and was given rows of "
                f"an array of shape {rows.dense_shape}."
            )
        shape = (len(rows.indices), *ref.shape[1:])
        values = self._checked(rows.values, shape, ref.dtype)
        rows = IndexedSlices(values if how == "assign_add" else -values, rows.indices)
        if self._combines(side):
            n = _this_strategy().num_replicas_in_sync
            rows = _aggregation.rows_across(self.aggregation, rows, _axes(), n)
        new = rows.added_to(ref[...])
        ref[...] = new
        return new


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
            (axis_name,) = _axes()
            return _values.of_local(ref[...][0], axis_name)
        return PerReplica(ref[...])

    @property
    def has_one_value(self) -> bool:
        """With an aggregation."""
        return self.aggregation is not NONE

    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """One per replica."""
        return [_on_host(shard.data)[0] for shard in held.addressable_shards]

    def read(self, ref: Any, side: Side) -> jax.Array:
        """This replica's copy, or outside `run` what the copies combine to."""
        if side is not Side.CROSS and self._in_step():
            return ref[...][0]
        return self._combined(ref)

    def _combined(self, ref: Any) -> jax.Array:
        if self.aggregation is NONE:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                "so it has no value outside `run`. Make it with "
                "`aggregation='sum'`, 'mean' or 'only_first_replica', or look at the "
                "copies with `strategy.experimental_local_results(variable)`."
            )
        if self._in_step():
            return _aggregation.across(self.aggregation, ref[...][0], _axes())
        copies, where = ref[...], _mesh.replicated(self.mesh)
        with _together.exchanging(f"the value of variable {self.name!r}", copies):
            return _combiner(self.aggregation, where)(copies)

    def write(self, ref: Any, side: Side, value: Any, how: str) -> Any:
        """Change this replica's copy, or outside `run` all of them."""
        if self._in_step():
            return self._write_in_step(ref, side, value, how)
        old = ref[...]
        value = _whole(value, old.shape[1:])
        if isinstance(value, PerReplica):
            stacked = _values.contents(value)
            given = self._checked(stacked, old.shape, old.dtype)
        else:
            value = self._checked(value, old.shape[1:], old.dtype)
            value = _mesh.put_same(value, _mesh.replicated(self.mesh))
            is_update = side is Side.UPDATE
            given = self._for_each(value) if is_update else self._to_each(value, how)
        given = _mesh.put(given, self.sharding)
        new = _mesh.put(_changed(old, given, how), self.sharding)
        ref[...] = new
        return self._combined(ref) if self.has_one_value else PerReplica(new)

    def _write_in_step(self, ref: Any, side: Side, value: Any, how: str) -> jax.Array:
        shape = ref.shape[1:]
        value = _whole(value, shape)
        if isinstance(value, PerReplica):
            value = _values.to_local(value)
        elif side is Side.CROSS:
            first, other = self._parts(self._checked(value, shape, ref.dtype), how)
            is_first = jax.lax.axis_index(_axes()) == 0
            value = jnp.where(is_first, first, other)
        given = self._checked(value, shape, ref.dtype)
        new = _changed(ref[...][0], given, how)
        ref[...] = new[None]
        return new

    def _parts(self, value: jax.Array, how: str) -> tuple[jax.Array, jax.Array]:
        """What the first copy, and each other one, takes of a `value` for all."""
        if self.aggregation is NONE:
            raise ValueError(
                f"Variable {self.name!r} has a copy per replica and aggregation NONE, "
                f"so `{how}` outside `run` does not say which copies should change. "
                "Assign in `run`, or give the variable an aggregation."
            )
        if how == "assign":
            return _aggregation.shares(self.aggregation, value, self.mesh.size)
        if self.aggregation is VariableAggregation.SUM:
            return value, jnp.zeros_like(value)
        return value, value

    def _to_each(self, value: jax.Array, how: str) -> jax.Array:
        first, other = self._parts(value, how)
        return self._for_each(other).at[0].set(first)

    def _for_each(self, value: jax.Array) -> jax.Array:
        copies = jnp.broadcast_to(value, (self.mesh.size, *value.shape))
        return _mesh.put(copies, self.sharding)


@functools.cache
def _combiner(aggregation: VariableAggregation, where: NamedSharding) -> Any:
    def combined(copies: jax.Array) -> jax.Array:
        return _aggregation.of_copies(aggregation, copies)

    return jax.jit(combined, out_shardings=where)
