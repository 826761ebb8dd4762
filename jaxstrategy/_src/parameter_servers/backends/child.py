"""The program of a child: runs as a file, and imports the package when it knows where.

Its arguments are what it is to do, and its name for those who list processes.
"""

from __future__ import annotations

import json
import signal
import sys
import threading


def main() -> None:
    """Serve a coordinator at an address, until a signal says that it is over."""
    task = json.loads(sys.argv[1])
    sys.path[:] = task["path"]
    if task["job"] == "ps":
        # Without JAX, which takes a second.
        from jaxstrategy._src.parameter_servers.store import host_of_server

        host = host_of_server()
    else:
        import jax

        from jaxstrategy._src.parameter_servers.server import worker_host

        jax.local_devices()  # who calls waits for an answer, which this would delay
        host = worker_host(None)
    host.listen(task["address"])
    # Before, the signal ends it at once: one that is starting has nothing to end.
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    over.wait()


if __name__ == "__main__":
    main()
