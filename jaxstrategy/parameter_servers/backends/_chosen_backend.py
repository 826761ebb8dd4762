"""The backend that a user asks for: `chosen_backend`."""

from __future__ import annotations

from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.parameter_servers._abstract_worker import AbstractWorkerBackend
from jaxstrategy.parameter_servers.backends._local_processes import LocalProcesses
from jaxstrategy.parameter_servers.backends._threads import Threads
from jaxstrategy.text._shown import shown


def chosen_backend(
    resolver: ClusterResolver | None,
    workers: int | None,
    parameter_servers: int | None,
    backend: str | AbstractWorkerBackend | None,
) -> AbstractWorkerBackend:
    """What starts the workers and servers.

    Raises:
      ValueError: it is not said which, or twice.
      TypeError: it is no backend.
    """
    if isinstance(backend, AbstractWorkerBackend):
        return backend
    if backend in (None, "processes") and resolver is None and workers is not None:
        return LocalProcesses(
            workers, 1 if parameter_servers is None else parameter_servers
        )
    if backend == "threads":
        return Threads(workers or 1, parameter_servers or 1)
    raise TypeError(
        f"`backend` was {shown(backend)}; 'processes', 'threads', 'ray' or an object "
        "that starts workers was wanted."
    )
