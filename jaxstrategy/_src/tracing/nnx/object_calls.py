"""Calls of steps with Flax NNX objects as arguments: `ObjectCalls`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import jax

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ObjectError
from jaxstrategy._src.options import RunOptions, is_function
from jaxstrategy._src.text import user_code
from jaxstrategy._src.tracing import roles
from jaxstrategy._src.tracing.functions import code, rebinding
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.tracing.nnx.object_form import (
    CallersObjects,
    FlaxVariable,
    ObjectForm,
    Parts,
    Same,
    is_changed_in_place,
    is_parts,
    is_variable,
    is_whole_object,
    is_whole_or_parts,
)
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree


def step_of_arrays(
    get_fn: Callable[[], Any], form: ObjectForm | None, captured: tuple[str, ...]
) -> Function:
    """A step with `Parts` for objects: what it returns, and their new arrays."""

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
        with rebinding.rebound(fn, replaced) as own:
            with rebinding.checking_leaks(own, step.__name__):
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
        roles.label(step, args, kwargs, index).strip("`")
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
    code.copy_source_location(step, fn)
    try:
        step.__signature__ = inspect.signature(fn)
    except (TypeError, ValueError):
        pass


def _own_keys(
    objects: Sequence[object],
) -> list[tuple[FlaxVariable, jax.Array, jax.Array]]:
    """Gives each replica random keys of its own, so that dropout differs."""
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


@dataclasses.dataclass(frozen=True)
class ObjectCall:
    """A call of a step with objects, or captured arrays, as one with arrays."""

    objects: CallersObjects | None
    captured: tuple[str, ...]
    args: Sequence[PyTree]
    kwargs: dict[str, PyTree]

    def finish(self, returned: tuple[PyTree, list[Parts]]) -> PyTree:
        """The results of the call; its objects then hold their new arrays."""
        return returned[0] if self.objects is None else self.objects.finish(returned)


def call_of(
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    captured: Mapping[str, object],
    known: Sequence[CallersObjects] = (),
) -> ObjectCall | None:
    """The call `fn(*args, **kwargs)` as one with arrays; None if it is one."""
    if not trees.object_kinds() and not captured:
        return None
    kwargs = {**kwargs, **captured}
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_whole_object)
    found = [leaf for leaf in leaves if is_changed_in_place(leaf)]
    if not found:
        return ObjectCall(None, tuple(captured), args, kwargs) if captured else None
    for objects in known:
        if objects.is_of(found):
            break
    else:
        objects = CallersObjects(found)
    parts = iter(objects.parts())
    leaves = [next(parts) if is_changed_in_place(leaf) else leaf for leaf in leaves]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return ObjectCall(objects, tuple(captured), args, kwargs)


def require_objects(
    objects: tuple[object, ...],
    captured: Mapping[str, object],
    known: Sequence[CallersObjects] = (),
) -> ObjectCall:
    """The call `fn(*objects)`, as `bind` begins one."""
    call = call_of(objects, {}, captured, known)
    if call is None or call.objects is None:
        raise TypeError(
            "`bind` was given no module, optimizer or metric of Flax NNX. Other "
            "arguments are looked up fast as they are: call the step with them."
        )
    return call


def captured_by(fn: Function) -> dict[str, object]:
    """The objects that a function refers to, by label."""
    if not trees.object_kinds():
        return {}
    return rebinding.references(fn).objects


def as_arrays(
    fn: Function, args: Sequence[PyTree], kwargs: dict[str, PyTree], options: RunOptions
) -> tuple[Function, Sequence[PyTree], dict[str, PyTree], RunOptions]:
    """A call of a step as a function of arrays, whether it has objects or not."""
    call = call_of(args, kwargs, captured_by(fn))
    if call is None:
        return fn, args, kwargs, options
    assert call.objects is not None
    function = step_of_arrays(lambda: fn, call.objects.form, call.captured)
    return function, call.args, call.kwargs, options_of(options)


def options_of(options: RunOptions) -> RunOptions:
    """The options of a step as a function of arrays: its objects are mirrored."""
    expected = options.expect_mirrored
    if is_function(expected):

        def both(path: KeyPath, leaf: Leaf) -> bool:
            # A step of arrays returns its results, then the `Parts` of its objects.
            return path[0].idx == 1 or expected(path[1:], leaf)

        return dataclasses.replace(options, expect_mirrored=both)
    return dataclasses.replace(options, expect_mirrored=(expected, True))


# Models, optimizers and metrics of one function: those of a few trainings at once.
_OBJECTS_KEPT = 8

Programs = TypeVar("Programs")


@final
class ObjectCalls(Generic[Programs]):
    """Calls with objects of functions that do the same, and programs for each form."""

    def __init__(
        self,
        get_fn: Callable[[], Function | None],
        make: Callable[[Function], Programs],
    ) -> None:
        self._get_fn = get_fn
        self._make = make
        # Objects that were given lately.
        self._objects: list[CallersObjects] = []
        # For objects that are put together alike: their form, the function of arrays,
        # which nobody else keeps, and its programs.
        self._known: dict[Hashable, tuple[ObjectForm | None, Function, Programs]] = {}

    def find(
        self,
        args: Sequence[PyTree],
        kwargs: dict[str, PyTree],
        captured: Mapping[str, object],
    ) -> ObjectCall | None:
        """A call as one with arrays; None if it is one."""
        return call_of(args, kwargs, captured, self._objects)

    def require(
        self, objects: Sequence[object], captured: Mapping[str, object]
    ) -> ObjectCall:
        """The call `fn(*objects)`, as `bind` begins one."""
        return require_objects(tuple(objects), captured, self._objects)

    def programs(self, call: ObjectCall) -> Programs:
        """The programs of the function of arrays that `call` calls."""
        objects = call.objects
        if objects is None:
            return self._for_form(None, call.captured)[2]
        if objects.known is not None and objects.known[0] == call.captured:
            return objects.known[1]  # hashing takes a tenth of a call
        if objects.may_be_kept and objects not in self._objects:
            others = [o for o in self._objects if not o.is_outdated_by(objects)]
            self._objects = [objects, *others][:_OBJECTS_KEPT]
        form, _, programs = self._for_form(objects.form, call.captured)
        assert form is not None
        # Calls of one program share its form, which learns what the step returns.
        objects.form = form
        objects.known = call.captured, programs
        return programs

    def _for_form(
        self, form: ObjectForm | None, captured: tuple[str, ...]
    ) -> tuple[ObjectForm | None, Function, Programs]:
        key = None if form is None else form.key, captured
        known = self._known.get(key)
        if known is None:
            function = step_of_arrays(self._get_fn, form, captured)
            known = self._known[key] = form, function, self._make(function)
        return known


@final
class BoundCall:
    """Calls of a step whose first arguments are fixed, as calls with arrays.

    It keeps no array alive that the objects have no more.
    """

    def __init__(self, call: ObjectCall) -> None:
        assert call.objects is not None
        self.objects: CallersObjects = call.objects
        known = (call.args, call.kwargs)
        leaves, structure = jax.tree.flatten(known, is_leaf=is_whole_or_parts)
        self._structure = structure
        self._places = [i for i, leaf in enumerate(leaves) if is_parts(leaf)]
        self._leaves: list[Leaf] = [None if is_parts(leaf) else leaf for leaf in leaves]

    def arguments(
        self, rest: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Those of a call with more, and with the arrays that the objects have now."""
        leaves = self._leaves.copy()
        for place, parts in zip(self._places, self.objects.parts(), strict=True):
            leaves[place] = parts
        args, captured = self._structure.unflatten(leaves)
        return (*args, *rest), {**kwargs, **captured}


def translated(error: Exception, name: str) -> ObjectError | None:
    """The error to raise instead of Flax's about a captured object."""
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
    line = user_code.users_line(error.__traceback__)
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
    """Raise at the end if objects in `tree` have changed meanwhile."""
    # What a function makes of an `nnx.State` may have the variables of that.
    found = jax.tree.leaves(tree, is_leaf=is_whole_object)
    objects = [node for node in found if is_changed_in_place(node)]
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
