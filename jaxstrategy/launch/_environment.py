"""The environment variables in which the launcher tells a worker its place."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jaxstrategy.cluster.resolvers._launched import (
    ATTEMPT,
    COMPILATION_CACHE,
    COORDINATOR,
    JOB,
    LOCAL_RANK,
    NUM_PROCESSES,
    PROCESS_ID,
)
from jaxstrategy.cluster.resolvers._tf_config import VARIABLE as TF_CONFIG
from jaxstrategy.launch import _gpus
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.processes._secret import Secret


def common(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are the same in every worker and every attempt.

    Simulated devices also choose the CPU, unless `environment` chooses a platform.
    """
    variables = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    if options.devices_per_process:
        variables["JAX_NUM_CPU_DEVICES"] = str(options.devices_per_process)
        variables["JAX_PLATFORMS"] = environment.get("JAX_PLATFORMS") or "cpu"
    return variables


def of_cache(options: Options) -> dict[str, str]:
    """The folder in which all processes, and those of a restart, keep programs."""
    cache = options.compilation_cache
    return {} if cache is None else {COMPILATION_CACHE: cache}


def place(
    options: Options,
    rank: int,
    local_rank: int,
    processes: int,
    coordinator: str,
    attempt: int,
    secret: Secret,
) -> dict[str, str]:
    """Variables of one worker, by which it finds the others.

    Args:
      rank: over all nodes.
      local_rank: on its machine.
      processes: how many this launcher runs in this attempt.
      secret: of the job, if this is its only launcher. Several have theirs from whoever
        started the launchers, in the environment.
    """
    own = {
        COORDINATOR: coordinator,
        PROCESS_ID: str(rank),
        NUM_PROCESSES: str(options.nodes * processes),
        LOCAL_RANK: str(local_rank),
        ATTEMPT: str(attempt),
    }
    if options.nodes == 1:
        # What is left of another attempt is refused by name. Launchers of several nodes
        # do not count alike.
        own[JOB] = f"{coordinator}, attempt {attempt}"
        own |= secret.variables()
    return own


def of_worker(
    options: Options,
    local_rank: int,
    processes: int,
    coordinator: str,
    attempt: int,
    secret: Secret,
) -> dict[str, str]:
    """The whole environment of one worker of this machine.

    `TF_CONFIG` is left out: it names one process, and there are several.
    """
    rank = options.node_rank * processes + local_rank
    own = place(options, rank, local_rank, processes, coordinator, attempt, secret)
    if options.gpus_per_process:
        own[_gpus.VARIABLE] = ",".join(
            _gpus.share(options.gpus_per_process, local_rank, os.environ)
        )
    inherited = {k: v for k, v in os.environ.items() if k != TF_CONFIG}
    return inherited | common(options, os.environ) | own
