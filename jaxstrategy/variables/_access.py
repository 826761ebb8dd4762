"""Which side of a step uses a variable, and which reference of it the step has.

A variable's numbers are in a `Cell` that lives outside. A step works on references of
its own, one for each variable, which the program connects with the cells; while it is
traced, a `StepVariables` knows them.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy.contexts import _context


class Side(enum.Enum):
    """Where code uses a variable."""

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

    def __init__(self, references: Sequence[tuple[Any, Any]], may_create: bool) -> None:
        self._references = {id(variable): ref for variable, ref in references}
        self.may_create = may_create
        self.used: dict[int, Any] = {}
        self.created: list[Any] = []

    @property
    def any(self) -> bool:
        """Whether there are some that the step may use."""
        return bool(self._references)

    def reference(self, variable: Any) -> Any:
        """The reference to use for `variable`; None if this step has none."""
        ref = self._references.get(id(variable))
        if ref is not None:
            self.used.setdefault(id(variable), variable)
        return ref

    def create(self, variable: Any, start: jax.Array) -> None:
        """Let the step make `variable`, which starts as `start`.

        The trace goes on with a copy, and is given up when it is done: then the step is
        traced again, with the variable there before it.
        """
        with jax.ensure_compile_time_eval():  # it may be in a loop or a branch now
            self._references[id(variable)] = jax.new_ref(start)
        self.created.append(variable)


_tracing: contextvars.ContextVar[StepVariables | None] = contextvars.ContextVar(
    "jaxstrategy_step_variables", default=None
)
_updating: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "jaxstrategy_updating", default=False
)


class NeedsProgram(BaseException):  # which no `except Exception` of a function takes
    """`extended.update` came to one copy of an on-read variable, outside of a step."""


_before: contextvars.ContextVar[dict[int, tuple[Any, Any]] | None]
_before = contextvars.ContextVar("jaxstrategy_values_before", default=None)


@contextlib.contextmanager
def undone_for_program() -> Iterator[None]:
    """Undo what is assigned in the block if it ends with `NeedsProgram`."""
    before: dict[int, tuple[Any, Any]] = {}
    token = _before.set(before)
    try:
        yield
    except NeedsProgram:
        for cell, value in before.values():
            cell[...] = value
        raise
    finally:
        _before.reset(token)


def about_to_change(cell: Any) -> None:
    """Keep what `cell` holds, if that may have to be undone."""
    before = _before.get()
    if before is not None and id(cell) not in before:
        before[id(cell)] = cell, cell[...]


# Where `colocate_vars_with` wants new variables.
_mesh: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "jaxstrategy_colocated", default=None
)
colocating: Callable[[], Mesh | None] = _mesh.get


def tracing() -> StepVariables | None:
    """The variables of the step that is being traced, None outside of one."""
    context = _context.current()
    return _tracing.get() if context is not None and context.in_step else None


# Calling a program gives it the memory of the variables and takes other memory back.
# Two threads that do so at once would end the process (JAX 0.10 and 0.12).
one_at_a_time = threading.RLock()

# A jitted function that a step calls has that step's references in its trace. JAX keys
# its caches by this value, so that another trace of a step does not get those.
_number_of_trace = jax.make_user_context(None)
_numbers = itertools.count()
_nothing = contextlib.nullcontext()


@contextlib.contextmanager
def traced_with(variables: StepVariables) -> Iterator[None]:
    """Let a step be traced with these."""
    token = _tracing.set(variables)
    try:
        with _number_of_trace(next(_numbers)) if variables.any else _nothing:
            yield
    finally:
        _tracing.reset(token)


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Let code be that of `extended.update`, which sees one copy of a variable."""
    token = _updating.set(True)
    try:
        yield
    finally:
        _updating.reset(token)


@contextlib.contextmanager
def colocated(mesh: Mesh) -> Iterator[None]:
    """Let variables be made on `mesh`."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


def side() -> Side:
    """Where the code that asks is."""
    context = _context.current()
    if context is not None and context.replica is not None:
        return Side.REPLICA
    return Side.UPDATE if _updating.get() else Side.CROSS
