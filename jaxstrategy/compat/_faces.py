"""The strategies of one generation of the API, each over one of the core: `Faces`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from jaxstrategy.contexts._strategy_face import StrategyFace

F = TypeVar("F", bound=StrategyFace)
Class = TypeVar("Class", bound=type[StrategyFace])


@final
class Faces(Generic[F]):
    """All faces of a generation: one for each strategy, so that `is` tells them apart.

    A face keeps its strategy alive, not the other way round. One that nobody holds is
    made anew when it is asked for.

    Args:
      common: the class for strategies that have none of their own. Its `__init__` takes
        the strategy, and adds the face here.
    """

    def __init__(self, common: Callable[[], type[F]]) -> None:
        self._common = common
        self._classes: dict[type, type[StrategyFace]] = {}
        # By the strategy's `id`, which is no other's while the face keeps it alive.
        self._known: weakref.WeakValueDictionary[int, F] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def of_type(self, *strategies: type) -> Callable[[Class], Class]:
        """A decorator of the class of faces for these types of strategies."""

        def register(cls: Class) -> Class:
            self._classes.update(dict.fromkeys(strategies, cls))
            return cls

        return register

    def add(self, face: F) -> None:
        """Makes `face` the one of its strategy."""
        with self._lock:
            assert self._known.get(id(face.core), face) is face
            self._known[id(face.core)] = face

    def of(self, strategy: Any) -> F:
        """The face of a strategy.

        Args:
          strategy: of the core, or any generation's face of one.
        """
        core = strategy.core if isinstance(strategy, StrategyFace) else strategy
        with self._lock:
            face = self._known.get(id(core))
            return self._made(core) if face is None else face

    def _made(self, core: Any) -> F:
        """A new face, without the `__init__` of its class, which makes a strategy."""
        common: Any = self._common()
        cls: Any = self._classes.get(type(core), common)
        face = cls.__new__(cls)
        common.__init__(face, core)
        return face
