"""The replica contexts of one generation of the API: `ContextFaces`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar, final

from jaxstrategy.contexts._replica_context import ReplicaContext

C = TypeVar("C")


@final
class ContextFaces(Generic[C]):
    """One object of a generation for each replica context, while somebody holds it.

    Args:
      make: makes one over a replica context, which it keeps alive.
    """

    def __init__(self, make: Callable[[ReplicaContext], C]) -> None:
        self._make = make
        # By the context's `id`, which is no other's while the face keeps it alive.
        self._known: weakref.WeakValueDictionary[int, C] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def of(self, context: ReplicaContext) -> C:
        """The object for a replica context."""
        with self._lock:
            known = self._known.get(id(context))
            if known is None:
                known = self._known[id(context)] = self._make(context)
            return known
