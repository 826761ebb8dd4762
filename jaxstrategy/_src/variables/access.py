"""Reads and changes of variables: outside, in a step, under differentiation."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast, final

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.cell import AbstractCell, Holder


class Lookup(NamedTuple):
    """One lookup.

    Attributes:
      shards: the `id` of each shard of the table.
      starts: the first row of each shard, and last the number of all rows.
      rows: the type of what it gives, `[n, ...]`.
    """

    shards: tuple[int, ...]
    starts: tuple[int, ...]
    rows: jax.ShapeDtypeStruct


@final
class RowTape:
    """The lookups of one call of a function, made while it runs.

    Args:
      watched: the `id` of each variable of whose lookups it takes note.
      added: what is added to the rows of each lookup; None while lookups are counted.

    Attributes:
      lookups: those that were made, in order.
      ids: the rows of each.
      whole: the `id` of each variable that was used by something else than lookups.
    """

    def __init__(
        self, watched: Iterable[int], added: Sequence[jax.Array] | None = None
    ) -> None:
        self._watched = set(watched)
        self._added = added
        self._trace = get_opaque_trace_state()
        self.lookups: list[Lookup] = []
        self.ids: list[jax.Array] = []
        self.whole: set[int] = set()

    def looked_up(
        self,
        shards: Sequence[Handle],
        starts: Sequence[int],
        ids: jax.Array,
        rows: jax.Array,
    ) -> jax.Array:
        """The rows, with what is added to them.

        Shapes: ids `[n]`, rows `[n, ...]` -> `[n, ...]`.
        """
        keys = tuple(map(id, shards))
        if not self._watched.intersection(keys):
            return rows
        # In a loop, or a function that is jitted, ids are that function's own.
        if get_opaque_trace_state() != self._trace:
            self.whole.update(keys)
            return rows
        like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        self.lookups.append(Lookup(keys, tuple(starts), like))
        self.ids.append(ids)
        if self._added is None:
            return rows
        return rows + self._added[len(self.ids) - 1]

    def used_whole(self, variable: Handle) -> None:
        """Take note of another use of a variable."""
        self.whole.add(id(variable))

    def sparse(self) -> set[int]:
        """The variables that are only looked up, the shards of a table all or none."""
        whole = set(self.whole)
        for _ in self.lookups:  # each round adds a table, or is the last
            for lookup in self.lookups:
                if whole.intersection(lookup.shards):
                    whole.update(lookup.shards)
        return self._watched - whole


def current() -> RowTape | None:
    """The tape of the function that runs, None if none is."""
    return cast("RowTape | None", _context.current().lookups)


def recording(tape: RowTape | None) -> contextlib.AbstractContextManager[object]:
    """A `with` block whose lookups `tape` takes note of; with None nothing does."""
    return _context.entered(lookups=tape)


def zeros(lookups: Iterable[Lookup]) -> list[jax.Array]:
    """What is added to the rows of each lookup."""
    return [jnp.zeros(each.rows.shape, each.rows.dtype) for each in lookups]


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
            _context.forget_jitted()


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
    trace = _context.new_trace() if variables.any else _context.current().trace
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
    """The value that `variable` has in the function being differentiated, or None."""
    context = _context.current()
    found = context.given.get(id(variable))
    if found is None:
        return None
    if context.read is not None:
        context.read.add(id(variable))
    found = cast(_Given, found)
    if found.step is not tracing():
        raise _outside(variable)
    if get_opaque_trace_state() != found.state:  # in a jitted function
        _traces.pop(found.key, None)
    tape = current()
    if tape is not None:
        tape.used_whole(variable)
    return found.value


def is_given(variable: Handle) -> bool:
    """Whether `variable` has a value in a function that is differentiated."""
    return id(variable) in _context.current().given


def check_outside(variables: Iterable[Handle | None]) -> None:
    """Raise unless a step that uses `variables` may be called here."""
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
    """A `with` block in which variables, by `id`, have these values."""
    context = _context.current()
    key = context.trace, frozenset({*context.given, *values})
    trace = _known_trace(key) if is_repeated else _context.new_trace()
    step, state = tracing(), get_opaque_trace_state()
    given = {i: _Given(step, value, state, key) for i, value in values.items()}
    try:
        with _context.entered(given={**context.given, **given}, trace=trace):
            yield
    finally:
        if _traces.get(key) != trace:  # a jitted function has used a value
            _context.forget_jitted()


# Functions that the user has jitted are kept by this number. A trace that was made
# elsewhere reads the variables themselves, of which nothing is differentiated; and one
# that has read what is given here holds values of this call.
_traces: dict[_Key, int] = {}
_MOST_TRACES = 256


def _known_trace(key: _Key) -> int:
    if len(_traces) >= _MOST_TRACES:
        _traces.clear()
    return _traces.setdefault(key, _context.new_trace())
