"""The scope of a strategy under an older name: `FaceScope`."""

from __future__ import annotations

import contextlib
from typing import Any, Generic, TypeVar, final

from jaxstrategy.contexts._strategy_face import StrategyFace

F = TypeVar("F", bound=StrategyFace)


@final
class FaceScope(contextlib.AbstractContextManager[F], Generic[F]):
    """A `with` block in which a strategy is current; it is given the strategy's face.

    Args:
      face: what the block gets. It lives at least as long as the block.
      scope: the strategy's own scope.
    """

    def __init__(
        self, face: F, scope: contextlib.AbstractContextManager[object]
    ) -> None:
        self._face = face
        self._scope = scope

    def __enter__(self) -> F:
        self._scope.__enter__()
        return self._face

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)
