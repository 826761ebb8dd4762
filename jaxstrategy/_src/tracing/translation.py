"""Translates errors of JAX and Flax into errors that say what to do."""

from __future__ import annotations

import re

import jax

from jaxstrategy._src import text
from jaxstrategy._src.errors import TracedValueError
from jaxstrategy._src.replicas.inner_axes import which_axes
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.tracing import nnx

# Raised by JAX when Python needs the value of a tracer.
CONCRETIZATION_ERRORS = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)
# A bare `Exception` of JAX 0.10 and 0.12.
_BATCHED_WRITE = "vmapped value on an unbatched array reference"
_OTHER_MESH = "should match the mesh of sharding"
_NOT_AUTO = "can only refer to Auto axes of the mesh"
_NOT_FOUND = re.compile(r"Resource axis: (\S+) of (P.*\)) is not found in mesh")
_NEEDS_MESH = "requires a non-empty mesh"
UNBOUND_AXIS = re.compile(r"[Uu]nbound axis name:? *'?(\w+)")


def translated(error: Exception, name: str, replicas: Replicas) -> Exception | None:
    """An error to raise instead of `error`, which a step raised; or None."""
    if isinstance(error, CONCRETIZATION_ERRORS):
        return _concretization_error(error, name)
    if isinstance(error, NameError) and (unbound := UNBOUND_AXIS.search(str(error))):
        return _unbound_axis_error(error, name, unbound[1], replicas.axis_name)
    if _BATCHED_WRITE in str(error):
        return _batched_write_error(error, name)
    if (unknown := unknown_axis(error, name, replicas)) is not None:
        return unknown
    if isinstance(error, ValueError) and _NOT_AUTO in str(error):
        return along_replicas(name, line_of(error), replicas)
    if needs_mesh(error):
        return _no_axes_error(error, name, replicas)
    if isinstance(error, ValueError) and _OTHER_MESH in str(error):
        return _other_mesh_error(error, name, replicas)
    return nnx.translated(error, name)


def _concretization_error(error: Exception, name: str) -> TracedValueError:
    return TracedValueError(
        f"`{name}` asked Python for the value of something that only the devices will "
        f"know, with `if`, `while`, `int()`, `float()`, indexing a list or NumPy:"
        f"{line_of(error)}"
        "`run` traces the function once for all replicas, so array and number "
        "arguments, and `replica_id_in_sync_group`, have no value yet. Choose with "
        "`jnp.where` or `jax.lax.cond`, index with `jnp.take`; or pass what decides as "
        "a Python bool or string, which are static. To look at values, run the step in "
        "`with js.experimental.eager_replicas():`, where each replica has its own."
    )


def _batched_write_error(error: Exception, name: str) -> ValueError:
    return ValueError(
        f"`{name}` changes a variable inside `jax.vmap`, with another value for each "
        f"mapped element, but it holds one:{line_of(error)}"
        "Return the values from the mapped function, combine them (`values.sum(0)`), "
        "and assign the result outside of it."
    )


def along_replicas(name: str, where: str, replicas: Replicas) -> ValueError:
    """The error for a sharding constraint along the replicas."""
    inner = replicas.inner_sizes
    advice = (
        f"Constrain it along the logical axes, {inner}, or not at all."
        if inner
        else "Leave the constraint out; which state the replicas divide among them, "
        "`sharding=` of the strategy says."
    )
    return ValueError(
        f"`{name}` constrains a value along {replicas.axis_name!r}, the axis of the "
        f"replicas:{where}"
        "A value in a step is one replica's, and no other has a part of it. " + advice
    )


def _no_axes_error(error: Exception, name: str, replicas: Replicas) -> ValueError:
    advice = (
        "Leave the constraint out."
        if replicas.per_device > 1
        else "Leave the constraint out, or make the strategy with axes along which the "
        'devices of a replica differ: `logical_axes={"core": 2}` (1 will do).'
    )
    return ValueError(
        f"`{name}` constrains a value along axes of a mesh, and its replicas have no "
        f"devices to divide it over:{line_of(error)}"
        f"A value in a step is one replica's; no other has a part of it. {advice}"
    )


def _other_mesh_error(error: Exception, name: str, replicas: Replicas) -> ValueError:
    names = replicas.inner_axes or replicas.axes
    return ValueError(
        f"`{name}` goes on with a value that it has constrained to a mesh by name, "
        f"`NamedSharding(mesh, ...)`:{line_of(error)}"
        "Inside a step the mesh is that of one replica, and JAX takes the two for "
        "different ones. Name the axes only: `jax.lax.with_sharding_constraint(x, "
        f"PartitionSpec(None, {names[0]!r}))`."
    )


def _unbound_axis_error(
    error: Exception, name: str, axis: str, ours: str | tuple[str, ...]
) -> NameError:
    return NameError(
        f"`{name}` reduces over an axis {axis!r} that there is not:{line_of(error)}"
        f"Inside `run` the axis of the replicas is called {ours!r}. Give the layer "
        f"that name (`BatchNorm(axis_name={ours!r})`, or what "
        "`jaxstrategy.flax.axis_name()` returns if it is made inside the step), use "
        "`jaxstrategy.flax.linen.BatchNorm` or `nnx.BatchNorm`, which need none, or "
        "reduce with `get_replica_context().all_reduce('mean', x)`."
    )


def needs_mesh(error: Exception) -> bool:
    """Whether JAX was asked to shard an array by axis names, without a mesh."""
    return isinstance(error, RuntimeError) and _NEEDS_MESH in str(error)


def without_axes(error: Exception, name: str) -> ValueError:
    """The error to raise instead, where a replica is one device."""
    return UnknownAxis(
        f"`{name}` wants an array to be divided over axes inside a replica:"
        f"{line_of(error)}Replicas have one device each. Make the strategy with "
        "`logical_axes`, of size 1 too, or use annotations of Flax, which mean nothing "
        "there."
    )


def line_of(error: Exception) -> str:
    """The user's line that raised `error`, for a message."""
    line = text.users_line(error.__traceback__)
    return f"\n  {line}\n" if line else " "


class UnknownAxis(ValueError):
    """Code shards an array along an unknown mesh axis."""


def unknown_axis(error: Exception, name: str, replicas: Replicas) -> UnknownAxis | None:
    """The error to raise instead of JAX's about an unknown axis; None for others."""
    found = _NOT_FOUND.search(str(error))
    if found is None or not isinstance(error, ValueError):
        return None
    axis, spec = found.groups()
    return UnknownAxis(
        f"`{name}` wants an array to lie as {spec}:{line_of(error)}This is a division "
        f"{which_axes(axis, replicas)} In a step values are one replica's: its rows "
        "of a batch are not divided once more."
    )
