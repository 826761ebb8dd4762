"""The values that variables have in a function that is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy.contexts import _context
from jaxstrategy.values._handle import Handle
from jaxstrategy.variables import _access, _row_tape


def value_of(variable: Handle) -> jax.Array | None:
    """The value that `variable` has in the function being differentiated, or None.

    Raises:
      ContextError: the function is not part of the step that asks, but runs it.
    """
    found = _context.current().given.get(id(variable))
    if found is None:
        return None
    step, value = found
    if step is not _access.tracing():
        raise _outside(variable)
    tape = _row_tape.current()
    if tape is not None:
        tape.used_whole(variable)
    return value


def is_given(variable: Handle) -> bool:
    """Whether `variable` has a value in a function that is differentiated."""
    return id(variable) in _context.current().given


def check_outside(variables: Iterable[Handle | None]) -> None:
    """Raise unless a step that uses `variables` may be called here.

    Raises:
      ContextError: inside a function that is differentiated with respect to one.
    """
    given = _context.current().given
    if given:
        for variable in variables:
            if variable is not None and id(variable) in given:
                raise _outside(variable)


def _outside(variable: Handle) -> ContextError:
    return ContextError(
        f"The gradient with respect to variable {variable.name!r} is taken outside "
        "`run`, of a function that runs a step which uses it. Take it inside the step, "
        "where gradients are this replica's own, and reduce it there."
    )


def entered(
    values: Mapping[int, jax.Array],
) -> contextlib.AbstractContextManager[object]:
    """A `with` block in which variables, by `id`, have these values.

    Functions that the user has jitted are traced anew: a trace made elsewhere reads the
    variables themselves, of which nothing is differentiated.
    """
    step = _access.tracing()
    given = {key: (step, value) for key, value in values.items()}
    return _context.entered(
        given={**_context.current().given, **given}, trace=_access.new_trace()
    )
