"""Someone who has connected to process 0 before all have met."""

from __future__ import annotations

import socket
import time
from typing import final

from jaxstrategy.cluster.connections import _wire
from jaxstrategy.cluster.connections._channel import (
    REFUSAL,
    ForgedError,
    Greeting,
)
from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._secret import Secret
from jaxstrategy.cluster.connections._wire import Connection
from jaxstrategy.cluster.meeting._meeting_messages import is_hello

HELLO_SECONDS = 5.0
"""The time that a stranger may stay connected."""


@final
class Caller:
    """Someone who has connected: a stranger until it proves to be one of the job.

    Attributes:
      hello: what it says of itself, None while it is a stranger.
      is_refused: whether it speaks our protocol and does not know the secret.
      deadline: when it is hung up on if it is a stranger still.
    """

    def __init__(self, sock: socket.socket, secret: Secret) -> None:
        self.sock = sock
        self.hello: Message | None = None
        self.is_refused = False
        self.deadline = time.monotonic() + HELLO_SECONDS
        self.connection: Connection | None = None
        self._greeting = Greeting(secret, is_host=True)

    def read(self) -> bool:
        """Take in what was sent; False when it is none of us, or has gone."""
        try:
            self._take(_wire.received(self.sock))
        except ForgedError:
            self._refuse()
            return False
        except (OSError, EOFError, ValueError):
            return False
        return True

    def _take(self, received: bytes) -> None:
        if self.connection is None:
            channel = self._greeting.add(received)
            if channel is None:
                return
            self.connection = Connection(self.sock, channel)
            self.sock.sendall(self._greeting.own)
        else:
            self.connection.channel.add(received)
        for message in self.connection.channel.messages():
            if self.hello is not None or not is_hello(message):
                raise ValueError("this is no hello")
            self.hello = message

    def _refuse(self) -> None:
        self.is_refused = self.hello is None
        try:
            self.sock.sendall(REFUSAL)
        except OSError:
            pass  # it is not waiting for it

    def tell(self, message: Message) -> None:
        """Say something to a process that has said who it is."""
        try:
            if self.connection is not None:
                self.connection.send(message)
        except OSError:
            pass  # its own deadline tells it

    def close(self) -> None:
        """Hang up."""
        if self.connection is not None:
            self.connection.close()
        self.sock.close()
