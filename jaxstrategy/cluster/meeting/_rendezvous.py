"""The meeting of a job's processes, before JAX is told of any of them.

JAX answers most mistakes here with a crash or a long silence: a coordinator port that
is taken is a segmentation fault, a process that never comes an abort of all others
after `initialization_timeout`, both without a Python error (measured with 0.10 and
0.12). So they meet first, at the same address, by a protocol of our own: process 0
listens, the others call, prove that they know the job's secret (`_channel`) and say who
they are, and process 0 tells all of them the same verdict. The connections stay open;
`_hub` goes on with them.
"""

from __future__ import annotations

import errno
import socket
import time

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.connections import (
    _secret,
    _wire,
)
from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.meeting import _other_process
from jaxstrategy.cluster.meeting._first_process import Host
from jaxstrategy.cluster.meeting._member import (
    Meeting,
    facts,
)
from jaxstrategy.cluster.meeting._other_process import Guest


def meet(
    index: int,
    count: int,
    coordinator: str,
    timeout_seconds: float = 300,
    told: Message | None = None,
    bind_address: str | None = None,
    secret: Secret | None = None,
    listener: socket.socket | None = None,
) -> Meeting:
    """Wait until all processes have come, and agree that they are the right ones.

    Args:
      index: this process's id, from 0 to `count - 1`.
      count: how many processes there are.
      coordinator: where process 0 listens, `"host:port"`.
      timeout_seconds: how long to wait for the others.
      told: what this process says of itself; `facts()` by default.
      bind_address: where process 0 listens if not at the coordinator's host, for
        example `"0.0.0.0"` behind a translated address.
      secret: what all processes of the job know; by default what
        `JAXSTRATEGY_CLUSTER_SECRET` says.
      listener: of process 0, if it listens there already.

    Raises:
      ClusterError: on every process with the same text: ids given twice or out of
        range, different numbers of processes, different versions, processes that did
        not come. On those that it concerns: the port is used by something else, the
        coordinator cannot be reached, or has another secret. There is no secret, and
        other hosts reach the address.
      ValueError: the address, the id, the count or the secret cannot be right.
    """
    host, _ = _wire.endpoint(coordinator)
    if count < 1 or index < 0:
        raise ValueError(
            f"The process's id was {index!r} of {count!r}; ids from 0 to the number "
            "of processes less one were wanted."
        )
    secret = Secret.of_environment() if secret is None else secret
    _secret.check(secret, host if index or bind_address is None else bind_address)
    hello = {"index": index, "count": count, **(facts() if told is None else told)}
    end = time.monotonic() + timeout_seconds
    if index != 0:
        return Guest(hello, coordinator, end, timeout_seconds, secret).join()
    try:
        if listener is None:
            host, port = _wire.endpoint(coordinator)
            listener = listening((bind_address or host, port))
    except OSError as error:
        return _refused_port(error, hello, coordinator, secret)
    with listener:
        return Host(listener, hello, coordinator, end, timeout_seconds, secret).meet()


def listening(endpoint: tuple[str, int]) -> socket.socket:
    """A socket that listens at a host and port, of which 0 is a free one."""
    family, kind, _, _, address = socket.getaddrinfo(
        *endpoint, type=socket.SOCK_STREAM
    )[0]
    listener = socket.socket(family, kind)
    try:
        # So that JAX can use the port at once when we have left it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        # Who called may hang up before `accept`, which would wait for the next one.
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _refused_port(
    error: OSError, hello: Message, coordinator: str, secret: Secret
) -> Meeting:
    """Process 0 cannot listen: a second process 0, or another program, does.

    A second process 0 joins the first one, which tells all of both.
    """
    if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        end = time.monotonic() + _other_process.CLOSED_SECONDS
        guest = Guest(hello, coordinator, end, 0, secret)
        try:
            return guest.join()
        except ClusterError:
            if guest.was_greeted:
                raise
    host, port = _wire.endpoint(coordinator)
    if error.errno == errno.EADDRINUSE:
        why = (
            f"port {port} is in use by another program. Choose a free port for the "
            "coordinator, the same for all processes, or end that program"
        )
    elif error.errno == errno.EADDRNOTAVAIL:
        why = (
            f"this host, {socket.gethostname()}, has no address {host}. The "
            "coordinator's address must be that of the host of process 0"
        )
    elif isinstance(error, socket.gaierror):
        why = f"the name {host!r} has no address ({error.strerror})"
    else:
        why = f"{error.strerror or error}"
    raise ClusterError(
        f"Process 0 cannot listen at the coordinator's address {coordinator}: {why}."
    ) from error
