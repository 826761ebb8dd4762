"""Values that replicas hold: `PerReplica`, mirrored arrays, and how they are built.

A *mirrored* value is equal on every replica. It needs no wrapper: it is a plain global
`jax.Array` whose sharding replicates it over the strategy's mesh. A `PerReplica` may
differ between replicas; it is a pytree node around one global array with a leading
replica dimension, split over the mesh.

This module decides nothing about strategies: it is given meshes.
"""

from __future__ import annotations

import abc
import dataclasses
import html
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._errors import DonatedValueError, shown
from jaxstrategy.replicas import (
    _devices,
    _mesh,
)
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _tables
from jaxstrategy.text._array_types import array_type
from jaxstrategy.values import _misuse
from jaxstrategy.values._types import PyTree as PyTree

_NOT_TRACED = get_opaque_trace_state()


def is_traced() -> bool:
    """Whether JAX is tracing the code that asks."""
    return get_opaque_trace_state() != _NOT_TRACED


def is_array(value: object) -> bool:
    """Whether `value` is an array of JAX or NumPy (a scalar of theirs included)."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_mirrored(value: object) -> bool:
    """Whether `value` is an array placed whole on every replica of some strategy."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and _mesh.is_replicated(value.sharding)
    )


class _DistributedType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            return value.is_distributed
        return isinstance(value, PerReplica) or is_mirrored(value)

    def __subclasscheck__(cls, other: type) -> bool:
        return other in (cls, PerReplica) or issubclass(other, Handle)


class DistributedValues(metaclass=_DistributedType):
    """The common type of `PerReplica`, mirrored values and variables of strategies.

    For `isinstance`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> isinstance(strategy.mirror(1.0), js.DistributedValues)
    True
    >>> isinstance(1.0, js.DistributedValues)
    False
    """


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PerReplica:
    """One version of an array for each replica; the versions may differ.

    Pass it to `strategy.run` and the function sees its own replica's version, of shape
    `[...]`. It stands in any pytree, is returned by `run` for every output that may
    differ, and costs no copy: all versions are one array of shape `[replica, ...]`.

    It is not itself an array. Read it with `strategy.reduce`, `strategy.gather`,
    `strategy.experimental_local_results`, or `value.local(replica_id)`.

    Args:
      stacked: an array of shape `[replica, ...]`, of JAX or NumPy. For a list with one
        entry per replica use `strategy.per_replica`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:4])
    >>> x = js.PerReplica(np.arange(8.0).reshape(4, 2))
    >>> doubled = strategy.run(lambda local: 2 * local, (x,))
    >>> doubled
    PerReplica(float32[2] on cpu:0..3)
    >>> doubled.local(3)
    Array([12., 14.], dtype=float32)
    """

    _value: Any
    # Inside a merge call the value is this replica's own, and these are all replicas.
    _replicas: Replicas | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    # Of a batch: which rows are real, bool[replica, rows]. The same on every replica,
    # so that each knows how many there are in all. Booleans, because a function mapped
    # over the tree then leaves them as they are, or makes what is refused.
    _mask: Any = None

    @property
    def stacked(self) -> Any:
        """All versions as one array of shape `[replica, ...]`."""
        if self._replicas is None:
            return self._value
        return jax.lax.all_gather(self._value, self._replicas.collective_axes)

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """One array of shape `[...]` per replica of this process, in replica order.

        Raises:
          DonatedValueError: it was donated to an earlier call.
        """
        if self._replicas is None and is_placed(self._value):
            check_alive(self._value, "A PerReplica")
            replicas = Replicas.dividing(self._value)
            return (
                tuple(self._value)
                if replicas is None
                else replicas.versions(self._value)
            )
        return tuple(self.stacked)

    def local(self, replica_id: int) -> jax.Array:
        """The version of replica `replica_id`, of shape `[...]`.

        Raises:
          IndexError: there is no such replica, or it is another process's.
        """
        versions = self.values
        if len(versions) < self.num_replicas:
            own = own_replicas(self)
            if replica_id not in own:
                raise IndexError(
                    f"Replica {replica_id} was asked of a value of which this process "
                    f"has replicas {own[0]} to {own[-1]}. Use `strategy.gather`."
                )
            return versions[own.index(replica_id)]
        if not 0 <= replica_id < len(versions):
            raise IndexError(
                f"Replica {replica_id} was asked of a value with {len(versions)} "
                f"replicas; they count from 0 to {len(versions) - 1}."
            )
        return versions[replica_id]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one replica's version."""
        shape = np.shape(self._value)
        return shape[1:] if self._replicas is None else shape

    @property
    def dtype(self) -> Any:
        """The dtype of every version."""
        return self._value.dtype

    @property
    def mask(self) -> Any:
        """The mask of real rows, `bool[replica, rows]`, of a batch that may be padded.

        None of other values. Inside a step see `batch_mask`.
        """
        return self._mask

    @property
    def num_replicas(self) -> int:
        """The number of versions.

        Raises:
          TypeError: it was made of something that has no first dimension.
        """
        if self._replicas is not None:
            return self._replicas.count
        shape = getattr(self._value, "shape", ())
        if not shape:
            raise TypeError(
                f"A PerReplica of {shown(self._value)} has no dimension of replicas; "
                "it was made of no array of shape `[num_replicas, ...]`."
            )
        return shape[0]

    def __repr__(self) -> str:
        if not hasattr(self._value, "dtype"):  # a pytree of something else
            return f"PerReplica({self._value!r})"
        return f"PerReplica({array_type(self.dtype, self.shape)}{self._where()})"

    def _where(self) -> str:
        if self._replicas is not None:
            return ", inside merge_call"
        if _is_deleted(self._value):
            return ", donated to an earlier call"
        if is_placed(self._value):
            return f" on {_devices.names(_own_devices(self._value))}"
        return f" x {self.num_replicas}"

    def _repr_html_(self) -> str:
        has_versions = is_placed(self._value) and not _is_deleted(self._value)
        if not has_versions:
            return f"<code>{html.escape(repr(self))}</code>"
        kind = array_type(self.dtype, self.shape)
        rows = [
            (i, _devices.name(device), kind)
            for i, device in enumerate(_own_devices(self._value))
        ]
        return _tables.html_table("PerReplica", ("replica", "device", "version"), rows)

    def _misused(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(_misuse.of_one_array(self))

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(_misuse.of_one_array(self, f"format '{spec}'"))
        return str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (bool, int, float, complex)) or is_array(other):
            raise TypeError(_misuse.of_one_array(self, "=="))
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_misuse.of_attribute(self, name))


def _refusal(use: str) -> Callable[..., NoReturn]:
    def refused(self: PerReplica, *_: object, **__: object) -> NoReturn:
        raise TypeError(_misuse.of_one_array(self, use))

    return refused


# A wrong use must fail here, with advice, and not somewhere inside JAX or NumPy.
for _name in _misuse.OPERATORS:
    setattr(PerReplica, f"__{_name}__", _refusal(_name))


def is_per_replica(value: object) -> bool:
    """Whether `value` is a `PerReplica`; a stopping rule for tree functions."""
    return isinstance(value, PerReplica)


def from_local(value: jax.Array, replicas: Replicas) -> PerReplica:
    """This replica's `value` as a `PerReplica` of all, while a step is being traced."""
    return PerReplica(value, replicas)


def local_value(value: PerReplica) -> Any:
    """This replica's version, while a step is being traced.

    Raises:
      TypeError: `value` was made outside the step and captured by it.
    """
    if value._replicas is None:
        value._misused()
    return value._value


def with_mask(value: PerReplica, mask: Any) -> PerReplica:
    """`value`, of which only some rows are real."""
    return dataclasses.replace(value, _mask=mask)


def contents(value: PerReplica) -> Any:
    """What `value` wraps: `[replica, ...]` outside a step, `[...]` inside one."""
    return value._value


def as_array(value: Any, what: str) -> jax.Array | np.ndarray:
    """`value` as an array that devices can hold; 64-bit types as JAX is set up.

    Raises:
      TypeError: it is not an array or a number.
      ValueError: it has integers that JAX does not hold.
    """
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"`{what}` is {shown(value)}, which is not an array or a number and cannot "
            "be placed on a device."
        )
    _mesh.check_held(array)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def is_placed(value: Any) -> bool:
    """Whether `value` is an array on devices, and not one that is being traced."""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def _is_deleted(value: Any) -> bool:
    return is_placed(value) and value.is_deleted()


def check_alive(value: Any, what: str) -> None:
    """Raise if `value` is an array whose memory was given to a step.

    Raises:
      DonatedValueError: it is. On JAX 0.10, computing with it may end the process.
    """
    if _is_deleted(value):
        raise DonatedValueError(
            f"{what} was donated to an earlier call, which has reused its memory. Go "
            "on with the value that call returned, or leave the argument out of "
            "`donate_argnums`."
        )


def own_replicas(value: PerReplica) -> tuple[int, ...]:
    """Those of whose versions `value.values` has some: of this process, in order."""
    replicas = Replicas.dividing(value.stacked)
    return tuple(range(value.num_replicas)) if replicas is None else replicas.own


def _own_devices(value: jax.Array) -> Sequence[Device]:
    """Those of this process that hold a stacked array, in replica order."""
    replicas = Replicas.dividing(value)
    if replicas is None:
        return [shard.device for shard in value.addressable_shards]
    return list(dict.fromkeys(replicas.own_devices))


class Handle(abc.ABC):
    """Something that stands for a value and is passed on as itself: a variable.

    Attributes:
      number: its place in the order in which they were made.
    """

    number: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""

    @abc.abstractmethod
    def value(self) -> jax.Array:
        """The value that the copies have together, or the replica's own in a step."""

    @abc.abstractmethod
    def distributed(self) -> Any:
        """All copies of it: a mirrored array or a `PerReplica`."""

    @property
    @abc.abstractmethod
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy, and so has a copy for each replica."""

    @property
    @abc.abstractmethod
    def copies_must_agree(self) -> bool:
        """Whether it has no copies that may differ."""


def is_whole(value: object) -> bool:
    """Whether `value` is looked at as a whole, although it is a pytree."""
    return isinstance(value, (PerReplica, Handle))


def is_object(node: object) -> bool:
    """Whether `node` is an object that is changed in place: of Flax NNX.

    A module, an optimizer, a metric. JAX takes it for a pytree, and copies it. Not to
    be asked before `object_kinds`.
    """
    # By type: `isinstance` asks some libraries' objects, which then load a library.
    return issubclass(type(node), _object_kinds)


_object_kinds: tuple[type, ...] = ()


def object_kinds() -> tuple[type, ...]:
    """The classes of such objects; none as long as Flax NNX is not imported."""
    global _object_kinds
    if not _object_kinds and (nnx := sys.modules.get("flax.nnx")) is not None:
        _object_kinds = (nnx.Pytree,)
    return _object_kinds


def map_leaves(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """`jax.tree.map` that gives `function` each `PerReplica` and variable whole."""
    return jax.tree.map(function, tree, is_leaf=is_whole)


def map_around_objects(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """`map_leaves` that keeps objects that are changed in place, uncopied."""
    object_kinds()
    return jax.tree.map(
        lambda leaf: leaf if is_object(leaf) else function(leaf),
        tree,
        is_leaf=lambda node: is_whole(node) or is_object(node),
    )
