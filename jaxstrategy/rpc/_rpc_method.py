"""A function that other processes call: `RpcMethod`."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np

from jaxstrategy.parameter_servers.wire._stream import Fields
from jaxstrategy.rpc import _structures
from jaxstrategy.rpc._rpc_errors import InvalidArgumentError

_STATE = threading.Lock()
"""Held by calls that may change `jax.Ref`s, as variables are: two at once would use
memory that the other has given away ("Array has been deleted", in JAX 0.12)."""


class _RpcProgram(NamedTuple):
    """A compiled function, what it returns, and whether it may have state."""

    compiled: jax.stages.Compiled
    outputs: object
    may_have_state: bool


@final
class RpcMethod:
    """A compiled function, with the structures of its arguments and results.

    Args:
      name: of the method.
      func: jitted, or compiled ahead of time.
      specs: examples of its arguments, or their specs; of a compiled one none.

    Raises:
      ValueError: it is neither, or cannot be called from elsewhere.
    """

    def __init__(
        self, name: str, func: Callable[..., Any], specs: Sequence[object]
    ) -> None:
        program = _program(name, func, specs)
        args, kwargs = program.compiled.args_info
        if kwargs:
            raise ValueError(
                f"`{name}` was compiled with arguments by keyword; remote calls have "
                "arguments by position."
            )
        self._compiled = program.compiled
        self._turn = _STATE if program.may_have_state else contextlib.nullcontext()
        self._inputs = _structures.specs_of(tuple(args), f"{name}: argument")
        self._outputs = _structures.specs_of(program.outputs, f"{name}: result")
        self._tree = jax.tree.structure(self._inputs)
        self._specs = jax.tree.leaves(self._inputs)
        self.described: Fields = [
            name,
            _structures.written(self._inputs, f"{name}: argument"),
            _structures.written(self._outputs, f"{name}: result"),
        ]

    @property
    def largest(self) -> int:
        """Bytes of all arguments, or of all results if those are more."""
        both = (self._inputs, self._outputs)
        return max(map(_structures.bytes_of, both))

    def __call__(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results, for arguments that came from elsewhere.

        Raises:
          InvalidArgumentError: the arguments do not fit.
          Exception: whatever the function raises.
        """
        if why := _structures.misfit(arrays, self._specs, "arg"):
            raise InvalidArgumentError(why)
        args = jax.tree.unflatten(self._tree, list(arrays))
        with self._turn:
            result = self._compiled(*args)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def _program(
    name: str, func: Callable[..., Any], specs: Sequence[object]
) -> _RpcProgram:
    if isinstance(func, jax.stages.Compiled):
        if specs:
            raise ValueError(
                f"`{name}` is compiled, for arguments that are known; do not give them "
                "again."
            )
        return _RpcProgram(func, _results(name, func), may_have_state=True)
    if not isinstance(func, jax.stages.Wrapped):
        raise ValueError(
            f"Only jitted functions are supported with Register method, and `{name}` "
            f"is a {type(func).__name__}: register `jax.jit(...)` of it."
        )
    if not specs and _needs_arguments(func):
        raise ValueError(
            f"Input signature not specified for the function. `{name}` has arguments: "
            "give an example of each, or a `jax.ShapeDtypeStruct`, as "
            f"`register({name!r}, func, *specs)`."
        )
    traced = func.trace(*_structures.specs_of(tuple(specs), f"{name}: argument"))
    has_state = any(isinstance(const, jax.Ref) for const in traced.jaxpr.consts)
    return _RpcProgram(traced.lower().compile(), traced.out_info, has_state)


def _results(name: str, compiled: jax.stages.Compiled) -> object:
    try:
        return compiled.out_info
    except ValueError:  # JAX 0.12 counts the `jax.Ref`s that it changes as results
        raise ValueError(
            f"`{name}` is compiled, and changes variables, so that JAX does not say "
            "what it returns: register the jitted function, with examples of its "
            "arguments."
        ) from None


def _needs_arguments(func: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return False  # it has none to look at; JAX says what is missing
    has_place = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return any(
        each.kind in has_place and each.default is each.empty for each in parameters
    )
