"""Scheduled functions, their arguments and their programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, cast, final

import jax
import numpy as np
from jax.stages import Wrapped

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.compiled import ReplicatedFunction
from jaxstrategy._src.parameter_servers import worker as _worker
from jaxstrategy._src.parameter_servers.protocol import (
    ElementChanged,
    ElementType,
    LoadedCode,
    ServerPool,
    ShippedProgram,
    aligned_empty,
)
from jaxstrategy._src.parameter_servers.wire import peer
from jaxstrategy._src.parameter_servers.worker import WorkerResource
from jaxstrategy._src.replicas.mesh import (
    as_numbers,
)
from jaxstrategy._src.replicas.replica_placements import SPLIT
from jaxstrategy._src.scheduled.shipping import shipped
from jaxstrategy._src.scheduled.trace import (
    Call,
    FunctionTrace,
    IteratorArgument,
    IteratorSlot,
    ValueArgument,
    is_whole,
    is_workers,
    trace_function,
    values_of,
)
from jaxstrategy._src.text.shown import (
    array_type,
)
from jaxstrategy._src.tracing import results as _results, roles
from jaxstrategy._src.tracing.functions import code as _code, rebinding
from jaxstrategy._src.tracing.functions.code import as_method, attributes_of
from jaxstrategy._src.tracing.functions.references import References
from jaxstrategy._src.tracing.functions.walk import ClosureCell
from jaxstrategy._src.tracing.functions.weak_references import Identity, weakly
from jaxstrategy._src.tracing.jaxprs.visit import Jaxpr, all_eqns
from jaxstrategy._src.tracing.nnx.object_form import (
    is_changed_in_place,
)
from jaxstrategy._src.tracing.results import Results
from jaxstrategy._src.tracing.roles import Signature
from jaxstrategy._src.values import arrays as _arrays, per_replica
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.variables.kinds.per_worker_kind import per_worker_kind_of
from jaxstrategy._src.variables.variable import Variable

_SMALL = 1 << 14
"""Bytes that a program copies in no time; it shares larger arrays that are aligned."""
_Key = tuple[Signature, tuple[tuple[tuple[int, ...], np.dtype], ...]]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledArguments:
    """What a function is called with, wherever it runs."""

    fn: Function
    args: tuple[tuple[PyTree, ...], dict[str, PyTree]]
    iterators: tuple[IteratorArgument, ...]
    slots: tuple[IteratorSlot, ...]
    differ: bool

    @classmethod
    def of(
        cls, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Self:
        """Those that a caller gave."""
        given = tuple(args), kwargs
        leaves, structure = jax.tree.flatten(given, is_leaf=is_whole)
        if not any(map(_is_special, leaves)):  # the usual case, kept short
            return cls(fn, given, (), (), differ=False)
        iterators: dict[int, IteratorArgument] = {
            id(leaf): leaf for leaf in leaves if isinstance(leaf, IteratorArgument)
        }
        slots = {
            key: IteratorSlot(number, (each.element,))
            for number, (key, each) in enumerate(iterators.items())
        }
        own = [slots.get(id(leaf), _taken(leaf)) for leaf in leaves]
        return cls(
            fn,
            jax.tree.unflatten(structure, own),
            tuple(iterators.values()),
            tuple(slots.values()),
            differ=any(isinstance(leaf, ValueArgument) for leaf in own),
        )

    def retyped(self, changed: ElementChanged) -> Self:
        """The same with elements of other types."""
        slots = list(self.slots)
        slots[changed.iterator] = slots[changed.iterator].retyped(changed.found)

        def slot(node: Any) -> Any:
            return slots[node.number] if isinstance(node, IteratorSlot) else node

        args = jax.tree.map(slot, self.args, is_leaf=is_whole)
        return dataclasses.replace(self, args=args, slots=tuple(slots))

    def taken_apart(self, worker: int) -> tuple[list[Leaf], Signature]:
        """The leaves of the arguments on one worker, and their signature."""
        args, kwargs = values_of(self.args, worker) if self.differ else self.args
        return roles.take_apart(self.fn, args, kwargs)

    def arrays(self, leaves: Sequence[Leaf]) -> list[Any]:
        """The leaves as arrays."""
        return [_arrays.as_array(leaf, "argument") for leaf in leaves]

    def of_workers(
        self, arrays: Sequence[Any], key: _Key
    ) -> Callable[[int], tuple[np.ndarray, ...]]:
        """The arrays for each worker."""
        first = tuple(np.asarray(as_numbers(_snapshot(array))) for array in arrays)
        return self._of_worker(key) if self.differ else lambda worker: first

    def _of_worker(self, key: _Key) -> Callable[[int], tuple[np.ndarray, ...]]:
        signature, types = key

        def of_worker(worker: int) -> tuple[np.ndarray, ...]:
            leaves, own = self.taken_apart(worker)
            arrays = self.arrays(leaves)
            if own != signature or tuple((x.shape, x.dtype) for x in arrays) != types:
                raise TypeError(
                    f"Worker {worker} was to be given {_listed(arrays)} by a "
                    "PerWorkerValue; the function was traced for the first worker's "
                    f"value, {', '.join(array_type(d, s) for s, d in types)}. The "
                    "values for all workers need one structure, and the same shapes "
                    "and dtypes."
                )
            return tuple(np.asarray(as_numbers(array)) for array in arrays)

        return of_worker


def _is_special(leaf: Leaf) -> bool:
    return is_workers(leaf) or isinstance(leaf, PerReplica)


def _taken(leaf: Leaf) -> Leaf:
    """A leaf as it is now."""
    is_callers = isinstance(leaf, np.ndarray)
    return _snapshot(leaf) if is_callers else _without_full_mask(leaf)


def _snapshot(array: Any) -> Any:
    """An array that the caller may change before the function runs."""
    if isinstance(array, jax.Array):
        return array
    if array.nbytes < _SMALL or array.dtype.hasobject:
        return array.copy()
    copy = aligned_empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def _without_full_mask(leaf: Leaf) -> Leaf:
    """A batch that is full, without a mask: others are another program's."""
    if not isinstance(leaf, PerReplica) or leaf.mask is None:
        return leaf
    is_full = np.all(np.asarray(leaf.mask))
    return PerReplica(per_replica.contents(leaf)) if is_full else leaf


def _listed(arrays: Sequence[Any]) -> str:
    return ", ".join(array_type(array.dtype, array.shape) for array in arrays)


_LOGGER = logging.getLogger("jax")


@final
class _Heard(logging.Handler):
    """The errors of callbacks that JAX logs, which it raises as texts (0.10, 0.12)."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: deque[BaseException] = deque(maxlen=64)
        self._count = 0
        self._lock_of_count = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the error; who called the program hears of it."""
        if record.exc_info and record.exc_info[1] is not None:
            self._errors.append(record.exc_info[1])

    def take(self, text: str) -> BaseException | None:
        """The latest error that the text of another one is about."""
        for error in reversed(self._errors):
            if f"{type(error).__name__}: {error}" in text:
                self._errors.remove(error)
                return error
        return None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """For a `with` block; those of several threads may overlap."""
        with self._lock_of_count:
            self._count += 1
            _LOGGER.addHandler(self)
        try:
            yield
        finally:
            with self._lock_of_count:
                self._count -= 1
                if not self._count:
                    _LOGGER.removeHandler(self)
                    self._errors.clear()


_replies = _Heard()


def with_errors_of_python(main: Callable[..., Any]) -> Callable[..., Any]:
    """A program that raises what its callbacks raise, and waits for its results."""

    def called(*given: Any) -> Any:
        with _replies.listening():
            try:
                return jax.block_until_ready(main(*given))
            except Exception as error:  # a JaxRuntimeError, or a ValueError
                original = _replies.take(str(error))
                if original is None:
                    raise
                raise original from error

    return called


_CALLBACKS = (
    "pure_callback",
    "io_callback",
    "debug_callback",
    "debug_print",
    "buffer_callback",
)
TraceHere: TypeAlias = Callable[
    [
        Function,
        AbstractStrategy,
        Signature,
        Sequence[Leaf],
        Sequence[IteratorSlot],
    ],
    ShippedProgram,
]


def calls_python(jaxpr: Jaxpr) -> bool:
    """Whether a program calls Python while it runs, as `jax.debug.print` does."""
    return any(eqn.primitive.name in _CALLBACKS for eqn in all_eqns(jaxpr))


@final
class HostCode:
    """The code of one function; in this process as it is, in others the function."""

    def __init__(
        self,
        main: Callable[..., Any],
        ids: Callable[..., Any] | None,
        trace: TraceHere,
        fn: Function,
        strategy: AbstractStrategy,
        signature: Signature,
        leaves: Sequence[Leaf],
        slots: Sequence[IteratorSlot],
    ) -> None:
        self._code = main, ids
        self._trace = trace
        self._call = fn, strategy, signature, leaves, slots
        self._sent: tuple[bytes, Sequence[np.ndarray]] | None = None

    def loaded(self, program: ShippedProgram) -> LoadedCode:
        """What a worker calls."""
        if self._sent is None:
            main, ids = self._code
            return LoadedCode(program, with_errors_of_python(main), ids)
        surroundings = _worker.current()
        assert surroundings is not None, "a worker loads it"
        arrived: list[object] = []
        with context.entered(arrived=arrived):
            strategy, fn, args, kwargs, slots = peer.loaded(*self._sent)
        for each in arrived:
            if isinstance(each, Variable):
                each._adopt(strategy)
        with context.entered(worker=None):
            leaves, signature = roles.take_apart(fn, args, kwargs)
            own = self._trace(fn, strategy, signature, leaves, slots)
        # What it refers to must live as long as it may be called.
        self._call = fn, strategy, signature, leaves, slots
        assert isinstance(own.main, HostCode)
        main, ids = own.main._code
        return LoadedCode(own, with_errors_of_python(main), ids)

    def __getstate__(self) -> dict[str, object]:
        fn, strategy, signature, leaves, slots = self._call
        blanks = [_blank(leaf) for leaf in leaves]
        args, kwargs = signature.rebuild(blanks)
        with context.entered(is_shipping=True):
            sent = peer.dumped((strategy, fn, args, kwargs, tuple(slots)))
        return {"_sent": sent, "_trace": self._trace, "_code": None, "_call": None}


def _blank(leaf: Leaf) -> Leaf:
    """An array of the type of one, of which nobody looks at the numbers."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, np.ndarray):
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    return np.zeros(array.shape, array.dtype)


_IDLE_KEPT = 8
"""So many programs are kept of functions of one code that are gone."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """One call of a function, ready to be sent to any worker."""

    program: ShippedProgram
    arguments_of: Callable[[int], tuple[np.ndarray, ...]]
    given: tuple[IteratorArgument, ...]
    variables: tuple[Handle, ...]
    varies: Sequence[bool]
    rebuild: Callable[[Sequence[Leaf]], PyTree]
    traced_again: Callable[[ElementChanged], Prepared]
    trace_seconds: float | None

    @property
    def iterators(self) -> tuple[int, ...]:
        """The numbers of the iterators on each worker."""
        return tuple(each.resource.number for each in self.given)

    @property
    def resources(self) -> tuple[WorkerResource, ...]:
        """What the worker must have built before."""
        kinds = map(per_worker_kind_of, self.variables)
        own = [kind.resource for kind in kinds if kind is not None]
        return (*(each.resource for each in self.given), *own)

    def taken(self, worker: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The program's results of all that a worker has sent for this call."""
        count = self.program.results
        told = iter(arrays[count:])
        for each, found in zip(self.given, self.program.iterators, strict=True):
            if found and each.tells_position:
                each.keep_position(worker, json.loads(bytes(next(told))))
        return list(arrays[:count])


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    shipped: ShippedProgram
    results: Results
    varies: Sequence[bool]
    variables: Sequence[weakref.ref[Handle]]
    key_results: Sequence[Any]


class _FunctionKey(NamedTuple):
    """Equal for functions that do the same."""

    form: tuple[Hashable, ...]
    code: Identity

    def is_gone(self) -> bool:
        """Whether no function can have it any more."""
        tokens = (self.code, *self.form)
        return any(isinstance(each, Identity) and each.is_gone for each in tokens)


@final
class _Function:
    """What a function object referred to when it was looked at, and its programs."""

    def __init__(
        self,
        alive: object,
        own: Function,
        key: _FunctionKey,
        programs: dict[Hashable, _Program],
        looks_again: bool,
    ) -> None:
        self._alive = alive
        self.key: _FunctionKey | None = key
        self.programs = programs
        self._looks_again = looks_again
        self._cells: list[tuple[ClosureCell, Identity]] = []
        self._owner: Callable[[], Any] = lambda: None
        self._attributes: dict[str, Identity] = {}
        self.note(own)

    def note(self, own: Any) -> None:
        """Take note of what it refers to now."""
        if isinstance(own, types.MethodType):
            self._owner = weakly(cast(Any, own.__self__))
            self._attributes = self._attributes_now()
            own = own.__func__
        cells = map(ClosureCell, getattr(own, "__closure__", None) or ())
        self._cells = [(cell, Identity(cell.get())) for cell in cells]

    def is_as_it_was(self) -> bool:
        """Whether it surely refers to the same as before."""
        if self._looks_again:
            return False
        if any(Identity(cell.get()) != value for cell, value in self._cells):
            return False
        # All of them: code may be handed the object, and ask for any.
        return self._attributes_now() == self._attributes

    def known(self, key: Hashable) -> _Program | None:
        """Its program for such arguments, if its variables live."""
        program = self.programs.get(key)
        if program is None or any(ref() is None for ref in program.variables):
            return None
        return program

    def _attributes_now(self) -> dict[str, Identity]:
        held = attributes_of(self._owner())
        return {name: Identity(value) for name, value in held.items()}


@final
class FunctionTracer:
    """The programs of the functions of one strategy."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        pool: ServerPool,
        platforms: Sequence[str] = ("cpu",),
        call: Call | None = None,
    ) -> None:
        self._strategy = strategy
        self._pool = pool
        self._platforms = tuple(platforms)
        self._call = call
        # By what functions refer to; and of each function object that lives.
        self._table: dict[_FunctionKey, dict[Hashable, _Program]] = {}
        self._functions: dict[Hashable, _Function] = {}
        # One thread traces: what it finds out is kept for the others.
        self._one_tracer = threading.RLock()
        self.traces = 0

    def prepare(
        self, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Prepared:
        """A call of `fn`, which is traced if there is no program for it."""
        if context.current().runs_eagerly is not None:
            raise ContextError(
                f"`{getattr(fn, '__name__', fn)}` was to be run by a worker of "
                f"{self._strategy!r} in `eager_replicas()`. Functions for workers are "
                "compiled here and sent there, so nothing can be looked at in Python: "
                "debug the step with another strategy, `js.MirroredStrategy()`, or "
                "leave out `eager_replicas()`."
            )
        return self._prepared(ScheduledArguments.of(fn, args, kwargs))

    def _prepared(self, given: ScheduledArguments) -> Prepared:
        fn, (leaves, signature) = given.fn, given.taken_apart(0)
        arrays = given.arrays(leaves)
        key = signature, tuple((x.shape, x.dtype) for x in arrays)
        function, seconds = self._function(fn), None
        program = function.known(key)
        if program is None:
            with self._one_tracer:
                function = self._function(fn)
                program = function.known(key)
                if program is None:
                    began = time.perf_counter()
                    program = self._traced(fn, key, signature, arrays, given.slots)
                    self._remember(fn, function, key, program)
                    seconds = time.perf_counter() - began
        return Prepared(
            program=program.shipped,
            arguments_of=given.of_workers(arrays, key),
            given=given.iterators,
            variables=tuple(v for ref in program.variables if (v := ref()) is not None),
            varies=program.varies,
            rebuild=lambda results: self._rebuilt(program, results),
            traced_again=lambda changed: self._prepared(given.retyped(changed)),
            trace_seconds=seconds,
        )

    def _function(self, fn: Function) -> _Function:
        """What is known of a function, as it is now."""
        known = self._functions.get(_identity(fn))
        if known is not None and known.is_as_it_was():
            return known
        return self._looked_at(fn)

    def _looked_at(self, fn: Function) -> _Function:
        own, wrappers = _own_function(fn)
        key, looks_again = _key_of(own, wrappers)
        programs = self._table.get(key)
        if programs is None:
            self._make_room(key.code)
            programs = self._table.setdefault(key, {})
        number = _identity(fn)
        alive = weakly(fn, lambda: self._functions.pop(number, None))
        found = _Function(alive, own, key, programs, looks_again)
        self._functions[number] = found
        return found

    def _make_room(self, code: Identity) -> None:
        """Drop what no function can ask for any more, and old programs of one code."""
        in_use = {id(each.programs) for each in list(self._functions.values())}
        idle = [k for k, v in list(self._table.items()) if id(v) not in in_use]
        alike = [key for key in idle if key.code == code]
        for key in (*filter(_FunctionKey.is_gone, idle), *alike[: 1 - _IDLE_KEPT]):
            self._table.pop(key, None)

    def _remember(
        self, fn: Function, function: _Function, key: Hashable, program: _Program
    ) -> None:
        """Keep a program; other functions share it if the trace changed nothing."""
        own, wrappers = _own_function(fn)
        if function.key != _key_of(own, wrappers)[0]:
            if function.key is not None and not function.programs:
                self._table.pop(function.key, None)
            function.key, function.programs = None, dict(function.programs)
        function.note(own)
        function.programs[key] = program

    def _traced(
        self,
        fn: Function,
        key: Hashable,
        signature: Signature,
        arrays: Sequence[Leaf],
        slots: Sequence[IteratorSlot],
    ) -> _Program:
        trace = trace_function(fn, self._strategy, signature, arrays, self._call)
        program = self._shipped(trace, fn, signature, arrays, slots)
        self.traces += 1
        used = [
            weakref.ref(variable)
            for variable in trace.variables.values()
            if _is_used(variable, program)
        ]
        made = _Program(
            program,
            trace.results,
            trace.varies,
            used,
            trace.key_results,
        )
        return made

    def _shipped(
        self,
        trace: FunctionTrace,
        fn: Function,
        signature: Signature,
        arrays: Sequence[Leaf],
        slots: Sequence[IteratorSlot],
    ) -> ShippedProgram:
        def as_code(main: Wrapped, ids: Wrapped | None) -> HostCode:
            given = fn, self._strategy, signature, arrays, slots
            return HostCode(main, ids, traced_on_worker, *given)

        return shipped(
            trace,
            self._strategy._replicas,
            self._pool,
            self._platforms,
            _elements(trace, slots),
            as_code if calls_python(trace.jaxpr) else None,
        )

    def _rebuilt(self, program: _Program, arrays: Sequence[Leaf]) -> PyTree:
        replicas = self._strategy._replicas
        own = [
            PerReplica(jax.device_put(array, replicas.sharding(SPLIT)))
            if differs and replicas.count > 1
            else array[0]
            if differs
            else array
            for array, differs in zip(arrays, program.varies, strict=True)
        ]
        own = [
            array if how is None else _keys(array, how)
            for array, how in zip(own, program.key_results, strict=True)
        ]
        return _results.unwrap_plain(program.results.rebuild(own))


def traced_on_worker(
    fn: Function,
    strategy: AbstractStrategy,
    signature: Signature,
    leaves: Sequence[Leaf],
    slots: Sequence[IteratorSlot],
) -> ShippedProgram:
    """A function that calls Python, traced where it is to run."""
    pool: Any = getattr(strategy, "server_pool")  # noqa: B009
    tracer = FunctionTracer(strategy, pool)
    arrays = [_arrays.as_array(leaf, "argument") for leaf in leaves]
    trace = trace_function(fn, strategy, signature, arrays)
    return tracer._shipped(trace, fn, signature, arrays, slots)


def _elements(
    trace: FunctionTrace, slots: Sequence[IteratorSlot]
) -> list[list[ElementType]]:
    """The types of the elements that a function takes of each of its iterators."""
    turns = trace.recorder.turns
    return [
        [slot.type(turn).type for turn in range(turns.get(slot.number, 0))]
        for slot in slots
    ]


def _is_used(variable: Handle, program: ShippedProgram) -> bool:
    own = per_worker_kind_of(variable)
    if own is not None:
        used = [each.number for each in program.inputs if each.kind == "own"]
        return own.resource.number in (*used, *(number for number, _ in program.own))
    number = getattr(getattr(variable, "cell", None), "number", None)
    return number in {number for number, _ in program.homes}


def _keys(numbers: Any, how: Any) -> jax.Array:
    """Random keys again, of the numbers that a worker has sent."""
    return jax.random.wrap_key_data(numbers, impl=how)


def _identity(fn: Function) -> Hashable:
    """What says which function it is; a method is another object at each access."""
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)


def _own_function(fn: Any) -> tuple[Function, tuple[Hashable, ...]]:
    """The user's own function in `fn`, and what stands for what was made of it."""
    if isinstance(fn, types.MethodType):
        own, wrappers = _own_function(fn.__func__)
        return types.MethodType(own, fn.__self__), wrappers
    if isinstance(fn, ReplicatedFunction):
        own, wrappers = _own_function(fn.function)
        return own, ("run", fn.options, *wrappers)
    if isinstance(fn, types.FunctionType) or not hasattr(fn, "__wrapped__"):
        return as_method(fn), ()
    if type(fn).__module__.startswith("jaxstrategy."):
        own, wrappers = _own_function(fn.__wrapped__)
        return own, (type(fn), *wrappers)
    if isinstance(fn, Wrapped):  # its options are known to JAX alone
        own, wrappers = _own_function(cast(Any, fn).__wrapped__)
        return own, (Identity(fn), *wrappers)
    return as_method(fn), ()


def _key_of(own: Any, wrappers: tuple[Hashable, ...]) -> tuple[_FunctionKey, bool]:
    """The key of functions that do the same, and whether it changes unnoticed."""
    with rebinding.one_at_a_time:
        references = References(own, lambda value: False)
    form = references.form
    if references.opaque:  # it is known by itself alone
        function = getattr(own, "__func__", own)
        cells = map(ClosureCell, getattr(function, "__closure__", None) or ())
        parts = [function, getattr(own, "__self__", None), *(c.get() for c in cells)]
        form = tuple(map(Identity, parts))
    arrays = map(Identity, references.arrays.values())
    key = _FunctionKey((*wrappers, *form, *arrays), Identity(_code.code_of(own)))
    return key, any(is_changed_in_place(each.value) for each in references.reached)
