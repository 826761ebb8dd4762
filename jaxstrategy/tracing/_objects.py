"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

A compiled step is a function of arrays. So the arrays of all objects that it is given
are passed to it, objects like them are put together there, the step works on those, and
their new arrays are put into the caller's objects. An array that is reached in several
ways is passed once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxstrategy import _contexts, _source, _values
from jaxstrategy._errors import NotMirroredError, ObjectError
from jaxstrategy._options import RunOptions, is_function
from jaxstrategy._values import PyTree, is_object
from jaxstrategy.tracing import _captured
from jaxstrategy.tracing._binding import Binding, Form, Parts, Same, is_variable


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a step with objects, as one with arrays.

    Attributes:
      binding: the objects.
      captured: the names of those that the step captured.
      args: positional arguments, with `Parts` for objects.
      kwargs: keyword arguments; those that it captured stand here too.
    """

    binding: Binding
    captured: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_rest(
        self, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with more arguments, and the arrays that the objects have now."""
        parts = iter(self.binding.parts())
        known = (self.args, self.kwargs)
        leaves, structure = jax.tree.flatten(known, is_leaf=_is_parts)
        leaves = [next(parts) if _is_parts(leaf) else leaf for leaf in leaves]
        args, captured = jax.tree.unflatten(structure, leaves)
        return (*args, *rest), {**kwargs, **captured}


def call_of(
    fn: Callable[..., Any], args: Any, kwargs: Any, known: Sequence[Binding] = ()
) -> Call | None:
    """The call `fn(*args, **kwargs)` as one with arrays; None without objects.

    Args:
      fn: the step.
      args: positional arguments.
      kwargs: keyword arguments.
      known: bindings that may be those of the objects.
    """
    if not _values.object_kinds():
        return None
    captured = _captured.objects_of(fn, _is_given)
    kwargs = {**kwargs, **captured}
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_one)
    objects = [leaf for leaf in leaves if _is_given(leaf)]
    if not objects:
        return None
    for binding in known:
        if binding.is_of(objects):
            break
    else:
        binding = Binding(objects)
    parts = iter(binding.parts())
    leaves = [next(parts) if _is_given(leaf) else leaf for leaf in leaves]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return Call(binding, tuple(captured), args, kwargs)


def as_arrays(
    fn: Callable[..., Any], args: Any, kwargs: Any, options: RunOptions
) -> tuple[Callable[..., Any], Any, Any, RunOptions]:
    """A call of a step as a function of arrays, whether it has objects or not."""
    call = call_of(fn, args, kwargs)
    if call is None:
        return fn, args, kwargs, options
    function = functional(lambda: fn, call.binding.form, call.captured)
    return function, call.args, call.kwargs, options_of(options)


def functional(
    get_fn: Callable[[], Any], form: Form, captured: tuple[str, ...]
) -> Callable[..., Any]:
    """A step with `Parts` for objects: what it returns, and their new arrays.

    Args:
      get_fn: returns the step, which is not kept alive.
      form: of the objects.
      captured: the names of those that the step captured.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[Parts]]:
        fn = get_fn()
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_parts)
        parts = [leaf for leaf in leaves if _is_parts(leaf)]
        objects = form.put_together(parts)
        keys = _own_keys(objects)
        following = iter(objects)
        leaves = [next(following) if _is_parts(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        replaced = {name: kwargs.pop(name) for name in captured}
        own = _captured.with_objects(fn, replaced, _is_given)
        returned = own(*args, **kwargs)
        returned = _marked(returned, objects, form)
        for variable, folded, key in keys:
            if variable.get_raw_value() is folded:
                variable.set_raw_value(key)
        return returned, form.take_apart(objects, parts)

    _name_like(step, get_fn())
    return step


def _name_like(step: Any, fn: Any) -> None:
    """What `functools.wraps` does, without a reference to `fn`."""
    step.__name__ = getattr(fn, "__name__", type(fn).__name__)
    step.__qualname__ = getattr(fn, "__qualname__", step.__name__)
    try:
        step.__signature__ = inspect.signature(fn)
    except (TypeError, ValueError):
        pass


def options_of(options: RunOptions) -> RunOptions:
    """The options of a step, for it as a function of arrays: its objects are mirrored.

    Replicas that go on with different weights are not one model any more.
    """
    expected = options.expect_mirrored
    if is_function(expected):

        def both(path: Any, leaf: Any) -> bool:
            return path[0].idx == 1 or expected(path[1:], leaf)

        return dataclasses.replace(options, expect_mirrored=both)
    own = False if expected is None else expected
    return dataclasses.replace(options, expect_mirrored=(own, True))


def explained(error: NotMirroredError) -> NotMirroredError:
    """An error about the results of the function of arrays, in terms of the objects."""
    found = re.fullmatch(r"(.*)\(\.\.\.\)\[(\d+)\](.*)", error.path or "", re.DOTALL)
    if found is None or found[2] != "1":
        path = error.path or ""
        return NotMirroredError(
            str(error).replace("(...)[0]", "(...)"),
            path=path.replace("(...)[0]", "(...)"),
            line=error.line,
        )
    _, *rest = str(error).splitlines()
    return NotMirroredError(
        f"`{found[1]}` leaves an object that it was given, or captured, different on "
        "each replica.\n"
        f"{rest[0]}\n"
        "Reduce what it is computed from: the gradients with "
        "`get_replica_context().all_reduce('mean', grads)`, statistics of BatchNorm "
        "with `jaxstrategy.flax.nnx.BatchNorm`, and give metrics what "
        "`get_replica_context().all_gather(values, 0)` returns.",
        path=error.path,
        line=error.line,
    )


def refused(error: Exception, name: str) -> ObjectError | None:
    """Flax's error about an object that a step captured, in our words."""
    text = str(error)
    is_ours = type(error).__name__ == "TraceContextError" or (
        isinstance(error, ValueError)
        and (
            "different trace level" in text
            # JAX's, about indices into an array that lies on the mesh.
            or ("Context mesh" in text and _went_through_flax(error.__traceback__))
        )
    )
    if not is_ours:
        return None
    line = _source.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes, or indexes, an object of Flax NNX that it was not given, "
        f"or inside a function that JAX transforms:{where}Pass it as an argument, and "
        "it is changed in place; to such a function too, with `nnx.grad` or `nnx.scan` "
        "instead of JAX's. Objects that a step captures by name are found as well, but "
        "not attributes of other objects, entries of containers, or what a library's "
        "function captures."
    )


def _went_through_flax(traceback: types.TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("flax.nnx"):
            return True
        traceback = traceback.tb_next
    return False


def _own_keys(objects: list[Any]) -> list[tuple[Any, Any, Any]]:
    """Gives each replica random keys of its own, so that dropout differs.

    Returns:
      For each variable with a key: it, the replica's key, and the key of all.
    """
    context = _contexts.current()
    if context is None or context.strategy.num_replicas_in_sync == 1:
        return []
    nnx = sys.modules["flax.nnx"]
    found = []
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            key = node.get_raw_value()
            folded = context.replica.fold_in(key)
            node.set_raw_value(folded)
            found.append((node, folded, key))
    return found


def _marked(returned: PyTree, objects: list[Any], form: Form) -> PyTree:
    """What the step returned, with a mark for each object that it was given."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=_is_one)
    if not any(map(_is_given, leaves)):
        return returned
    graph = list(nnx.iter_graph(objects))
    paths = {id(node): path for path, node in graph if _is_given(node)}
    given = {id(node) for _, node in graph}
    for i, leaf in enumerate(leaves):
        if not _is_given(leaf):
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


def _is_given(node: Any) -> bool:
    """Whether `node` may be given to a step to be changed in place."""
    return is_object(node) or is_variable(node)


def _is_one(node: Any) -> bool:
    # The variables of a state are copies: it is passed, and returned, as a pytree.
    return _is_given(node) or isinstance(node, sys.modules["flax.nnx"].State)


def _is_parts(node: Any) -> bool:
    return isinstance(node, Parts)
