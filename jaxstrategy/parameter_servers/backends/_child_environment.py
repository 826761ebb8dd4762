"""The environment variables of children: which devices and threads they use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import jax

from jaxstrategy.cluster.resolvers import _environment
from jaxstrategy.cluster.resolvers._environment import VARIABLE as TF_CONFIG
from jaxstrategy.processes._secret import VARIABLE as SECRET

# What names one process of a job, and children are none of its processes.
_OF_ONE_PROCESS = (
    TF_CONFIG,
    SECRET,
    _environment.COORDINATOR,
    _environment.PROCESS_ID,
    _environment.NUM_PROCESSES,
    _environment.LOCAL_RANK,
    _environment.ATTEMPT,
    _environment.JOB,
)

# Options of JAX by which programs and dataset functions mean something else.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_compilation_cache_dir",
)

# XLA refuses to be told by two who disagree, and users set this one for their script.
_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=\S*")


def of_child(
    inherited: Mapping[str, str], cpu_devices: int, threads: int
) -> dict[str, str]:
    """The environment of a child that uses CPU devices only."""
    variables = {k: v for k, v in inherited.items() if k not in _OF_ONE_PROCESS}
    variables |= options_of_jax()
    variables["XLA_FLAGS"] = _SIMULATED.sub("", variables.get("XLA_FLAGS", "")).strip()
    return variables | {
        "PYTHONUNBUFFERED": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(cpu_devices),
        # XLA takes all cores for each process otherwise: two workers on two cores
        # took 1.5 times as long for each step (3 x 256 MLP, JAX 0.12).
        "PJRT_NPROC": str(max(cpu_devices, threads)),
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


def options_of_jax() -> dict[str, str]:
    """This process's options of JAX, in the form in which a new process reads them."""
    found = {name: getattr(jax.config, name, None) for name in _OPTIONS}
    return {k.upper(): str(v) for k, v in found.items() if v is not None}


def threads_of_one(workers: int) -> int:
    """How many threads a worker has for itself, of several on this host."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // workers)
