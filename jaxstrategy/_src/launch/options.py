"""The launcher's command line, checked before anything is started, and its tasks."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

from jaxstrategy._src.cluster.resolvers import environment as _environment
from jaxstrategy._src.cluster.resolvers.cluster_spec import endpoint, host_and_port
from jaxstrategy._src.processes import secret
from jaxstrategy._src.processes.exit_codes import MEANINGS, ExitCode
from jaxstrategy._src.processes.secret import Secret

T = TypeVar("T", int, float)
GPUS = "CUDA_VISIBLE_DEVICES"
RAY_ADDRESS = "RAY_ADDRESS"
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

LAUNCH = """\
Starts several processes of one training script on this machine, and ends them
together. In the script, `MultiWorkerMirroredStrategy()` finds the others.

  python -m jaxstrategy.launch -n 4 train.py --epochs 3
      4 processes of this machine's own devices
  python -m jaxstrategy.launch -n 4 --devices-per-process 2 train.py
      the same with 2 simulated CPU devices each: 8 replicas, to try things out
  python -m jaxstrategy.launch -n 8 --gpus-per-process 1 train.py
      one process for each of 8 GPUs
  python -m jaxstrategy.launch -n 4 --max-restarts 3 train.py
      when a process dies, start all again (the script loads its checkpoint)
  python -m jaxstrategy.launch -n 4 --nodes 2 --node-rank 0 \\
      --coordinator node0:2222 train.py
      node 0 of 2; run it on node 1 too, with --node-rank 1 and the same
      JAXSTRATEGY_CLUSTER_SECRET
  python -m jaxstrategy.launch --workers 2 --parameter-servers 1 train.py
      2 workers, 1 parameter server and the script, whose `ParameterServerStrategy()`
      finds them by TF_CONFIG; workers and servers that end are started again
  python -m jaxstrategy.launch -n 4 --check
      runs no script: the processes meet, and say what they have and how long it took
  python -m jaxstrategy.launch -n 4 --nodes 2 --print slurm train.py > train.sbatch
      starts nothing, prints what a cluster needs
  python -m jaxstrategy.launch -n 4 --on ray --ray-cpus 8 train.py
      on the machines of a Ray cluster, which finds room for the processes
"""

_CHECK = (
    "jaxstrategy._src.training.job_check"  # above this layer, and only run from here
)

_MEANINGS = "\n".join(f"  {code:<10d}{text}" for code, text in MEANINGS.items())

MORE = f"""\
What a process sees, in its environment:
  JAXSTRATEGY_COORDINATOR     host:port where process 0 waits for the others
  JAXSTRATEGY_PROCESS_ID      its rank: 0, 1, ... over all nodes
  JAXSTRATEGY_NUM_PROCESSES   how many there are, over all nodes
  JAXSTRATEGY_LOCAL_RANK      its rank on this node
  JAXSTRATEGY_ATTEMPT         0 at first, one more at every restart
  JAXSTRATEGY_COMPILATION_CACHE  that of --compilation-cache, if it is given
  JAXSTRATEGY_CLUSTER_SECRET  by which processes know each other: random, of this job;
                              with --nodes, set the same one for all launchers
TF_CONFIG is taken out; standard input is empty. With --workers it is TF_CONFIG that
tells the script, which is the chief, and the others what they are.

What it prints appears behind its rank, as in "[1] loss 0.3"; a progress bar becomes
one line a second.

With --workers the job is over when the script ends; the exit code is its. A worker or
parameter server that ends is started again, whenever that is; the script, up to
--max-restarts times. GPUs and simulated devices are those of workers.

Otherwise, when a process fails, the others have --grace seconds to end, then they are
killed with all that they started. SIGINT and SIGTERM are handed on to every process, so
that it can save its state; what has not ended after --stop-grace seconds is killed, and
by a second signal at once. With --min-processes every restart after a
failure takes one process fewer, and never fewer than that. With
--wait-for-replacement it takes as many first: on this machine a new process in place of
the lost one, on Ray what finds room within that time. If one fails within that time
again, or there is no room, the job goes on with one fewer. With
--nodes M:N the launcher of node 0 waits one port above the coordinator's for the
others, after a loss for --wait-for-replacement, at least --grace and 2 seconds, and the
job goes on with those that came; who does not reach node 0, ends. If node 0 may be
lost, too, give --coordinator the addresses of several nodes, as in
node0:2222,node1:2222,node2:2222: the first one that is left takes its place, if more
than half of the last attempt's machines (at first: of all N) come to it, or half, with
the first of them; else it ends, as the others may be a job by now. After --grow-every
seconds the others get SIGTERM, so that they save their state, and all are started
again; with --nodes M:N if a launcher has come that takes no part yet.

With --on ray, an actor on a machine of the cluster starts each process, in the folder
of the same path, and with the environment of that machine; from here it gets what
begins with JAX_, JAXSTRATEGY_ or XLA_. Ray chooses GPUs, and threads of OpenMP as
CPUs. A process whose machine is lost counts as killed; a restart looks for room again.
Where Ray starts no process, the launcher says why, and returns 1.

Exit codes:
  0         every process returned 0
  2         wrong arguments
{_MEANINGS}
  128 + s   a process died of signal s (137: SIGKILL, 139: SIGSEGV, 134: SIGABRT)
  other     that of the process that failed first
{ExitCode.NO_RESTART:d} is never restarted. {ExitCode.PREEMPTED:d} always is, and does
not count, unless the launcher itself was asked to stop.
"""


# Types of options.


def _number(
    read: Callable[[str], T], least: T, wanted: str, is_more: bool = False
) -> Callable[[str], T]:
    """Reads numbers that are not smaller than the least one, or are more than it."""

    def number(text: str) -> T:
        try:
            found = read(text)
        except ValueError:
            found = None
        if found is None or not least <= found < math.inf or (is_more and not found):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return found

    return number


count = _number(int, 1, "a whole number above 0")
_whole = _number(int, 0, "a whole number from 0 on")
_amount = _number(float, 0.0, "a number from 0 on")
_seconds = _number(float, 0.0, "a time in seconds")
positive_seconds = _number(float, 0.0, "a time above 0 seconds", is_more=True)


def _range(text: str) -> int | tuple[int, int]:
    """A number of processes, or the least and the most."""
    least, colon, most = text.partition(":")
    return (count(least), count(most)) if colon else count(text)


def _addresses(text: str) -> str:
    try:
        for address in text.split(","):
            host_and_port(address)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _folder(text: str) -> str:
    """A folder, or the address of what serves as one, whether it is there or not."""
    if not text or os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _resource(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=K, such as TPU=4")
    return name, _amount(number)


def _option(*flags: str, default: object = None, **how: object) -> Any:
    """A field as `ArgumentParser.add_argument` wants it; by default by its own name."""
    return dataclasses.field(default=default, metadata={"flags": flags, **how})


@final
@dataclasses.dataclass
class Options:
    """The command line."""

    # fmt: off
    processes: int = _option("-n", "--processes", default=1, type=_range, metavar="N",
        help="processes on this machine (default: 1); M:N also means --min-processes M")
    devices_per_process: int | None = _option(type=count, metavar="K",
        help="simulated CPU devices of each process")
    gpus_per_process: int | None = _option(type=count, metavar="K",
        help="GPUs of each process: its share of CUDA_VISIBLE_DEVICES")
    max_restarts: int = _option(default=0, type=_whole, metavar="K",
        help="start all again up to K times after a failure (default: 0)")
    min_processes: int | None = _option(type=count, metavar="M",
        help="a restart takes one process fewer, down to M")
    wait_for_replacement: float = _option(default=0.0, type=_seconds, metavar="S",
        help="seconds after a loss in which a replacement is to come and to hold, "
        "before the job goes on with one process fewer (default: 0)")
    grow_every: float = _option(default=600.0, type=positive_seconds, metavar="S",
        help="seconds after which a job with fewer processes saves its state, and "
        "starts with all again (default: 600)")
    workers: int | None = _option(type=count, metavar="W",
        help="workers of the script's ParameterServerStrategy")
    parameter_servers: int | None = _option(type=count, metavar="P",
        help="parameter servers of it (default: 1)")
    evaluator: bool = _option(default=False,
        help="run the script a second time, as the evaluator of TF_CONFIG")
    grace: float = _option(default=3.0, type=_seconds, metavar="S",
        help="seconds that the others have after a failure (default: 3)")
    stop_grace: float = _option(default=300.0, type=_seconds, metavar="S",
        help="seconds to save and end after a signal (default: 300)")
    nodes: int = _option(default=1, type=_range, metavar="N",
        help="machines of the job (default: 1); run the launcher on each. M:N lets the "
        "job go on with as few as M")
    node_rank: int | None = _option(type=_whole, metavar="R",
        help="which of the machines this is: 0, 1, ...")
    coordinator: str | None = _option(type=_addresses, metavar="HOST:PORT",
        help="where process 0 listens (default: a free port, loopback); with --nodes "
        "M:N addresses of nodes 0, 1, ..., separated by commas, that may have it")
    on: str | None = _option(choices=("ray",),
        help="run the processes on a Ray cluster, not on this machine")
    print_for: str | None = _option("--print", choices=("slurm", "k8s"),
        help="print a batch script or a JobSet manifest, start nothing")
    verbose: bool = _option(default=False,
        help="also show gloo's lines about connected ranks")
    summary: str | None = _option(metavar="FILE",
        help="write what became of each process into a text file")
    compilation_cache: str | None = _option(type=_folder, metavar="DIR",
        help="where all processes keep what they have compiled")
    check: bool = _option(default=False,
        help="only try whether the processes can meet and exchange")
    module: bool = _option("-m", default=False,
        help="run a module, as `python -m` does")
    ray_address: str | None = _option(metavar="HOST:PORT",
        help="the cluster (default: RAY_ADDRESS, or a Ray of this machine that is "
        "started, and ended with the job)")
    ray_cpus: float = _option(default=1.0, type=_amount, metavar="K",
        help="CPUs of each process, as Ray counts them (default: 1)")
    ray_resource: Sequence[tuple[str, float]] | None = _option(
        type=_resource, metavar="NAME=K", action="append",
        help="another resource of each process; repeatable")
    ray_placement: str = _option(default="PACK", choices=PLACEMENTS,
        help="on few machines (PACK, the default) or many (SPREAD); "
        "STRICT_: on one, or each on another, or not at all")
    ray_working_dir: str | None = _option(metavar="DIR",
        help="copy this folder to each machine, and run there; without, all machines "
        "need the folder in which the launcher is started")
    ray_env: Sequence[str] | None = _option(metavar="NAME", action="append",
        help="hand on this environment variable; repeatable (those of JAX, XLA and "
        "jaxstrategy are handed on anyway)")
    ray_wait: float = _option(default=300.0, type=_seconds, metavar="S",
        help="seconds to wait for room on the cluster (default: 300)")
    # fmt: on
    command: Sequence[str] = ()
    min_nodes: int | None = None

    @property
    def program(self) -> tuple[str, ...]:
        """The arguments of `python`."""
        if self.module:
            return ("-m", *self.command)
        script, *arguments = self.command
        # Python would take a script called `-c` for an option.
        return (f"./{script}" if script.startswith("-") else script, *arguments)

    @property
    def total(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.processes

    @property
    def name(self) -> str:
        """The script or module without its path and ending."""
        if self.module:
            return self.command[0].rsplit(".", 1)[-1]
        return os.path.splitext(os.path.basename(self.command[0]))[0]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line; prints and exits with 2 where they are wrong."""
    parser = _parser()
    options = parser.parse_args(arguments, Options())
    if isinstance(options.processes, tuple):
        options.min_processes, options.processes = options.processes
    if isinstance(options.nodes, tuple):
        options.min_nodes, options.nodes = options.nodes
    if options.command[:1] == ["--"]:
        options.command = options.command[1:]
    if options.check:
        if options.command or options.print_for:
            parser.error(
                "--check runs a program of its own: leave out script and --print"
            )
        options.command, options.module = [_CHECK], True
    if complaint := next(_complaints(options, os.environ), None):
        parser.error(complaint)
    return options


def cores() -> int:
    """How many of this host's cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names; none where it is unset or empty."""
    return [name for name in environment.get(GPUS, "").split(",") if name.strip()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.launch",
        usage="%(prog)s [options] script.py [args ...]\n"
        "       %(prog)s [options] -m module [args ...]\n"
        "       %(prog)s [options] --check",
        description=LAUNCH,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    on_ray = parser.add_argument_group("with --on ray")
    for field in dataclasses.fields(Options):
        if how := dict(field.metadata):
            group = on_ray if field.name.startswith("ray_") else parser
            flags = how.pop("flags") or (f"--{field.name.replace('_', '-')}",)
            if field.default is False:
                how["action"] = "store_true"
            group.add_argument(*flags, dest=field.name, **how)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _complaints(o: Options, environment: Mapping[str, str]) -> Iterator[str]:
    """Contradictions between well-formed options, the most important first."""
    if not o.command:
        yield "the script is missing: name it after the options, as in `-n 4 train.py`"
        return
    usual = vars(Options())
    for name in usual if o.on is None else ():
        if name.startswith("ray_") and getattr(o, name) != usual[name]:
            option = name.replace("_", "-")
            yield f"--{option} needs --on ray: nothing else would look at it"
    if (least := o.min_processes) is not None:
        if least > o.processes:
            yield (
                f"--min-processes {least} is more than the {o.processes} processes of "
                "-n; give at most as many"
            )
        if o.nodes > 1:
            yield (
                "--min-processes works on one machine only: on several, as many "
                "processes are on each; leave it out, and give --nodes M:N"
            )
        if not o.max_restarts:
            yield "--min-processes needs restarts: add --max-restarts"
        if o.print_for:
            yield (
                "--min-processes has no meaning with --print: what a cluster starts "
                "has as many processes as it is told"
            )
    elif o.wait_for_replacement and o.min_nodes is None:
        yield (
            "--wait-for-replacement needs --min-processes, or --nodes M:N: with how "
            "many may the job go on where no replacement comes?"
        )
    if o.min_nodes is not None:
        if o.min_nodes > o.nodes:
            yield f"--nodes {o.min_nodes}:{o.nodes} has its larger number first"
        if not o.max_restarts:
            yield "--nodes M:N needs restarts: add --max-restarts"
        if o.print_for:
            yield "--nodes M:N has no meaning with --print: give one number"
    if o.devices_per_process and o.gpus_per_process:
        yield (
            "--devices-per-process simulates devices on the CPU, --gpus-per-process "
            "uses GPUs; give one of them"
        )
    if o.summary is not None:
        if o.print_for or o.workers is not None:
            yield (
                "--summary tells of processes that the launcher starts by -n; leave it "
                "out with --print and --workers"
            )
        there = os.path.isdir(os.path.dirname(o.summary) or ".")
        if os.path.isdir(o.summary) or not there:
            yield (
                f"--summary was {o.summary!r}; a file in a folder that exists was "
                "wanted"
            )
    if o.workers is None:
        if o.parameter_servers is not None or o.evaluator:
            yield (
                "--parameter-servers and --evaluator belong to a job with --workers: "
                "say how many"
            )
    else:
        if o.processes > 1 or least is not None:
            yield (
                "-n starts processes that take the same steps, --workers those that a "
                "script calls; give one of them"
            )
        if o.nodes > 1 and not o.print_for:
            yield (
                "--workers starts processes of one machine; for several, --print makes "
                "a script or manifest, or set TF_CONFIG for `python -m "
                "jaxstrategy.parameter_servers` on each"
            )
        if o.on:
            yield (
                "--workers starts processes of this machine; on a Ray cluster the "
                "script starts its own, by ParameterServerStrategy(..., backend='ray')"
            )
        if o.coordinator is not None:
            yield "--coordinator has no meaning with --workers: the script is the chief"
    if o.on:
        yield from _about_ray(o, environment)
    if o.node_rank is not None and o.node_rank >= o.nodes:
        yield (
            f"--node-rank {o.node_rank} is out of range: --nodes is {o.nodes}, so "
            f"ranks go from 0 to {o.nodes - 1}"
        )
    if o.print_for:
        return
    if o.nodes > 1:
        if o.node_rank is None:
            yield "--nodes needs --node-rank: which of the machines is this?"
        if o.coordinator is None:
            yield (
                "--nodes needs --coordinator host:port: an address of the first "
                "machine that all of them can reach, and a free port there"
            )
        else:
            each = o.coordinator.split(",")
            if len(each) > (1 if o.min_nodes is None else o.nodes):
                yield (
                    f"--coordinator has {len(each)} addresses; it may have one, or "
                    "with --nodes M:N one for each of the first nodes"
                )
            try:
                host, _ = endpoint(each[min(o.node_rank or 0, len(each) - 1)])
                if why := secret.why_refused(Secret.of_environment(), host):
                    yield f"the launchers of --nodes do not start: {why}"
            except ValueError as error:
                yield str(error)
    path = os.path.join(o.ray_working_dir or "", o.command[0])
    if not o.module and not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "no file"
        yield f"{path!r} is {kind}; give the path of a Python script, or -m module"
    visible = [] if o.on else visible_gpus(environment)  # Ray knows its own
    wanted = (o.gpus_per_process or 0) * (o.workers or o.processes)
    if visible and wanted > len(visible):
        yield (
            f"{wanted} GPUs are wanted, {GPUS} has {len(visible)} "
            f"({','.join(visible)}); ask for fewer processes or fewer GPUs"
        )


def _about_ray(o: Options, environment: Mapping[str, str]) -> Iterator[str]:
    if o.nodes > 1 or o.node_rank is not None or o.coordinator:
        yield (
            "--on ray finds machines by itself, and where process 0 listens; leave out "
            "--nodes, --node-rank and --coordinator"
        )
    if o.print_for:
        yield "--print and --on ray are two ways to a cluster; give one of them"
    where = o.ray_address or environment.get(RAY_ADDRESS, "")
    if where.startswith("ray://"):
        yield (
            f"{where!r} is an address for Ray's client; start the launcher on a "
            "machine of the cluster, and give host:port of its head, or auto"
        )
    if not any((o.ray_cpus, o.gpus_per_process, *dict(o.ray_resource or ()).values())):
        yield "--ray-cpus 0 needs GPUs or a --ray-resource, or Ray has nothing to place"
    if (copied := o.ray_working_dir) is not None:
        if not os.path.isdir(copied):
            yield f"--ray-working-dir {copied!r} is no folder"
        if not o.module and os.path.isabs(o.command[0]):
            yield (
                f"{o.command[0]!r} is not looked for in a copy of {copied!r}; give the "
                "path of the script from there on"
            )
    for name in o.ray_env or ():
        if name not in environment:
            yield f"--ray-env {name}: there is no such variable in the environment"


# The processes of a job: what each runs, and what it is told.

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
