"""The part that this process has in a job: `ProcessRole`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, final

Task: TypeAlias = tuple[str | None, int | None]
"""The name of a job, and the number of a task of it; None where there are none."""

# The jobs whose tasks run the program; parameter servers only keep variables.
_RUNNING = ("chief", "master", "worker", "evaluator")


def no_task() -> Task:
    """That of a process that is alone."""
    return None, None


@final
@dataclasses.dataclass(frozen=True)
class ProcessRole:
    """What this process is among those of a job.

    Attributes:
      is_chief: whether it saves what all have.
      is_between_graph: whether each process runs the whole program.
      waits: whether all but the chief wait for variables that it makes.
      task: says which of the cluster's tasks it is.
    """

    is_chief: bool = True
    is_between_graph: bool = False
    waits: bool = False
    task: Callable[[], Task] = no_task

    def is_another(self, task: tuple[str, int]) -> bool:
        """Whether this is the task of another process that runs the program."""
        if task[0] not in _RUNNING:
            return False
        own = self.task()
        return None not in own and own != task
