"""Values that may differ between replicas: `PerReplica`.

Outside a step it holds one global array with a leading dimension of replicas, divided
over them; inside a merge call, this replica's own array. A *mirrored* value, which is
equal on all replicas, needs no wrapper: it is a plain global `jax.Array`.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import NoReturn, final

import jax
import numpy as np

from jaxstrategy._src.replicas import devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import html as _html
from jaxstrategy._src.text.array_types import array_type
from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values import arrays, misuse
from jaxstrategy._src.values.types import Leaf, Value
from jaxstrategy._src.values.value_text import line_of_value

# More are not printed, though each may fit.
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
    # Inside a merge call the value is this replica's own, and these are all replicas.
    _replicas: Replicas | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    # Of a batch: which rows are real, bool[replica, rows]. The same on every replica,
    # so that each knows how many there are in all. Booleans, because a function mapped
    # over the tree then leaves them as they are, or makes what is refused.
    _mask: Leaf = None

    @property
    def stacked(self) -> Leaf:
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
        """Whether the devices of this process have versions that can be read."""
        value = self._value
        return arrays.is_placed(value) and not arrays.is_deleted(value)

    def _lines(self) -> list[str]:
        """Each version of this process on a line, or "" if it does not fit."""
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
        raise TypeError(misuse.of_one_array(self))

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(misuse.of_one_array(self, f"format '{spec}'"))
        return str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (bool, int, float, complex)) or arrays.is_array(other):
            raise TypeError(misuse.of_one_array(self, "=="))
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(misuse.of_attribute(self, name))


def _refusal(use: str) -> Callable[..., NoReturn]:
    def refused(self: PerReplica, *_: object, **__: object) -> NoReturn:
        raise TypeError(misuse.of_one_array(self, use))

    return refused


# A wrong use must fail here, with advice, and not somewhere inside JAX or NumPy.
for _name in misuse.OPERATORS:
    setattr(PerReplica, f"__{_name}__", _refusal(_name))


def is_per_replica(value: object) -> bool:
    """Whether `value` is a `PerReplica`; a stopping rule for tree functions."""
    return isinstance(value, PerReplica)


def from_local(value: jax.Array, replicas: Replicas) -> PerReplica:
    """This replica's `value` as a `PerReplica` of all, while a step is being traced."""
    return PerReplica(value, replicas)


def local_value(value: PerReplica) -> Leaf:
    """This replica's version, while a step is being traced.

    Raises:
      TypeError: `value` was made outside the step and captured by it.
    """
    if value._replicas is None:
        value._misused()
    return value._value


def with_mask(value: PerReplica, mask: Value) -> PerReplica:
    """`value`, of which only some rows are real."""
    return dataclasses.replace(value, _mask=mask)


def with_contents(value: PerReplica, array: jax.Array) -> PerReplica:
    """`value`, with an array in place of its own: see `contents`."""
    return dataclasses.replace(value, _value=array)


def contents(value: PerReplica) -> Leaf:
    """The array in `value`: `[replica, ...]` outside a step, `[...]` inside one."""
    return value._value


def own_replicas(value: PerReplica) -> tuple[int, ...]:
    """Those of whose versions `value.values` has some: of this process, in order."""
    replicas = Replicas.dividing(value.stacked)
    return tuple(range(value.num_replicas)) if replicas is None else replicas.own


def _devices_of(value: jax.Array) -> Sequence[Device]:
    """Those of this process that hold a stacked array, in replica order."""
    replicas = Replicas.dividing(value)
    if replicas is None:
        return sorted(value.sharding.addressable_devices, key=lambda d: d.id)
    found = (device for i in replicas.own for device in replicas.devices_of(i))
    return list(dict.fromkeys(found))


def _by_replica(value: jax.Array) -> list[tuple[int, str]]:
    """The replicas of this process and the devices that hold the version of each."""
    replicas = Replicas.dividing(value)
    if replicas is None:
        # JAX keeps no division over one device, which several replicas may share.
        where = [devices.name(device) for device in _devices_of(value)]
        return list(enumerate(where * (value.shape[0] if len(where) == 1 else 1)))
    return [(i, replicas.device_names_of(i)) for i in replicas.own]
