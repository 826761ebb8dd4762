"""Messages between processes: whole, in order, and only among those of a job."""

import contextlib
import socket

import numpy as np
import pytest
import zmq
from helpers.sockets import Proxy
from helpers.threads import until

from jaxstrategy._src.processes import messages
from jaxstrategy._src.processes.messages import (
    Client,
    LostError,
    RemoteError,
    Server,
    chunks,
    joined,
)
from jaxstrategy._src.processes.secret import Secret

WORD = "correct horse battery staple"
SECRET = Secret(WORD)
ADDRESSES = "127.0.0.1:0", "localhost:0", "[::1]:0"


@pytest.fixture
def serve():
    """`serve(...)` starts a server, closed after the test, that answers by echo."""
    made = []

    def started(handle=None, **options):
        seen = []

        def echo(request):
            seen.append([bytes(frame) for frame in request.frames])
            if seen[-1] == [b"fail"]:
                raise ValueError("as you say")
            if seen[-1] != [b"be silent"]:
                request.reply(*request.frames)

        options = {"address": "127.0.0.1:0", **options}
        made.append(Server(SECRET, handle or echo, **options))
        vars(made[-1])["seen"] = seen
        return made[-1]

    yield started
    for server in made:
        server.close(0)


@pytest.fixture
def call():
    made = []

    def connected(server, secret=SECRET, **options):
        address = getattr(server, "address", server)
        made.append(Client(address, secret, **{"timeout_seconds": 20, **options}))
        return made[-1]

    yield connected
    for client in made:
        client.close(0)


def test_requests_news_and_errors_at_all_kinds_of_addresses(serve, call):
    for address in ADDRESSES:
        news, peers = [], []

        def handle(request, news=news, peers=peers):
            peers.append(request.peer)
            if request.is_news:
                news.append(bytes(request.frames[0]))
            elif bytes(request.frames[0]) == b"fail":
                raise ValueError("as you say")
            else:
                request.reply(*request.frames)

        server, replies = serve(handle, address=address), []
        client = call(server, news=lambda frames, h=replies: h.append(bytes(frames[0])))
        for size in (0, 3, messages.CHUNK, 3 * messages.CHUNK + 1):
            array = np.arange(size) % 251
            sent = memoryview(array.astype(np.uint8))
            name, *got = client.request(b"name", *chunks(sent), timeout_seconds=20)
            assert bytes(name) == b"name" and joined(size, iter(got)) == sent
        with pytest.raises(RemoteError, match="ValueError: as you say"):
            client.request(b"fail", timeout_seconds=20)
        client.send(b"of the client")
        until(lambda news=news: news == [b"of the client"])
        server.send(peers[0], b"of the server")
        until(lambda replies=replies: replies == [b"of the server"])
        assert len(set(peers)) == 1


def test_what_is_said_before_the_end_arrives(serve, call):
    server = serve()
    client = call(server)
    client.send(b"x" * 3_000_000)
    client.close()
    until(lambda: server.seen == [[b"x" * 3_000_000]])
    for say in (client.request, client.send):
        with pytest.raises(LostError, match="is closed"):
            say(b"x")


def test_bytes_of_strangers_end_their_own_connection_only(serve, call):
    host, port = (server := serve(largest=100_000)).address.split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(54, b"\0")
    with contextlib.ExitStack() as stack:
        for number in range(100):  # half-open ones, which stay
            sock = stack.enter_context(socket.create_connection((host, int(port))))
            sock.sendall((greeting + bytes(64))[: number % 128])
        for said in (
            b"GET / HTTP/1.0\r\n\r\n",
            b"\xff" * 1000,
            greeting + b"\x06" + (1 << 62).to_bytes(8, "big"),
            greeting + b"\x04\xc8\x05HELLO" + bytes(194),
        ):
            with socket.create_connection((host, int(port)), 20) as sock:
                sock.sendall(said + bytes(2000))
                with contextlib.suppress(ConnectionError):
                    while sock.recv(1000):
                        pass
        client = call(server)
        assert bytes(client.request(b"x")[0]) == b"x"
        large = call(server)
        with pytest.raises(LostError):
            large.request(b"x" * 100_001, timeout_seconds=20)
        assert bytes(client.request(b"y")[0]) == b"y"
    assert server.seen == [[b"x"], [b"y"]]


def test_what_was_said_can_neither_be_said_again_nor_changed_nor_read(serve, call):
    server, changed = serve(), None

    def change(data, is_to_server):
        if is_to_server is not changed:
            return data
        return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]

    def connected():
        relay = Proxy(server.address)
        relay.change = change
        return relay, call(relay.address)

    relay, client = connected()
    client.request(b"a word that nobody else reads", timeout_seconds=20)
    (said,) = relay.said
    assert b"a word that nobody" not in said
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 20) as again:
        again.sendall(said)
        with contextlib.suppress(ConnectionError):
            while again.recv(1000):
                pass
    assert server.seen == [[b"a word that nobody else reads"]]
    for changed in (True, False):  # noqa: B007
        with pytest.raises(LostError):
            client.request(b"changed on its way", timeout_seconds=20)
        relay.close()
        changed_before, changed = changed, None
        relay, client = connected()
        assert len(server.seen) == 1 + (not changed_before)
    relay.close()


def test_a_message_that_fails_does_not_hold_up_those_behind_it(call, capsys):
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.curve_server, server.linger = True, 0
    server.curve_secretkey = messages.keys(SECRET, b"server")[1]
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = call(f"127.0.0.1:{port}", news=lambda frames: 1 / 0)
    answer = client.submit(b"x")
    peer, header, _ = server.recv_multipart()
    news, reply = bytes(9), bytes([2]) + header[1:]
    for frames in [b""], [b"short"], [bytes([3]) * 9], [news], [reply, b"y"]:
        server.send_multipart([peer, *frames])
    assert [bytes(frame) for frame in answer.result(20)] == [b"y"]
    assert "ZeroDivisionError" in capsys.readouterr().err
    context.destroy()
