"""The launcher's command line, checked before anything is started: `parse`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from jaxstrategy._src.cluster.resolvers.cluster_spec import host_and_port
from jaxstrategy._src.processes import secret
from jaxstrategy._src.processes.exit_codes import ExitCode, Restart
from jaxstrategy._src.processes.secret import Secret

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

_MEANINGS = "\n".join(f"  {row.value:<10}{row.meaning}" for row in ExitCode)
_NEVER = ", ".join(map(str, ExitCode.that_restart(Restart.NEVER)))
_ALWAYS = ", ".join(map(str, ExitCode.that_restart(Restart.UNCOUNTED)))

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
failure takes one process fewer, and never fewer than that.

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
{_NEVER} is never restarted. {_ALWAYS} always is, and does not count, unless the
launcher itself was asked to stop.
"""


@final
@dataclasses.dataclass(frozen=True)
class RayOptions:
    """What each process takes of a Ray cluster, and which cluster that is."""

    address: str | None = None
    cpus: float = 1.0
    resources: tuple[tuple[str, float], ...] = ()
    placement: str = "PACK"
    working_dir: str | None = None
    variables: tuple[str, ...] = ()
    wait: float = 300.0


@final
@dataclasses.dataclass(frozen=True)
class Options:
    """A checked command line."""

    command: tuple[str, ...]
    module: bool = False
    processes: int = 1
    devices_per_process: int | None = None
    gpus_per_process: int | None = None
    max_restarts: int = 0
    min_processes: int | None = None
    grace: float = 3.0
    stop_grace: float = 300.0
    nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    print_for: str | None = None
    verbose: bool = False
    check: bool = False
    ray: RayOptions | None = None
    workers: int | None = None
    parameter_servers: int | None = None
    evaluator: bool = False
    summary: str | None = None
    compilation_cache: str | None = None

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
    given = vars(parser.parse_args(arguments))
    command = given["command"]
    given["command"] = tuple(command[1:] if command[:1] == ["--"] else command)
    if given["check"]:
        if given["command"] or given["print_for"]:
            parser.error(
                "--check runs a program of its own: leave out script and --print"
            )
        given["command"], given["module"] = (_CHECK,), True
    rank = given["node_rank"]
    given["node_rank"] = rank or 0
    ray = {name: given.pop(name) for name in list(given) if name.startswith("ray_")}
    ray = {name: value for name, value in ray.items() if value is not None}
    if given.pop("on") == "ray":
        own = {name.removeprefix("ray_"): value for name, value in ray.items()}
        for name in own.keys() & {"resources", "variables"}:
            own[name] = tuple(own[name])
        given["ray"] = RayOptions(**own)
    elif ray:
        name = next(iter(ray))
        option = {"ray_resources": "ray_resource", "ray_variables": "ray_env"}
        flag = option.get(name, name).replace("_", "-")
        parser.error(f"--{flag} needs --on ray: nothing else would look at it")
    options = Options(**given)
    complaint = next(_complaints(options, rank is not None, os.environ), None)
    if complaint:
        parser.error(complaint)
    return options


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
    add = parser.add_argument
    add("-n", "--processes", type=count, default=1, metavar="N",
        help="processes on this machine (default: 1)")  # fmt: skip
    add("--devices-per-process", type=count, metavar="K",
        help="simulated CPU devices of each process")  # fmt: skip
    add("--gpus-per-process", type=count, metavar="K",
        help="GPUs of each process: its share of CUDA_VISIBLE_DEVICES")  # fmt: skip
    add("--max-restarts", type=whole, default=0, metavar="K",
        help="start all again up to K times after a failure (default: 0)")  # fmt: skip
    add("--min-processes", type=count, metavar="M",
        help="a restart takes one process fewer, down to M")  # fmt: skip
    add("--workers", type=count, metavar="W",
        help="workers of the script's ParameterServerStrategy")  # fmt: skip
    add("--parameter-servers", type=count, metavar="P",
        help="parameter servers of it (default: 1)")  # fmt: skip
    add("--evaluator", action="store_true",
        help="run the script a second time, as the evaluator of TF_CONFIG")  # fmt: skip
    add("--grace", type=seconds, default=3.0, metavar="S",
        help="seconds that the others have after a failure (default: 3)")  # fmt: skip
    add("--stop-grace", type=seconds, default=300.0, metavar="S",
        help="seconds to save and end after a signal (default: 300)")  # fmt: skip
    add("--nodes", type=count, default=1, metavar="N",
        help="machines of the job (default: 1); run the launcher on each")  # fmt: skip
    add("--node-rank", type=whole, metavar="R",
        help="which of the machines this is: 0, 1, ...")  # fmt: skip
    add("--coordinator", type=address, metavar="HOST:PORT",
        help="where process 0 listens (default: a free port, loopback)")  # fmt: skip
    add("--on", choices=("ray",),
        help="run the processes on a Ray cluster, not on this machine")  # fmt: skip
    add("--print", choices=("slurm", "k8s"), dest="print_for",
        help="print a batch script or a JobSet manifest, start nothing")  # fmt: skip
    add("--verbose", action="store_true",
        help="also show gloo's lines about connected ranks")  # fmt: skip
    add("--summary", metavar="FILE",
        help="write what became of each process into a text file")  # fmt: skip
    add("--compilation-cache", type=folder, metavar="DIR",
        help="where all processes keep what they have compiled")  # fmt: skip
    add("--check", action="store_true",
        help="only try whether the processes can meet and exchange")  # fmt: skip
    add("-m", dest="module", action="store_true",
        help="run a module, as `python -m` does")  # fmt: skip
    on_ray = parser.add_argument_group("with --on ray").add_argument
    on_ray("--ray-address", metavar="HOST:PORT",
        help="the cluster (default: RAY_ADDRESS, or a Ray of this machine that is "
        "started, and ended with the job)")  # fmt: skip
    on_ray("--ray-cpus", type=amount, metavar="K",
        help="CPUs of each process, as Ray counts them (default: 1)")  # fmt: skip
    on_ray("--ray-resource", type=_resource, metavar="NAME=K", action="append",
        dest="ray_resources",
        help="another resource of each process; repeatable")  # fmt: skip
    on_ray("--ray-placement", choices=PLACEMENTS,
        help="on few machines (PACK, the default) or many (SPREAD); "
        "STRICT_: on one, or each on another, or not at all")  # fmt: skip
    on_ray("--ray-working-dir", metavar="DIR",
        help="copy this folder to each machine, and run there; without, all machines "
        "need the folder in which the launcher is started")  # fmt: skip
    on_ray("--ray-env", metavar="NAME", action="append", dest="ray_variables",
        help="hand on this environment variable; repeatable (those of JAX, XLA and "
        "jaxstrategy are handed on anyway)")  # fmt: skip
    on_ray("--ray-wait", type=seconds, metavar="S",
        help="seconds to wait for room on the cluster (default: 300)")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


# Types of options.


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def amount(text: str, wanted: str = "a number from 0 on") -> float:
    """A number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return number


def seconds(text: str) -> float:
    """A time from 0 on."""
    return amount(text, "a time in seconds")


def positive_seconds(text: str) -> float:
    """A time above 0."""
    if (number := seconds(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 seconds")
    return number


def address(text: str) -> str:
    """A `host:port`."""
    try:
        host_and_port(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def folder(text: str) -> str:
    """A folder, or the address of what serves as one, whether it is there or not."""
    if not text or os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def _resource(text: str) -> tuple[str, float]:
    name, equals, number = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=K, such as TPU=4")
    return name, amount(number)


# Contradictions between well-formed options, the most important first.


def _complaints(
    options: Options, rank_given: bool, environment: Mapping[str, str]
) -> Iterator[str]:
    if not options.command:
        yield "the script is missing: name it after the options, as in `-n 4 train.py`"
        return
    yield from _about_numbers(options)
    yield from _about_summary(options)
    yield from _about_roles(options)
    if options.ray is not None:
        yield from _about_ray(options, options.ray, rank_given, environment)
    yield from _about_nodes(options, rank_given)
    if not options.print_for:
        if not options.module:
            yield from _about_script(options)
        yield from _about_gpus(options, environment)


def _about_numbers(options: Options) -> Iterator[str]:
    if (least := options.min_processes) is not None:
        if least > options.processes:
            yield (
                f"--min-processes {least} is more than the {options.processes} "
                "processes of -n; give at most as many"
            )
        if options.nodes > 1:
            yield (
                "--min-processes works on one machine only: several launchers cannot "
                "agree on how many processes remain; leave it out with --nodes"
            )
        if not options.max_restarts:
            yield "--min-processes needs restarts: add --max-restarts"
    if options.devices_per_process and options.gpus_per_process:
        yield (
            "--devices-per-process simulates devices on the CPU, --gpus-per-process "
            "uses GPUs; give one of them"
        )


def _about_summary(options: Options) -> Iterator[str]:
    if options.summary is None:
        return
    if options.print_for or options.workers is not None:
        yield (
            "--summary tells of processes that the launcher starts by -n; leave it out "
            "with --print and --workers"
        )
    place = os.path.dirname(options.summary) or "."
    if os.path.isdir(options.summary) or not os.path.isdir(place):
        yield (
            f"--summary was {options.summary!r}; a file in a folder that exists was "
            "wanted"
        )


def _about_roles(options: Options) -> Iterator[str]:
    if options.workers is None:
        if options.parameter_servers is not None or options.evaluator:
            yield (
                "--parameter-servers and --evaluator belong to a job with --workers: "
                "say how many"
            )
        return
    if options.processes > 1 or options.min_processes is not None:
        yield (
            "-n starts processes that take the same steps, --workers those that a "
            "script calls; give one of them"
        )
    if options.nodes > 1 and not options.print_for:
        yield (
            "--workers starts processes of one machine; for several, --print makes a "
            "script or manifest, or set TF_CONFIG for `python -m "
            "jaxstrategy.parameter_servers` on each"
        )
    if options.ray is not None:
        yield (
            "--workers starts processes of this machine; on a Ray cluster the script "
            "starts its own, by ParameterServerStrategy(..., backend='ray')"
        )
    if options.coordinator is not None:
        yield "--coordinator has no meaning with --workers: the script is the chief"


def _about_ray(
    options: Options, ray: RayOptions, rank_given: bool, environment: Mapping[str, str]
) -> Iterator[str]:
    if options.nodes > 1 or rank_given or options.coordinator:
        yield (
            "--on ray finds machines by itself, and where process 0 listens; leave out "
            "--nodes, --node-rank and --coordinator"
        )
    if options.print_for:
        yield "--print and --on ray are two ways to a cluster; give one of them"
    where = ray.address or environment.get(RAY_ADDRESS, "")
    if where.startswith("ray://"):
        yield (
            f"{where!r} is an address for Ray's client; start the launcher on a "
            "machine of the cluster, and give host:port of its head, or auto"
        )
    needs = ray.cpus, options.gpus_per_process, *(number for _, number in ray.resources)
    if not any(needs):
        yield "--ray-cpus 0 needs GPUs or a --ray-resource, or Ray has nothing to place"
    if ray.working_dir is not None and not os.path.isdir(ray.working_dir):
        yield f"--ray-working-dir {ray.working_dir!r} is no folder"
    for name in ray.variables:
        if name not in environment:
            yield f"--ray-env {name}: there is no such variable in the environment"


def _about_nodes(options: Options, rank_given: bool) -> Iterator[str]:
    if options.node_rank >= options.nodes:
        yield (
            f"--node-rank {options.node_rank} is out of range: --nodes is "
            f"{options.nodes}, so ranks go from 0 to {options.nodes - 1}"
        )
    if options.nodes == 1 or options.print_for:
        return
    if not rank_given:
        yield "--nodes needs --node-rank: which of the machines is this?"
    if options.coordinator is None:
        yield (
            "--nodes needs --coordinator host:port: an address of the first machine "
            "that all of them can reach, and a free port there"
        )
        return
    host, _ = host_and_port(options.coordinator)
    try:
        why = secret.why_refused(Secret.of_environment(), host.strip("[]"))
    except ValueError as error:
        yield str(error)
    else:
        if why:
            yield f"the launchers of --nodes do not start: {why}"


def _about_script(options: Options) -> Iterator[str]:
    script = options.command[0]
    copied = options.ray and options.ray.working_dir
    if copied and os.path.isabs(script):
        yield (
            f"{script!r} is not looked for in a copy of {copied!r}; give the path of "
            "the script from there on"
        )
    path = os.path.join(copied, script) if copied else script
    if not os.path.isfile(path):
        kind = "a folder" if os.path.isdir(path) else "no file"
        yield f"{path!r} is {kind}; give the path of a Python script, or -m module"


def _about_gpus(options: Options, environment: Mapping[str, str]) -> Iterator[str]:
    visible = [] if options.ray else visible_gpus(environment)  # Ray knows its own
    wanted = (options.gpus_per_process or 0) * (options.workers or options.processes)
    if visible and wanted > len(visible):
        yield (
            f"{wanted} GPUs are wanted, {GPUS} has {len(visible)} "
            f"({','.join(visible)}); ask for fewer processes or fewer GPUs"
        )
