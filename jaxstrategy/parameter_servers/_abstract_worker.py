"""The interface of a worker, and of what starts workers and servers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.parameter_servers._abstract_server import AbstractServer
from jaxstrategy.parameter_servers._shipped_program import Call, ShippedProgram

Builder = Callable[..., object]
"""Makes a resource of a worker: of its index, and of other resources of it."""


class AbstractWorker(abc.ABC):
    """One life of a worker: when it is lost, its backend starts another one.

    One thread calls it at a time, except for `kill`. Methods raise `WorkerLost` when it
    is gone, and otherwise what the user's code raised there, with the worker's
    traceback as a note.
    """

    @abc.abstractmethod
    def define(self, program: ShippedProgram) -> None:
        """Get ready to run a program; one that is known already costs nothing."""

    @abc.abstractmethod
    def build(self, resource: int, builder: Builder, uses: Sequence[int] = ()) -> None:
        """Make a resource: a dataset, an iterator over one, a variable of its own."""

    @abc.abstractmethod
    def release(self, resources: Sequence[int]) -> None:
        """Forget resources; those that are not there are none."""

    @abc.abstractmethod
    def call(self, call: Call) -> list[np.ndarray]:
        """The results of a program, once all that it pushes is on the servers."""

    @abc.abstractmethod
    def own(self, variable: int) -> np.ndarray:
        """What one of the worker's own variables holds."""

    @abc.abstractmethod
    def kill(self) -> None:
        """End it now, whatever it is doing; callable from any thread."""


class AbstractWorkerBackend(abc.ABC):
    """Starts the workers and servers of one strategy, and ends them."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers there are, lost ones included."""

    @property
    @abc.abstractmethod
    def replicas_per_worker(self) -> int:
        """How many devices each worker has."""

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms of these devices, as `jax.export` calls them."""
        return ("cpu",)

    @property
    @abc.abstractmethod
    def servers(self) -> Sequence[AbstractServer]:
        """The parameter servers, in their order."""

    @property
    def can_restart_servers(self) -> bool:
        """Whether `restart_servers` works."""
        return False

    def restart_servers(self, servers: Sequence[int]) -> None:
        """Start lost servers again, which then have nothing."""
        raise ParameterServerLost(
            f"Parameter servers {list(servers)} are lost, and a {type(self).__name__} "
            "cannot start them again."
        )

    @abc.abstractmethod
    def start(self, worker: int, incarnation: int) -> AbstractWorker:
        """Start a worker, or wait for the one that somebody else starts."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all that it has started; may be called twice."""
