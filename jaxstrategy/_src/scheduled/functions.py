"""Functions that use variables of servers: their programs, and steps taken here."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, cast, final

import jax
import numpy as np
from jax.stages import Wrapped

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import (
    AbstractExecutor,
    CompiledExecutor,
    FunctionProgram,
    ReplicatedFunction,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.parameter_servers import peer
from jaxstrategy._src.parameter_servers.protocol import (
    Call as WorkerCall,
    ElementChanged,
    LoadedCode,
    RecentlyUsed,
    ShippedProgram,
)
from jaxstrategy._src.parameter_servers.store import ServerPool
from jaxstrategy._src.parameter_servers.worker import WorkerEngine
from jaxstrategy._src.replicas.replicas import REPLICATED, STACKED, Replicas
from jaxstrategy._src.scheduled.arguments import (
    ArgumentTypes,
    IteratorSlot,
    ScheduledArguments,
    is_whole,
)
from jaxstrategy._src.scheduled.shipping import shipped
from jaxstrategy._src.scheduled.trace import Call, trace_function
from jaxstrategy._src.scheduled.values import WorkerArgument
from jaxstrategy._src.text import shown
from jaxstrategy._src.tracing import rebinding, signature as _signature
from jaxstrategy._src.tracing.function_cache import Key, identity
from jaxstrategy._src.tracing.references import (
    Binding,
    Identity,
    References,
    as_method,
    attributes_of,
    code_of,
    weak_function,
)
from jaxstrategy._src.tracing.signature import Results, Signature
from jaxstrategy._src.values import arrays as _arrays
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.trees import is_nnx_node
from jaxstrategy._src.variables.remote_kinds import per_worker_kind_of, server_kind_of
from jaxstrategy._src.variables.variable import Variable

_LOGGER = logging.getLogger("jax")


def with_errors_of_python(main: Callable[..., Any]) -> Callable[..., Any]:
    """A program that raises what its callbacks raise, and waits for its results."""

    def called(*given: Any) -> Any:
        # JAX raises them as texts, and logs them (0.10, 0.12), in threads of its own:
        # those of other programs are here, too.
        logged: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.addFilter(lambda record: bool(logged.append(record)))  # none goes on
        _LOGGER.addHandler(handler)
        try:
            return jax.block_until_ready(main(*given))
        except Exception as error:  # a JaxRuntimeError, or a ValueError
            for record in reversed(logged):
                each = record.exc_info[1] if record.exc_info else None
                if each and f"{type(each).__name__}: {each}" in str(error):
                    raise each from error
            raise
        finally:
            _LOGGER.removeHandler(handler)

    return called


TracedFunction: TypeAlias = tuple[
    Function,
    AbstractStrategy,
    Signature,
    Sequence[Leaf],
    Sequence[IteratorSlot],
]
"""What was traced: the function, and the types of its arguments."""


@final
class HostCode:
    """The code of one function; in this process as it is, in others the function."""

    def __init__(
        self,
        function: TracedFunction,
        main: Callable[..., Any],
        ids: Callable[..., Any] | None,
    ) -> None:
        self._code = main, ids
        # What it refers to must live as long as it may be called.
        self._function = function
        self._sent: peer.Dumped | None = None

    def loaded(self, program: ShippedProgram) -> LoadedCode:
        """What a worker calls."""
        if self._sent is not None:
            program = self._traced_here(self._sent)
        main, ids = self._code
        return LoadedCode(program, with_errors_of_python(main), ids)

    def _traced_here(self, sent: peer.Dumped) -> ShippedProgram:
        arrived: list[object] = []
        with context.entered(unpickled=arrived):
            strategy, fn, args, kwargs, slots = sent.loaded()
        for each in arrived:
            if isinstance(each, Variable):
                each._adopt(strategy)
        with context.entered(worker=None):
            leaves, signature = _signature.flatten(fn, (args, kwargs))
            arrays = [_arrays.as_array(leaf, "argument") for leaf in leaves]
            trace = trace_function(fn, strategy, signature, arrays)
            function = fn, strategy, signature, arrays, slots
            as_code = functools.partial(HostCode, function)
            own = shipped(trace, strategy.server_pool, ("cpu",), slots, as_code)
        assert isinstance(own.main, HostCode)
        self._code, self._function = own.main._code, function
        return own

    def __getstate__(self) -> dict[str, object]:
        fn, strategy, signature, leaves, slots = self._function
        blanks = [_blank(leaf) for leaf in leaves]
        args, kwargs = signature.rebuild(blanks)
        with context.entered(is_shipping=True):
            sent = peer.dumped((strategy, fn, args, kwargs, tuple(slots)))
        return {"_sent": sent, "_code": None, "_function": None}


def _blank(leaf: Leaf) -> Leaf:
    """A placeholder for an array, of the same type."""
    if isinstance(leaf, jax.Array) and not isinstance(leaf, np.ndarray):
        return jax.numpy.zeros(leaf.shape, leaf.dtype)
    array = np.asarray(leaf)
    return np.zeros(array.shape, array.dtype)


@final
@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """A function that was traced for some types of arguments."""

    shipped: ShippedProgram
    varies: Sequence[bool]
    key_results: Sequence[Any]
    results: Results
    variables: Sequence[weakref.ref[Variable]]

    def rebuilt(self, arrays: Sequence[Any], replicas: Replicas) -> PyTree:
        """What the function returned, of the results of the program."""
        own: list[Any] = []
        for array, differs, how in zip(
            arrays, self.varies, self.key_results, strict=True
        ):
            value: Any = array
            if differs and replicas.count > 1:
                placed = jax.device_put(array, replicas.sharding(STACKED))
                value = PerReplica(placed)
            elif differs:
                value = array[0]
            own.append(
                value if how is None else jax.random.wrap_key_data(value, impl=how)
            )
        return _signature.unwrap_non_arrays(self.results.rebuild(own))


@final
class Prepared:
    """One call of a function, ready to be sent to any worker."""

    def __init__(self, tracer: FunctionTracer, given: ScheduledArguments) -> None:
        arrays, types = given.on_worker(0)
        found = tracer.program(given, arrays, types)
        self.program, self.varies = found.shipped, found.varies
        self.arguments_of = given.sent(arrays, types)  # the arrays for each worker
        # They live as long as the call.
        self._variables = [v for ref in found.variables if (v := ref()) is not None]
        kinds = map(per_worker_kind_of, self._variables)
        iterators = [each.resource for each in given.iterators]
        self.iterators = tuple(each.number for each in iterators)
        # What the worker must have built before.
        self.resources = (*iterators, *(k.resource for k in kinds if k is not None))
        self._tracer, self._given, self._found = tracer, given, found

    def traced_again(self, changed: ElementChanged) -> Prepared:
        """The same call of a function that takes other elements."""
        return Prepared(self._tracer, self._given.retyped(changed))

    def taken(self, worker: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The program's results of all that a worker has sent for this call."""
        count = self.program.results
        told = iter(arrays[count:])
        pairs = zip(self._given.iterators, self.program.iterators, strict=True)
        for each, elements in pairs:
            if elements and each.positions is not None:
                each.positions[worker] = json.loads(bytes(next(told)))
        return list(arrays[:count])

    def rebuild(self, results: Sequence[Leaf]) -> PyTree:
        """What the function returned."""
        return self._found.rebuilt(results, self._tracer.strategy._replicas)


@final
@dataclasses.dataclass(eq=False)
class _Function:
    """A function object, as it was when it was looked at."""

    alive: object
    key: Key | None  # None once a trace has changed it
    token: object  # the same for functions of one key
    looks_again: bool
    refers_to: object


# Programs that are kept: to trace one again takes longer than to send it again.
_TRACED = 1024


@final
class FunctionTracer:
    """The programs of the functions of one strategy."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        pool: ServerPool,
        platforms: Sequence[str] = ("cpu",),
        call: Call | None = None,
        observe: Callable[[float], None] = lambda _: None,  # how long a trace took
    ) -> None:
        self.strategy = strategy
        self._pool = pool
        self._platforms = tuple(platforms)
        self._call, self._observe = call, observe
        # Functions that refer to the same have the same token; keys take long to hash.
        self._tokens: RecentlyUsed[object] = RecentlyUsed(_TRACED)
        self._programs: RecentlyUsed[_Program] = RecentlyUsed(_TRACED)
        self._functions: dict[Hashable, _Function] = {}  # that live
        # One thread traces: what it finds out is kept for the others.
        self._one_tracer = threading.RLock()

    def prepare(
        self,
        fn: Function,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        of_element: bool = False,
    ) -> Prepared:
        """A call of `fn`, which is traced if there is no program for it.

        Of an iterator, which is the argument then, it is given the next element.
        """
        if context.current().runs_eagerly is not None:
            raise ContextError(
                f"`{getattr(fn, '__name__', fn)}` was to be run by a worker of "
                f"{self.strategy!r} in `eager_replicas()`. Functions for workers are "
                "compiled here and sent there, so nothing can be looked at in Python: "
                "debug the step with another strategy, `js.MirroredStrategy()`, or "
                "leave out `eager_replicas()`."
            )
        return Prepared(self, ScheduledArguments.of(fn, args, kwargs, of_element))

    def program(
        self, given: ScheduledArguments, arrays: Sequence[Leaf], types: ArgumentTypes
    ) -> _Program:
        """The program for such arguments, which may be traced now."""
        if (program := self._known(given, types)) is None:
            with self._one_tracer:
                if (program := self._known(given, types)) is None:
                    began = time.perf_counter()
                    program = self._traced(given, arrays, types)
                    self._observe(time.perf_counter() - began)
        return program

    def _known(
        self, given: ScheduledArguments, types: ArgumentTypes
    ) -> _Program | None:
        """The program for such arguments, if its variables live."""
        token = self._function(given.owner).token
        program = self._programs.get((token, given.fn is given.owner, types))
        if program is None or any(ref() is None for ref in program.variables):
            return None
        return program

    def _function(self, fn: Function) -> _Function:
        """What is known of a function, as it is now."""
        number = identity(fn)
        own, wrappers = _own_function(fn)
        known, now = self._functions.get(number), _refers_to(own)
        if known and not known.looks_again and known.refers_to == now:
            return known
        key, looks_again = _key_of(own, wrappers)
        alive = weak_function(fn, lambda _: self._functions.pop(number, None))
        if (token := self._tokens.get(key)) is None:
            self._tokens.put(key, token := object())
        found = _Function(alive, key, token, looks_again, now)
        self._functions[number] = found
        return found

    def _traced(
        self, given: ScheduledArguments, arrays: Sequence[Leaf], types: ArgumentTypes
    ) -> _Program:
        fn, function = given.fn, self._function(given.owner)
        trace = trace_function(fn, self.strategy, types[0], arrays, self._call)
        traced = fn, self.strategy, types[0], arrays, given.slots
        as_code = functools.partial(HostCode, traced)
        sent = shipped(trace, self._pool, self._platforms, given.slots, as_code)
        variables = [
            weakref.ref(each)
            for each in trace.step.used
            if server_kind_of(each) or per_worker_kind_of(each)
        ]
        varies, results = trace.step.varies, trace.step.results
        program = _Program(sent, varies, trace.key_results, results, variables)
        # Other functions share it if the trace has changed nothing.
        own, wrappers = _own_function(given.owner)
        if function.key and function.key != _key_of(own, wrappers)[0]:
            function.key, function.token = None, object()
        function.refers_to = _refers_to(own)
        self._programs.put((function.token, fn is given.owner, types), program)
        return program


@final
class ServerExecutor(CompiledExecutor):
    """Runs steps in this process that use variables of parameter servers."""

    compile = AbstractExecutor.compile  # it cannot

    def __init__(self, strategy: AbstractStrategy, pool: ServerPool) -> None:
        super().__init__(strategy)
        self._pool = pool
        self._one_call = threading.Lock()

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        return lambda args, kwargs: self.step(fn, (args, kwargs))

    def _run(
        self,
        fn: Function,
        arguments: Arguments,
        options: RunOptions | None,
        program: FunctionProgram | None = None,
    ) -> PyTree:
        """The results of `fn`; in a function, as part of the same trace."""
        if context.require_cross_replica(self._strategy, "run").in_step:
            return super()._run(fn, arguments, options)
        return self.step(fn, arguments)

    def step(self, fn: Function, arguments: Arguments) -> PyTree:
        """The results of a step that is taken now, by this process."""
        for leaf in jax.tree.leaves(arguments, is_leaf=is_whole):
            if isinstance(leaf, WorkerArgument):
                raise ContextError(
                    f"`run` was given {shown(leaf)} outside of a scheduled function, "
                    "but each worker has its own. Call `run` in a function that takes "
                    "it, and schedule that with a `ClusterCoordinator`."
                )
        prepared = self._tracer.prepare(fn, *arguments)
        call = WorkerCall(None, prepared.program.key, prepared.arguments_of(0))
        with self._one_call:
            self._engine.define(prepared.program)
            arrays = self._engine.call(call)
        where = self._strategy._replicas.sharding(REPLICATED)
        placed = [
            array if differs else jax.device_put(array, where)
            for array, differs in zip(arrays, prepared.varies, strict=True)
        ]
        return prepared.rebuild(placed)

    @functools.cached_property
    def _tracer(self) -> FunctionTracer:
        platform = self._strategy._replicas.devices[0].platform
        return FunctionTracer(
            self._strategy, self._pool, (platform,), call=self._as_replica
        )

    @functools.cached_property
    def _engine(self) -> WorkerEngine:
        return WorkerEngine(-1, self._pool.servers, self._strategy.devices)


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
    if isinstance(fn, Wrapped):  # its options are known to JAX alone
        own, wrappers = _own_function(cast(Any, fn).__wrapped__)
        return own, (Identity(fn), *wrappers)
    return as_method(fn), ()


def _refers_to(own: Any) -> tuple[object, ...]:
    """What says whether a function refers to the same as before."""
    held: dict[str, Identity] = {}
    if isinstance(own, types.MethodType):
        # All of them: code may be handed the object, and ask for any.
        attributes = attributes_of(own.__self__)
        held = {name: Identity(value) for name, value in attributes.items()}
    return [Identity(each) for each in _closure(own)], held


def _closure(own: Any) -> list[object]:
    function = getattr(own, "__func__", own)
    cells = getattr(function, "__closure__", None) or ()
    return [Binding(cell).get() for cell in cells]


def _key_of(own: Any, wrappers: tuple[Hashable, ...]) -> tuple[Key, bool]:
    """The key of functions that do the same, and whether it changes unnoticed."""
    with rebinding.rebinding_lock:
        references = References(own, finds_objects=False)
    tokens = references.key
    if references.opaque:  # it is known by itself alone
        function = getattr(own, "__func__", own)
        parts = [function, getattr(own, "__self__", None), *_closure(own)]
        tokens = tuple(map(Identity, parts))
    arrays = map(Identity, references.arrays.values())
    code = Identity(code_of(own))
    key = (code, *wrappers, *tokens, *arrays)
    return key, any(is_nnx_node(each.value) for each in references.nodes)
