"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

A compiled step is a function of arrays. So the arrays of all objects that it is given
are passed to it, objects like them are put together there, the step works on those, and
their new arrays are put into the caller's objects. An array that is reached in several
ways is passed once.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxstrategy._errors import ObjectError
from jaxstrategy._options import RunOptions, is_function
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._replica_context import ReplicaContext
from jaxstrategy.text import _user_code
from jaxstrategy.tracing.functions import (
    _code,
    _leaks,
    _lending,
)
from jaxstrategy.tracing.functions._references import References
from jaxstrategy.tracing.nnx._binding import (
    Binding,
    Form,
    Parts,
    Same,
    is_changed_in_place,
    is_variable,
)
from jaxstrategy.tracing.stages import _roles
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import PyTree


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a step with objects, or captured arrays, as one with arrays.

    Attributes:
      binding: the objects; None if there are none.
      captured: the names of what the step captured.
      args: positional arguments, with `Parts` for objects.
      kwargs: keyword arguments; those that it captured stand here too.
    """

    binding: Binding | None
    captured: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_rest(
        self, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with more arguments, and the arrays that the objects have now."""
        assert self.binding is not None
        parts = iter(self.binding.parts())
        known = (self.args, self.kwargs)
        leaves, structure = jax.tree.flatten(known, is_leaf=_is_whole)
        leaves = [next(parts) if _is_parts(leaf) else leaf for leaf in leaves]
        args, captured = jax.tree.unflatten(structure, leaves)
        return (*args, *rest), {**kwargs, **captured}


def call_of(
    args: Any,
    kwargs: Any,
    captured: Mapping[str, Any],
    known: Sequence[Binding] = (),
) -> Call | None:
    """The call `fn(*args, **kwargs)` as one with arrays; None if it is one.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      captured: what the step captured: objects, and arrays that it is to be given.
      known: bindings that may be those of the objects.
    """
    if not _per_replica.object_kinds() and not captured:
        return None
    kwargs = {**kwargs, **captured}
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_one)
    objects = [leaf for leaf in leaves if is_changed_in_place(leaf)]
    if not objects:
        return Call(None, tuple(captured), args, kwargs) if captured else None
    for binding in known:
        if binding.is_of(objects):
            break
    else:
        binding = Binding(objects)
    parts = iter(binding.parts())
    leaves = [next(parts) if is_changed_in_place(leaf) else leaf for leaf in leaves]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return Call(binding, tuple(captured), args, kwargs)


def require_objects(
    objects: tuple[Any, ...],
    captured: Mapping[str, Any],
    known: Sequence[Binding] = (),
) -> Call:
    """The call `fn(*objects)`, as `bind` begins one.

    Raises:
      TypeError: none of them can be changed in place.
    """
    call = call_of(objects, {}, captured, known)
    if call is None or call.binding is None:
        raise TypeError(
            "`bind` was given no module, optimizer or metric of Flax NNX. Other "
            "arguments are looked up fast as they are: call the step with them."
        )
    return call


def captured_by(fn: Any) -> dict[str, Any]:
    """The objects that a function refers to, by label."""
    if not _per_replica.object_kinds():
        return {}
    with _lending.one_at_a_time:
        return References(fn, is_changed_in_place).objects


def as_arrays(
    fn: Callable[..., Any], args: Any, kwargs: Any, options: RunOptions
) -> tuple[Callable[..., Any], Any, Any, RunOptions]:
    """A call of a step as a function of arrays, whether it has objects or not."""
    call = call_of(args, kwargs, captured_by(fn))
    if call is None:
        return fn, args, kwargs, options
    assert call.binding is not None
    function = functional(lambda: fn, call.binding.form, call.captured)
    return function, call.args, call.kwargs, options_of(options)


def functional(
    get_fn: Callable[[], Any], form: Form | None, captured: tuple[str, ...]
) -> Callable[..., Any]:
    """A step with `Parts` for objects: what it returns, and their new arrays.

    Args:
      get_fn: returns the step, which is not kept alive.
      form: of the objects; None if there are none.
      captured: the names of what the step captured.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[Parts]]:
        fn = get_fn()
        labels = _labels(step, args, kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
        parts = [leaf for leaf in leaves if _is_parts(leaf)]
        objects = [] if form is None else form.put_together(parts)
        keys = _own_keys(objects)
        following = iter(objects)
        leaves = [next(following) if _is_parts(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        replaced = {name: kwargs.pop(name) for name in captured}
        with _lending.lent(fn, replaced, is_changed_in_place) as own:
            with _leaks.refused(own, step.__name__, is_changed_in_place):
                returned = own(*args, **kwargs)
        if form is None:
            return returned, []
        returned = _marked(returned, objects, form)
        for variable, folded, key in keys:
            if variable.get_raw_value() is folded:
                variable.set_raw_value(key)
        return returned, _labelled(form.take_apart(objects, parts), labels)

    step.__dict__[_MARK] = True
    _name_like(step, get_fn())
    return step


_MARK = "_is_function_of_arrays"


def is_functional(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is a step with `Parts` for objects; it looks for leaks itself."""
    return getattr(fn, _MARK, False)


def _labels(step: Any, args: Any, kwargs: Any) -> list[str]:
    """How the caller would write each object among the arguments."""
    nodes, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_whole)
    args, kwargs = jax.tree.unflatten(structure, range(len(nodes)))
    return [
        _roles.label(step, args, kwargs, index).strip("`")
        for index, node in enumerate(nodes)
        if _is_parts(node)
    ]


def _labelled(parts: Sequence[Parts], labels: Sequence[str]) -> list[Parts]:
    """`parts` with the names by which the caller would write their arrays."""
    return [
        dataclasses.replace(part, names=tuple(f"{label}.{name}" for name in part.names))
        for part, label in zip(parts, labels, strict=True)
    ]


def _name_like(step: Any, fn: Any) -> None:
    """What `functools.wraps` does, without a reference to `fn`."""
    step.__name__ = getattr(fn, "__name__", type(fn).__name__)
    step.__qualname__ = getattr(fn, "__qualname__", step.__name__)
    _code.define_at(step, _code.place_of(fn))
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
    return dataclasses.replace(options, expect_mirrored=(expected, True))


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
    line = _user_code.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes, or indexes, an object of Flax NNX that it was not given, "
        f"or inside a function that JAX transforms:{where}Pass it as an argument, and "
        "it is changed in place; to such a function too, with `nnx.grad` or `nnx.scan` "
        "instead of JAX's. Objects that a step refers to by name, attribute or "
        "container are found as well, but not those of a generator, a cached function "
        "or a context variable."
    )


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


def _marked(returned: PyTree, objects: list[Any], form: Form) -> PyTree:
    """What the step returned, with a mark for each object that it was given."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=_is_one)
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


def _is_one(node: Any) -> bool:
    if is_changed_in_place(node) or _per_replica.is_whole(node):
        return True
    # The variables of a state are copies: it is passed, and returned, as a pytree.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)


def _is_whole(node: Any) -> bool:
    return _is_parts(node) or _per_replica.is_whole(node)


def _is_parts(node: Any) -> bool:
    return isinstance(node, Parts)
