"""Other values in the place of some that a function refers to, while it is traced.

Flax lets a step change only variables that were made in its own trace, and has no
public way to put tracers into others. So what refers to an object (a cell of a closure,
a global name, an attribute, an entry of a list or dict) refers to one put together in
the trace as long as that lasts, and to the caller's again afterwards, whatever happens.
The function itself stays what it is, and so do its globals.

One thread at a time traces such functions. Another thread of the user's that reads the
same name just then gets what the trace uses. What this package looks for is never that:
`references` looks again once the trace has ended, and waits for no other trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import final

from jaxstrategy._src.contexts import context
from jaxstrategy._src.tracing.functions.references import References
from jaxstrategy._src.tracing.functions.walk import Place, rebuilt
from jaxstrategy._src.values.arrays import Function

# Held while a function is traced that refers to other values.
one_at_a_time = threading.RLock()
# The loans of now, and another object whenever these change.
_active: list[FunctionLoans] = []
_version = object()
_MOST_LOOKS = 5


def references(fn: Function, is_object: Callable[[object], bool]) -> References:
    """What `fn` refers to, and nothing that another thread's trace has lent."""
    for _ in range(_MOST_LOOKS):
        version, active = _version, list(_active)
        found = References(fn, is_object)
        if version is _version:
            if any(loans.are_met_in(found) for loans in active):
                break
            return found
    with one_at_a_time:
        return References(fn, is_object)


def callers_value(place: Place) -> object:
    """The value of a place, whatever another thread's trace has lent there."""
    while True:
        version, found = _version, place.get()
        for loans in reversed(_active):
            found = loans.callers_value(place, found)
        if version is _version:
            return found


@contextlib.contextmanager
def lent(
    fn: Function, replaced: Mapping[str, object], is_object: Callable[[object], bool]
) -> Iterator[Function]:
    """`fn`, which refers to other values for the length of the `with` block."""
    if not replaced:
        yield fn
        return
    if (eager := context.current().eager) is not None:
        # Others of its threads wait meanwhile, and may ask for the lock.
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
    """The places where a function refers to something else for a while."""

    def __init__(
        self,
        fn: Function,
        replaced: Mapping[str, object],
        is_object: Callable[[object], bool],
    ) -> None:
        labelled = references(fn, is_object)  # as when the values were taken
        known = {**labelled.objects, **labelled.arrays}
        self._references = References(fn, is_object, with_form=False)
        self._others = {id(known[label]): new for label, new in replaced.items()}
        self.function: Function = rebuilt(self._references.root, self._others)
        self._lent: list[tuple[Place, object, object]] | None = None
        self._thread = 0

    def set(self) -> None:
        """Let the function refer to the other values."""
        global _version
        # First, so that whoever looks meanwhile knows of it.
        self._thread = threading.get_ident()
        _active.append(self)
        _version = object()
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
        global _version
        for place, value, new in reversed(self._lent or ()):
            if place.get() is new:  # else the function has put another there
                place.set(value)
        _active.remove(self)
        _version = object()

    def callers_value(self, place: Place, found: object) -> object:
        """What was in a place if that is lent; else `found`."""
        if self._thread != threading.get_ident():
            for other, value, new in self._lent or ():
                if new is found and other.where == place.where:
                    return value
        return found

    def are_met_in(self, found: References) -> bool:
        """Whether another thread than theirs has come to what is lent."""
        if self._thread == threading.get_ident():
            return False
        lent = {id(new) for _, _, new in self._lent or ()}
        lent |= {id(new) for new in self._others.values()}
        return any(id(each.value) in lent for each in found.reached)
