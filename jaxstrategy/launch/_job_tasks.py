"""The processes of a job with parameter servers: `JobTask`, and what each is told."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy.cluster.resolvers import _launched
from jaxstrategy.launch import _gpus
from jaxstrategy.launch._environment import of_cache
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.processes._secret import Secret

PROGRAM = (
    "-m",
    "jaxstrategy.parameter_servers",
)  # above this layer: only run from here
"""What workers and parameter servers run, as arguments of `python`."""

_OF_RANKS = (
    _launched.COORDINATOR,
    _launched.PROCESS_ID,
    _launched.NUM_PROCESSES,
    _launched.LOCAL_RANK,
    _launched.ATTEMPT,
    _launched.JOB,
)


@final
@dataclasses.dataclass(frozen=True)
class JobTask:
    """One task of the job.

    Attributes:
      job: "chief", "worker", "ps" or "evaluator".
      index: its number among those of its job.
    """

    job: str
    index: int

    @property
    def name(self) -> str:
        """It in words."""
        return self.job if self.runs_script else f"{self.job} {self.index}"

    @property
    def runs_script(self) -> bool:
        """Whether it is the user's script that decides what it does."""
        return self.job in ("chief", "evaluator")

    def command(self, options: Options) -> list[str]:
        """What it runs."""
        program = options.program if self.runs_script else PROGRAM
        return [sys.executable, *program]


def job_tasks(options: Options) -> list[JobTask]:
    """All roles of a job; the chief, which is the script, is the first."""
    counts = {
        "chief": 1,
        "worker": options.workers or 0,
        "ps": options.parameter_servers or 1,
        "evaluator": int(options.evaluator),
    }
    return [JobTask(job, k) for job, count in counts.items() for k in range(count)]


def tf_config(addresses: Mapping[JobTask, str], role: JobTask) -> str:
    """What tells a role the cluster and its place in it."""
    cluster: dict[str, list[str]] = {}
    for each, address in addresses.items():
        cluster.setdefault(each.job, []).append(address)
    task = {"type": role.job, "index": role.index}
    return json.dumps({"cluster": cluster, "task": task})


def environment(
    options: Options, role: JobTask, inherited: Mapping[str, str], secret: Secret
) -> dict[str, str]:
    """The environment of a role, but for its TF_CONFIG."""
    variables = {k: v for k, v in inherited.items() if k not in _OF_RANKS}
    # Functions of modules beside the script are imported by workers.
    path = [inherited.get("PYTHONPATH", "")]
    if not options.module:
        path.insert(0, os.path.dirname(os.path.abspath(options.command[0])))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return variables | of_devices(options, role, inherited) | secret.variables()


def of_devices(
    options: Options, role: JobTask, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Variables that say which devices and threads a role uses."""
    variables = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    if role.job == "worker" and options.gpus_per_process:
        own = _gpus.share(options.gpus_per_process, role.index, inherited)
        return variables | {_gpus.VARIABLE: ",".join(own)}
    own = simulated(options, role)
    devices = int(own.get("JAX_NUM_CPU_DEVICES", 1))
    return variables | own | _threads(options, role, devices)


def simulated(options: Options, role: JobTask) -> dict[str, str]:
    """Variables of a role that has simulated CPU devices; none of one that has not."""
    count = options.devices_per_process or options.gpus_per_process
    if count is None or (role.job == "worker" and options.gpus_per_process):
        return {}
    # The chief traces functions of workers, with as many devices as one has.
    devices = 1 if role.job == "ps" else count
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def _threads(options: Options, role: JobTask, devices: int) -> dict[str, str]:
    """Its share of the cores: XLA's own choice for each process would be all."""
    if role.runs_script:
        return {}
    shares = (options.workers or 1) if role.job == "worker" else _cores()
    return {"PJRT_NPROC": str(max(devices, _cores() // shares, 1))}


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def placed(found: Sequence[JobTask], addresses: Sequence[str]) -> dict[JobTask, str]:
    """The roles with their addresses."""
    return dict(zip(found, addresses, strict=True))
