"""`PerReplica`, `DistributedValues` and handles of variables."""

from __future__ import annotations

import abc
import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import jax
import numpy as np

from jaxstrategy._src import text as _html
from jaxstrategy._src.replicas import devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf, Value, is_mirrored

_MOST_ELEMENTS = 12


def value_text(array: np.ndarray) -> str:
    """The value as text, shortened in the middle if it is large.

    >>> value_text(np.float32(0.1)), value_text(np.arange(3))
    ('0.1', '[0, 1, 2]')
    """
    if np.ndim(array):
        return np.array2string(array, separator=", ")
    return str(np.asarray(array)[()])


def line_of_value(array: jax.Array | np.ndarray) -> str:
    """The value on one line; "" if it does not fit.

    >>> line_of_value(np.ones((2, 2))), line_of_value(np.ones(100))
    ('[[1., 1.], [1., 1.]]', '')
    """
    if array.size > _MOST_ELEMENTS or is_key(array.dtype):
        return ""
    return " ".join(value_text(np.asarray(array)).split())


# The special methods of arrays, by use.
_READING = "array index int float complex bool round"
_GOING_THROUGH = "len iter getitem contains"
_COMPUTING = (
    "jax_array array_ufunc add radd sub rsub mul rmul truediv rtruediv floordiv "
    "rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs lt le gt ge and rand or "
    "ror xor rxor invert lshift rlshift rshift rrshift"
)
OPERATORS = f"{_READING} {_GOING_THROUGH} {_COMPUTING}".split()

# The methods and attributes of arrays of NumPy, JAX and TensorFlow.
_REDUCING = "sum mean min max".split()
_TO_HOST = "item numpy tolist eval cpu tobytes".split()
_OF_ARRAYS = (
    "all any argmax argmin astype at block_until_ready clip copy cumprod cumsum "
    "device devices diagonal dot flatten imag is_fully_addressable "
    "is_fully_replicated nbytes ndim nonzero prod ptp ravel real repeat reshape "
    "round set_shape sharding size sort squeeze std swapaxes take trace transpose T "
    "var view get_shape addressable_shards addressable_data"
).split()

_READ = "For one number or array of all replicas use `strategy.reduce('mean', value)`. "
_GO_THROUGH = (
    "For each replica's version use `strategy.experimental_local_results(value)`. "
)
_COMPUTE = (
    "Compute inside the step, or in one of its own, `strategy.run(lambda x: ..., "
    "(value,))`, where the function gets its own replica's version. "
)
_ALL = (
    "Outside `run` it is read with `strategy.reduce(op, value)`, "
    "`strategy.gather(value)` and `strategy.experimental_local_results(value)`; inside "
    "`run` pass it as an argument, and the function gets its own replica's version."
)


def _misuse_message(value: object, use: str = "") -> str:
    """The message for a `PerReplica` that is used like an array."""
    named = f" (`{use}`)" if use else ""
    advice = ""
    if use in _COMPUTING.split() or use == "==":
        advice = _COMPUTE
    elif use in _READING.split() or use.startswith("format"):
        advice = _READ
    elif use in _GOING_THROUGH.split():
        advice = _GO_THROUGH
    return (
        f"A PerReplica was used as if it were one array{named}, but {value!r} holds "
        f"one version per replica. {advice}{_ALL}"
    )


def _attribute_message(value: object, name: str) -> str:
    """The message for an attribute of arrays that a `PerReplica` does not have."""
    if name in _REDUCING:
        advice = (
            f"Use `strategy.reduce({name!r}, value)` over the replicas, and with "
            "`axis=...` over dimensions of the versions, too."
        )
    elif name in _TO_HOST:
        advice = _READ + _ALL
    elif name in _OF_ARRAYS:
        advice = _COMPUTE + _ALL
    else:
        return f"{type(value).__name__!r} object has no attribute {name!r}"
    return f"A PerReplica has no `{name}`: it holds one version per replica. {advice}"


_MOST_VERSIONS = 16


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

    _value: Leaf
    # Set inside a merge call, where the value is the version of this replica.
    _replicas: Replicas | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    # Of a batch: which rows are real, bool[replica, rows], replicated, so that each
    # replica knows how many there are in all. Booleans, because functions mapped over
    # the tree leave them as they are, or return what is refused.
    _mask: Leaf = None

    @property
    def stacked(self) -> Leaf:
        """All versions as one array of shape `[replica, ...]`."""
        if self._replicas is None:
            return self._value
        return jax.lax.all_gather(self._value, self._replicas.axes)

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """One array of shape `[...]` per replica of this process, in replica order.

        Raises:
          DonatedValueError: it was donated to an earlier call.
        """
        if self._replicas is None and arrays.is_placed(self._value):
            arrays.check_alive(self._value, "A PerReplica")
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
            local_ids = local_replicas(self)
            if replica_id not in local_ids:
                raise IndexError(
                    f"Replica {replica_id} was asked of a value of which this process "
                    f"has replicas {local_ids[0]} to {local_ids[-1]}. Use "
                    "`strategy.gather`."
                )
            return versions[local_ids.index(replica_id)]
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
    def dtype(self) -> np.dtype:
        """The dtype of every version."""
        return self._value.dtype

    @property
    def mask(self) -> Leaf:
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
        if arrays.is_deleted(self._value):
            return ", donated to an earlier call"
        if arrays.is_placed(self._value):
            return f" on {devices.names(_devices_of(self._value))}"
        return f" x {self.num_replicas}"

    def __str__(self) -> str:
        lines = self._lines() if self._has_versions() else []
        if not all(lines) or not 0 < len(lines) <= _MOST_VERSIONS:
            return repr(self)
        return f"{repr(self)[:-1]}: {', '.join(lines)})"

    def _has_versions(self) -> bool:
        """Whether it holds an array that can be read here."""
        value = self._value
        return arrays.is_placed(value) and not arrays.is_deleted(value)

    def _lines(self) -> list[str]:
        """A line for each version of this process, "" for one that does not fit."""
        return [line_of_value(version) for version in self.values]

    def _repr_html_(self) -> str:
        if not self._has_versions():
            return f"<code>{html.escape(repr(self))}</code>"
        lines = self._lines()
        if not all(lines):
            lines = [array_type(self.dtype, self.shape)] * len(lines)
        places = _by_replica(self._value)
        rows = [(*place, line) for place, line in zip(places, lines, strict=True)]
        header = ("replica", "device", "version")
        return _html.rows_of(repr(self), header, rows)

    def _misused(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(_misuse_message(self))

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(_misuse_message(self, f"format '{spec}'"))
        return str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (bool, int, float, complex)) or arrays.is_array(other):
            raise TypeError(_misuse_message(self, "=="))
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_attribute_message(self, name))


def _refusal(use: str) -> Callable[..., NoReturn]:
    def refused(self: PerReplica, *_: object, **__: object) -> NoReturn:
        raise TypeError(_misuse_message(self, use))

    return refused


# Raise here, with advice, and not somewhere inside JAX or NumPy.
for _name in OPERATORS:
    setattr(PerReplica, f"__{_name}__", _refusal(_name))


def is_per_replica(value: object) -> bool:
    """Whether `value` is a `PerReplica`; an `is_leaf` for tree functions."""
    return isinstance(value, PerReplica)


def from_local(value: jax.Array, replicas: Replicas) -> PerReplica:
    """This replica's `value` as a `PerReplica`, while a step is traced."""
    return PerReplica(value, replicas)


def local_value(value: PerReplica) -> Leaf:
    """This replica's version, while a step is traced."""
    if value._replicas is None:
        value._misused()
    return value._value


def with_mask(value: PerReplica, mask: Value) -> PerReplica:
    """`value` with a mask of its real rows."""
    return dataclasses.replace(value, _mask=mask)


def with_contents(value: PerReplica, array: jax.Array) -> PerReplica:
    """`value` with other `contents`."""
    return dataclasses.replace(value, _value=array)


def contents(value: PerReplica) -> Leaf:
    """The array in `value`: `[replica, ...]` outside a step, `[...]` inside one."""
    return value._value


def local_replicas(value: PerReplica) -> tuple[int, ...]:
    """The ids of the replicas whose versions are in `value.values`."""
    replicas = Replicas.dividing(value.stacked)
    return tuple(range(value.num_replicas)) if replicas is None else replicas.local_ids


def _devices_of(value: jax.Array) -> Sequence[Device]:
    """The devices of this process that hold a stacked array, in replica order."""
    replicas = Replicas.dividing(value)
    if replicas is None:
        return sorted(value.sharding.addressable_devices, key=lambda d: d.id)
    groups = map(replicas.devices_of, replicas.local_ids)
    return list(dict.fromkeys(device for group in groups for device in group))


def _by_replica(value: jax.Array) -> list[tuple[int, str]]:
    """The ids of this process's replicas, with the names of their devices."""
    replicas = Replicas.dividing(value)
    if replicas is None:
        # On one device, which several replicas may share, there is no sharding.
        names = [devices.name(device) for device in _devices_of(value)]
        return list(enumerate(names * (value.shape[0] if len(names) == 1 else 1)))
    return [(i, replicas.device_names_of(i)) for i in replicas.local_ids]


class Handle(abc.ABC):
    """A variable, as lower layers see it: a leaf that is passed on as itself.

    Attributes:
      number: variables are numbered in the order of creation.
    """

    number: int

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""

    @abc.abstractmethod
    def value(self) -> jax.Array:
        """The value of all copies together; in a step that of this replica."""

    @abc.abstractmethod
    def distributed(self) -> jax.Array | PerReplica:
        """All copies: a mirrored array or a `PerReplica`."""

    @property
    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """The replicas that have a copy each."""

    @property
    @abc.abstractmethod
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy."""

    @property
    @abc.abstractmethod
    def copies_must_agree(self) -> bool:
        """Whether its copies must be equal."""

    @property
    @abc.abstractmethod
    def division(self) -> LeafSharding:
        """The dimension along which it is sharded over the replicas, if any."""


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
