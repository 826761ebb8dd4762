"""The programs of one strategy: one per step function and structure of arguments.

A function's programs are forgotten when the function is. A bound method counts as the
pair of its object and its function, because Python makes a new one at each access.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxstrategy._options import RunOptions
from jaxstrategy._values import PyTree
from jaxstrategy.tracing import _recompilation, _roles
from jaxstrategy.tracing._program import Program

_is_deleted = operator.methodcaller("is_deleted")


class Programs:
    """All programs of a strategy.

    Args:
      mesh: where its replicas are.
      call: runs a function as one replica: `call(fn, args, kwargs)`.
    """

    def __init__(self, mesh: Mesh, call: Callable[..., Any]) -> None:
        self.mesh = mesh
        self.call = call
        self.log = _recompilation.Log()
        self._of_function: dict[Any, FunctionPrograms] = {}

    def of(self, fn: Callable[..., Any]) -> FunctionPrograms:
        """The programs of `fn`, the same object as long as `fn` lives."""
        key = _identity(fn)
        programs = self._of_function.get(key)
        if programs is None:
            programs = FunctionPrograms(fn, self, lambda: self._forget(key))
            self._of_function[key] = programs
        return programs

    def _forget(self, key: Any) -> None:
        self._of_function.pop(key, None)


class FunctionPrograms:
    """The programs of one function."""

    def __init__(
        self, fn: Callable[..., Any], owner: Programs, forget: Callable[[], None]
    ) -> None:
        self._get_fn = _weakly(fn, forget)
        self._owner = owner
        self._history = owner.log.of(fn)
        self._calls = _recompilation.Calls()
        self._by_key: dict[Any, Program] = {}
        # For calls without static leaves: found by structure alone.
        self._by_structure: dict[Any, Program] = {}

    def __call__(
        self, args: Sequence[Any], kwargs: dict[str, Any], options: RunOptions | None
    ) -> PyTree:
        """The results of the function on all replicas."""
        self._calls.count += 1
        leaves, structure = jax.tree.flatten((args, kwargs))
        program = self._by_structure.get((structure, options))
        if program is not None and _are_live_arrays(leaves):
            return program(leaves)
        return self._call_carefully(args, kwargs, options, structure)

    def _call_carefully(
        self, args: Any, kwargs: Any, options: RunOptions | None, structure: Any
    ) -> PyTree:
        fn = self._get_fn()
        assert fn is not None
        leaves, signature = _roles.take_apart(fn, args, kwargs)
        key = (signature, options)
        program = self._by_key.get(key)
        if program is None:
            program = self._new_program(signature, options)
            self._by_key[key] = program
        if not signature.statics:
            self._by_structure[structure, options] = program
        return program.place_and_call(leaves)

    def _new_program(
        self, signature: _roles.Signature, options: RunOptions | None
    ) -> Program:
        return Program(
            get_fn=self._get_fn,
            call=self._owner.call,
            signature=signature,
            mesh=self._owner.mesh,
            donate=options.donated if options is not None else (),
            traced=lambda fn, avals: self._history.record(
                fn, self._calls, signature, avals
            ),
        )


def _are_live_arrays(leaves: Sequence[Any]) -> bool:
    """Whether all leaves are arrays on devices, none of them donated before."""
    # On JAX 0.10, dispatching a deleted array on several devices ends the process.
    try:
        return not any(map(_is_deleted, leaves))
    except (AttributeError, jax.errors.ConcretizationTypeError):
        return False


def _identity(fn: Callable[..., Any]) -> Any:
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)


def _weakly(
    fn: Callable[..., Any], forget: Callable[[], None]
) -> Callable[[], Callable[..., Any] | None]:
    """A function that returns `fn` while it lives; `forget` is called when it dies."""

    def died(_: Any) -> None:
        forget()

    try:
        if isinstance(fn, types.MethodType):
            return weakref.WeakMethod(fn, died)
        return weakref.ref(fn, died)
    except TypeError:  # its type allows no weak references
        return lambda: fn
