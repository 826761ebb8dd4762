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
    with one_at_a_time:
        labelled = References(fn, is_object)  # as when the values were taken
        known = {**labelled.objects, **labelled.arrays}
        references = References(fn, is_object, with_form=False)
        others = {id(known[label]): value for label, value in replaced.items()}
        loans: list[tuple[Place, object, object]] = []
        try:
            for step in references.holders(set(others)):
                assert step.place is not None
                new = rebuilt(step.value, others)
                loans.append((step.place, step.value, new))
                step.place.set(new)
            yield rebuilt(references.root, others)
        finally:
            for place, value, new in reversed(loans):
                if place.get() is new:  # else the function has put another there
                    place.set(value)
