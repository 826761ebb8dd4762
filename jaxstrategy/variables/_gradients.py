"""Gradients with respect to the variables that a function reads."""

from __future__ import annotations

import contextlib
import contextvars
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jaxstrategy._values import Handle, PyTree

# While a function is differentiated, the values its variables have for it.
_given: contextvars.ContextVar[Mapping[int, Any]] = contextvars.ContextVar(
    "jaxstrategy_given_values", default=types.MappingProxyType({})
)


def value_of(variable: Any) -> Any:
    """The value that `variable` has in the function being differentiated, or None."""
    return _given.get().get(id(variable))


@contextlib.contextmanager
def _given_values(values: Mapping[int, Any]) -> Iterator[None]:
    token = _given.set({**_given.get(), **values})
    try:
        yield
    finally:
        _given.reset(token)


def value_and_grad(
    fn: Callable[..., Any], variables: PyTree, has_aux: bool = False
) -> Callable[..., tuple[Any, PyTree]]:
    """A function that calls `fn` and also differentiates it, like `jax.value_and_grad`.

    The gradient is with respect to variables that `fn` reads, not to its arguments. It
    is this replica's own inside `run`, as always: reduce it yourself. `fn` must not
    assign those variables; others it may, of values that do not depend on these.

    Args:
      fn: returns a scalar, or with `has_aux` a scalar and something else.
      variables: a pytree of variables.
      has_aux: see `fn`.

    Returns:
      A function of the arguments of `fn` that returns what `fn` does, and gradients in
      a pytree like `variables`.

    Raises:
      TypeError: a leaf of `variables` is no variable.

    >>> import jaxstrategy as js
    >>> w = js.Variable(3.0)
    >>> loss_and_grad = js.value_and_grad(lambda x: (w * x) ** 2, [w])
    >>> loss_and_grad(2.0)
    (Array(36., dtype=float32), [Array(24., dtype=float32)])
    """
    leaves, treedef = jax.tree.flatten(
        variables, is_leaf=lambda node: isinstance(node, Handle)
    )
    for leaf in leaves:
        if not isinstance(leaf, Handle):
            raise TypeError(
                f"`variables` holds {leaf!r}, which is no Variable. For gradients with "
                "respect to arguments use `jax.value_and_grad`."
            )

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        def of_values(values: list[Any]) -> Any:
            given = {id(leaf): v for leaf, v in zip(leaves, values, strict=True)}
            with _given_values(given):
                return fn(*args, **kwargs)

        values = [leaf.value for leaf in leaves]  # type: ignore[attr-defined]
        result, grads = jax.value_and_grad(of_values, has_aux=has_aux)(values)
        return result, jax.tree.unflatten(treedef, grads)

    return differentiated


def grad(
    fn: Callable[..., Any], variables: PyTree, has_aux: bool = False
) -> Callable[..., Any]:
    """The same as `value_and_grad`, without the value.

    Returns:
      A function of the arguments of `fn` that returns the gradients; with `has_aux` the
      gradients and what `fn` returns beside the scalar.

    >>> import jaxstrategy as js
    >>> w = js.Variable(3.0)
    >>> js.grad(lambda x: (w * x) ** 2, {"w": w})(2.0)
    {'w': Array(24., dtype=float32)}
    """
    both = value_and_grad(fn, variables, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return differentiated
