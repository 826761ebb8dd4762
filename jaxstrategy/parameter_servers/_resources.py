"""What a worker was given to keep: datasets, iterators, variables. `Resources`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from jaxstrategy.parameter_servers._abstract_worker import Builder
from jaxstrategy.parameter_servers._peeked_iterator import PeekedIterator
from jaxstrategy.parameter_servers._worker_surroundings import WorkerSurroundings


@final
class Resources:
    """The resources of a worker, by their numbers."""

    def __init__(self, surroundings: WorkerSurroundings) -> None:
        self._surroundings = surroundings
        self._held: dict[int, Any] = {}

    def build(self, resource: int, builder: Builder, uses: Sequence[int]) -> None:
        """Make one; see `AbstractWorker.build`."""
        others = [self._held[number] for number in uses]
        with self._surroundings.entered():
            self._held[resource] = builder(self._surroundings.index, *others)

    def release(self, resources: Sequence[int]) -> None:
        """Forget some, and end those that read."""
        for number in resources:
            held = self._held.pop(number, None)
            if isinstance(held, PeekedIterator):
                held.close()

    def get(self, resource: int) -> Any:
        """One."""
        return self._held[resource]

    def set(self, resource: int, value: np.ndarray) -> None:
        """Put something in its place."""
        self._held[resource] = value

    def iterator(self, resource: int) -> PeekedIterator:
        """One that is an iterator."""
        held = self._held[resource]
        if not isinstance(held, PeekedIterator):
            held = self._held[resource] = PeekedIterator(iter(held))
        return held
