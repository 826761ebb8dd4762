"""Parameter servers of this process, at addresses as a cluster has them."""

import contextlib
import socket

import jaxstrategy as js
from jaxstrategy._src.parameter_servers.server import ServedTask


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def servers_of(workers):
    """The tasks of a cluster of two servers, which run here, and some workers."""
    tasks = {
        job: [f"127.0.0.1:{free_port()}" for _ in range(count)]
        for job, count in (("worker", workers), ("ps", 2))
    }
    spec = js.cluster_resolver.ClusterSpec(tasks)
    servers = [ServedTask(spec, "ps", index) for index in range(2)]
    for server in servers:
        server.start()
    yield tasks
    for server in servers:
        server.close()
