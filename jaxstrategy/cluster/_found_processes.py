"""The processes of the cluster that a resolver tells of, or that JAX finds."""

from __future__ import annotations

import os

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _processes, _startup
from jaxstrategy.cluster._processes import Processes
from jaxstrategy.cluster.liveness import _termination
from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    Process,
)

TIMEOUT_SECONDS = 300.0
"""How long a step may go without progress, if nothing else is said."""

_ALONE = Process(0, 1, "")
_ASKED_IN_VAIN = (
    "This program runs in a pod of Kubernetes, and JAX could not ask there for the "
    "other processes: {} Say which processes there are: give a `cluster_resolver`, or "
    "set TF_CONFIG. For a process alone, use `MirroredStrategy`."
)


def found(
    resolver: ClusterResolver | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    otherwise: ClusterResolver | None = None,
) -> Processes:
    """The processes, which have met.

    Args:
      resolver: of the cluster; None to let JAX look for one.
      timeout_seconds: how long a step may go without progress.
      otherwise: of the cluster if JAX finds none; by default the process is alone.

    Raises:
      ClusterError: they could not start together.
      ValueError: the cluster makes no sense.
    """
    if resolver is not None:
        process = resolver.process()
    else:
        _let_jax_look()
        if jax.distributed.is_initialized():
            process = None
        else:
            process = _ALONE if otherwise is None else otherwise.process()
    return _processes.start(process, timeout_seconds=timeout_seconds)


def agree_on_replicas(processes: Processes | None, replicas: str) -> None:
    """Compare the replicas of a strategy, in words, with those of the other processes.

    Processes that count other replicas would take other parts of one batch.

    Raises:
      ClusterError: another process has made other ones, or is doing something else.
    """
    if processes is not None and processes.count > 1:
        processes.operations.agree(f"make a strategy of {replicas}")


def _let_jax_look() -> None:
    """Start JAX's distributed runtime if JAX finds a cluster by itself."""
    if jax.distributed.is_initialized():
        return
    _termination.keep()
    try:
        jax.distributed.initialize()
    except ValueError:
        return  # no cluster
    except RuntimeError as error:
        if "before" in str(error):
            return  # too late to look for one: there are devices already
        raise
    except Exception as error:
        if _startup.IN_POD in os.environ:
            raise ClusterError(_ASKED_IN_VAIN.format(error)) from error
        raise
