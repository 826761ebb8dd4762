"""The feeding of a strategy's replicas with batches."""

from __future__ import annotations

import itertools

from jaxstrategy._src.inputs.dataset import Feeding
from jaxstrategy._src.processes.agreement import Agreement
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.replicas.replicas import Replicas

# All processes begin passes over datasets in the same order.
_passes = itertools.count()


def feeding_for(replicas: Replicas, processes: Processes | None) -> Feeding:
    """The division of datasets over the replicas.

    Args:
      replicas: those of all processes.
      processes: those that read together; None for this one alone.
    """

    def agree() -> Agreement:
        if processes is None:
            return Agreement()
        return processes.agreement(f"input {next(_passes)}")

    return Feeding(replicas, agree)
