"""What each worker builds for itself, and again when it was lost: `WorkerResource`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import final

from jaxstrategy.parameter_servers._abstract_worker import Builder

_numbers = itertools.count()


@final
class WorkerResource:
    """A dataset, an iterator or a variable that each worker has by itself."""

    def __init__(
        self,
        builder: Builder,
        uses: tuple[WorkerResource, ...] = (),
        number: int | None = None,
    ) -> None:
        self.number = next(_numbers) if number is None else number
        self.builder = builder
        self.uses = uses

    def when_gone(self, forget: Callable[[int], object]) -> None:
        """Call `forget` with the number when this object is gone; not at exit."""
        weakref.finalize(self, forget, self.number).atexit = False

    def in_order(self) -> Iterator[WorkerResource]:
        """What it uses, and it itself last."""
        for each in self.uses:
            yield from each.in_order()
        yield self
