"""Steps that are called as they are, by the only replica: `EagerExecutor`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import final

from jaxstrategy._options import RunOptions
from jaxstrategy.contexts import _context
from jaxstrategy.executors._executor import AbstractExecutor, FunctionProgram
from jaxstrategy.replicas._devices import Device
from jaxstrategy.tracing.nnx import _adapter
from jaxstrategy.values import _building, _per_replica, _trees
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import (
    Function,
    Leaf,
    PyTree,
)


@final
class EagerExecutor(AbstractExecutor):
    """Calls a function, in which code is part of no strategy; compiles nothing."""

    def program(
        self, fn: Function, options: RunOptions | None = None
    ) -> FunctionProgram:
        """The function itself, called with a tuple and a dict of arguments."""
        return EagerProgram(fn, functools.partial(self.run, fn, options=options))

    def _run(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions | None,
    ) -> PyTree:
        """The results of the function."""
        _context.require_same(_context.current(), self._strategy)
        args, kwargs = _alone((args, kwargs))
        with _context.outside():
            return fn(*args, **kwargs)

    def across(self, function: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """`function` of the only version."""
        return function(_alone(value))

    def update(
        self,
        devices: tuple[Device, ...],
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
    ) -> PyTree:
        """The results of `fn`, called for the only copy."""
        with _context.entered(updated=devices):
            return fn(*args, **kwargs)


@final
class EagerProgram:
    """One function of an `EagerExecutor`.

    Args:
      fn: the function.
      run: calls it with a tuple and a dict of arguments.
    """

    def __init__(self, fn: Function, run: Callable[..., PyTree]) -> None:
        self._fn = fn
        self._run = run

    def __call__(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> PyTree:
        """The results of the function."""
        return self._run(tuple(args), kwargs)

    def bound(self, objects: Sequence[object]) -> Callable[..., PyTree]:
        """The function with these first arguments.

        Raises:
          TypeError: none of them can be changed in place.
        """
        captured = _adapter.captured_by(self._fn)
        _adapter.require_objects(tuple(objects), captured)

        @functools.wraps(self._fn)
        def step(*rest: PyTree, **kwargs: PyTree) -> PyTree:
            return self((*objects, *rest), kwargs)

        return step


def _alone(tree: PyTree) -> PyTree:
    """`tree` with each `PerReplica` as its only version."""

    def unwrap(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, PerReplica):
            return leaf
        _building.check_stacked(_per_replica.contents(leaf), 1, "value")
        return leaf.local(0)

    return _trees.map_around_objects(unwrap, tree)
