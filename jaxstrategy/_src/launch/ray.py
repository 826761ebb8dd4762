"""Processes on a Ray cluster, for the launcher and for parameter servers.

`RayCluster` is a connection, `RayActors` holds room on its machines, a `ProcessActor`
starts one process there, which is a `RayStartedProcess` here. `RayMachines` runs the
processes of a `Job` so. Ray sends `ProcessActor` to machines whose Python need not
import the package: it uses the standard library, Ray and `child_process` only.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, final

from jaxstrategy._src.cluster.resolvers.cluster_spec import address_of
from jaxstrategy._src.cluster.resolvers.environment import MEMORY
from jaxstrategy._src.errors import ClusterError, MissingExtraError
from jaxstrategy._src.launch import child_process
from jaxstrategy._src.launch.child_process import (
    Guard,
    GuardedProcess,
    HeldPort,
    StartedProcess,
    Stream,
)
from jaxstrategy._src.launch.local import LOOPBACK, Ended, Events, NoRoomError
from jaxstrategy._src.launch.options import RAY_ADDRESS, JobTask, Options, place
from jaxstrategy._src.text import with_noun

HANDED_ON = ("JAX_", "JAXSTRATEGY_", "XLA_")
"""The beginnings of environment variables that go with processes to other machines."""

_THREADS = 8  # of an actor: two for its output, one for its end, the rest to be asked
# What Ray sets for its own workers, or what names another process of a job.
_NOT_HANDED_ON = (
    "PYTHONBREAKPOINT",
    "RAY_JOB_ID",
    "RAY_RAYLET_PID",
    "TF_CONFIG",
)
_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_QUIET_SECONDS = 2.0  # on a free cluster there is room within 10 ms
_END_SECONDS = 10.0  # until those who ask hear that an actor was ended
_LOOK_SECONDS = 0.2  # between looks whether there is room, or a reason to stop
_UNAVAILABLE_SECONDS = 60.0  # as long as Ray itself waits for its head

# A Ray of this machine alone, for as long as the standard input stays open. It is a
# process of its own, because Ray takes signals for itself, and starts others by `fork`,
# which a process that uses JAX must not do.
_HEAD = """
import ray, sys

started = ray.init(
    address="local",  # not one that somebody else has started here
    num_cpus=int(sys.argv[1]),
    include_dashboard=False,
    log_to_driver=False,
    logging_level="ERROR",
)
print(started.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@final
class ProcessActor:
    """One process of one machine. Its guard outlives it, and ends the process then."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._process: GuardedProcess | None = None
        self._ports: list[HeldPort] = []
        self._code: concurrent.futures.Future[int] = concurrent.futures.Future()

    def machine(self) -> tuple[str, str]:
        """The identifier of the machine, and its address."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, ray.util.get_node_ip_address()

    def free_port(self, host: str) -> int:
        """A port of this machine that is held for the process until this actor ends."""
        self._ports.append(HeldPort(host))
        return self._ports[-1].number

    def start(
        self,
        program: Sequence[str],
        variables: Mapping[str, str],
        folder: str | None,
        script: str | None,
        joined: bool = False,
    ) -> None:
        """Start the process."""
        where = folder or os.getcwd()
        if not os.path.isdir(where):
            raise FileNotFoundError(f"{where} is no folder of {socket.gethostname()}")
        if script and not os.path.isfile(os.path.join(where, script)):
            raise FileNotFoundError(
                f"{script} is not in {where} of {socket.gethostname()}"
            )
        kept = {k: v for k, v in os.environ.items() if k not in _NOT_HANDED_ON}
        command = [sys.executable, *program]
        # Ray blocks SIGINT in its workers (2.60), and a process inherits that.
        old = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            self._process = GuardedProcess(
                command,
                kept | dict(variables),
                "the process",
                self._guard,
                self._code.set_result,
                joined=joined,
                folder=where,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    def wait(self) -> int:
        """Wait for its end; its code as `subprocess` has it."""
        return self._code.result()

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the process returns, as of a `StartedProcess`."""
        return getattr(self._process, method)(*arguments)


@final
class MemoryActor:
    """A folder in the memory of a machine, which goes with this actor."""

    def __init__(self) -> None:
        self._folder, lock = child_process.memory_folder()
        self._guard = Guard(self._folder, lock=lock)

    def folder(self) -> str:
        return self._folder


@final
class RayCluster:
    """Ray, as this process is connected to it."""

    def __init__(
        self, address: str | None, cpus: int, working_dir: str | None = None
    ) -> None:
        self._head: subprocess.Popen[str] | None = None
        self._is_connected_here = False
        loaded = sys.modules.get("ray")
        if loaded is not None and loaded.is_initialized():
            if address or working_dir:
                raise ClusterError(
                    "This process is connected to Ray already, which is used where no "
                    "other address and no folder to copy are given."
                )
            self.ray: ModuleType = loaded
            return
        address = address or os.environ.get(RAY_ADDRESS, "")
        if not address:
            _choose_token()
        try:
            self.ray = importlib.import_module("ray")
        except ImportError as missing:
            raise MissingExtraError(
                "Ray is not installed, on which the processes should run. Install the "
                'extra: pip install "jaxstrategy[ray]"'
            ) from missing
        try:
            if not address:
                address = self._start_head(max(cpus, os.cpu_count() or 1))
            self._connect(address, working_dir)
        except BaseException:
            self.close()
            raise

    @property
    def is_own(self) -> bool:
        """Whether it was started for this, so that nobody will ever add machines."""
        return self._head is not None

    def machines(self) -> list[str]:
        """The identifiers of the machines that it has now."""
        return [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """End what was started and connected here; may be called twice."""
        if self._is_connected_here:
            self._is_connected_here = False
            self.ray.shutdown()
        if self._head is not None:
            assert self._head.stdin is not None
            self._head.stdin.close()
            self._head.wait()

    def _start_head(self, cpus: int) -> str:
        """Start a Ray that ends with this process; its address."""
        with tempfile.TemporaryFile() as said:
            self._head = subprocess.Popen(
                [sys.executable, "-P", "-c", _HEAD, str(cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C of a terminal does not end it
                text=True,
            )
            assert self._head.stdout is not None
            with self._head.stdout as printed:
                if address := printed.readline().strip():
                    return address
            self.close()
            said.seek(0)
            *_, last = ["", *said.read().decode(errors="replace").splitlines()]
            raise ClusterError(
                f"Ray does not start on this machine: {last}. Start one by `ray start "
                f"--head`, and give its address, or set {RAY_ADDRESS}."
            )

    def _connect(self, address: str, working_dir: str | None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self.ray.init(
                address=address,
                runtime_env={"working_dir": working_dir} if working_dir else None,
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            self.ray.exceptions.RayError,
        ) as error:
            first = str(error).strip().partition("\n")[0].rstrip(".")
            raise ClusterError(
                f"Ray at {address} does not answer: {first}. Is the address that of "
                f"its head, and has a Ray that asks for a token {_MODE}=token and "
                f"{_TOKEN} here as well?"
            ) from error
        self._is_connected_here = True
        if threading.current_thread() is threading.main_thread():
            # Ray takes it for itself; a job that saves its state then needs it.
            signal.signal(signal.SIGTERM, handler)


def _choose_token() -> None:
    """Have Ray ask for a token that only this process and that Ray know."""
    if _MODE in os.environ:
        return
    if sys.modules.get("ray") is not None:
        raise ClusterError(
            "Ray was imported before, and takes no new token then, so that none is "
            "started here. Connect first, by `ray.init()`, which will be used; or set "
            f"{RAY_ADDRESS}."
        )
    # Else it writes one to a file; it looks at these when it is imported.
    os.environ[_MODE] = "token"
    if not {_TOKEN, _TOKEN_PATH} & set(os.environ):
        os.environ[_TOKEN] = secrets.token_hex(32)


@final
class RayActors:
    """A placement group, and an actor in a bundle of it whenever one is wanted."""

    def __init__(
        self,
        cluster: RayCluster,
        bundles: Sequence[Mapping[str, float]],
        placement: str,
        wait: float,
        is_stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.ray = cluster.ray
        self._cluster = cluster
        self._lock = threading.Condition()
        self._asking = 0
        self._is_closed = False
        self._bundles = bundles
        self._actors: list[Any] = []
        for module in (child_process, sys.modules[__name__]):
            self.ray.cloudpickle.register_pickle_by_value(module)
        self._described = " and ".join(
            f"{with_noun(count, 'process')} with {_amounts(dict(kind))} each"
            for kind, count in Counter(tuple(each.items()) for each in bundles).items()
        )
        if cluster.is_own:  # what it has not now, it will never have
            there, needed = self.ray.cluster_resources(), Counter[str]()
            for bundle in bundles:
                needed.update(bundle)
            if any(there.get(name, 0) < number for name, number in needed.items()):
                raise NoRoomError(
                    f"This machine has no room for {self._described}: Ray finds "
                    f"{self._there()} here. Ask for less, or give the address of a "
                    "larger Ray."
                )
        self._group = self.ray.util.placement_group(
            [dict(bundle) for bundle in bundles], strategy=placement
        )
        try:
            self._wait(wait, placement, is_stopped, tell)
        except BaseException:
            self.close()
            raise

    def ask(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """The result of a method of an actor."""
        # Who asks Ray when this process is disconnected from it, starts another Ray
        # (2.60): so nobody does after `close`, which waits for those who do.
        with self._lock:
            self._check_open()
            self._asking += 1
        try:
            return self.ray.get(call(), timeout=seconds)
        finally:
            with self._lock:
                self._asking -= 1
                self._lock.notify_all()

    def tell(self, call: Callable[[], Any]) -> None:
        """Call `remote` of a method whose result nobody waits for."""
        with self._lock:
            if not self._is_closed:
                call()

    def start(self, bundle: int) -> Any:
        """A new `ProcessActor` in the bundle of this number, where none may be left."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = dict(self._bundles[bundle])
        made = self.ray.remote(ProcessActor).options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            resources=wanted,
            max_concurrency=_THREADS,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        )
        with self._lock:
            self._check_open()
            self._actors.append(actor := made.remote())
        return actor

    def end(self, actor: Any) -> None:
        """End an actor, and with it what is left of its process."""
        with self._lock:
            if actor in self._actors and not self._is_closed:
                self._actors.remove(actor)
                self.ray.kill(actor)

    def close(self) -> None:
        """End all actors and give the room back; may be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self.ray.is_initialized():
                return  # Ray itself ended them when this process disconnected
            for actor in self._actors:
                self.ray.kill(actor)
            self.ray.util.remove_placement_group(self._group)
            self._lock.wait_for(lambda: not self._asking, _END_SECONDS)

    def _check_open(self) -> None:
        if self._is_closed:
            raise self.ray.exceptions.RayError("all of them were ended")

    def _wait(
        self,
        seconds: float,
        placement: str,
        is_stopped: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        if self._group.wait(min(seconds, _QUIET_SECONDS)):
            return
        end = time.monotonic() + seconds - _QUIET_SECONDS
        if time.monotonic() < end:
            tell(f"waiting for room on Ray for {self._described}")
        while not self._group.wait(_LOOK_SECONDS):
            if is_stopped():
                raise ClusterError("The launcher was asked to stop.")
            if time.monotonic() > end:
                raise NoRoomError(
                    f"Ray has no room for {self._described} ({placement}). The "
                    f"cluster has {self._there()} in all, on "
                    f"{with_noun(len(self._cluster.machines()), 'machine')}; what "
                    "others use of that is not free. Ask for less, or wait longer."
                )

    def _there(self) -> str:
        names = {"CPU", "GPU"}.union(*self._bundles)
        there = self.ray.cluster_resources()
        return _amounts({name: there[name] for name in sorted(names & set(there))})


def _amounts(resources: Mapping[str, float]) -> str:
    amounts = [f"{number:g} {name}" for name, number in resources.items()]
    return ", ".join(amounts) or "nothing"


@final
class RayStartedProcess:
    """A process elsewhere. If its actor is lost, it counts as killed."""

    def __init__(
        self, actors: RayActors, actor: Any, name: str, ended: Callable[[int], None]
    ) -> None:
        self.killed = False
        self._actors = actors
        self._errors = actors.ray.exceptions
        self._actor = actor
        self._is_over = False
        self._has_told = False
        self._waiter = threading.Thread(
            target=self._wait, args=(ended,), name=f"end of {name}", daemon=True
        )
        self._waiter.start()

    def read(self, stream: Stream) -> bytes:
        try:
            return self._asked(lambda: self._actor.call.remote("read", stream))
        except self._errors.RayError as error:
            return self._last_words(error) if stream == 1 else b""

    def send(self, number: int) -> None:
        self._actors.tell(lambda: self._actor.call.remote("send", number))

    def kill(self) -> None:
        self.killed |= not self._is_over
        self._actors.tell(lambda: self._actor.call.remote("kill"))

    def close(self) -> None:
        if threading.current_thread() is not self._waiter:
            self._waiter.join()
        try:
            self._actors.ask(lambda: self._actor.call.remote("close"), _END_SECONDS)
        except self._errors.RayError:
            return  # it is gone, and the guard of its machine has ended the rest

    def _wait(self, ended: Callable[[int], None]) -> None:
        try:
            code = self._asked(lambda: self._actor.wait.remote())
        except self._errors.RayError:
            code = -signal.SIGKILL
        self._is_over = True
        ended(code)

    def _asked(self, call: Callable[[], Any]) -> Any:
        """What a method of the actor returns; asks again while it cannot be reached."""
        end = time.monotonic() + _UNAVAILABLE_SECONDS
        while True:
            try:
                return self._actors.ask(call)
            except self._errors.ActorUnavailableError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def _last_words(self, error: Exception) -> bytes:
        """The last line of its output, which says why it was lost; none after that."""
        if self._has_told:
            return b""
        self._has_told = True
        *_, why = str(error).strip().splitlines()
        return f"jaxstrategy.launch: this process was lost: {why.strip()}\n".encode()


@final
class RayMachines:
    """Those machines on which Ray finds room."""

    def __init__(self, options: Options, events: Events) -> None:
        self._options = options
        self._events = events
        cpus = math.ceil(options.processes * options.ray_cpus)
        self._cluster = RayCluster(options.ray_address, cpus, options.ray_working_dir)
        self._actors: RayActors | None = None
        self._memories: dict[str, Any] = {}  # an actor of each machine

    def start(
        self, processes: int, attempt: Mapping[str, str], room_seconds: float
    ) -> dict[int, StartedProcess]:
        end = time.monotonic() + self._options.ray_wait
        errors = self._cluster.ray.exceptions
        while True:
            try:
                return self._started(processes, attempt, room_seconds)
            # A machine went as soon as it was found: look for room without it.
            except (errors.RayActorError, errors.ActorUnschedulableError) as error:
                self.release()
                if time.monotonic() > end or not self._events.empty():
                    raise NoRoomError(
                        f"Ray does not start processes: {error}"
                    ) from error
                time.sleep(_LOOK_SECONDS)

    def release(self) -> None:
        if self._actors is not None:
            self._actors.close()
            self._actors = None

    def close(self) -> None:
        self.release()
        for actor in self._memories.values():
            self._cluster.ray.kill(actor)
        self._cluster.close()

    def _started(
        self, processes: int, attempt: Mapping[str, str], room_seconds: float
    ) -> dict[int, StartedProcess]:
        options, get = self._options, self._cluster.ray.get
        bundle = {
            "CPU": options.ray_cpus,
            "GPU": options.gpus_per_process or 0,
            **dict(options.ray_resource or ()),
        }
        actors = self._actors = RayActors(
            self._cluster,
            [{name: number for name, number in bundle.items() if number}] * processes,
            options.ray_placement,
            room_seconds,
            lambda: not self._events.empty(),
            lambda text: print(f"jaxstrategy.launch: {text}", file=sys.stderr),
        )
        made = [actors.start(number) for number in range(processes)]
        hosts = dict[str, str]()  # by the identifier of the machine
        placed: dict[str, list[Any]] = {}
        places = get([actor.machine.remote() for actor in made])
        for actor, (machine, host) in zip(made, places, strict=True):
            hosts[machine] = host
            placed.setdefault(machine, []).append(actor)
        folders = get([self._memory_of(machine).folder.remote() for machine in placed])
        (first, *_), *others = placed.values()
        # Process 0 listens for no other machine, if there is none.
        host = next(iter(hosts.values())) if others else LOOPBACK
        coordinator = address_of(host, get(first.free_port.remote(host)))
        # The processes of one machine have ranks that follow each other.
        ranked = [
            (local_rank, actor, folder)
            for local, folder in zip(placed.values(), folders, strict=True)
            for local_rank, actor in enumerate(local)
        ]
        # What all get of this process's environment, and of the options.
        named = options.ray_env or ()
        shared = {
            name: value
            for name, value in os.environ.items()
            if name in named
            or (name.startswith(HANDED_ON) and name not in _NOT_HANDED_ON)
        } | JobTask("process", 0).variables(options)
        script = None if options.module else options.program[0]
        where = None if options.ray_working_dir is not None else os.getcwd()
        try:
            for rank, (local_rank, actor, folder) in enumerate(ranked):
                own = place(options, attempt, coordinator, rank, local_rank)
                own[MEMORY] = folder
                get(actor.start.remote(options.program, shared | own, where, script))
        except FileNotFoundError as error:
            raise ClusterError(
                f"{getattr(error, 'cause', error)}. All machines need the folder in "
                "which the launcher was started, by a file system that they share; or "
                "--ray-working-dir copies one to them."
            ) from error

        def watched(rank: int, actor: Any) -> StartedProcess:
            def ended(code: int) -> None:
                self._events.put(Ended(rank, code))

            return RayStartedProcess(actors, actor, f"rank {rank}", ended)

        return {rank: watched(rank, actor) for rank, (_, actor, _) in enumerate(ranked)}

    def _memory_of(self, machine: str) -> Any:
        """The actor that has the folder of a machine for as long as the job lasts."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if machine not in self._memories:
            made = self._cluster.ray.remote(MemoryActor).options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
            )
            self._memories[machine] = made.remote()
        return self._memories[machine]
