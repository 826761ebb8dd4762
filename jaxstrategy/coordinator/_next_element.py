"""A function of a batch as one of an iterator: `of_next_element`."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from typing import final

from jaxstrategy.coordinator._function_names import function_name
from jaxstrategy.tracing.functions._weak_function import weakly
from jaxstrategy.values._types import Function, PyTree


@final
class OfNextElement:
    """Calls a function with the next element of an iterator; does not keep it alive."""

    def __init__(self, fn: Function) -> None:
        self._function = weakly(fn)
        self.__name__ = function_name(fn)

    @property
    def __wrapped__(self) -> Function:
        """The user's own function: what it refers to is looked at."""
        return inspect.unwrap(self._given())

    def __call__(self, iterator: PyTree) -> PyTree:
        return self._given()(next(iterator))

    def _given(self) -> Function:
        fn = self._function()
        assert fn is not None, "who evaluates it holds it"
        return fn


_made: weakref.WeakKeyDictionary[Function, OfNextElement] = weakref.WeakKeyDictionary()


def of_next_element(fn: Function) -> OfNextElement:
    """The same one each time for a function, so that it is traced once."""
    with contextlib.suppress(
        TypeError
    ):  # not everything has a hash and weak references
        return _made.setdefault(fn, OfNextElement(fn))
    return OfNextElement(fn)
