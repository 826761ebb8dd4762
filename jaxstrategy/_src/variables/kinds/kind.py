"""The interface of all kinds of variables: `VariableKind`.

A kind is given the reference to work on: inside a step the step's own, of one replica's
copy; outside, the one that holds all copies.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import VariableAggregation
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import WHOLE
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding, Shaped
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Side
from jaxstrategy._src.variables.cell import AbstractCell, Cell, Holder
from jaxstrategy._src.variables.changes import Change
from jaxstrategy._src.variables.initial_value import Start
from jaxstrategy._src.variables.sharding_choice import ShardingChoice


class SentKind(abc.ABC):
    """Where a variable is, as it is sent to workers."""

    @abc.abstractmethod
    def on_worker(
        self, name: str, aggregation: VariableAggregation
    ) -> tuple[VariableKind, AbstractCell]:
        """The kind of the variable on the worker that asks, and what holds it."""


class VariableKind(abc.ABC):
    """The way in which one variable is kept.

    Args:
      name: the variable's.
      aggregation: of the variable.
      replicas: those that have a copy each.
      owner: the variable's strategy, None for an ordinary variable.
    """

    # How it prints.
    describe: str
    # Whether this process can read it outside of steps.
    is_readable = True
    # How one copy lies over the devices of its replica.
    inner = WHOLE

    def __init__(
        self,
        name: str,
        aggregation: VariableAggregation,
        replicas: Replicas,
        owner: AbstractStrategy | None,
    ) -> None:
        self.name = name
        self.aggregation = aggregation
        self.replicas = replicas
        self.owner = owner

    @property
    @abc.abstractmethod
    def sharding(self) -> NamedSharding:
        """The placement of all copies."""

    @property
    def sharding_of_value(self) -> NamedSharding:
        """The placement of a value that all copies take."""
        return self.sharding

    @property
    def division(self) -> LeafSharding:
        """The division of the value over the replicas, if it has one."""
        return LeafSharding(None, "each replica has a copy of its own")

    def divided(self, leaf: Shaped, choice: ShardingChoice) -> Self:
        """This kind for a variable of the type of `leaf`, divided if that is chosen."""
        twin = copy.copy(self)
        twin.inner = choice.inner(leaf, self.replicas)
        return twin

    @abc.abstractmethod
    def placed(self, start: Start) -> jax.Array:
        """All copies, each of them `start`, where the reference is to hold them."""

    def cell(self, start: Start) -> AbstractCell:
        """What holds all copies outside of steps, each of them `start`."""
        return Cell(self.placed(start), is_alone=True)

    @property
    def device(self) -> Device | str:
        """The device that holds the first of the copies."""
        return self.replicas.devices[0]

    def updated(
        self,
        ref: Holder,
        side: Side,
        fn: Callable[..., jax.Array],
        operands: tuple[Value, ...],
        change: Change,
    ) -> jax.Array | PerReplica:
        """Makes the value what `fn` makes of it; returns the new one."""
        return self.write(ref, side, fn(self.read(ref, side), *operands), change)

    def sent(self) -> SentKind:
        """What workers need to read and change the variable where it is."""
        raise TypeError(
            f"Variable {self.name!r} is {self.describe}, where workers do not reach "
            "it, and was to be sent to one, as part of the function of a dataset. Make "
            "it in the scope of the ParameterServerStrategy, or let the function refer "
            "to `variable.numpy()`."
        )

    @abc.abstractmethod
    def of_one_replica(self, start: Start) -> jax.Array:
        """The content of a step's reference if this replica's copy is `start`."""

    @abc.abstractmethod
    def copies(self, ref: Holder) -> jax.Array | PerReplica:
        """All copies: a mirrored array or a `PerReplica`."""

    @property
    @abc.abstractmethod
    def has_one_value(self) -> bool:
        """Whether the copies have a value together."""

    @abc.abstractmethod
    def host_copies(self, held: jax.Array) -> list[np.ndarray]:
        """The copies that this process has, on the host, in replica order."""

    @abc.abstractmethod
    def read(self, ref: Holder, side: Side) -> jax.Array:
        """The value."""

    @abc.abstractmethod
    def write(
        self, ref: Holder, side: Side, value: Value, change: Change
    ) -> jax.Array | PerReplica:
        """Changes the value, and returns the new one."""

    @abc.abstractmethod
    def scatter(
        self, ref: Holder, side: Side, rows: IndexedSlices, change: Change
    ) -> jax.Array | PerReplica:
        """Changes some rows, and returns the new value."""

    @abc.abstractmethod
    def rows_for(self, rows: IndexedSlices, change: Change) -> IndexedSlices:
        """The rows that code here means, of those that were given for a change."""

    def combined(self, rows: IndexedSlices, side: Side) -> IndexedSlices:
        """The rows of all replicas that count, where each may have given others."""
        return rows

    # Of one that is elsewhere rows can be had without the others.
    has_remote_rows = False

    def read_rows(self, ref: Holder, side: Side, rows: np.ndarray) -> jax.Array:
        """Some rows of the value, outside of steps.

        Args:
          ref: as of `read`.
          side: likewise.
          rows: the numbers of rows that it has, `[n]`.
        """
        return self.read(ref, side)[rows]

    def rows_changed(
        self, ref: Holder, rows: IndexedSlices, change: Change, new: jax.Array
    ) -> jax.Array:
        """Takes the value that a change of the rows of several variables has made."""
        ref[...] = new
        return new

    def _in_step(self) -> bool:
        return access.tracing() is not None

    def _checked_part(
        self, value: Value, whole: tuple[int, ...], dtype: np.dtype, change: Change
    ) -> jax.Array:
        """`value` as an array of the shape of what changes.

        Raises: as `_checked`.
        """
        shape = change.shape(whole, dtype)
        if not change.is_whole and np.shape(value) != shape:
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
        except mesh.NotHeldError:
            raise
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Variable {self.name!r} was given {shown(value)}, a "
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
        return given if is_key(dtype) else given.astype(dtype)


def _fits(given: jax.Array, wanted: np.dtype) -> bool:
    """Whether `given` may become the dtype `wanted`."""
    if is_key(given.dtype) or is_key(wanted):
        return given.dtype == wanted
    # A Python number is a weakly typed float32 or int32, and fits narrower dtypes too.
    if given.weak_type and _same_sort(given.dtype, wanted):
        return True
    return jnp.promote_types(given.dtype, wanted) == wanted


def _same_sort(given: np.dtype, wanted: np.dtype) -> bool:
    """Whether a Python number of the one sort may become the other."""
    sorts = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)

    def rank(dtype: np.dtype) -> int:
        return next(i for i, sort in enumerate(sorts) if jnp.issubdtype(dtype, sort))

    return rank(given) <= rank(wanted)


def on_host(copy: jax.Array) -> np.ndarray:
    if is_key(copy.dtype):
        copy = jax.random.key_data(copy)
    return np.asarray(copy)


def this_strategy() -> AbstractStrategy:
    strategy = context.current().strategy
    assert strategy is not None, "a step has a strategy"
    return strategy


def whole(value: Value, shape: tuple[int, ...]) -> Value:
    """`value`, made dense if it is sparse."""
    if not is_slices(value):
        return value
    return IndexedSlices(value.values, value.indices, shape).to_dense()
