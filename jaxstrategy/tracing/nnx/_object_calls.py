"""The calls with objects of functions that do the same: `ObjectCalls`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar, final

from jaxstrategy.tracing.nnx._callers_objects import CallersObjects
from jaxstrategy.tracing.nnx._object_call import ObjectCall, call_of, require_objects
from jaxstrategy.tracing.nnx._object_form import ObjectForm
from jaxstrategy.tracing.nnx._object_step import step_of_arrays
from jaxstrategy.values._types import Function, PyTree

# Models, optimizers and metrics of one function: those of a few trainings at once.
_OBJECTS_KEPT = 8

Programs = TypeVar("Programs")


@final
class ObjectCalls(Generic[Programs]):
    """Calls with objects of functions that do the same, and programs for each form.

    Args:
      get_fn: returns one of the functions, which is not kept alive.
      make: makes the programs of a function of arrays.
    """

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
        """The call `fn(*objects)`, as `bind` begins one.

        Raises:
          TypeError: none of them can be changed in place.
        """
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
