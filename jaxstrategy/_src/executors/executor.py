"""Steps that are called as they are, by the only replica: `EagerExecutor`."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast, final

from jaxstrategy._src.contexts import context as _context, step_outputs as _step_outputs
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.tracing.explanation.explain import explain
from jaxstrategy._src.tracing.explanation.explanation import Explanation
from jaxstrategy._src.tracing.functions import code
from jaxstrategy._src.tracing.nnx import object_calls
from jaxstrategy._src.tracing.saved_step import Obtain
from jaxstrategy._src.tracing.traced_step import StepEnvironment
from jaxstrategy._src.values import building, per_replica, trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import abstract_variable
from jaxstrategy._src.variables.variable import Variable


class FunctionProgram(Protocol):
    """One function, as an executor runs it on all replicas."""

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The results of the function, called outside of every scope and step."""
        ...

    def bound(self, objects: Sequence[object]) -> Callable[..., PyTree]:
        """The function with these first arguments, which are looked into only now."""
        ...


class AbstractExecutor(abc.ABC):
    """Runs functions on all replicas of one strategy.

    What a strategy asks of it does not say how: compiled as one program for all
    replicas, as the function stands, or sent to processes that take their own steps.
    """

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy

    @abc.abstractmethod
    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        """The program of `fn`, the same object as long as `fn` lives."""

    def run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        """The results of `fn`, in whatever context `run` is called."""
        context = _context.current()
        if context.observer is not None and not context.in_step:
            context.observer(self, fn, args, kwargs, options)
        step_outputs = _step_outputs.around_steps()
        if step_outputs is None:
            return self._run(fn, args, kwargs, options)
        with_outputs = step_outputs.with_outputs(fn)
        code.define_at(with_outputs, code.place_of(fn))
        args, kwargs = _step_outputs.without_sender(step_outputs, (args, kwargs))
        result, posted = self._run(with_outputs, args, kwargs, options)
        for message in posted:
            step_outputs.receive(message)
        return result

    @abc.abstractmethod
    def _run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        """The results of `fn` and nothing besides, as `run`."""

    @abc.abstractmethod
    def across(self, function: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """`function` of each replica's version of `value`, in a step or outside."""

    @abc.abstractmethod
    def update(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """The results of `fn`, called for each copy of the variables it changes."""

    def compile(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
        obtain: Obtain,
    ) -> FunctionProgram:
        """The program of one such call of `fn`, compiled before it is made."""
        raise NotImplementedError(
            f"A {type(self._strategy).__name__} compiles a step where it runs, when it "
            "is scheduled: `compile` and `load_compiled` cannot do it before. Set up "
            "`js.experimental.compilation_cache(directory)` in each process instead."
        )

    def run_compiled(
        self,
        program: FunctionProgram,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        raise NotImplementedError("`compile` gives nothing that could be run")

    def explain(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        *,
        options: RunOptions,
        topology: Topology,
        compiled: bool,
    ) -> Explanation:
        return explain(
            fn,
            args,
            kwargs,
            environment=self._environment,
            options=options,
            topology=topology,
            compiled=compiled,
        )

    @property
    def _environment(self) -> StepEnvironment:
        replicas = self._strategy._replicas
        return StepEnvironment(
            replicas, self._as_replica, self._variables, self._strategy._overlap
        )

    def _as_replica(
        self, fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
    ) -> PyTree:
        """One replica's call of `fn`, while it is traced."""
        with self._in_replica():
            return fn(*args, **kwargs)

    @contextlib.contextmanager
    def _in_replica(self) -> Iterator[ReplicaContext]:
        """A `with` block in which code is a step's, as one replica sees it."""
        replica = ReplicaContext(self._strategy)
        with _context.entered(
            strategy=self._strategy, replica=replica, in_step=True, updated=()
        ):
            yield replica

    def _variables(self) -> list[Variable]:
        return cast("list[Variable]", abstract_variable.usable_by(self._strategy))


@final
class EagerExecutor(AbstractExecutor):
    """Calls a function, in which code is part of no strategy; compiles nothing."""

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        return EagerProgram(fn, functools.partial(self.run, fn, options=options))

    def _run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        _context.require_same(_context.current(), self._strategy)
        args, kwargs = _alone((args, kwargs))
        with _context.outside():
            return fn(*args, **kwargs)

    def across(self, function: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        return function(_alone(value))

    def update(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        with _context.entered(updated=devices):
            return fn(*args, **kwargs)


@final
class EagerProgram:
    def __init__(self, fn: Function, run: Callable[..., PyTree]) -> None:
        self._fn = fn
        self._run = run

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        return self._run(tuple(args), kwargs)

    def bound(self, objects: Sequence[object]) -> Callable[..., PyTree]:
        captured = object_calls.captured_by(self._fn)
        object_calls.require_objects(tuple(objects), captured)

        @functools.wraps(self._fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            return self((*objects, *rest), kwargs)

        return step


def _alone(tree: PyTree) -> PyTree:
    def unwrap(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        building.check_stacked(per_replica.contents(leaf), 1, "value")
        return leaf.local(0)

    return trees.map_around_objects(unwrap, tree)
