"""The outcome of restoring: `Restored`."""

from __future__ import annotations

import dataclasses
from typing import final

from jaxstrategy.processes._rendezvous import Json


@final
@dataclasses.dataclass(frozen=True)
class Restored:
    """The outcome of restoring: which checkpoint, and what did not fit.

    Attributes:
      step: of the checkpoint.
      metrics: that were saved with it.
      extra: what was saved with it as such.
      missing: names of values that it had not, which stayed as they were.
      unexpected: names of values that only it has.
      damaged: for each later checkpoint that could not be used: why.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with js.checkpoint.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     _ = manager.save(7, {"w": np.ones(3)}, extra="after the first pass")
    ...     state = manager.restore({"w": np.zeros(3), "b": 0.0}, partial=True)
    >>> restored = manager.restored
    >>> restored.step, restored.extra, restored.missing
    (7, 'after the first pass', ('b',))
    """

    step: int
    metrics: dict[str, float]
    extra: Json
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
