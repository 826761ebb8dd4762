"""The machines of a Ray cluster that have room for the processes of a job."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from jaxstrategy._errors import ClusterError
from jaxstrategy.launch import _environment
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._machines import AbstractMachines
from jaxstrategy.launch._ray_actors import RayActors
from jaxstrategy.launch._ray_cluster import RayCluster
from jaxstrategy.launch._ray_options import HANDED_ON, RayOptions
from jaxstrategy.launch._ray_process import RayStartedProcess
from jaxstrategy.launch._started_process import AbstractStartedProcess
from jaxstrategy.launch._workers import Ended, Events
from jaxstrategy.processes._channel import address_of
from jaxstrategy.processes._secret import Secret


@final
class RayMachines(AbstractMachines):
    """Those machines on which Ray finds room.

    Args:
      events: which hear of the end of each process, and say that the job should stop.

    Raises:
      MissingExtraError: Ray is not installed.
      ClusterError: it does not answer.
    """

    def __init__(self, options: Options, ray: RayOptions, events: Events) -> None:
        self._options = ray
        self._events = events
        self._cluster = RayCluster(
            ray.address, math.ceil(options.processes * ray.cpus), ray.working_dir
        )
        self._actors: RayActors | None = None

    def start(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> dict[int, AbstractStartedProcess]:
        end = time.monotonic() + self._options.wait
        lost = self._cluster.ray.exceptions.RayActorError
        while True:
            try:
                return self._started(options, processes, attempt, secret)
            except lost as error:  # a machine went as soon as it was found
                self.release()
                if time.monotonic() > end or not self._events.empty():
                    raise ClusterError(
                        f"Ray does not start processes: {error}"
                    ) from error

    def release(self) -> None:
        if self._actors is not None:
            self._actors.close()
            self._actors = None

    def close(self) -> None:
        self.release()
        self._cluster.close()

    def _started(
        self, options: Options, processes: int, attempt: int, secret: Secret
    ) -> dict[int, AbstractStartedProcess]:
        self._actors = RayActors(
            self._cluster,
            [_bundle(options, self._options)] * processes,
            self._options.placement,
            self._options.wait,
            lambda: not self._events.empty(),
            lambda text: print(f"jaxstrategy.launch: {text}", file=sys.stderr),
        )
        placed = self._placed(self._actors, processes)
        coordinator = self._coordinator(placed)
        seen = Counter[str]()
        for rank, (actor, machine, _) in enumerate(placed):
            own = _environment.place(
                options, rank, seen[machine], processes, coordinator, attempt, secret
            )
            seen[machine] += 1
            self._start(actor, options, self._variables(options) | own)
        return {
            rank: self._watched(rank, actor) for rank, (actor, *_) in enumerate(placed)
        }

    def _watched(self, rank: int, actor: Any) -> RayStartedProcess:
        assert self._actors is not None
        return RayStartedProcess(
            self._actors,
            actor,
            f"rank {rank}",
            lambda code: self._events.put(Ended(rank, code)),
        )

    def _placed(self, actors: RayActors, processes: int) -> list[_PlacedActor]:
        """The actors, those of one machine one after the other."""
        made = [actors.start(number) for number in range(processes)]
        machines = self._cluster.ray.get([actor.machine.remote() for actor in made])
        placed = [
            _PlacedActor(actor, *found)
            for actor, found in zip(made, machines, strict=True)
        ]
        order = list(dict.fromkeys(one.machine for one in placed))
        return sorted(placed, key=lambda one: order.index(one.machine))

    def _coordinator(self, placed: Sequence[_PlacedActor]) -> str:
        """Where process 0 listens: for no other machine, if there is none."""
        first = placed[0]
        alone = all(one.machine == first.machine for one in placed)
        host = "127.0.0.1" if alone else first.host
        port = self._cluster.ray.get(first.actor.free_port.remote(host))
        return address_of(host, port)

    def _variables(self, options: Options) -> dict[str, str]:
        """What all processes get of this one's environment, and of the options."""
        named = set(self._options.variables)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(HANDED_ON) or name in named
        }
        return kept | _environment.common(options, os.environ)

    def _start(self, actor: Any, options: Options, variables: dict[str, str]) -> None:
        copied = self._options.working_dir is not None
        script = None if options.module else options.program[0]
        folder = None if copied else os.getcwd()
        try:
            self._cluster.ray.get(
                actor.start.remote(options.program, variables, folder, script)
            )
        except FileNotFoundError as error:
            raise ClusterError(
                f"{getattr(error, 'cause', error)}. All machines need the folder in "
                "which the launcher was started, by a file system that they share; or "
                "--ray-working-dir copies one to them."
            ) from error


class _PlacedActor(NamedTuple):
    actor: Any
    machine: str  # Ray's identifier
    host: str


def _bundle(options: Options, ray: RayOptions) -> dict[str, float]:
    bundle = {
        "CPU": ray.cpus,
        "GPU": options.gpus_per_process or 0,
        **dict(ray.resources),
    }
    return {name: number for name, number in bundle.items() if number}
