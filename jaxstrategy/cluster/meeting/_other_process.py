"""The meeting of all processes, as all but process 0 see it."""

from __future__ import annotations

import contextlib
import errno
import socket
import time

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.connections import (
    _secret,
    _wire,
)
from jaxstrategy.cluster.connections._channel import (
    Channel,
    ForgedError,
    Greeting,
    RefusedError,
)
from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.connections._wire import Connection
from jaxstrategy.cluster.meeting._meeting_messages import is_word
from jaxstrategy.cluster.meeting._member import Meeting, Member

_VERDICT_SECONDS = 5.0  # how much later than it said process 0 may answer
CLOSED_SECONDS = 3.0
"""The time after which a server that hangs up counts as another program's."""
ANSWER_SECONDS = 15.0
"""The time for an answer; process 0 does nothing else while it listens."""


class Guest:
    """The meeting, as each process but process 0 sees it: a guest calls the host.

    Args:
      hello: the facts that this process tells of itself.
      coordinator: the address of process 0, `host:port`.
      end: when to give up, of `time.monotonic()`.
      timeout_seconds: the time until then, for messages.
      secret: of the job.

    Attributes:
      was_greeted: whether a process of some jaxstrategy job has answered.
    """

    def __init__(
        self,
        hello: Message,
        coordinator: str,
        end: float,
        timeout_seconds: float,
        secret: Secret,
    ) -> None:
        self._hello = hello
        self._coordinator = coordinator
        self._end = end
        self._timeout_seconds = timeout_seconds
        self._secret = secret
        self._hung_up_since: float | None = None
        self.was_greeted = False

    def join(self) -> Meeting:
        """Call process 0 until it answers, then wait for its verdict."""
        pause, why = 0.02, "it was not called"
        while time.monotonic() < self._end:
            try:
                sock = self._called()
            except OSError as error:
                why = error.strerror or str(error)
            else:
                try:
                    return self._met_over(sock)
                except _HungUp:
                    why = "it closes the connection"
            time.sleep(min(pause, max(0.0, self._end - time.monotonic())))
            pause = min(2 * pause, 0.3)
        raise ClusterError(
            f"Process {self._hello['index']} (host {self._hello['host']}) could not "
            f"reach process 0 at the coordinator's address {self._coordinator} within "
            f"{self._timeout_seconds:g} s: {why}. Is process 0 running, is this the "
            "address of its host, and does no firewall stand between them?"
        )

    def _called(self) -> socket.socket:
        left = max(0.05, min(2.0, self._end - time.monotonic()))
        sock = socket.create_connection(_wire.endpoint(self._coordinator), left)
        # While nobody listens, a call from this very port reaches itself.
        if sock.getsockname() == sock.getpeername():
            sock.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        _wire.tune(sock)
        return sock

    def _met_over(self, sock: socket.socket) -> Meeting:
        """The meeting, or an error and no connection."""
        with contextlib.ExitStack() as unless_met:
            unless_met.callback(sock.close)
            connection = Connection(sock, self._greet(sock))
            meeting = self._met(connection)
            unless_met.pop_all()
            return meeting

    def _greet(self, sock: socket.socket) -> Channel:
        """Greet, and read the answer; the channel that both make."""
        end = min(self._end, time.monotonic() + ANSWER_SECONDS)
        greeting, channel = Greeting(self._secret, is_host=False), None
        try:
            sock.sendall(greeting.own)
            while channel is None:
                channel = greeting.add(_wire.received(sock, end))
        except TimeoutError as error:
            # The kernel accepts calls for a process that is stopped.
            does = "accepts calls and does not answer (or process 0 is stopped)"
            raise self._foreign(does) from error
        except (EOFError, OSError) as error:
            # Process 0 may be about to listen again; nothing of ours hangs up for long.
            now = time.monotonic()
            self._hung_up_since = self._hung_up_since or now
            if now - self._hung_up_since > CLOSED_SECONDS:
                raise self._foreign("closes the connection") from error
            raise _HungUp from error
        except ValueError as error:
            raise self._foreign("does not speak our protocol") from error
        self.was_greeted, self._hung_up_since = True, None
        return channel

    def _met(self, connection: Connection) -> Meeting:
        message = self._verdict(connection)
        if message["verdict"]:
            raise ClusterError(message["verdict"])
        members = tuple(Member(*row) for row in message["members"])
        connection.sock.settimeout(None)
        return Meeting(self._hello["index"], members, {0: connection})

    def _verdict(self, connection: Connection) -> Message:
        end = self._end
        try:
            connection.send(self._hello)
            while True:
                message = connection.receive(end)
                if not is_word(message, self._hello["count"]):
                    raise ValueError("process 0 says something else")
                if "verdict" in message:
                    return message
                end = max(self._end, time.monotonic() + message["seconds"])
                end += _VERDICT_SECONDS
        except (ForgedError, RefusedError) as error:
            raise self._unproved() from error
        except (EOFError, OSError, ValueError) as error:
            gone = isinstance(error, EOFError | ConnectionError)
            if gone and not connection.channel.is_proved:
                raise _HungUp from error  # to make room, when too many strangers call
            raise ClusterError(
                f"Process 0 at {self._coordinator} "
                + ("ended" if gone else "stopped answering")
                + " before all processes had come. Look at its own output."
            ) from error

    def _unproved(self) -> ClusterError:
        variable = _secret.VARIABLE
        own = "has one" if self._secret else "has none"
        return ClusterError(
            f"The process that listens at the coordinator's address "
            f"{self._coordinator} has another {variable} than process "
            f"{self._hello['index']} (host {self._hello['host']}), which {own}. Give "
            "all processes of the job the same, and each job a port of its own."
        )

    def _foreign(self, does: str) -> ClusterError:
        return ClusterError(
            f"Something that is not process 0 of a jaxstrategy job listens at the "
            f"coordinator's address {self._coordinator}: it {does}. The port is in use "
            "by another program: choose a free one, the same for all processes."
        )


class _HungUp(Exception):
    """The connection was closed before process 0 had proved to be one of the job."""
