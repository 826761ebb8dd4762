"""How the replicas of a strategy are fed."""

from __future__ import annotations

import itertools

import jax

from jaxstrategy.cluster._processes import Processes
from jaxstrategy.cluster.agreement._agreement import AbstractAgreement, LoneAgreement
from jaxstrategy.inputs._distribute import Feeding
from jaxstrategy.inputs._division import Replicas as Share
from jaxstrategy.replicas._replicas import Replicas

# All processes begin passes over datasets in the same order.
_passes = itertools.count()


def feeding_for(replicas: Replicas, processes: Processes | None) -> Feeding:
    """What divides datasets over the replicas.

    Args:
      replicas: those of all processes.
      processes: those that read together; None for this one alone.
    """
    own = replicas.own
    share = Share(replicas.count, own[0], len(own))
    process = jax.process_index(), jax.process_count()
    if share.local == share.total:
        process = 0, 1

    def agree() -> AbstractAgreement:
        if processes is None:
            return LoneAgreement()
        return processes.agreement(f"input {next(_passes)}")

    return Feeding(replicas.mesh, share, process, agree)
