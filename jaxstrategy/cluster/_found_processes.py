"""The processes of the cluster that a resolver, the environment or JAX tells of."""

from __future__ import annotations

import dataclasses
import os
from typing import final

import jax

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster import _processes, _startup
from jaxstrategy.cluster._processes import Processes
from jaxstrategy.cluster.liveness import _termination
from jaxstrategy.cluster.resolvers._addresses import address_of
from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    Process,
)
from jaxstrategy.text import _user_code

TIMEOUT_SECONDS = 300.0
"""How long a step may go without progress, if nothing else is said."""

_ALONE = Process(0, 1, "")
_WARNING = (
    "This process trains alone: `MultiWorkerMirroredStrategy` was given no "
    "`cluster_resolver`, and no environment variable tells of other processes. If "
    "there are others, each trains a model of its own: start them with `python -m "
    "jaxstrategy.launch`, `srun` or `torchrun`, set TF_CONFIG, or give a "
    "`cluster_resolver`. If there are none, use `MirroredStrategy`."
)
_ASKED_IN_VAIN = (
    "This program runs in a pod of Kubernetes, and JAX could not ask there for the "
    "other processes: {} Say which processes there are: give a `cluster_resolver`, or "
    "set TF_CONFIG. For a process alone, use `MirroredStrategy`."
)


@final
@dataclasses.dataclass(frozen=True)
class _Launcher:
    """The variables by which a launcher tells of several processes.

    Attributes:
      advice: what to do if they cannot be followed.
      counts: numbers of processes, of which the first that is set is right.
      ranks: numbers of this process, from 0.
      hosts: the hosts, separated by commas.
      needed: set in each process of several; not looked at if the count is 1.
    """

    advice: str
    counts: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()

    @property
    def _count(self) -> str | None:
        return next(filter(_value, self.counts), None)

    def is_alone(self) -> bool:
        """Whether it says that there is one process only."""
        count = self._count
        return count is not None and _value(count) == "1" and self.speaking() is None

    def speaking(self) -> str | None:
        """The name of a variable that tells of several processes."""
        count = self._count
        if count is not None and _value(count) != "1":
            return count
        for name in self.ranks:
            if _value(name) not in ("", "0"):
                return name
        for name in self.hosts:
            if len(_value(name).strip(",").split(",")) > 1:
                return name
        return next(filter(_value, self.needed), None) if count is None else None


_JAX = _Launcher(
    "Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each process",
    counts=("JAX_NUM_PROCESSES",),
    ranks=("JAX_PROCESS_ID",),
    needed=("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)
_TORCHRUN = _Launcher(
    "Start the processes with `torchrun`, or set MASTER_ADDR, MASTER_PORT, WORLD_SIZE "
    "and RANK in each",
    counts=("WORLD_SIZE",),
    ranks=("RANK",),
    needed=("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
)
_SLURM = _Launcher(
    "Start the program in tasks of a job step, with `srun`",
    counts=(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_NTASKS",
        "SLURM_NPROCS",
        "SLURM_STEP_NUM_NODES",
        "SLURM_NNODES",
        "SLURM_JOB_NUM_NODES",
    ),
    ranks=("SLURM_PROCID",),
)
_LAUNCHERS = (
    _JAX,
    _TORCHRUN,
    _Launcher(
        "JAX knows Open MPI 4; for others install `mpi4py` and call "
        '`jax.distributed.initialize(cluster_detection_method="mpi4py")` first',
        counts=("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
        ranks=("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    ),
    _SLURM,
    _Launcher(
        "JAX finds no TPU of theirs: install `jax[tpu]`",
        counts=("MEGASCALE_NUM_SLICES",),
        ranks=("TPU_WORKER_ID", "MEGASCALE_SLICE_ID"),
        hosts=("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"),
        needed=("MEGASCALE_COORDINATOR_ADDRESS",),
    ),
    _Launcher(
        "Install `kubernetes`, with which JAX asks for the other pods",
        needed=("JOB_COMPLETION_INDEX",),
    ),
)
_SHELLS = ("interactive", "bash", "sh", "zsh")  # SLURM_JOB_NAME of `salloc` and shells


def found(
    resolver: ClusterResolver | None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    otherwise: ClusterResolver | None = None,
) -> Processes:
    """The processes, which have met.

    Args:
      resolver: of the cluster; None to join that of which the environment tells.
      timeout_seconds: how long a step may go without progress.
      otherwise: of the cluster if there is none to join; by default the process is
        alone.

    Raises:
      ClusterError: they could not start together, or the environment tells of other
        processes that this one cannot join.
      ValueError: the cluster makes no sense.

    Warns:
      RuntimeWarning: nothing tells of a cluster, and there is no `otherwise`.
    """
    if resolver is not None:
        process = resolver.process()
    elif (hindrance := _join()) is None:
        process = None
    else:
        process = _ALONE if otherwise is None else otherwise.process()
        if process.count == 1:
            _check_alone(hindrance)
        if otherwise is None and not any(each.is_alone() for each in _LAUNCHERS):
            _user_code.warn(_WARNING, RuntimeWarning)
    return _processes.start(process, timeout_seconds=timeout_seconds)


def agree_on_replicas(processes: Processes | None, replicas: str) -> None:
    """Compare the replicas of a strategy, in words, with those of the other processes.

    Processes that count other replicas would take other parts of one batch.

    Raises:
      ClusterError: another process has made other ones, or is doing something else.
    """
    if processes is not None and processes.count > 1:
        processes.operations.agree(f"make a strategy of {replicas}")


def _join() -> str | None:
    """Start JAX's distributed runtime, or return what keeps it from starting."""
    if jax.distributed.is_initialized():
        return None
    if _speaking() is None and (_JAX.is_alone() or _TORCHRUN.is_alone()):
        return "There is one process."
    _termination.keep()
    try:
        _initialize()
    except ValueError as error:
        if "coordinator_address" in str(error):
            return "JAX finds no cluster."
        return f"{str(error).removesuffix('.')}."
    except Exception as error:
        if isinstance(error, RuntimeError) and "before" in str(error):
            return (
                "JAX has started its devices already. Make the strategy before "
                "anything asks for devices or computes."
            )
        if _startup.IN_POD in os.environ:
            raise ClusterError(_ASKED_IN_VAIN.format(error)) from error
        if (speaking := _speaking()) is not None:
            raise _unjoined(*speaking, f"JAX says: {error}") from error
        raise
    return None


def _initialize() -> None:
    if all(map(_value, _TORCHRUN.needed)) and not _TORCHRUN.is_alone():
        _initialize_as_torchrun()
        return
    count, rank = _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID")
    method = _startup.detection() if all(map(_value, _JAX.needed)) else None
    # In a shell that is an interactive step, SLURM_NTASKS is that of the whole job.
    if _value("SLURM_STEP_NUM_TASKS") == "1" != _value("SLURM_NTASKS"):
        method = "deactivate"
    jax.distributed.initialize(
        num_processes=None if count == 1 else count,
        process_id=None if count == 1 else rank,
        cluster_detection_method=method,
    )


def _initialize_as_torchrun() -> None:
    host, port = _value("MASTER_ADDR"), _number("MASTER_PORT")
    assert port is not None
    # There the agent of torchrun itself listens.
    if _value("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1
    address = address_of(host, port)
    per_host = _number("LOCAL_WORLD_SIZE") or 1
    local = host in ("localhost", "127.0.0.1", "::1")
    jax.distributed.initialize(
        address,
        _number("WORLD_SIZE"),
        _number("RANK"),
        local_device_ids=_number("LOCAL_RANK") if per_host > 1 else None,
        cluster_detection_method="deactivate",
        coordinator_bind_address=address if local else None,
    )


def _check_alone(hindrance: str) -> None:
    """Raises if there are other processes after all."""
    if (speaking := _speaking()) is not None:
        raise _unjoined(*speaking, hindrance)
    # A TPU of several hosts is one without JAX's distributed runtime, too.
    if not jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ClusterError(
            f"JAX has {jax.process_count()} processes, which cannot meet. {hindrance}"
        )


def _unjoined(launcher: _Launcher, name: str, hindrance: str) -> ClusterError:
    missing = [needed for needed in launcher.needed if not _value(needed)]
    if missing:
        hindrance = f"{' and '.join(missing)} must be set, too."
    return ClusterError(
        f"{name} is {os.environ[name]!r} in the environment, so this is one process of "
        f"several, and it cannot join the others. {hindrance} {launcher.advice}; or "
        "set TF_CONFIG, or give a `cluster_resolver`. For a process alone, use "
        f"`MirroredStrategy`, or unset {name}."
    )


def _speaking() -> tuple[_Launcher, str] | None:
    """The first launcher that tells of several processes, and by which variable."""
    shell = _value("SLURM_JOB_NAME") in _SHELLS
    steps = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    for launcher in _LAUNCHERS:
        if launcher is _SLURM and shell and not any(map(_value, steps)):
            continue
        name = launcher.speaking()
        if name is not None:
            return launcher, name
    return None


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _number(name: str) -> int | None:
    text = _value(name)
    if text and not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it is a whole number from 0 on.")
    return int(text) if text else None
