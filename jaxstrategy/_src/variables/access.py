"""What holds a variable's copies, and who may use it: steps, gradients, updates."""

from __future__ import annotations

import contextlib
import enum
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.values import arrays, per_replica
from jaxstrategy._src.values.arrays import NOT_TRACED, is_traced as is_traced
from jaxstrategy._src.values.per_replica import Handle, PerReplica


class Holder(Protocol):
    """What holds copies: a `Cell` all between steps, a step's `jax.Ref` one of them."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: EllipsisType, /) -> jax.Array: ...

    def __setitem__(self, index: EllipsisType, value: jax.Array, /) -> None: ...


class Cell:
    """What holds all copies of a variable between steps; read and written with `[...]`.

    Where JAX traces by itself it becomes a reference, and stays one.
    """

    def __init__(self, array: jax.Array | None, is_alone: bool = False) -> None:
        self.array: Any = array  # None if there is nothing to lend: it is a reference
        self.is_alone = is_alone  # nobody else has it: a program may overwrite it
        self._ref: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it holds."""
        return (self.array if self._ref is None else self._ref).shape

    @property
    def dtype(self) -> np.dtype:
        """Of what it holds."""
        return (self.array if self._ref is None else self._ref).dtype

    @property
    def is_reference(self) -> bool:
        """Whether it has become a reference."""
        return self._ref is not None

    @property
    def ref(self) -> jax.Ref:
        """The reference that it becomes."""
        if self._ref is None:
            with eval_context():  # in `jax.grad`, too
                self._ref = jax.new_ref(self.array)
            self.array, self.is_alone = None, False
        return self._ref

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        if self._ref is None and get_opaque_trace_state() == NOT_TRACED:
            self.is_alone = False
            return self.array
        if not _context.current().is_initial:
            return self.ref[...]
        # For a function that is traced to be called once: what it holds now.
        if self._ref is None:
            self.is_alone = False
            return self.array
        with eval_context():
            return self._ref[...]

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        if self._ref is not None or get_opaque_trace_state() != NOT_TRACED:
            self.ref[...] = value
        else:
            # The user may have it, too: what is assigned is not copied.
            self.array, self.is_alone = value, False

    def lend(self) -> jax.Array:
        """The array, for a program that may overwrite it; it must be replaced then."""
        assert self._ref is None, "references are not lent"
        # Who has read the cell has this very array, and donated it would be deleted.
        if not self.is_alone:
            self.array, self.is_alone = jnp.copy(self.array), True
        return self.array


class RemoteCell(Cell):
    """The shape and dtype of what is elsewhere: no array for steps here."""

    def __init__(self, like: jax.ShapeDtypeStruct, refusal: str) -> None:
        super().__init__(None)
        self._like = like
        self._refusal = refusal  # of code that wants an array here

    @property
    def shape(self) -> tuple[int, ...]:
        return self._like.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._like.dtype)

    @property
    def ref(self) -> NoReturn:
        raise ContextError(self._refusal)

    def __getitem__(self, index: EllipsisType) -> jax.Array:
        raise ContextError(self._refusal)

    def __setitem__(self, index: EllipsisType, value: jax.Array) -> None:
        raise ContextError(self._refusal)


class Side(enum.Enum):
    """The side of a step on which code uses a variable."""

    REPLICA = "in `run`"
    CROSS = "in cross-replica context"
    UPDATE = "in `extended.update`"


class Access(NamedTuple):
    """How the code that asks may use a variable."""

    holder: Holder  # of one replica's copy in a step, of all copies outside
    side: Side  # of the code
    in_step: bool  # whether a step is being traced


class StepVariables:
    """The variables of one trace of a step, which may make new ones."""

    def __init__(
        self, references: Sequence[tuple[Handle, Holder]], may_create: bool
    ) -> None:
        self._references = {id(variable): ref for variable, ref in references}
        self._state = get_opaque_trace_state()
        self._is_used_within = False
        self.may_create = may_create
        self.used: dict[int, Handle] = {}  # that it has read or written, in order
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
        """Let the step make `variable`, which starts as `start`."""
        # The trace goes on with a copy, and is given up when it is done: then the step
        # is traced again, with the variable there before it.
        with jax.ensure_compile_time_eval():  # it may be in a loop or a branch now
            self._references[id(variable)] = cast(Holder, jax.new_ref(start))
        self.created.append(variable)

    def end(self) -> None:
        """Drop the references when the trace ends, which none of them may outlive."""
        self._references.clear()
        if self._is_used_within:
            _context.forget_jitted()


def tracing() -> StepVariables | None:
    """The variables of the step that is being traced, None outside of one."""
    now = _context.current()
    return cast("StepVariables | None", now.variables) if now.in_step else None


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


# Calling a program gives it the memory of the variables and takes other memory back.
# Two threads that do so at once would end the process (JAX 0.10 and 0.12).
one_at_a_time = threading.RLock()


def exclusively() -> contextlib.AbstractContextManager[object]:
    """A `with` block of one thread at a time that uses what variables hold."""
    # A replica that runs eagerly has copies of its own, and may wait for others in it.
    is_eager = _context.current().eager is not None
    return contextlib.nullcontext() if is_eager else one_at_a_time


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


class NeedsProgram(BaseException):  # which no `except Exception` of a function takes
    """`extended.update` came to one copy of an on-read variable, outside of a step."""


@contextlib.contextmanager
def undone_for_program() -> Iterator[None]:
    """Undo what is assigned in the block if it ends with `NeedsProgram`."""
    before: dict[Cell, jax.Array] = {}
    try:
        with _context.entered(before=before):
            yield
    except NeedsProgram:
        for cell, value in before.items():
            cell[...] = value
        raise


def about_to_change(cell: Cell, before: object) -> None:
    """Keep what `cell` holds in `before`, that of `undone_for_program`."""
    known = cast("dict[Cell, jax.Array]", before)
    if cell not in known:
        known[cell] = cell[...]


# Weak: no variable, with its memory, and no strategy outlives who holds it.
# Those of no strategy, and those of each.
_ordinary: weakref.WeakSet[Handle] = weakref.WeakSet()
_of_strategy: weakref.WeakKeyDictionary[AbstractStrategy, weakref.WeakSet[Handle]] = (
    weakref.WeakKeyDictionary()
)
# To go through a WeakSet to which another thread adds raises RuntimeError.
_lock = threading.Lock()


def add(variable: Handle, owner: AbstractStrategy | None) -> None:
    """Count `variable` as alive for as long as somebody holds it."""
    with _lock:
        if owner is None:
            _ordinary.add(variable)
        else:
            _of_strategy.setdefault(owner, weakref.WeakSet()).add(variable)


def usable_by(strategy: AbstractStrategy) -> list[Handle]:
    """The variables that steps of `strategy` may use, oldest first."""
    with _lock:
        found = [*_ordinary, *_of_strategy.get(strategy, ())]
    # A set has the order of addresses, which differs between the processes of a job.
    return sorted(found, key=lambda variable: variable.number)


# The copies of variables that `experimental_local_results` has returned: plain arrays,
# known by identity. As long as somebody holds them and the variable has not changed,
# the same objects are given again.

_Weak: TypeAlias = weakref.ref[jax.Array]
_given: weakref.WeakKeyDictionary[Handle, tuple[_Weak, list[_Weak]]]
_given = weakref.WeakKeyDictionary()
# By the `id` of a copy: it, and its variable.
_copies: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()
_owners: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()


def copies_of(
    variable: Handle,
    held: jax.Array | PerReplica,
    divide: Callable[[jax.Array | PerReplica], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """The copies of `variable` in this process."""
    array = per_replica.contents(held) if isinstance(held, PerReplica) else held
    if not arrays.is_placed(array):
        return divide(held)
    if (known := _given.get(variable)) is not None and known[0]() is array:
        alive = [copy for each in known[1] if (copy := each()) is not None]
        if len(alive) == len(known[1]):
            return tuple(alive)
    copies = divide(held)
    _given[variable] = weakref.ref(array), [weakref.ref(copy) for copy in copies]
    for copy in copies:
        _copies[id(copy)], _owners[id(copy)] = copy, variable
    return copies


def owner_of(value: object) -> Handle | None:
    """The variable that `value` is a copy of, None of other values."""
    # An id may be that of another object by now.
    return _owners.get(id(value)) if _copies.get(id(value)) is value else None


# Functions that are differentiated with respect to variables.

_Key: TypeAlias = tuple[int | None, frozenset[int]]


class _Given(NamedTuple):
    """The value of a variable in a function that is differentiated."""

    step: object  # that the function is part of
    value: jax.Array
    state: object  # of JAX's tracing, in the function itself
    key: _Key  # of the number by which jitted functions are kept


def value_of(variable: Handle) -> jax.Array | None:
    """The value that `variable` has in the function being differentiated, or None."""
    context = _context.current()
    found = context.differentiated.get(id(variable))
    if found is None:
        return None
    if context.reads is not None:
        context.reads.add(id(variable))
    found = cast(_Given, found)
    if found.step is not tracing():
        raise _outside(variable)
    if get_opaque_trace_state() != found.state:  # in a jitted function
        _traces.pop(found.key, None)
    if context.lookups is not None:  # a `RowTape`
        cast(Any, context.lookups).whole.add(id(variable))
    return found.value


def is_given(variable: Handle) -> bool:
    """Whether `variable` has a value in a function that is differentiated."""
    return id(variable) in _context.current().differentiated


def check_outside(variables: Iterable[Handle | None]) -> None:
    """Raise unless a step that uses `variables` may be called here."""
    if given := _context.current().differentiated:
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
    key = context.trace, frozenset({*context.differentiated, *values})
    trace = _known_trace(key) if is_repeated else _context.new_trace()
    step, state = tracing(), get_opaque_trace_state()
    given = {i: _Given(step, value, state, key) for i, value in values.items()}
    try:
        with _context.entered(
            differentiated={**context.differentiated, **given}, trace=trace
        ):
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
