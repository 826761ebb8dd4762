"""`SlurmClusterResolver`: what Slurm tells the tasks of a job step."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    ClusterResolver,
    all_tasks,
)
from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec

_GPUS = "CUDA_VISIBLE_DEVICES"
# Of the step where Slurm says so, else of the whole job.
_NODES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")

_NAMES = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[[^\]]*\]|[^\[]+")
_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")


@final
class SlurmClusterResolver(ClusterResolver):
    """Reads the environment of a task that `srun` started.

    Tasks are taken in the order of their ranks, which fill one node after the other
    (Slurm's default), and dealt out to the jobs in the order of their names. `JAX`
    finds a plain Slurm job by itself; use this for jobs with roles, for ports of your
    choice, or to share out the GPUs of a node.

    Args:
      jobs: how many tasks each job has, as `{"chief": 1, "worker": 3}`; by default all
        are workers.
      port_base: the port of the first task on each node; the next one has the next.
      gpus_per_node: by default as many as `CUDA_VISIBLE_DEVICES` names, as Slurm
        allotted, or as `nvidia-smi` lists.
      gpus_per_task: by default an equal share of the node's.
      tasks_per_node: by default what Slurm says.
      auto_set_gpu: let `CUDA_VISIBLE_DEVICES` of this process name its own GPUs only,
        whenever the cluster is asked for, which must come before JAX's first device.
        It stays as it is if Slurm has already bound the tasks to GPUs, that is, if a
        node's visible GPUs are fewer than its tasks.
      rpc_layer: what `master` puts before addresses.

    Raises:
      ValueError: this is no task of Slurm, or what Slurm says cannot be read.
      RuntimeError: the jobs have another number of tasks than Slurm started, or the
        tasks of a node want more GPUs than it has.

    >>> import os
    >>> os.environ.update(SLURM_PROCID="2", SLURM_NTASKS="4",
    ...     SLURM_TASKS_PER_NODE="2(x2)", SLURM_NODELIST="node[08-09]")
    >>> resolver = js.cluster_resolver.SlurmClusterResolver(auto_set_gpu=False)
    >>> resolver.cluster_spec().job_tasks("worker")
    ['node08:8888', 'node08:8889', 'node09:8888', 'node09:8889']
    >>> resolver.process()
    Process(index=2, count=4, coordinator='node08:8888')
    >>> for name in ("PROCID", "NTASKS", "TASKS_PER_NODE", "NODELIST"):
    ...     del os.environ[f"SLURM_{name}"]
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Sequence[int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        rank, count = _number("SLURM_PROCID"), _number(*_NUM_TASKS)
        hosts = _expanded_hosts(_variable(*_NODES))
        if tasks_per_node is None:
            per_node = _expanded_tasks(_variable(*_TASKS_PER_NODE))
        elif isinstance(tasks_per_node, int):
            per_node = [tasks_per_node] * len(hosts)
        else:
            per_node = list(tasks_per_node)
        jobs = dict(sorted((jobs or {"worker": count}).items()))
        if sum(jobs.values()) != count:
            raise RuntimeError(
                f"`jobs` is {jobs}, {sum(jobs.values())} tasks in all, but Slurm "
                f"started {count}. Give as many, or start as many with `srun --ntasks`."
            )
        if len(per_node) != len(hosts) or sum(per_node) < count:
            raise RuntimeError(
                f"{count} tasks do not fit on {len(hosts)} nodes with {per_node} tasks "
                "each. Leave `tasks_per_node` to Slurm, or give what it did."
            )
        if rank >= count:
            raise ValueError(f"SLURM_PROCID is {rank}, of {count} tasks.")
        # The node of each task, and its place there.
        places = [
            (host, i)
            for host, tasks in zip(hosts, per_node, strict=True)
            for i in range(tasks)
        ]
        addresses = iter(f"{host}:{port_base + i}" for host, i in places)
        self._spec = ClusterSpec(
            {job: list(itertools.islice(addresses, n)) for job, n in jobs.items()}
        )
        self._task_type, self._task_id = all_tasks(self._spec, list(jobs))[rank]
        self._rpc_layer = rpc_layer
        local_rank = int(os.environ.get("SLURM_LOCALID") or places[rank][1])
        each, own = _gpus(gpus_per_node, gpus_per_task, max(per_node), local_rank)
        self._accelerators = {"GPU": each}  # of any task
        self._own_gpus = own if auto_set_gpu else None

    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the step; also chooses this process's GPUs, if it should."""
        if self._own_gpus is not None:
            os.environ[_GPUS] = ",".join(self._own_gpus)
        return self._spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The type and the index of this process."""
        return self.task_type, self.task_id


def _gpus(
    per_node: int | None, per_task: int | None, tasks: int, local_rank: int
) -> tuple[int, list[str] | None]:
    """How many GPUs each task has, and which this one; None where Slurm has chosen."""
    visible = [gpu for gpu in os.environ.get(_GPUS, "").split(",") if gpu.strip()]
    if per_node is None and per_task is None and 0 < len(visible) < tasks:
        return len(visible), None  # each task sees its own ones only
    if per_node is None:
        per_node = len(visible) or _gpus_of_node()
    if per_task is None:
        per_task = per_node // tasks
    if per_task * tasks > per_node:
        raise RuntimeError(
            f"{tasks} tasks with {per_task} GPUs each want more than the {per_node} "
            "GPUs of a node. Change `gpus_per_task` or `gpus_per_node`, or start fewer "
            "tasks on a node."
        )
    names = visible if len(visible) == per_node else list(map(str, range(per_node)))
    first = local_rank * per_task
    return per_task, names[first : first + per_task]


def _expanded_hosts(hostlist: str) -> list[str]:
    """The names that Slurm's short form stands for."""
    names = _NAMES.findall(hostlist)
    if not names or ",".join(names) != hostlist.strip():
        raise ValueError(
            f"{hostlist!r} is not a list of hosts of Slurm's; one looks like "
            '"node[01-03,07],gpu5".'
        )

    def numbers(part: str) -> list[str]:
        if not part.startswith("["):
            return [part]
        found = []
        for each in part[1:-1].split(","):
            match = _RANGE.fullmatch(each.strip())
            if match is None:
                raise ValueError(
                    f"{each!r} in the list of hosts {hostlist!r} is no range of "
                    "numbers."
                )
            first, last = match["first"], match["last"] or match["first"]
            width = len(first)
            found += [str(n).zfill(width) for n in range(int(first), int(last) + 1)]
        return found

    # `a[1-2]b[3,4]` is `a1b3`, `a1b4`, `a2b3`, `a2b4`.
    return [
        "".join(host)
        for name in names
        for host in itertools.product(*map(numbers, _PARTS.findall(name)))
    ]


def _expanded_tasks(tasks: str) -> list[int]:
    """The number of tasks on each node, from Slurm's short form."""
    counts = []
    for part in tasks.split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            raise ValueError(
                f"{tasks!r} does not tell the tasks of each node; what does looks "
                'like "3(x2),2".'
            )
        counts += [int(found["tasks"])] * int(found["nodes"] or 1)
    return counts


def _gpus_of_node() -> int:
    allotted = os.environ.get("SLURM_GPUS_ON_NODE", "")
    if allotted.isdecimal():
        return int(allotted)
    # CUDA takes a variable that is set and empty for no GPU at all.
    if os.environ.get(_GPUS) is not None or shutil.which("nvidia-smi") is None:
        return 0
    # Not checked: where there is no driver it fails, and lists none.
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _variable(*names: str) -> str:
    """The first of the variables that is set."""
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    raise ValueError(
        f"{' or '.join(names)} is not set, so this is no task of a Slurm job step. "
        "Start it with `srun`."
    )


def _number(*names: str) -> int:
    text = _variable(*names)
    if not text.isdecimal():
        raise ValueError(f"{' or '.join(names)} is {text!r}; it is a whole number.")
    return int(text)
