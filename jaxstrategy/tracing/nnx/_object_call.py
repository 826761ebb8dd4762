"""A call of a step with objects, as one with arrays: `ObjectCall`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax

from jaxstrategy._options import RunOptions, is_function
from jaxstrategy.tracing.functions import _lending
from jaxstrategy.tracing.jaxprs._visit import KeyPath
from jaxstrategy.tracing.nnx._callers_objects import CallersObjects
from jaxstrategy.tracing.nnx._object_kinds import is_changed_in_place, is_whole_object
from jaxstrategy.tracing.nnx._object_step import step_of_arrays
from jaxstrategy.tracing.nnx._parts import Parts
from jaxstrategy.values import _trees
from jaxstrategy.values._types import Function, Leaf, PyTree


@dataclasses.dataclass(frozen=True)
class ObjectCall:
    """A call of a step with objects, or captured arrays, as one with arrays.

    Attributes:
      objects: the objects; None if there are none.
      captured: the names of what the step captured.
      args: positional arguments, with `Parts` for objects.
      kwargs: keyword arguments; those that it captured stand here too.
    """

    objects: CallersObjects | None
    captured: tuple[str, ...]
    args: Sequence[PyTree]
    kwargs: dict[str, PyTree]

    def finish(self, returned: tuple[PyTree, list[Parts]]) -> PyTree:
        """The results of the call; its objects then hold their new arrays.

        Args:
          returned: what the step as one of arrays returned.
        """
        return returned[0] if self.objects is None else self.objects.finish(returned)


def call_of(
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    captured: Mapping[str, object],
    known: Sequence[CallersObjects] = (),
) -> ObjectCall | None:
    """The call `fn(*args, **kwargs)` as one with arrays; None if it is one.

    Args:
      args: positional arguments.
      kwargs: keyword arguments.
      captured: what the step captured: objects, and arrays that it is to be given.
      known: objects of earlier calls, which these may be.
    """
    if not _trees.object_kinds() and not captured:
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
    """The call `fn(*objects)`, as `bind` begins one.

    Raises:
      TypeError: none of them can be changed in place.
    """
    call = call_of(objects, {}, captured, known)
    if call is None or call.objects is None:
        raise TypeError(
            "`bind` was given no module, optimizer or metric of Flax NNX. Other "
            "arguments are looked up fast as they are: call the step with them."
        )
    return call


def captured_by(fn: Function) -> dict[str, object]:
    """The objects that a function refers to, by label."""
    if not _trees.object_kinds():
        return {}
    return _lending.references(fn, is_changed_in_place).objects


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
    """The options of a step, for it as a function of arrays: its objects are mirrored.

    Replicas that go on with different weights are not one model any more.
    """
    expected = options.expect_mirrored
    if is_function(expected):

        def both(path: KeyPath, leaf: Leaf) -> bool:
            # A step of arrays returns its results, then the `Parts` of its objects.
            return path[0].idx == 1 or expected(path[1:], leaf)

        return dataclasses.replace(options, expect_mirrored=both)
    return dataclasses.replace(options, expect_mirrored=(expected, True))
