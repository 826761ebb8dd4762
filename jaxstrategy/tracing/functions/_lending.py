"""Other values in the place of some that a function refers to, while it is traced.

Flax lets a step change only variables that were made in its own trace, and has no
public way to put tracers into others. So what refers to an object (a cell of a closure,
a global name, an attribute, an entry of a list or dict) refers to one put together in
the trace as long as that lasts, and to the caller's again afterwards, whatever happens.
The function itself stays what it is, and so do its globals.

One thread at a time traces such functions. Another thread of the user's that reads the
same name just then gets what the trace uses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import final

from jaxstrategy.contexts import _context
from jaxstrategy.tracing.functions._places import Place
from jaxstrategy.tracing.functions._rebuilding import rebuilt
from jaxstrategy.tracing.functions._references import References
from jaxstrategy.values._types import Function

# Held while a function is traced or looked into; threads see no other's loans.
one_at_a_time = threading.RLock()


@contextlib.contextmanager
def lent(
    fn: Function, replaced: Mapping[str, object], is_object: Callable[[object], bool]
) -> Iterator[Function]:
    """`fn`, which refers to other values for the length of the `with` block.

    Args:
      fn: any callable.
      replaced: the other values, by the labels of those that they stand for.
      is_object: which objects have labels.
    """
    if not replaced:
        yield fn
        return
    if (eager := _context.current().eager) is not None:
        # Others of its threads wait meanwhile, and may ask for the lock.
        with one_at_a_time:
            loans = FunctionLoans(fn, replaced, is_object)
        with eager.lending(loans):
            yield loans.function
        return
    with one_at_a_time:
        loans = FunctionLoans(fn, replaced, is_object)
        try:
            loans.set()
            yield loans.function
        finally:
            loans.take_back()


@final
class FunctionLoans:
    """The places where a function refers to something else for a while.

    Args:
      fn: any callable.
      replaced: the other values, by the labels of those that they stand for.
      is_object: which objects have labels.

    Attributes:
      function: `fn`, or what takes its place because it holds such a value.
    """

    def __init__(
        self,
        fn: Function,
        replaced: Mapping[str, object],
        is_object: Callable[[object], bool],
    ) -> None:
        labelled = References(fn, is_object)  # as when the values were taken
        known = {**labelled.objects, **labelled.arrays}
        self._references = References(fn, is_object, with_form=False)
        self._others = {id(known[label]): new for label, new in replaced.items()}
        self.function: Function = rebuilt(self._references.root, self._others)
        self._lent: list[tuple[Place, object, object]] | None = None

    def set(self) -> None:
        """Let the function refer to the other values."""
        if self._lent is None:
            self._lent = []
            for step in self._references.holders(set(self._others)):
                assert step.place is not None
                new = rebuilt(step.value, self._others)
                self._lent.append((step.place, step.value, new))
                step.place.set(new)
            return
        for place, _, new in self._lent:
            place.set(new)

    def take_back(self) -> None:
        """Let it refer to the caller's."""
        for place, value, new in reversed(self._lent or ()):
            if place.get() is new:  # else the function has put another there
                place.set(value)
