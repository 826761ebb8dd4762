"""What stands at the other end: the protocol once more, by hand, to break it with."""

import contextlib
import hmac
import json
import os
import socket
import struct
import time

GREETING = b"jaxstrategy-meeting/2\n"
REFUSAL = b"\xff\xff\xff\xff"


def call(address, seconds=10):
    """A connection to an address, as soon as somebody listens there."""
    host, port = address.rsplit(":", 1)
    end = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host, int(port)), 2)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "nobody listens"
            time.sleep(0.01)


def read(sock, count, seconds=10):
    """So many bytes within the time, or fewer if the other side hangs up."""
    end = time.monotonic() + seconds
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < count:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
            if not (more := sock.recv(count - len(data))):
                break
            data += more
    return data


def has_hung_up(sock, seconds=10):
    """Whether the other side hangs up, whatever it says before."""
    try:
        read(sock, 1 << 20, seconds)
    except TimeoutError:
        return False
    return True


class Peer:
    """One end of a connection, with the nonces of both."""

    def __init__(self, sock, secret="", is_host=False, nonce=None):
        self.sock = sock
        self.secret = secret.encode()
        self.is_host = is_host
        self.nonce = os.urandom(32) if nonce is None else nonce
        self.sent = self.received = 0

    def greet(self):
        self.sock.sendall(GREETING + self.nonce)
        return self

    def hear(self):
        """The other side's greeting."""
        replies = read(self.sock, len(GREETING) + 32)
        assert replies[: len(GREETING)] == GREETING, replies
        self.other = replies[len(GREETING) :]
        return self

    def key(self, to_host):
        guest, host = (
            (self.other, self.nonce) if self.is_host else (self.nonce, self.other)
        )
        way = b"guest to host" if to_host else b"host to guest"
        return hmac.digest(self.secret, GREETING + guest + host + way, "sha256")

    def frame(self, body, number=None, to_host=None):
        """Bytes of a message that has this body."""
        number = self.sent if number is None else number
        to_host = not self.is_host if to_host is None else to_host
        framed = struct.pack(">I", len(body)) + body
        sealed = struct.pack(">Q", number) + framed
        return framed + hmac.digest(self.key(to_host), sealed, "sha256")

    def send(self, message):
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.sock.sendall(self.frame(body))
        self.sent += 1

    def receive(self):
        """The next message, whose seal must be right."""
        (size,) = struct.unpack(">I", read(self.sock, 4))
        body, seal = read(self.sock, size), read(self.sock, 32)
        assert self.frame(body, self.received, self.is_host)[-32:] == seal
        self.received += 1
        return json.loads(body)


def guest(address, hello, secret=""):
    """A connection to process 0 that has said `hello`."""
    peer = Peer(call(address), secret).greet().hear()
    peer.send(hello)
    return peer
