"""Actors on a Ray cluster, each with room for one process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jaxstrategy._errors import ClusterError
from jaxstrategy.launch import _guarded_process, _ray_actor, _started_process
from jaxstrategy.launch._ray_actor import THREADS, ProcessActor
from jaxstrategy.launch._ray_cluster import RayCluster
from jaxstrategy.text._units import with_noun

_QUIET_SECONDS = 2.0  # on a free cluster there is room within 10 ms
_END_SECONDS = 10.0  # until those who ask hear that an actor was ended
_LOOK_SECONDS = 0.2  # between looks whether there is room, or a reason to stop


@final
class RayActors:
    """A placement group, and an actor in a bundle of it whenever one is wanted.

    Args:
      bundles: the resources of each process.
      placement: how machines are chosen, in Ray's words.
      wait: seconds to wait for room.
      is_stopped: whether to wait no longer.
      tell: what is said if that takes a while.

    Attributes:
      ray: the module.

    Raises:
      ClusterError: there is no room.
    """

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
        for module in (_guarded_process, _ray_actor, _started_process):
            self.ray.cloudpickle.register_pickle_by_value(module)
        if cluster.is_own:
            self._check_own()
        self._group = self.ray.util.placement_group(
            [dict(bundle) for bundle in bundles], strategy=placement
        )
        try:
            self._wait(wait, placement, is_stopped, tell)
        except BaseException:
            self.close()
            raise

    def ask(self, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """The result of a method of an actor.

        Whoever asks Ray when this process is disconnected from it, starts another Ray
        (2.60): so nobody does after `close`, and that waits for those who do.

        Args:
          call: calls `remote` of the method.
          seconds: the time for the result; None: any.

        Raises:
          RayError: the actor is lost, the time is over, or all actors were ended.
        """
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
        """A new `ProcessActor` in the bundle of this number, where none may be left.

        Raises:
          RayError: all actors were ended.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wanted = dict(self._bundles[bundle])
        made = self.ray.remote(ProcessActor).options(
            num_cpus=wanted.pop("CPU", 0),
            num_gpus=wanted.pop("GPU", 0),
            resources=wanted,
            max_concurrency=THREADS,
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
            tell(f"waiting for room on Ray for {self._described()}")
        while not self._group.wait(_LOOK_SECONDS):
            if is_stopped():
                raise ClusterError("The launcher was asked to stop.")
            if time.monotonic() > end:
                raise ClusterError(
                    f"Ray has no room for {self._described()} ({placement}). The "
                    f"cluster has {_amounts(self._there())} in all, on "
                    f"{with_noun(len(self._cluster.machines()), 'machine')}; what "
                    "others use of that is not free. Ask for less, or wait longer."
                )

    def _check_own(self) -> None:
        """Do not wait for what a Ray of this machine alone will never have."""
        there = self._there()
        needed = Counter[str]()
        for bundle in self._bundles:
            needed.update(bundle)
        if any(there.get(name, 0) < number for name, number in needed.items()):
            raise ClusterError(
                f"This machine has no room for {self._described()}: Ray finds "
                f"{_amounts(there)} here. Ask for less, or give the address of a "
                "larger Ray."
            )

    def _described(self) -> str:
        kinds = Counter(tuple(bundle.items()) for bundle in self._bundles)
        return " and ".join(
            f"{with_noun(count, 'process')} with {_amounts(dict(kind))} each"
            for kind, count in kinds.items()
        )

    def _there(self) -> dict[str, float]:
        names = {"CPU", "GPU"}.union(*self._bundles)
        there = self.ray.cluster_resources()
        return {name: there[name] for name in sorted(names & set(there))}


def _amounts(resources: Mapping[str, float]) -> str:
    return (
        ", ".join(f"{number:g} {name}" for name, number in resources.items())
        or "nothing"
    )
