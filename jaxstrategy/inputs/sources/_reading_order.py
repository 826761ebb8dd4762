"""Whose turn it is at a dataset that keeps its own place, for one reader only."""

from __future__ import annotations

from typing import final

from jaxstrategy.inputs.sources._source import Pass


@final
class ReadingOrder:
    """Notices when two passes read in turns, so that no wrong state is given away."""

    def __init__(self) -> None:
        self._latest: Pass | None = None
        self._is_mixed = False

    def begin(self, reader: Pass) -> None:
        """`reader` begins to read, and those before it are expected to be done."""
        self._latest, self._is_mixed = reader, False

    def take(self, reader: Pass) -> None:
        """`reader`, which has begun, reads on."""
        self._is_mixed |= reader is not self._latest

    def check(self, reader: Pass, name: str) -> None:
        """Raise unless the dataset's place is that of `reader`.

        Raises:
          TypeError: another pass read since `reader` began.
        """
        if self._is_mixed or reader is not self._latest:
            raise TypeError(
                f"The place of this pass is unknown: {name} remembers one place only, "
                "and another pass over it has begun. Finish one pass before the next, "
                "or give each its own dataset."
            )
