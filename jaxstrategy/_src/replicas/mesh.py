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
from jaxstrategy._src.text import shown


class DtypeRangeError(ValueError):
    """A number is out of the range of its dtype."""


def array_of(value: Any, dtype: DTypeLike | None = None) -> jax.Array:
    """`jnp.asarray`, which raises `DtypeRangeError` for numbers out of range."""
    if dtype is None and isinstance(value, (np.ndarray, np.generic)):
        check_range(np.asarray(value))
    try:
        return jnp.asarray(value, dtype)
    except OverflowError:
        raise DtypeRangeError(too_large(value, dtype)) from None


def types_of(leaves: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of leaves of a step's arguments."""
    for leaf in leaves:
        if isinstance(leaf, (np.ndarray, np.generic)):
            check_range(np.asarray(leaf))
    try:
        return jax.eval_shape(list, leaves)
    except OverflowError:
        for leaf in leaves:
            if isinstance(leaf, int):
                array_of(leaf)
        raise


def too_large(value: Any, dtype: DTypeLike | None = None) -> str:
    """The message for a number out of the range of `dtype`, by default JAX's int."""
    kind = jax.dtypes.canonicalize_dtype(int if dtype is None else dtype)
    is_integer = jnp.issubdtype(kind, jnp.integer)
    info = jnp.iinfo(kind) if is_integer else jnp.finfo(kind)
    ends = [
        end if is_integer else f"{end:.6g}" for end in map(int, (info.min, info.max))
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


def check_range(host: np.ndarray) -> None:
    """Raise if JAX, without 64 bits, would silently truncate integers of `host`."""
    kind = jax.dtypes.canonicalize_dtype(host.dtype)
    if host.dtype.kind not in "iu" or kind == host.dtype or not host.size:
        return
    info = jnp.iinfo(kind)
    for extreme in (int(host.max()), int(host.min())):
        if not info.min <= extreme <= info.max:
            raise DtypeRangeError(too_large(extreme, kind))


def is_key(dtype: Any) -> bool:
    """Whether arrays of this dtype hold random keys.

    >>> is_key(jax.random.key(0).dtype), is_key(np.dtype("uint32"))
    (True, False)
    """
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def as_numbers(array: Any) -> Any:
    """The key data of an array of random keys; any other array as it is.

    Shapes: keys `[...]` -> `[..., words]`.
    """
    return jax.random.key_data(array) if is_key(array.dtype) else array


REPLICA_AXIS = "replica"

# While a step is traced for replicas that share devices: the axis of the devices, and
# that of the replicas of one device.
DEVICE_AXIS = "device_of_replicas"
SHARED_DEVICE_AXIS = "replica_of_device"

# A larger array is sharded in steps, so that no device ever has all of it.
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
    """The types of so many mesh axes."""
    # Auto, not Explicit (the default of `jax.make_mesh`), which refuses NumPy inputs.
    return (AxisType.Auto,) * axes


def as_seen_on(sharding: NamedSharding, mesh: AbstractMesh) -> NamedSharding:
    """The same spec on `mesh`, unless `sharding` has other axes."""
    is_same = sharding.mesh.shape == mesh.shape
    return NamedSharding(mesh, sharding.spec) if is_same else sharding


def has_explicit_axes(value: Tracer) -> bool:
    """Whether the type of a traced array has explicit sharding.

    Outside of the mesh of a `shard_map` that raises a bare `KeyError` (JAX 0.10 and
    0.12). `jax.make_mesh` makes such axes by default.
    """
    return AxisType.Explicit in jax.typeof(value).sharding.mesh.axis_types


def is_large(size: int) -> bool:
    """Whether no device should have all of a sharded array of so many bytes."""
    return size > _AT_ONCE_BYTES


def place(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """`value` on the devices of `sharding`.

    With several processes each places its own shards, without communication: all must
    have the same value.
    """

    def put_local_shards(host: np.ndarray, sharding: Sharding) -> jax.Array:
        # Copied as in `_placed`.
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: host[index].copy()
        )

    return _placed(value, sharding, put_local_shards)


def broadcast(value: ArrayLike, sharding: Sharding) -> jax.Array:
    """`value` of the first process, on the devices of `sharding`.

    All processes must take part. A large array that is sharded is sent shard by shard.
    """
    return _placed(value, sharding, _put_from_first)


def _placed(
    value: ArrayLike, sharding: Sharding, put: Callable[[np.ndarray, Any], jax.Array]
) -> jax.Array:
    """`value` placed by `sharding`, by `put` if other processes have devices of it."""
    if is_spread(value):
        return _reshard(value, sharding)
    if isinstance(value, (np.ndarray, np.generic)):
        check_range(np.asarray(value))
    if sharding.is_fully_addressable or isinstance(value, Tracer):
        if isinstance(value, Tracer) and not sharding.is_fully_replicated:
            return _shard_traced(value, sharding)
        if _is_sharded_in_steps(value, sharding):
            return _shard_in_steps(value, sharding)
        try:
            # A device may share NumPy's memory, or read it later, whatever `may_alias`
            # says (JAX 0.10 and 0.12); and NumPy may change its array in place.
            copy = value.copy() if isinstance(value, np.ndarray) else value
            return jax.device_put(copy, sharding)
        except (OverflowError, TypeError):  # the latter of 10**400
            if not isinstance(value, int):
                raise
            raise DtypeRangeError(too_large(value)) from None
    if isinstance(value, jax.Array):
        if is_key(value.dtype):
            data = _placed(jax.random.key_data(value), sharding, put)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    # NumPy makes 64 bits of a Python number.
    host = np.asarray(array_of(value) if isinstance(value, int) else value)
    dtype = jax.dtypes.canonicalize_dtype(host.dtype)
    placed = put(host.astype(dtype, copy=False), sharding)
    is_weak = type(value) in (int, float, complex)
    if isinstance(value, jax.Array):
        is_weak = value.ndim == 0 and value.weak_type
    return _with_weak_type(placed, sharding) if is_weak else placed


def _with_weak_type(array: jax.Array, sharding: Sharding) -> jax.Array:
    """A scalar as JAX makes it of a Python number.

    Arrays from NumPy have no weak type; without, `bfloat16` times a number would be
    `float32` with several processes only.
    """
    with eval_context():
        number = _jitted(_same, sharding)(array.addressable_data(0).item())
    return number if number.dtype == array.dtype else array


# JAX knows jitted functions by identity: a new one at each call would compile anew.
@functools.cache
def _jitted(function: Callable[..., Any], sharding: Sharding) -> Callable[..., Any]:
    return jax.jit(function, out_shardings=sharding)


def _same(array: Any) -> Any:
    return array


def _are_same(each: jax.Array) -> jax.Array:
    return (each == each[0]).all()


def _shard_traced(value: jax.Array, sharding: Sharding) -> jax.Array:
    # In a jitted function `device_put` does not shard a result, and in a mapped one it
    # shards the mapped array (JAX 0.10 and 0.12). A constraint cannot move it.
    whole = jax.device_put(value, replicated_like(sharding))
    return lax.with_sharding_constraint(whole, sharding)


def _is_sharded_in_steps(value: object, sharding: Sharding) -> TypeGuard[jax.Array]:
    """Whether `value` is a large array of one device that is to be sharded."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and not sharding.is_fully_replicated
        and len(value.sharding.device_set) == 1
        and is_large(value.nbytes)
    )


def _shard_in_steps(value: jax.Array, sharding: Sharding) -> jax.Array:
    """Shards `value` one shard at a time.

    `jax.device_put` makes all shards on the device of the array, which then has it
    twice (JAX 0.10 and 0.12).
    """
    shards: list[jax.Array] = []
    size = sharding.shard_shape(value.shape)
    for device, index in sharding.devices_indices_map(value.shape).items():
        starts = [
            each.indices(n)[0] for each, n in zip(index, value.shape, strict=True)
        ]
        shard = lax.dynamic_slice(value, starts, size)
        shards.append(jax.block_until_ready(jax.device_put(shard, device)))
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def _put_from_first(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    with job.exchanging("one value for all replicas", host):
        if not is_large(host.nbytes) or sharding.is_fully_replicated:
            return _broadcast(host, sharding)
        return _broadcast_in_steps(host, sharding)


def _broadcast(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`host` of the first process, by one collective."""
    return first_entry(_stacked_by_device(host, sharding), sharding)


def first_entry(stacked: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Entry 0 of an array `[entry, ...]`, placed by `sharding`."""
    return _jitted(_first, sharding)(stacked)


def _first(stacked: jax.Array) -> jax.Array:
    return stacked[0]


def _stacked_by_device(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The arrays of all processes, one entry for each device."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "values lie on devices"
    return jax.make_array_from_callback(
        (mesh.size, *host.shape),
        NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
        lambda _: host[None],
    )


def _broadcast_in_steps(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """`host` of the first process, by one collective for each shard."""
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    holders: dict[tuple[tuple[int, int, int], ...], list[Device]] = {}
    for device, index in sharding.devices_indices_map(host.shape).items():
        # Before Python 3.12 slices cannot be hashed.
        place = (each.indices(n) for each, n in zip(index, host.shape, strict=True))
        holders.setdefault(tuple(place), []).append(device)
    shards: list[jax.Array] = []
    for place, devices in holders.items():
        part = host[tuple(slice(*each) for each in place)]
        sent = jax.block_until_ready(_broadcast(part, whole))
        at = {shard.device: shard.data for shard in sent.addressable_shards}
        shards += [at[device] for device in devices if device in at]
    return jax.make_array_from_single_device_arrays(host.shape, sharding, shards)


def are_equal(text: bytes, sharding: NamedSharding) -> bool:
    """Whether all processes of `sharding` have the same text; a collective."""
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint32)
    with job.exchanging("whether all processes compute the same", digest):
        compare = _jitted(_are_same, replicated_like(sharding))
        equal = compare(_stacked_by_device(digest, sharding))
    return bool(np.asarray(equal.addressable_data(0)))


def is_spread(value: object) -> TypeGuard[jax.Array]:
    """Whether `value` is an array on devices of several processes."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return False
    return not value.is_fully_addressable


def _reshard(value: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several processes with another sharding."""
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
        return _jitted(_same, sharding)(value)


def replicated_like(sharding: Sharding) -> Sharding:
    """The sharding that replicates an array on the devices of `sharding`."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return NamedSharding(
        mesh_of(sorted(sharding.device_set, key=lambda d: d.id)), PartitionSpec()
    )


def has_sharding(array: jax.Array, sharding: Sharding) -> bool:
    """Whether `array` is on a mesh, with an equivalent sharding."""
    # On one device a plain array is equivalent, but has another type to JAX.
    return isinstance(array.sharding, NamedSharding) and (
        array.sharding.is_equivalent_to(sharding, array.ndim)
    )


def twin(array: jax.Array) -> jax.Array:
    """Another array object with the same buffers."""
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def has_sharding_on_mesh(array: jax.Array, sharding: NamedSharding) -> bool:
    """As `has_sharding`, on the same mesh."""
    mesh = getattr(array.sharding, "mesh", None)
    return mesh == sharding.mesh and has_sharding(array, sharding)


def is_in_another_order(sharding: Sharding | None, other: NamedSharding) -> bool:
    """Whether both are on the same devices, in different orders."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh is other.mesh:
        return False
    one, two = (
        list(np.ravel(np.asarray(each.mesh.devices))) for each in (sharding, other)
    )
    return one != two and set(one) == set(two)


def is_replicated(sharding: Sharding) -> bool:
    """Whether `sharding` replicates over the replicas of some mesh."""
    return (
        isinstance(sharding, NamedSharding)
        and REPLICA_AXIS in sharding.mesh.axis_names
        and not is_split(sharding)
    )


def is_split(sharding: Sharding) -> bool:
    """Whether `sharding` shards over the replicas of some mesh."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return False
    return any(REPLICA_AXIS in axes_of(entry) for entry in sharding.spec)


def axes_of(entry: object) -> tuple[Any, ...]:
    """The mesh axes in an entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def spec_of(entries: Iterable[Sequence[str]]) -> PartitionSpec:
    """The spec with these axes for each dimension, in JAX's shortest form."""
    spec = [tuple(e) if len(e) > 1 else next(iter(e), None) for e in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def spec_over(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """The part of `spec` that names some of the axes."""
    return spec_of([name for name in axes_of(e) if name in axes] for e in spec)


def is_divided(array: jax.Array) -> bool:
    """Whether `array` is sharded over several devices, on any mesh."""
    sharding = array.sharding
    return len(sharding.device_set) > 1 and not sharding.is_fully_replicated
