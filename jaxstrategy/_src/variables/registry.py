"""The variables that are alive, so that a step can be given those it might use."""

from __future__ import annotations

import threading
import weakref

from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.values.handle import Handle

# Weak: no variable, with its memory, and no strategy outlives who holds it.
# Those of no strategy, and those of each.
_ordinary: weakref.WeakSet[Handle] = weakref.WeakSet()
_of_strategy: weakref.WeakKeyDictionary[AbstractStrategy, weakref.WeakSet[Handle]] = (
    weakref.WeakKeyDictionary()
)
# To go through a WeakSet to which another thread adds raises RuntimeError.
_lock = threading.Lock()


def add(variable: Handle, owner: AbstractStrategy | None) -> None:
    """Count `variable` as alive for as long as somebody holds it."""
    with _lock:
        if owner is None:
            _ordinary.add(variable)
        else:
            _of_strategy.setdefault(owner, weakref.WeakSet()).add(variable)


def usable_by(strategy: AbstractStrategy) -> list[Handle]:
    """The variables that steps of `strategy` may use, oldest first."""
    with _lock:
        found = [*_ordinary, *_of_strategy.get(strategy, ())]
    # A set has the order of addresses, which differs between the processes of a job.
    return sorted(found, key=lambda variable: variable.number)
