"""Scheduled functions and their programs: `FunctionTracer`."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.parameter_servers._server_pool import ServerPool
from jaxstrategy.parameter_servers._shipped_program import ElementType, ShippedProgram
from jaxstrategy.replicas._random_keys import as_numbers
from jaxstrategy.replicas._replicas import SPLIT
from jaxstrategy.scheduled._function_trace import Call, trace_function
from jaxstrategy.scheduled._iterator_slot import (
    IteratorArgument,
    IteratorSlot,
)
from jaxstrategy.scheduled._shipping import shipped
from jaxstrategy.tracing import _results, _roles
from jaxstrategy.tracing._results import Results
from jaxstrategy.tracing._roles import Signature
from jaxstrategy.tracing.functions._weak_function import weakly
from jaxstrategy.values import _arrays, _trees
from jaxstrategy.values._handle import Handle
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Function, Leaf, PyTree


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """One call of a function, ready to be sent to any worker.

    Attributes:
      program: the program.
      arguments: its arrays.
      iterators: what the caller gave in place of each iterator.
      variables: those that it uses, which must live until it has ended.
      varies: for each result of the program whether it has one version for each
        replica.
      rebuild: makes the function's results of the program's.
    """

    program: ShippedProgram
    arguments: tuple[np.ndarray, ...]
    iterators: tuple[IteratorArgument, ...]
    variables: tuple[Handle, ...]
    varies: Sequence[bool]
    rebuild: Callable[[Sequence[Leaf]], PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    shipped: ShippedProgram
    results: Results
    varies: Sequence[bool]
    variables: Sequence[weakref.ref[Handle]]
    key_results: Sequence[Any]
    captured: Sequence[object]


@final
class FunctionTracer:
    """The programs of the functions of one strategy.

    Args:
      strategy: of the coordinator.
      pool: its servers.
      platforms: of the workers' devices.
      call: calls them as steps of `run`; None: they are functions in cross-replica
        context.

    Attributes:
      traces: how many functions were traced so far.
    """

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
        self._programs: dict[int, dict[Hashable, _Program]] = {}
        self._alive: dict[int, Callable[[], Function | None]] = {}
        # One thread traces: what it finds out is kept for the others.
        self._one_tracer = threading.RLock()
        self.traces = 0

    def prepare(
        self, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> Prepared:
        """A call of `fn`, which is traced if there is no program for it.

        Raises:
          Exception: what the function raises while it is traced.
        """
        (args, kwargs), iterators = _with_slots(args, kwargs)
        leaves, signature = _roles.take_apart(fn, args, kwargs)
        arrays = [_arrays.as_array(leaf, "argument") for leaf in leaves]
        key = signature, tuple((x.shape, x.dtype) for x in arrays)
        program = self._known(fn, key)
        if program is None:
            with self._one_tracer:
                program = self._known(fn, key)
                if program is None:
                    program = self._traced(fn, key, signature, arrays, iterators)
        return Prepared(
            program=program.shipped,
            arguments=tuple(np.asarray(as_numbers(array)) for array in arrays),
            iterators=iterators,
            variables=tuple(v for ref in program.variables if (v := ref()) is not None),
            varies=program.varies,
            rebuild=lambda results: self._rebuilt(program, results),
        )

    def _known(self, fn: Function, key: Hashable) -> _Program | None:
        program = self._programs.get(id(fn), {}).get(key)
        if program is None or any(ref() is None for ref in program.variables):
            return None
        same = zip(program.captured, _captured(fn), strict=False)
        return program if all(a is b for a, b in same) else None

    def _traced(
        self,
        fn: Function,
        key: Hashable,
        signature: Signature,
        arrays: Sequence[Leaf],
        iterators: Sequence[IteratorArgument],
    ) -> _Program:
        trace = trace_function(fn, self._strategy, signature, arrays, self._call)
        types: list[ElementType] = [each.element.type for each in iterators]
        program = shipped(
            trace, self._strategy.replicas, self._pool, self._platforms, types
        )
        self.traces += 1
        numbers = {number for number, _ in program.homes}
        used = [
            weakref.ref(variable)
            for variable in trace.variables.values()
            if getattr(getattr(variable, "cell", None), "number", None) in numbers
        ]
        made = _Program(
            program,
            trace.results,
            trace.varies,
            used,
            trace.key_results,
            _captured(fn),
        )
        self._remember(fn)[key] = made
        return made

    def _remember(self, fn: Function) -> dict[Hashable, _Program]:
        number = id(fn)
        if number not in self._programs:

            def forget() -> None:
                self._programs.pop(number, None)
                self._alive.pop(number, None)

            self._programs[number] = {}
            self._alive[number] = weakly(fn, forget)
        return self._programs[number]

    def _rebuilt(self, program: _Program, arrays: Sequence[Leaf]) -> PyTree:
        replicas = self._strategy.replicas
        own = [
            PerReplica(jax.device_put(array, replicas.sharding(SPLIT)))
            if differs and replicas.count > 1
            else array[0]
            if differs
            else array
            for array, differs in zip(arrays, program.varies, strict=True)
        ]
        own = [
            array if how is None else jax.random.wrap_key_data(array, impl=how)
            for array, how in zip(own, program.key_results, strict=True)
        ]
        return _results.unwrap_plain(program.results.rebuild(own))


def _with_slots(
    args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> tuple[tuple[Sequence[PyTree], dict[str, PyTree]], tuple[IteratorArgument, ...]]:
    """The arguments with a stand-in for each iterator, and the iterators."""
    found: list[IteratorArgument] = []

    def slot(node: Any) -> Any:
        if not isinstance(node, IteratorArgument):
            return node
        for number, each in enumerate(found):
            if each is node:
                return IteratorSlot(number, node.element)
        found.append(node)
        return IteratorSlot(len(found) - 1, node.element)

    def is_whole(node: object) -> bool:
        return isinstance(node, IteratorArgument) or _trees.is_whole(node)

    made = jax.tree.map(slot, (tuple(args), kwargs), is_leaf=is_whole)
    return made, tuple(found)


def _captured(fn: Any) -> list[object]:
    """What the variables of enclosing functions hold, which a trace takes as it is."""
    function = getattr(fn, "__func__", getattr(fn, "__wrapped__", fn))
    held: list[object] = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            held.append(None)
    return held
