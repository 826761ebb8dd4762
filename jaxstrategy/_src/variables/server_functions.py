"""Changes of variables that servers make, as they stand in a trace: `server_function`.

A function that is sent to workers must not read a variable in order to add to it: what
others have added meanwhile would be lost. So each change is one `jit` equation of a
name that says what it is. Who runs the trace where it stands gets its result; who sends
it to workers finds the equation, and lets the server do it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxstrategy._src.variables.changes import Change

PREFIX = "jaxstrategy_server_"
"""An equation's name is this and the name of a `ServerOperation`."""
UPDATE = PREFIX + "update"


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which stands in a trace as one `jit` equation of this name."""

    def marked(*operands: jax.Array) -> Any:
        return fn(*operands)

    marked.__name__ = marked.__qualname__ = name
    return jax.jit(marked)


@functools.cache
def of_whole(operation: str) -> Callable[..., jax.Array]:
    """ "set", "add" or "subtract", of what a variable holds and what is given."""
    change = Change(operation, operation)
    return named(PREFIX + operation, change.applied)
