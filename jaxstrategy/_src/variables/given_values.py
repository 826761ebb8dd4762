"""The values that variables have in a function that is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast

import jax
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context as _context, trace_numbers
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.variables import access, row_tape

_Key: TypeAlias = tuple[int | None, frozenset[int]]


class _Given(NamedTuple):
    """The value of a variable in a function that is differentiated.

    Attributes:
      step: the step that the function is part of.
      value: of the variable.
      state: of JAX's tracing, in the function itself.
      key: of the number by which jitted functions are kept.
    """

    step: object
    value: jax.Array
    state: object
    key: _Key


def value_of(variable: Handle) -> jax.Array | None:
    """The value that `variable` has in the function being differentiated, or None.

    Raises:
      ContextError: the function is not part of the step that asks, but runs it.
    """
    context = _context.current()
    found = context.given.get(id(variable))
    if found is None:
        return None
    if context.read is not None:
        context.read.add(id(variable))
    found = cast(_Given, found)
    if found.step is not access.tracing():
        raise _outside(variable)
    if get_opaque_trace_state() != found.state:  # in a jitted function
        _traces.pop(found.key, None)
    tape = row_tape.current()
    if tape is not None:
        tape.used_whole(variable)
    return found.value


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


@contextlib.contextmanager
def entered(
    values: Mapping[int, jax.Array], is_repeated: bool = True
) -> Iterator[None]:
    """A `with` block in which variables, by `id`, have these values.

    Args:
      values: of the function that is differentiated in the block.
      is_repeated: whether such functions may use again what JAX has traced of others.
    """
    context = _context.current()
    key = context.trace, frozenset({*context.given, *values})
    trace = _known_trace(key) if is_repeated else trace_numbers.new_trace()
    step, state = access.tracing(), get_opaque_trace_state()
    given = {i: _Given(step, value, state, key) for i, value in values.items()}
    try:
        with _context.entered(given={**context.given, **given}, trace=trace):
            yield
    finally:
        if _traces.get(key) != trace:  # a jitted function has used a value
            trace_numbers.forget_jitted()


# Functions that the user has jitted are kept by this number. A trace that was made
# elsewhere reads the variables themselves, of which nothing is differentiated; and one
# that has read what is given here holds values of this call.
_traces: dict[_Key, int] = {}
_MOST_TRACES = 256


def _known_trace(key: _Key) -> int:
    if len(_traces) >= _MOST_TRACES:
        _traces.clear()
    return _traces.setdefault(key, trace_numbers.new_trace())
