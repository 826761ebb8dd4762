"""Chooses the backend of a strategy from what the user gave."""

from __future__ import annotations

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.cluster.resolvers.environment import (
    VARIABLE as TF_CONFIG,
    TFConfigClusterResolver,
)
from jaxstrategy._src.parameter_servers.backends.cluster_tasks import (
    ClusterTasks,
    is_for_servers,
)
from jaxstrategy._src.parameter_servers.backends.local_processes import LocalProcesses
from jaxstrategy._src.parameter_servers.backends.ray_processes import RayProcesses
from jaxstrategy._src.parameter_servers.backends.threads import Threads
from jaxstrategy._src.parameter_servers.protocol import AbstractWorkerBackend
from jaxstrategy._src.text.shown import listed, shown


def chosen_backend(
    resolver: ClusterResolver | None,
    workers: int | None,
    parameter_servers: int | None,
    backend: str | AbstractWorkerBackend | None,
) -> AbstractWorkerBackend:
    """What starts the workers and servers."""
    if isinstance(backend, AbstractWorkerBackend):
        _check_said_once(resolver, workers, parameter_servers, "`backend` is an object")
        return backend
    if backend == "threads":
        return Threads(workers or 1, parameter_servers or 1)
    if backend == "ray":
        if workers is None or resolver is not None:
            raise ValueError(
                "backend='ray' starts workers and parameter servers by itself: say how "
                "many, as in workers=4, parameter_servers=2, and give no cluster."
            )
        return RayProcesses(workers, parameter_servers or 1)
    if backend not in (None, "processes"):
        raise TypeError(
            f"`backend` was {shown(backend)}; 'processes', 'threads', 'ray' or an "
            "object that starts workers was wanted."
        )
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"`cluster_resolver` was {shown(resolver)}; one of "
            "`jaxstrategy.cluster_resolver` was wanted, such as a "
            "`SimpleClusterResolver`."
        )
    resolver = resolver or _of_environment()
    if resolver is None and workers is not None:
        servers = 1 if parameter_servers is None else parameter_servers
        return LocalProcesses(workers, servers)
    _check_said_once(None, workers, parameter_servers, "there is a cluster")
    return ClusterTasks(resolver or TFConfigClusterResolver())


def _of_environment() -> ClusterResolver | None:
    """TF_CONFIG, if it describes a cluster with parameter servers."""
    resolver = TFConfigClusterResolver()
    return resolver if is_for_servers(resolver.cluster_spec()) else None


def _check_said_once(
    resolver: ClusterResolver | None,
    workers: int | None,
    parameter_servers: int | None,
    how: str,
) -> None:
    given = {
        "cluster_resolver": resolver,
        "workers": workers,
        "parameter_servers": parameter_servers,
    }
    names = [f"`{name}`" for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"{how[0].upper()}{how[1:]}, which says which workers and parameter "
            f"servers there are, and {listed(names, 3)} was given too. Leave one out; "
            f"a cluster may be that of {TF_CONFIG} in the environment."
        )
