"""Calls of steps with Flax NNX objects, as calls with arrays: `ObjectCalls`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.options import RunOptions, is_function
from jaxstrategy._src.text import users_line
from jaxstrategy._src.tracing import signature as _signature
from jaxstrategy._src.tracing.functions import code, rebinding
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.tracing.nnx.objects import (
    CallerObjects,
    ObjectArrays,
    ObjectStructure,
    ReturnedObject,
    is_call_leaf,
    is_object_arrays,
    is_whole_or_arrays,
)
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Arguments, Function, Leaf, PyTree
from jaxstrategy._src.values.trees import FlaxVariable, is_nnx_node, is_variable


def array_step(
    get_fn: Callable[[], Any], form: ObjectStructure | None, captured: tuple[str, ...]
) -> Function:
    """The function with arrays for objects; returns results and new arrays.

    Args:
      captured: labels of captured values, which are keyword arguments.
    """

    def step(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, list[ObjectArrays]]:
        fn = get_fn()
        labels = _labels(step, (args, kwargs))
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_whole_or_arrays)
        parts = [leaf for leaf in leaves if is_object_arrays(leaf)]
        objects = [] if form is None else form.merge(parts)
        keys = _fold_in_replica(objects)
        following = iter(objects)
        leaves = [
            next(following) if is_object_arrays(leaf) else leaf for leaf in leaves
        ]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        replaced = {name: kwargs.pop(name) for name in captured}
        with rebinding.rebound(fn, replaced) as rebound:
            with rebinding.checking_leaks(rebound, step.__name__):
                returned = rebound(*args, **kwargs)
        if form is None:
            return returned, []
        returned = _with_marks(returned, objects, form)
        # A key that the step did not use is equal on all replicas again.
        for variable, folded, key in keys:
            if variable.get_raw_value() is folded:
                variable.set_raw_value(key)
        new = zip(form.split(objects, parts), labels, strict=True)
        return returned, [
            dataclasses.replace(part, names=tuple(f"{label}.{n}" for n in part.names))
            for part, label in new
        ]

    step.__dict__[_MARK] = True
    _name_like(step, get_fn())
    return step


_MARK = "_is_function_of_arrays"


def takes_arrays(fn: Function) -> bool:
    """Whether `fn` is an `array_step`, which checks for leaks itself."""
    return getattr(fn, _MARK, False)


def _labels(step: Function, arguments: Arguments) -> list[str]:
    """Each object among the arguments, as the caller writes it."""
    nodes, structure = jax.tree.flatten(arguments, is_leaf=is_whole_or_arrays)
    numbered = jax.tree.unflatten(structure, range(len(nodes)))
    return [
        _signature.label(step, numbered, index).strip("`")
        for index, node in enumerate(nodes)
        if is_object_arrays(node)
    ]


def _name_like(step: Any, fn: Function) -> None:
    """As `functools.wraps`, without a reference to `fn`."""
    step.__name__ = getattr(fn, "__name__", type(fn).__name__)
    step.__qualname__ = getattr(fn, "__qualname__", step.__name__)
    code.copy_source_location(step, fn)
    try:
        step.__signature__ = inspect.signature(fn)
    except (TypeError, ValueError):
        pass


def _fold_in_replica(
    objects: Sequence[object],
) -> list[tuple[FlaxVariable, jax.Array, jax.Array]]:
    """Folds the replica's id into random keys, so that dropout differs.

    Returns each variable with its new and its old key.
    """
    context = _context.current()
    strategy, replica = context.strategy, context.replica
    if not objects or strategy is None or strategy.num_replicas_in_sync == 1:
        return []
    assert isinstance(replica, ReplicaContext)
    nnx = sys.modules["flax.nnx"]
    keys = []
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            key = node.get_raw_value()
            folded = replica.fold_in(key)
            node.set_raw_value(folded)
            keys.append((node, folded, key))
    return keys


def _with_marks(
    returned: PyTree, objects: Sequence[object], form: ObjectStructure
) -> PyTree:
    """Replaces the caller's objects among results by marks."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=is_call_leaf)
    if not any(map(is_nnx_node, leaves)):
        return returned
    graph = list(nnx.iter_graph(objects))
    paths = {id(node): path for path, node in graph if is_nnx_node(node)}
    passed = {id(node) for _, node in graph}
    for i, leaf in enumerate(leaves):
        if not is_nnx_node(leaf):
            continue
        if id(leaf) in paths:
            leaves[i] = ReturnedObject(paths[id(leaf)])
            form.returns_objects = True
        elif any(id(n) in passed for _, n in nnx.iter_graph(leaf) if is_variable(n)):
            raise ObjectError(
                f"The step returned a new {type(leaf).__name__} that shares variables "
                "with an object that it was given; they would not be shared any more. "
                "Return the object itself, or nothing: it is changed in place."
            )
    return jax.tree.unflatten(structure, leaves)


def came_from_step(error: Exception) -> bool:
    """Whether an error was raised inside of an `array_step`."""
    each: BaseException | None = error
    while each is not None:
        traceback = each.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            if frame.f_globals is globals() and frame.f_code.co_name == "step":
                return True
        each = each.__cause__
    return False


@dataclasses.dataclass(frozen=True)
class ObjectCall:
    """A call with objects or captured values, as a call of an `array_step`."""

    objects: CallerObjects | None
    captured: tuple[str, ...]
    arguments: Arguments

    def finish(self, returned: tuple[PyTree, list[ObjectArrays]]) -> PyTree:
        """Stores new arrays in the objects; returns the results."""
        return returned[0] if self.objects is None else self.objects.finish(returned)


def object_call(
    arguments: Arguments,
    captured: Mapping[str, object],
    known: Sequence[CallerObjects] = (),
) -> ObjectCall | None:
    """A call with arrays for objects; None without any.

    Args:
      captured: captured objects and arrays, by label.
      known: objects of earlier calls.
    """
    if not trees.object_kinds() and not captured:
        return None
    args, kwargs = arguments
    arguments = args, {**kwargs, **captured}
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_call_leaf)
    nodes = [leaf for leaf in leaves if is_nnx_node(leaf)]
    if not nodes:
        return ObjectCall(None, tuple(captured), arguments) if captured else None
    matching = (objects for objects in known if objects.matches(nodes))
    objects = next(matching, None) or CallerObjects(nodes)
    parts = iter(objects.parts())
    leaves = [next(parts) if is_nnx_node(leaf) else leaf for leaf in leaves]
    return ObjectCall(objects, tuple(captured), structure.unflatten(leaves))


def require_objects(
    objects: tuple[object, ...],
    captured: Mapping[str, object],
    known: Sequence[CallerObjects] = (),
) -> ObjectCall:
    """The call `fn(*objects)` for `bind`; raises without objects."""
    call = object_call((objects, {}), captured, known)
    if call is None or call.objects is None:
        raise TypeError(
            "`bind` was given no module, optimizer or metric of Flax NNX. Other "
            "arguments are looked up fast as they are: call the step with them."
        )
    return call


def captured_by(fn: Function) -> dict[str, object]:
    """The objects that a function captures, by label."""
    if not trees.object_kinds():
        return {}
    return rebinding.references(fn).objects


def as_arrays(
    fn: Function, arguments: Arguments, options: RunOptions
) -> tuple[Function, Arguments, RunOptions]:
    """A call with arrays for objects: function, arguments and options."""
    call = object_call(arguments, captured_by(fn))
    if call is None:
        return fn, arguments, options
    assert call.objects is not None
    function = array_step(lambda: fn, call.objects.form, call.captured)
    return function, call.arguments, array_options(options)


def array_options(options: RunOptions) -> RunOptions:
    """The options for an `array_step`, whose objects are expected to be mirrored."""
    expected = options.expect_mirrored
    if is_function(expected):

        def both(path: KeyPath, leaf: Leaf) -> bool:
            # An `array_step` returns results, then arrays of objects.
            return path[0].idx == 1 or expected(path[1:], leaf)

        return dataclasses.replace(options, expect_mirrored=both)
    return dataclasses.replace(options, expect_mirrored=(expected, True))


@final
class BoundCall:
    """A call whose first arguments are bound; keeps none of their old arrays alive."""

    def __init__(self, call: ObjectCall) -> None:
        assert call.objects is not None
        self.objects: CallerObjects = call.objects
        leaves, self._structure = jax.tree.flatten(
            call.arguments, is_leaf=is_whole_or_arrays
        )
        self._places = [i for i, leaf in enumerate(leaves) if is_object_arrays(leaf)]
        self._leaves: list[Leaf] = [
            None if is_object_arrays(leaf) else leaf for leaf in leaves
        ]

    def arguments(
        self, rest: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments of a call, with the current arrays of the bound objects."""
        leaves = self._leaves.copy()
        for place, parts in zip(self._places, self.objects.parts(), strict=True):
            leaves[place] = parts
        args, captured = self._structure.unflatten(leaves)
        return (*args, *rest), {**kwargs, **captured}


def translated(error: Exception, name: str) -> ObjectError | None:
    """The error to raise instead of Flax's about a captured object."""
    said = str(error)
    is_ours = type(error).__name__ == "TraceContextError" or (
        isinstance(error, ValueError)
        and (
            "different trace level" in said
            # Raised by JAX for indices into an array on the mesh.
            or ("Context mesh" in said and _went_through_flax(error.__traceback__))
        )
    )
    if not is_ours:
        return None
    line = users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes, or indexes, an object of Flax NNX that it was not given, "
        f"or inside a function that JAX transforms:{where}Pass it as an argument, and "
        "it is changed in place; to such a function too, with `nnx.grad` or `nnx.scan` "
        "instead of JAX's. Objects that a step refers to by name, attribute or "
        "container are found as well, but not those of a generator, a cached function "
        "or a context variable."
    )


def _went_through_flax(traceback: types.TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("flax.nnx"):
            return True
        traceback = traceback.tb_next
    return False


@contextlib.contextmanager
def unchanged(tree: PyTree, name: str) -> Iterator[None]:
    """A `with` block that raises if it has changed objects in `tree`."""
    # Objects merged from an `nnx.State` may share its variables.
    leaves = jax.tree.leaves(tree, is_leaf=is_call_leaf)
    objects = [node for node in leaves if is_nnx_node(node)]
    before = [jax.tree.flatten(node) for node in objects]
    yield
    for node, (leaves, structure) in zip(objects, before, strict=True):
        now, structure_now = jax.tree.flatten(node)
        same = all(a is b for a, b in zip(leaves, now, strict=False))
        if not same or structure != structure_now:
            raise ObjectError(
                f"`{name}` runs for parameter servers, and changes a "
                f"{type(node).__name__} of Flax NNX that it was given: the caller's "
                "object would stay as it was. Pass the state of `nnx.split` instead, "
                "make the object of it with `nnx.merge`, and return its `nnx.state`, "
                "for `nnx.update` where the result is fetched; or keep what changes in "
                "variables made in `strategy.scope()`."
            )
