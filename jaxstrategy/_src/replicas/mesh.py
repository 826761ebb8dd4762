"""The mesh of replicas, arrays placed on it, random keys and out-of-range numbers."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_context
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)
from jax.typing import ArrayLike, DTypeLike

from jaxstrategy._src.errors import PlacementError
from jaxstrategy._src.processes import job
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text.shown import shown


class NotHeldError(ValueError):
    """A number is larger than its dtype holds."""


def array_of(value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """`value` as `jnp.asarray` has it."""
    if dtype is None and isinstance(value, (np.ndarray, np.generic)):
        check_held(np.asarray(value))
    try:
        return jnp.asarray(value, dtype)
    except OverflowError:
        raise NotHeldError(too_large(value, dtype)) from None


def types_of(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of leaves as arguments of a step, which may be types of arrays."""
    for leaf in leaves:
        if isinstance(leaf, (np.ndarray, np.generic)):
            check_held(np.asarray(leaf))
    try:
        return jax.eval_shape(list, leaves)
    except OverflowError:
        for leaf in leaves:
            if isinstance(leaf, int):
                array_of(leaf)
        raise


def too_large(value: Any, dtype: DTypeLike | None = None) -> str:
    """The complaint about a number that `dtype`, by default JAX's integer, lacks."""
    kind = jax.dtypes.canonicalize_dtype(int if dtype is None else dtype)
    is_integer = jnp.issubdtype(kind, jnp.integer)
    held = jnp.iinfo(kind) if is_integer else jnp.finfo(kind)
    ends = [
        end if is_integer else f"{end:.6g}" for end in map(int, (held.min, held.max))
    ]
    advice = ", such as `np.float32(value)`" if is_integer else ""
    if is_integer and kind.itemsize < 8:
        advice += (
            ", or let JAX have 64 bits: `jax.config.update('jax_enable_x64', True)`"
        )
    return (
        f"{shown(value)} was given, and {kind} holds {ends[0]} to {ends[1]}. Give an "
        f"array of a dtype that holds it{advice}."
    )


def check_held(host: np.ndarray) -> None:
    """Raise if JAX, without 64 bits, would cut integers of `host` without a word."""
    kind = jax.dtypes.canonicalize_dtype(host.dtype)
    if host.dtype.kind not in "iu" or kind == host.dtype or not host.size:
        return
    held = jnp.iinfo(kind)
    for extreme in (int(host.max()), int(host.min())):
        if not held.min <= extreme <= held.max:
            raise NotHeldError(too_large(extreme, kind))


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype hold random keys.

    >>> is_key(jax.random.key(0).dtype), is_key(np.dtype("uint32"))
    (True, False)
    """
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(array: Any) -> Any:
    """The numbers of which an array of random keys is made; any other array as it is.

    Shapes: keys `[...]` -> `[..., words]`.
    """
    return jax.random.key_data(array) if is_key(array.dtype) else array


REPLICA_AXIS = "replica"

# Where replicas share devices, and only while a step is made for that: the axis of the
# devices, and that of the replicas of one device.
DEVICE_AXIS = "device_of_replicas"
LANE_AXIS = "replica_of_device"

SAME = PartitionSpec()
SPLIT = PartitionSpec(REPLICA_AXIS)

# Of an array that is divided, so much is copied or sent at once, so that no device has
# all of a large one meanwhile.
_AT_ONCE_BYTES = 64 * 2**20


def mesh_of(devices: Sequence[Device], inner: Mapping[str, int] | None = None) -> Mesh:
    """A mesh with one replica per device, in the order given."""
    found = np.asarray(devices)
    for device in found.flat:
        if not isinstance(device, jax.Device):
            raise TypeError(f"`devices` has {shown(device)}; devices were wanted.")
    if not found.size or found.ndim != 1 or len(set(found)) < found.size:
        raise ValueError(
            f"`devices` was {shown(devices)}; a list of one or more devices, each of "
            "them once, was wanted."
        )
    sizes = dict(inner or {})
    if found.size % math.prod(sizes.values()):
        raise ValueError(
            f"`logical_axes` was {sizes}: a replica has {math.prod(sizes.values())} "
            f"devices, and {found.size} are no multiple of that. Give other sizes, or "
            "a list of `devices`."
        )
    return Mesh(
        found.reshape(-1, *sizes.values()),
        (REPLICA_AXIS, *sizes),
        axis_types=axis_types(1 + len(sizes)),
    )


def axis_types(axes: int) -> tuple[AxisType, ...]:
    """The types of so many mesh axes, along which XLA may divide arrays as it likes."""
    # Auto, not Explicit (the default of `jax.make_mesh`), which refuses NumPy inputs.
    return (AxisType.Auto,) * axes


def on_mesh(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The same division on another mesh with axes of these names."""
    return NamedSharding(mesh, sharding.spec)


def as_seen_on(sharding: NamedSharding, mesh: AbstractMesh) -> NamedSharding:
    """The same on `mesh`, if it has the same axes; another mesh was meant if not."""
    is_same = sharding.mesh.shape == mesh.shape
    return on_mesh(sharding, mesh) if is_same else sharding


def has_explicit_axes(value: Tracer) -> bool:
    """Whether the type of a traced array says how it lies on a mesh.

    Where that is not the mesh of a `shard_map`, that raises a bare `KeyError` (JAX 0.10
    and 0.12). `jax.make_mesh` makes such axes unless told otherwise.
    """
    return AxisType.Explicit in jax.typeof(value).sharding.mesh.axis_types


def is_large(size: int) -> bool:
    """Whether no device should have all of a divided array of so many bytes."""
    return size > _AT_ONCE_BYTES


def place(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """`value` on the devices of `sharding`.

    With several processes each places its own part of what it has, without asking the
    others; all must have the same.
    """
    return _placed(value, sharding, _put_own_part)


def broadcast(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """`value` of the first replica's process, as `sharding` says.

    With several processes it is sent to the others, which must take part. If it is to
    be divided and large, no device has more of it at a time than some parts.
    """
    return _placed(value, sharding, _put_first)


def _placed(
    value: ArrayLike, sharding: Sharding, put: Callable[[np.ndarray, Any], jax.Array]
) -> jax.Array:
    """`value` on devices; `put` is asked if some of them are other processes'."""
    if is_spread(value):
        return _moved(value, sharding)
    if isinstance(value, (np.ndarray, np.generic)):
        check_held(np.asarray(value))
    if sharding.is_fully_addressable or isinstance(value, Tracer):
        if isinstance(value, Tracer) and not sharding.is_fully_replicated:
            return _divided_while_traced(value, sharding)
        if _is_divided_in_steps(value, sharding):
            return _divided_in_steps(value, sharding)
        try:
            # A device may share NumPy's memory, or read it later, whatever `may_alias`
            # says (JAX 0.10 and 0.12); and NumPy may change its array in place.
            kept = value.copy() if isinstance(value, np.ndarray) else value
            return jax.device_put(kept, sharding)
        except (OverflowError, TypeError):  # the latter of 10**400
            if not isinstance(value, int):
                raise
            raise NotHeldError(too_large(value)) from None
    if isinstance(value, jax.Array):
        if is_key(value.dtype):
            data = _placed(jax.random.key_data(value), sharding, put)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    # NumPy has 64 bits for a number of Python.
    host = np.asarray(array_of(value) if isinstance(value, int) else value)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    found = put(host.astype(dtype, copy=False), sharding)
    return _as_number(found, sharding) if _is_number(value) else found


def _is_number(value: ArrayLike) -> bool:
    """Whether `value` gives way to the dtypes of arrays, as Python's numbers do."""
    if isinstance(value, jax.Array):
        return value.ndim == 0 and value.weak_type
    return type(value) in (int, float, complex)


def _as_number(array: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of one number, as JAX has it of a number of Python.

    What comes from NumPy has no weak type, and JAX gives one to numbers of Python only.
    Without, `bfloat16` times a number would be `float32` as soon as there are several
    processes.
    """
    with eval_context():
        number = _itself(sharding)(array.addressable_data(0).item())
    return number if number.dtype == array.dtype else array


@functools.cache
def _itself(sharding: Sharding) -> Callable[[complex], jax.Array]:
    return jax.jit(lambda number: number, out_shardings=sharding)


def _put_own_part(host: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        host.shape,
        sharding,
        lambda index: host[index].copy(),  # see `_placed`
    )


def _divided_while_traced(value: jax.Array, sharding: Sharding) -> jax.Array:
    # In a jitted function `device_put` does not divide a result, and in a mapped one it
    # divides the mapped array (JAX 0.10 and 0.12). A constraint cannot move it.
    whole = jax.device_put(value, replicated_like(sharding))
    return lax.with_sharding_constraint(whole, sharding)


def _is_divided_in_steps(value: object, sharding: Sharding) -> TypeGuard[jax.Array]:
    """Whether `value` is a large array of one device that is to be divided."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and not sharding.is_fully_replicated
        and len(value.sharding.device_set) == 1
        and is_large(value.nbytes)
    )


def _divided_in_steps(value: jax.Array, sharding: Sharding) -> jax.Array:
    """`value` divided part by part.

    `jax.device_put` makes all parts on the device that has the array, which then has it
    twice (JAX 0.10 and 0.12).
    """
    found: list[jax.Array] = []
    size = sharding.shard_shape(value.shape)
    for device, index in sharding.devices_indices_map(value.shape).items():
        starts = [
            each.indices(n)[0] for each, n in zip(index, value.shape, strict=True)
        ]
        part = lax.dynamic_slice(value, starts, size)
        found.append(jax.block_until_ready(jax.device_put(part, device)))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, found)


def _put_first(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    with job.exchanging("one value for all replicas", host):
        if not is_large(host.nbytes) or sharding.is_fully_replicated:
            return _sent(host, sharding)
        return _sent_in_steps(host, sharding)


def _sent(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`host` of the first process, by one collective."""
    return _first(sharding)(_of_each_device(host, sharding))


def _of_each_device(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """What the processes have, one entry for each device, whatever axes there are."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "values lie on devices"
    return jax.make_array_from_callback(
        (mesh.size, *host.shape),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda _: host[None],
    )


def _sent_in_steps(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`host` of the first process, by one collective for each of its parts."""
    whole = NamedSharding(sharding.mesh, SAME)
    holders: dict[tuple[tuple[int, int, int], ...], list[Device]] = {}
    for device, index in sharding.devices_indices_map(host.shape).items():
        # Before Python 3.12 slices are no keys.
        place = (each.indices(n) for each, n in zip(index, host.shape, strict=True))
        holders.setdefault(tuple(place), []).append(device)
    found: list[jax.Array] = []
    for place, devices in holders.items():
        part = host[tuple(slice(*each) for each in place)]
        sent = jax.block_until_ready(_sent(part, whole))
        at = {shard.device: shard.data for shard in sent.addressable_shards}
        found += [at[device] for device in devices if device in at]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, found)


@functools.cache
def _first(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda each: each[0], out_shardings=sharding)


def are_equal(text: bytes, sharding: NamedSharding) -> bool:
    """Whether the processes of `sharding`, which all must ask, have the same text."""
    own = np.frombuffer(hashlib.sha256(text).digest(), np.uint32)
    with job.exchanging("whether all processes compute the same", own):
        found = _all_equal(sharding)(_of_each_device(own, sharding))
    return bool(np.asarray(found.addressable_data(0)))


@functools.cache
def _all_equal(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    whole = replicated_like(sharding)
    return jax.jit(lambda each: (each == each[0]).all(), out_shardings=whole)


def is_spread(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array of several processes, divided or on each."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return not value.is_fully_addressable


def _moved(value: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several processes, elsewhere."""
    if sharding.is_fully_addressable:
        if not value.is_fully_replicated:
            raise PlacementError(
                f"An array of shape {value.shape} that is spread over several "
                "processes was to be placed on devices of this one, which has parts of "
                "it. Read it in all processes together first: `js.to_host(array)` of "
                "state, `strategy.gather` or `strategy.reduce` of a PerReplica."
            )
        return jax.device_put(value.addressable_data(0), sharding)
    if value.sharding.is_equivalent_to(sharding, value.ndim):
        return jax.device_put(value, sharding)
    with job.exchanging("an array for other replicas", value):
        return jax.jit(lambda array: array, out_shardings=sharding)(value)


def replicated_like(sharding: Sharding) -> Sharding:
    """The whole array on each device that `sharding` uses."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, SAME)
    return NamedSharding(mesh_of(sorted(sharding.device_set, key=lambda d: d.id)), SAME)


def lies_as(array: jax.Array, wanted: Sharding) -> bool:
    """Whether `array` lies where `wanted` says, and JAX knows it as being on a mesh."""
    # On one device a plain array lies there too, but has another type to JAX.
    return isinstance(array.sharding, NamedSharding) and (
        array.sharding.is_equivalent_to(wanted, array.ndim)
    )


def twin(array: jax.Array) -> jax.Array:
    """Another array in the same memory."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def lies_on(array: jax.Array, wanted: NamedSharding) -> bool:
    """Whether `array` lies as `wanted` says, on the same mesh."""
    sharding = array.sharding
    is_named = isinstance(sharding, NamedSharding) and sharding.mesh == wanted.mesh
    return is_named and lies_as(array, wanted)


def is_in_another_order(sharding: Sharding | None, wanted: NamedSharding) -> bool:
    """Whether `sharding` is of the devices of `wanted` in another order."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh is wanted.mesh:
        return False
    devices, others = (
        list(np.ravel(np.asarray(each.mesh.devices))) for each in (sharding, wanted)
    )
    return devices != others and set(devices) == set(others)


def is_replicated(sharding: Sharding) -> bool:
    """Whether `sharding` puts the same array on every replica of some mesh.

    The devices of one replica may have different parts of it.
    """
    return (
        isinstance(sharding, NamedSharding)
        and REPLICA_AXIS in sharding.mesh.axis_names
        and not is_split(sharding)
    )


def is_split(sharding: Sharding) -> bool:
    """Whether `sharding` divides an array over the replicas of some mesh."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return False
    return any(REPLICA_AXIS in names(entry) for entry in sharding.spec)


def names(entry: object) -> tuple[Any, ...]:
    """The axes that an entry of a `PartitionSpec` names."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_of(entries: Iterable[Sequence[str]]) -> PartitionSpec:
    """The division by these axes of each dimension, written as users write it."""
    found = [tuple(e) if len(e) > 1 else next(iter(e), None) for e in entries]
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


def along(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The division by some of the axes; that by others is left out."""
    return spec_of([name for name in names(e) if name in axes] for e in spec)


def is_divided(array: jax.Array) -> bool:
    """Whether no device of several has all of `array`, whatever mesh divides it."""
    sharding = array.sharding
    return len(sharding.device_set) > 1 and not sharding.is_fully_replicated
