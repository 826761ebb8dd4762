"""The side of a step that uses a variable, and the step's reference to it.

A variable's numbers are in a `Cell` that lives outside. A step works on references of
its own, one for each variable, which the program connects with the cells; while it is
traced, a `StepVariables` knows them.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import jax
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context as _context, trace_numbers
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.variables.cell import AbstractCell, Holder


class Side(enum.Enum):
    """The side of a step on which code uses a variable."""

    REPLICA = "in `run`"
    CROSS = "in cross-replica context"
    UPDATE = "in `extended.update`"


class StepVariables:
    """The variables of one trace of a step.

    Args:
      references: what the step has of each variable.
      may_create: whether it may make new ones.

    Attributes:
      used: those that it has read or written so far, in order.
      created: those that it has made.
    """

    def __init__(
        self, references: Sequence[tuple[Handle, Holder]], may_create: bool
    ) -> None:
        self._references = {id(variable): ref for variable, ref in references}
        self._state = get_opaque_trace_state()
        self._is_used_within = False
        self.may_create = may_create
        self.used: dict[int, Handle] = {}
        self.created: list[Handle] = []

    @property
    def any(self) -> bool:
        """Whether there are some that the step may use."""
        return bool(self._references)

    def reference(self, variable: Handle) -> Holder | None:
        """The reference to use for `variable`; None if this step has none."""
        ref = self._references.get(id(variable))
        if ref is not None:
            self.used.setdefault(id(variable), variable)
            self._is_used_within |= get_opaque_trace_state() != self._state
        return ref

    def create(self, variable: Handle, start: jax.Array) -> None:
        """Let the step make `variable`, which starts as `start`.

        The trace goes on with a copy, and is given up when it is done: then the step is
        traced again, with the variable there before it.
        """
        with jax.ensure_compile_time_eval():  # it may be in a loop or a branch now
            self._references[id(variable)] = cast(Holder, jax.new_ref(start))
        self.created.append(variable)

    def end(self) -> None:
        """Drop the references when the trace ends, which none of them may outlive."""
        self._references.clear()
        if self._is_used_within:
            trace_numbers.forget_jitted()


class NeedsProgram(BaseException):  # which no `except Exception` of a function takes
    """`extended.update` came to one copy of an on-read variable, outside of a step."""


class _Before:
    """The contents of cells before an update, to undo it."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[AbstractCell, jax.Array]] = {}

    def keep(self, cell: AbstractCell) -> None:
        if id(cell) not in self._held:
            self._held[id(cell)] = cell, cell[...]

    def put_back(self) -> None:
        for cell, value in self._held.values():
            cell[...] = value


@contextlib.contextmanager
def undone_for_program() -> Iterator[None]:
    """Undo what is assigned in the block if it ends with `NeedsProgram`."""
    before = _Before()
    try:
        with _context.entered(before=before):
            yield
    except NeedsProgram:
        before.put_back()
        raise


def about_to_change(cell: AbstractCell) -> None:
    """Keep what `cell` holds, if that may have to be undone."""
    before = _context.current().before
    if before is not None:
        cast(_Before, before).keep(cell)


def check_not_mapped(error: Exception, name: str) -> None:
    """Raise an error of ours if JAX's is of a change under `jax.vmap`."""
    # It has no type of its own, and speaks of references (JAX 0.10 and 0.12). In a step
    # it is for the step, which knows the user's line.
    is_outside = not _context.current().in_step
    if is_outside and "vmapped value on an unbatched" in str(error):
        raise ContextError(
            f"Variable {name!r} was changed under `jax.vmap` by a value that is "
            "mapped: it would have another value in each call. Return what is to be "
            "assigned, and assign it outside the mapped function."
        ) from None


def tracing() -> StepVariables | None:
    """The variables of the step that is being traced, None outside of one."""
    context = _context.current()
    if not context.in_step:
        return None
    return cast("StepVariables | None", context.variables)


# Calling a program gives it the memory of the variables and takes other memory back.
# Two threads that do so at once would end the process (JAX 0.10 and 0.12).
one_at_a_time = threading.RLock()


def exclusively() -> contextlib.AbstractContextManager[object]:
    """A `with` block of one thread at a time that uses what variables hold.

    A replica that runs eagerly has copies of its own, and may wait for others in it.
    """
    is_eager = _context.current().eager is not None
    return contextlib.nullcontext() if is_eager else one_at_a_time


@contextlib.contextmanager
def traced_with(variables: StepVariables) -> Iterator[None]:
    """A `with` block in which a step is traced with these variables."""
    # Functions that the user has jitted are kept by this number: their traces hold the
    # references of one trace. Without variables they may be used in the next one, too.
    trace = trace_numbers.new_trace() if variables.any else _context.current().trace
    try:
        with _context.entered(variables=variables, trace=trace):
            yield
    finally:
        variables.end()


def side() -> Side:
    """The side on which the code that asks is."""
    context = _context.current()
    if context.replica is not None:
        return Side.REPLICA
    return Side.UPDATE if context.updated else Side.CROSS
