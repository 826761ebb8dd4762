"""Values that a step returns besides its results: `StepOutputs`.

What code of a step computes is known to its trace only. So such values go out of the
program as further results, and whoever has opened a `StepOutputs` around the call
receives them afterwards, each time the program runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast, final

import jax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Function, PyTree


class Sender:
    """An object with methods that steps call to hand something out.

    To a program one is as good as another, because it keeps nothing itself: whichever
    a step is given, or refers to, the `StepOutputs` around the call receives it.
    """

    @classmethod
    @functools.cache
    def of_steps(cls) -> Sender:
        """The one that steps are given in place of another."""
        return cls()


@final
class StepOutputs:
    """Receives what steps that use `sender` hand out, in order, once they started."""

    def __init__(self, sender: Sender, receive: Callable[[PyTree], object]) -> None:
        self.sender = sender
        self.receive = receive
        self._posting: dict[Function, Function] = {}

    def opened(self) -> AbstractContextManager[object]:
        return _context.entered(step_outputs=self)

    def with_outputs(self, fn: Function) -> Function:
        """A function that returns what `fn` does, and a list of what it hands out.

        The same for the last few functions, because what a new one refers to is looked
        through.
        """
        try:
            if (known := self._posting.get(fn)) is not None:
                return known
        except TypeError:  # it cannot be hashed
            return with_outputs(fn)
        if len(self._posting) >= _KEPT:
            del self._posting[next(iter(self._posting))]
        return self._posting.setdefault(fn, with_outputs(fn))


_KEPT = 8


def around_steps() -> StepOutputs | None:
    """The `StepOutputs` of a step that begins now, if there is one."""
    context = _context.current()
    if context.step_outputs is None or context.posted is not None:
        return None
    return cast("StepOutputs", context.step_outputs)


def in_step() -> bool:
    """Whether what is handed out now goes out of a step that has not ended."""
    return _context.current().posted is not None


def require_open(sender: Sender, method: str) -> None:
    """Raise unless what `sender` hands out now is received."""
    step_outputs = cast("StepOutputs | None", _context.current().step_outputs)
    if step_outputs is None:
        raise ContextError(
            f"`{method}` was called after the steps had ended whose context it belongs "
            "to. Call it in the function that is run, or in a step that this starts."
        )
    if sender is not step_outputs.sender and sender is not type(sender).of_steps():
        raise ContextError(
            f"`{method}` was called on the context of other steps than those that run "
            "now. Use the context that the function of these steps is given."
        )


def post(message: PyTree, method: str) -> None:
    context = _context.current()
    if context.posted is not None:
        began, messages = context.posted
        if get_opaque_trace_state() != began:
            raise ContextError(_inner(method))
        messages.append(message)
    elif _is_traced(message):
        raise ContextError(_inner(method))
    else:
        cast("StepOutputs", context.step_outputs).receive(message)


def with_outputs(fn: Function) -> Function:
    """A function that returns what `fn` does, and a list of what it hands out.

    As of one step. A function that is differentiated in a step can be one: what the
    list holds is posted again where the arrays are the step's own.
    """

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[PyTree]]:
        messages: list[PyTree] = []
        with _context.entered(posted=(get_opaque_trace_state(), messages)):
            return fn(*args, **kwargs), messages

    return step


def without_sender(step_outputs: StepOutputs, tree: PyTree) -> PyTree:
    """`tree` for a program that serves other senders: with that of all steps."""
    sender = step_outputs.sender
    return trees.map_around_objects(
        lambda leaf: type(sender).of_steps() if leaf is sender else leaf, tree
    )


def _is_traced(message: PyTree) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(message))


def _inner(method: str) -> str:
    return (
        f"`{method}` was called inside a function that JAX traces by itself within the "
        "step (`jax.jit`, `jax.grad`, `jax.lax.scan`), whose arrays nobody outside of "
        "it can use. Let the function return the value (`has_aux=True` of `jax.grad`), "
        "and call it where the function has returned."
    )
