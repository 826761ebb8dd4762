"""A step with objects as a function of arrays: what it returns, and their new arrays.

A compiled step is a function of arrays. So the arrays of all objects that it is given
are passed to it, objects like them are put together there, the step works on those, and
their new arrays are put into the caller's objects. An array that is reached in several
ways is passed once.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxstrategy._errors import ObjectError
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._replica_context import ReplicaContext
from jaxstrategy.tracing import _roles
from jaxstrategy.tracing.functions import (
    _code,
    _leaks,
    _lending,
)
from jaxstrategy.tracing.nnx._flax_types import FlaxVariable
from jaxstrategy.tracing.nnx._object_form import ObjectForm
from jaxstrategy.tracing.nnx._object_kinds import (
    is_changed_in_place,
    is_variable,
    is_whole_object,
)
from jaxstrategy.tracing.nnx._parts import Parts, Same, is_parts, is_whole_or_parts
from jaxstrategy.values._types import Function, PyTree


def step_of_arrays(
    get_fn: Callable[[], Any], form: ObjectForm | None, captured: tuple[str, ...]
) -> Function:
    """A step with `Parts` for objects: what it returns, and their new arrays.

    Args:
      get_fn: returns the step, which is not kept alive.
      form: of the objects; None if there are none.
      captured: the names of what the step captured.
    """

    def step(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, list[Parts]]:
        fn = get_fn()
        labels = _labels(step, args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_whole_or_parts)
        parts = [leaf for leaf in leaves if is_parts(leaf)]
        objects = [] if form is None else form.put_together(parts)
        keys = _own_keys(objects)
        following = iter(objects)
        leaves = [next(following) if is_parts(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        replaced = {name: kwargs.pop(name) for name in captured}
        with _lending.lent(fn, replaced, is_changed_in_place) as own:
            with _leaks.refused(own, step.__name__, is_changed_in_place):
                returned = own(*args, **kwargs)
        if form is None:
            return returned, []
        returned = _marked(returned, objects, form)
        # A key that the step left alone is the same on all replicas again.
        for variable, folded, key in keys:
            if variable.get_raw_value() is folded:
                variable.set_raw_value(key)
        return returned, _labelled(form.take_apart(objects, parts), labels)

    step.__dict__[_MARK] = True
    _name_like(step, get_fn())
    return step


_MARK = "_is_function_of_arrays"


def takes_arrays(fn: Function) -> bool:
    """Whether `fn` is a step with `Parts` for objects; it looks for leaks itself."""
    return getattr(fn, _MARK, False)


def _labels(
    step: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> list[str]:
    """Each object among the arguments as the caller would write it."""
    nodes, structure = jax.tree.flatten((args, kwargs), is_leaf=is_whole_or_parts)
    args, kwargs = jax.tree.unflatten(structure, range(len(nodes)))
    return [
        _roles.label(step, args, kwargs, index).strip("`")
        for index, node in enumerate(nodes)
        if is_parts(node)
    ]


def _labelled(parts: Sequence[Parts], labels: Sequence[str]) -> list[Parts]:
    """`parts` with the names by which the caller would write their arrays."""
    return [
        dataclasses.replace(part, names=tuple(f"{label}.{name}" for name in part.names))
        for part, label in zip(parts, labels, strict=True)
    ]


def _name_like(step: Any, fn: Function) -> None:
    """Gives `step` the names of `fn`, as `functools.wraps`, but without a reference."""
    step.__name__ = getattr(fn, "__name__", type(fn).__name__)
    step.__qualname__ = getattr(fn, "__qualname__", step.__name__)
    _code.define_at(step, _code.place_of(fn))
    try:
        step.__signature__ = inspect.signature(fn)
    except (TypeError, ValueError):
        pass


def _own_keys(
    objects: Sequence[object],
) -> list[tuple[FlaxVariable, jax.Array, jax.Array]]:
    """Gives each replica random keys of its own, so that dropout differs.

    Returns:
      For each variable with a key: it, the replica's key, and the key of all.
    """
    context = _context.current()
    strategy, replica = context.strategy, context.replica
    if not objects or strategy is None or strategy.num_replicas_in_sync == 1:
        return []
    assert isinstance(replica, ReplicaContext)
    nnx = sys.modules["flax.nnx"]
    found = []
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            key = node.get_raw_value()
            folded = replica.fold_in(key)
            node.set_raw_value(folded)
            found.append((node, folded, key))
    return found


def _marked(returned: PyTree, objects: Sequence[object], form: ObjectForm) -> PyTree:
    """The results of a step, with a mark for each object that it was given."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=is_whole_object)
    if not any(map(is_changed_in_place, leaves)):
        return returned
    graph = list(nnx.iter_graph(objects))
    paths = {id(node): path for path, node in graph if is_changed_in_place(node)}
    given = {id(node) for _, node in graph}
    for i, leaf in enumerate(leaves):
        if not is_changed_in_place(leaf):
            continue
        if id(leaf) in paths:
            leaves[i] = Same(paths[id(leaf)])
            form.returns_objects = True
        elif any(id(n) in given for _, n in nnx.iter_graph(leaf) if is_variable(n)):
            raise ObjectError(
                f"The step returned a new {type(leaf).__name__} that shares variables "
                "with an object that it was given; they would not be shared any more. "
                "Return the object itself, or nothing: it is changed in place."
            )
    return jax.tree.unflatten(structure, leaves)


def came_from_step(error: Exception) -> bool:
    """Whether an error was raised by a step while it was traced as one of arrays."""
    each: BaseException | None = error
    while each is not None:
        traceback = each.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            if frame.f_globals is globals() and frame.f_code.co_name == "step":
                return True
        each = each.__cause__
    return False
