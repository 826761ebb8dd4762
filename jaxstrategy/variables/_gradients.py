"""Gradients with respect to the variables that a function reads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxstrategy._errors import ContextError
from jaxstrategy.contexts import _context
from jaxstrategy.values._handle import Handle
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables import _access


def value_of(variable: Handle) -> jax.Array | None:
    """The value that `variable` has in the function being differentiated, or None.

    Raises:
      ContextError: the function is not part of the step that asks, but runs it.
    """
    found = _context.current().given.get(id(variable))
    if found is None:
        return None
    step, value = found
    if step is not _access.tracing():
        raise _outside(variable)
    return value


def check_outside(variables: Iterable[Handle | None]) -> None:
    """Raise unless a step that uses `variables` may be called here.

    Raises:
      ContextError: inside a function that is differentiated with respect to one.
    """
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


def _given_values(
    values: Mapping[int, jax.Array],
) -> contextlib.AbstractContextManager[object]:
    step = _access.tracing()
    given = {key: (step, value) for key, value in values.items()}
    return _context.entered(given={**_context.current().given, **given})


def value_and_grad(
    fn: Callable[..., PyTree], variables: PyTree, has_aux: bool = False
) -> Callable[..., tuple[PyTree, PyTree]]:
    """A function that calls `fn` and also differentiates it, like `jax.value_and_grad`.

    The gradient is with respect to variables that `fn` reads, not to its arguments. It
    is this replica's own inside `run`, as always: reduce it yourself. `fn` must not
    assign those variables; others it may.

    Args:
      fn: returns a scalar, or with `has_aux` a scalar and something else.
      variables: a pytree of variables.
      has_aux: see `fn`.

    Returns:
      A function of the arguments of `fn` that returns what `fn` does, and gradients in
      a pytree like `variables`, each of the shape of its variable.

    Raises:
      TypeError: a leaf of `variables` is no variable.
      ValueError: `fn` assigns one of them.
      ContextError: `fn` runs a step that uses one of them.

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

    def differentiated(*args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
        def of_values(values: dict[int, jax.Array]) -> PyTree:
            with _given_values(values):
                return fn(*args, **kwargs)

        # By identity, so that a variable that is there twice gets its gradient twice.
        values = {id(leaf): leaf.value() for leaf in leaves}
        result, grads = jax.value_and_grad(of_values, has_aux=has_aux)(values)
        return result, treedef.unflatten([grads[id(leaf)] for leaf in leaves])

    return differentiated


def grad(
    fn: Callable[..., PyTree], variables: PyTree, has_aux: bool = False
) -> Callable[..., PyTree]:
    """The same as `value_and_grad`, without the value.

    Args:
      fn: returns a scalar, or with `has_aux` a scalar and something else.
      variables: a pytree of variables.
      has_aux: see `fn`.

    Returns:
      A function of the arguments of `fn` that returns the gradients, each of the shape
      of its variable; with `has_aux` the gradients and what `fn` returns beside the
      scalar.

    Raises:
      TypeError: a leaf of `variables` is no variable.
      ValueError: `fn` assigns one of them.
      ContextError: `fn` runs a step that uses one of them.

    >>> import jaxstrategy as js
    >>> w = js.Variable(3.0)
    >>> js.grad(lambda x: (w * x) ** 2, {"w": w})(2.0)
    {'w': Array(24., dtype=float32)}
    """
    both = value_and_grad(fn, variables, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> PyTree:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return differentiated
