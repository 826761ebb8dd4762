"""Addresses, and a proxy between two ends of connections."""

import contextlib
import socket
import threading


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return f"127.0.0.1:{reserved.getsockname()[1]}"


def free_addresses(count):
    """So many, of which nobody seems to use the port or the one above it."""
    with contextlib.ExitStack() as reserved:
        found = []
        while len(found) < count:
            first = socket.create_server(("127.0.0.1", 0))
            port = reserved.enter_context(first).getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                reserved.enter_context(socket.create_server(("127.0.0.1", port + 1)))
                found.append(f"127.0.0.1:{port}")
        return found


def called(address):
    """A plain connection to an address."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 60)


def shut(*sockets):
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Hands on what is said to a target and back, and keeps or changes it."""

    def __init__(self, target):
        self.said, self.change = [], lambda data, is_to_target: data
        self._target, self._pairs = target, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = []
        self._start(self._accept)

    def _start(self, function, *arguments):
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far, said = called(self._target), bytearray()
                far.settimeout(None)
                self.said.append(said)
                self._pairs.append((near, far))
                self._start(self._forward, near, far, said)
                self._start(self._forward, far, near, None)

    def _forward(self, source, sink, said):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if said is not None:
                    said += data
                sink.sendall(self.change(data, said is not None))
        shut(source, sink)

    def hang_up(self, number):
        """Break one of the connections that were made."""
        shut(*self._pairs[number % len(self._pairs)])

    def close(self):
        shut(self._listener)
        self._listener.close()
        for pair in self._pairs:
            shut(*pair)
        for thread in self._threads:
            thread.join(20)
        for pair in self._pairs:
            for each in pair:
                each.close()
