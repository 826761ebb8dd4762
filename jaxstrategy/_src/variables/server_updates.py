"""Changes of several variables of one server together: `update_together`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables import access, server_functions
from jaxstrategy._src.variables.kinds.exported_update import exported_update
from jaxstrategy._src.variables.kinds.server_kind import ServerKind, server_kind_of
from jaxstrategy._src.variables.variable import Variable


def update_together(
    variables: Sequence[Variable],
    fn: Callable[..., Sequence[jax.Array]],
    operands: Sequence[Value],
) -> None:
    """Makes variables of one server what `fn` makes of all of them, at once.

    Args:
      variables: on one server.
      fn: of what they hold and of the operands; returns what they hold then.
      operands: arrays.
    """
    kinds = [_kind_of(variable) for variable in variables]
    arrays = [jnp.asarray(operand) for operand in operands]
    if access.tracing() is None:
        types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        program = exported_update(fn, [*types, *arrays])
        kinds[0].update_with(variables, program, arrays)
        return
    name = f"{server_functions.UPDATE}_of_{len(variables)}"
    marked = server_functions.named(name, lambda *given: tuple(fn(*given)))
    holders = [variable.holder() for variable in variables]
    new = marked(*(holder[...] for holder in holders), *arrays)
    for kind, holder, value in zip(kinds, holders, new, strict=True):
        kind.told("update")
        holder[...] = value


def _kind_of(variable: Variable) -> ServerKind:
    kind = server_kind_of(variable)
    assert kind is not None, "the optimizer has checked its variables"
    return kind
