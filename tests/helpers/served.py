"""Parameter servers of this process, at addresses as a cluster has them."""

import contextlib

from helpers.sockets import free_address

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.server import ServedTask


@contextlib.contextmanager
def servers_of(workers):
    """The tasks of a cluster of two servers, which run here, and some workers."""
    tasks = {
        job: [free_address() for _ in range(count)]
        for job, count in (("worker", workers), ("ps", 2))
    }
    spec = js.cluster_resolver.ClusterSpec(tasks)
    servers = [ServedTask(spec, "ps", index) for index in range(2)]
    for server in servers:
        server.start()
    yield tasks
    for server in servers:
        server.close()
