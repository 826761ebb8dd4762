"""The part that this process has in a job: `ProcessRole`."""

from __future__ import annotations

import dataclasses
from typing import final


@final
@dataclasses.dataclass(frozen=True)
class ProcessRole:
    """What this process is among those of a job.

    Attributes:
      is_chief: whether it saves what all have.
      is_between_graph: whether each process runs the whole program.
      waits: whether all but the chief wait for variables that it makes.
    """

    is_chief: bool = True
    is_between_graph: bool = False
    waits: bool = False
