"""Errors for sharding constraints along an axis that the mesh does not have."""

from __future__ import annotations

import re

from jaxstrategy._src.replicas.inner_axes import which_axes
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import user_code

_NOT_FOUND = re.compile(r"Resource axis: (\S+) of (P.*\)) is not found in mesh")
_NEEDS_MESH = "requires a non-empty mesh"


def needs_mesh(error: Exception) -> bool:
    """Whether JAX was asked to divide an array, by names of axes, without a mesh."""
    return isinstance(error, RuntimeError) and _NEEDS_MESH in str(error)


def without_axes(error: Exception, name: str) -> ValueError:
    """An error to raise instead, where a replica is one device."""
    return UnknownAxis(
        f"`{name}` wants an array to be divided over axes inside a replica:"
        f"{line_of(error)}Replicas have one device each. Make the strategy with "
        "`logical_axes`, of size 1 too, or use annotations of Flax, which mean nothing "
        "there."
    )


def line_of(error: Exception) -> str:
    """The user's line that raised `error`, as a part of a message."""
    line = user_code.users_line(error.__traceback__)
    return f"\n  {line}\n" if line else " "


class UnknownAxis(ValueError):
    """Code divides an array along an axis of the mesh that there is not."""


def unknown_axis(error: Exception, name: str, replicas: Replicas) -> UnknownAxis | None:
    """An error to raise instead of JAX's about an unknown axis; None of another."""
    found = _NOT_FOUND.search(str(error))
    if found is None or not isinstance(error, ValueError):
        return None
    axis, spec = found.groups()
    return UnknownAxis(
        f"`{name}` wants an array to lie as {spec}:{line_of(error)}This is a division "
        f"{which_axes(axis, replicas)} In a step values are one replica's: its rows "
        "of a batch are not divided once more."
    )
