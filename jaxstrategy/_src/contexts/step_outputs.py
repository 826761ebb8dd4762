"""Values that steps emit besides their results: `StepOutputs`.

They are further results of the compiled program. The `StepOutputs` around the call
receives them each time the program runs.
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
    """An object with methods by which steps emit messages; it has no state.

    So one compiled program serves all senders of a class.
    """

    @classmethod
    @functools.cache
    def of_steps(cls) -> Sender:
        """The sender that compiled steps see in place of any other."""
        return cls()


@final
class StepOutputs:
    """Receives the messages of steps that use `sender`, in order."""

    def __init__(self, sender: Sender, receive: Callable[[PyTree], object]) -> None:
        self.sender = sender
        self.receive = receive
        self._wrapped: dict[Function, Function] = {}

    def opened(self) -> AbstractContextManager[object]:
        return _context.entered(step_outputs=self)

    def with_outputs(self, fn: Function) -> Function:
        """`with_outputs`, cached for the last few functions.

        A new function would be looked through for captured values again.
        """
        try:
            if (known := self._wrapped.get(fn)) is not None:
                return known
        except TypeError:  # it cannot be hashed
            return with_outputs(fn)
        if len(self._wrapped) >= _MOST_WRAPPED:
            del self._wrapped[next(iter(self._wrapped))]
        return self._wrapped.setdefault(fn, with_outputs(fn))


_MOST_WRAPPED = 8


def around_steps() -> StepOutputs | None:
    """The `StepOutputs` of a step that begins now, if there is one."""
    context = _context.current()
    if context.step_outputs is None or context.step_messages is not None:
        return None
    return cast("StepOutputs", context.step_outputs)


def in_step() -> bool:
    """Whether a message emitted now is a result of a step that is traced."""
    return _context.current().step_messages is not None


def require_open(sender: Sender, method: str) -> None:
    """Raise unless a message of `sender` is received now."""
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


def emit(message: PyTree, method: str) -> None:
    """Adds a message to those of the step; outside of one it is received at once."""
    context = _context.current()
    state, messages = context.step_messages or (None, None)
    if messages is None:
        is_inner = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(message))
    else:
        is_inner = get_opaque_trace_state() != state
    if is_inner:
        raise ContextError(
            f"`{method}` was called inside a function that JAX traces by itself within "
            "the step (`jax.jit`, `jax.grad`, `jax.lax.scan`), whose arrays nobody "
            "outside of it can use. Let the function return the value (`has_aux=True` "
            "of `jax.grad`), and call it where the function has returned."
        )
    if messages is None:
        cast("StepOutputs", context.step_outputs).receive(message)
    else:
        messages.append(message)


def with_outputs(fn: Function) -> Function:
    """`fn` as a function that also returns the list of its messages.

    It may be a function that is differentiated in a step, which emits them again.
    """

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[PyTree]]:
        messages: list[PyTree] = []
        with _context.entered(step_messages=(get_opaque_trace_state(), messages)):
            return fn(*args, **kwargs), messages

    return step


def without_sender(step_outputs: StepOutputs, tree: PyTree) -> PyTree:
    """`tree` with the sender that compiled steps see."""
    sender = step_outputs.sender
    return trees.map_around_objects(
        lambda leaf: type(sender).of_steps() if leaf is sender else leaf, tree
    )
