"""What JAX says of a step that runs eagerly, in our words."""

from __future__ import annotations

import re

import jax

from jaxstrategy._errors import NonFiniteError
from jaxstrategy._options import RunOptions
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _user_code
from jaxstrategy.tracing._translation import translated

_UNBOUND = re.compile(r"[Uu]nbound axis name:? *'?(\w+)")
# In a function that the step maps or differentiates: JAX says itself what to do.
_TRACED = (
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)


def eagerly_translated(
    error: Exception, name: str, replicas: Replicas, options: RunOptions
) -> Exception | None:
    """An error to raise instead of one that a replica raised; or None.

    Args:
      error: what it raised.
      name: of the step.
      replicas: those it runs on.
      options: of the step.
    """
    if isinstance(error, _TRACED):
        return None
    line = _user_code.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    if isinstance(error, NameError) and (unbound := _UNBOUND.search(str(error))):
        return NameError(
            f"`{name}` reduces over the axis {unbound[1]!r} by hand, which "
            f"`eager_replicas()` has not:{where}"
            "Each replica runs by itself there, and JAX knows nothing of the others. "
            "Use `get_replica_context().all_reduce('sum', x)` or `all_gather` instead "
            "of `jax.lax.psum` and its like, and `replica_id_in_sync_group` instead of "
            "`jax.lax.axis_index`; or run this step compiled."
        )
    is_checked = bool(options.check_finite)
    if is_checked and type(error) is FloatingPointError:
        return NonFiniteError(
            f"`{name}` made a NaN in `eager_replicas()`:{where}{error}",
            line=line and str(line),
        )
    return translated(error, name, replicas)
