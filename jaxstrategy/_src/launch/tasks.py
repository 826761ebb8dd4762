"""The processes of a job: what each runs, and what it is told: `JobTask`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import final

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.launch.options import Options, visible_gpus
from jaxstrategy._src.processes.exit_codes import ExitCode, Restart

NEVER_AGAIN = ExitCode.that_restart(Restart.NEVER)
ALWAYS_AGAIN = ExitCode.that_restart(Restart.UNCOUNTED)

_SERVE = ("-m", "jaxstrategy.parameter_servers")  # it is above this layer


@final
@dataclasses.dataclass(frozen=True)
class JobTask:
    """One process: a `chief`, `worker`, `ps` or `evaluator`, or just a `process`."""

    job: str
    index: int

    @property
    def name(self) -> str:
        """It in words."""
        if self.job == "process":
            return str(self.index)
        return self.job if self.runs_script else f"{self.job} {self.index}"

    @property
    def runs_script(self) -> bool:
        """Whether it is the user's script that decides what it does."""
        return self.job not in ("worker", "ps")

    def program(self, options: Options) -> tuple[str, ...]:
        """The arguments of `python`."""
        return options.program if self.runs_script else _SERVE

    def gpus(self, options: Options) -> int:
        """How many GPUs it uses."""
        has_gpus = self.job in ("process", "worker")
        return (options.gpus_per_process or 0) if has_gpus else 0

    def variables(self, options: Options) -> dict[str, str]:
        """What the environment has in every such process, wherever it runs."""
        variables = {"PYTHONUNBUFFERED": "1"}
        if options.compilation_cache is not None:
            variables[_environment.COMPILATION_CACHE] = options.compilation_cache
        simulated = options.devices_per_process or options.gpus_per_process
        if simulated is not None and not self.gpus(options):
            # The chief traces functions of workers, with as many devices as one has.
            simulated = 1 if self.job == "ps" else simulated
            variables["JAX_NUM_CPU_DEVICES"] = str(simulated)
            variables["JAX_PLATFORMS"] = "cpu"
        return variables


def job_tasks(options: Options) -> dict[str, list[JobTask]]:
    """All processes by what they are; those of the script come first."""
    counts = {"process": options.total}
    if options.workers is not None:
        counts = {"chief": 1, "worker": options.workers}
        counts["ps"] = options.parameter_servers or 1
        counts |= {"evaluator": 1} if options.evaluator else {}
    return {
        job: [JobTask(job, index) for index in range(count)]
        for job, count in counts.items()
    }


def tf_config(addresses: Mapping[JobTask, str], task: JobTask) -> str:
    """What tells a process the cluster and its place in it."""
    cluster: dict[str, list[str]] = {}
    for each, address in addresses.items():
        cluster.setdefault(each.job, []).append(address)
    own = {"type": task.job, "index": task.index}
    return json.dumps({"cluster": cluster, "task": own})


def place(
    options: Options,
    attempt: Mapping[str, str],
    coordinator: str,
    rank: int,
    local_rank: int,
) -> dict[str, str]:
    """What the environment of an attempt is for one of its processes."""
    own = {
        **attempt,
        _environment.COORDINATOR: coordinator,
        _environment.PROCESS_ID: str(rank),
        _environment.LOCAL_RANK: str(local_rank),
    }
    if options.nodes == 1:
        # What is left of another attempt is refused by name. Launchers of several nodes
        # do not count alike.
        number = attempt[_environment.ATTEMPT]
        own[_environment.JOB] = f"{coordinator}, attempt {number}"
    return own


def share(gpus: int, local_rank: int) -> str:
    """The GPUs of one process, out of those that the launcher may use."""
    names = visible_gpus(os.environ)
    wanted = range(gpus * local_rank, gpus * (local_rank + 1))
    return ",".join(names[i] if names else str(i) for i in wanted)
