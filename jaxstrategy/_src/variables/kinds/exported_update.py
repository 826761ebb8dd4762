"""Programs that change variables on their servers: `ExportedUpdate`."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike


class ExportedUpdate(NamedTuple):
    """A program of what variables hold and of operands.

    Attributes:
      key: of no other program.
      exported: in the form of `jax.export`, for CPUs.
    """

    key: str
    exported: bytes


def exported_update(
    fn: Callable[..., Any], operands: Sequence[jax.ShapeDtypeStruct | ArrayLike]
) -> ExportedUpdate:
    """`fn` for operands of these types, for a server.

    Args:
      fn: of the old values and the operands; returns the new values.
      operands: arrays, or types of arrays.
    """
    export: Any = jax.export
    jitted = jax.jit(functools.partial(_as_tuple, fn))
    types = jax.eval_shape(lambda *given: given, *operands)
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in types]
    exported = export.export(jitted, platforms=["cpu"])(*types).serialize()
    return ExportedUpdate(hashlib.sha256(exported).hexdigest(), bytes(exported))


def _as_tuple(fn: Callable[..., Any], *operands: jax.Array) -> tuple[jax.Array, ...]:
    made = fn(*operands)
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)
