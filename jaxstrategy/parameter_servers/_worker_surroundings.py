"""The worker for which the code of a dataset runs: `WorkerSurroundings`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import cast, final

from jaxstrategy.contexts import _context
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.replicas._replicas import Replicas


@final
@dataclasses.dataclass(frozen=True, eq=False)
class WorkerSurroundings:
    """What code that builds and reads datasets finds on its worker."""

    index: int
    servers: Sequence[AbstractServer]
    replicas: Replicas

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block of code that runs for this worker."""
        return _context.entered(worker=self)


def current() -> WorkerSurroundings | None:
    """Those of the code that asks; None of code that runs for no worker's dataset."""
    return cast("WorkerSurroundings | None", _context.current().worker)
