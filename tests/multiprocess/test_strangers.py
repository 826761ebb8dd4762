"""Whoever calls, and whatever is said before all have met, stops no job."""

import contextlib
import json
import pathlib
import socket
import textwrap

import pytest
from harness import VERSIONS, Client, RemoteError, Secret, meets

import jaxstrategy

HELLO = {"index": 1, "count": 2, "host": "h", "pid": 7, "versions": VERSIONS}
NO_HELLOS = [
    b"",
    b"[" * 60_000,
    b"\xff\xfe",
    [1],
    None,
    {"index": 1},
    HELLO | {"index": "1"},
    HELLO | {"index": True},
    HELLO | {"count": None},
    HELLO | {"pid": "7"},
    HELLO | {"job": {}},
]


def called(address):
    """A plain connection to process 0, as soon as it listens."""
    host, port = address.split(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), 20)


def test_a_hello_that_is_none_is_dropped_alone(address, attend, pool):
    zero = pool.submit(attend, 0)
    with contextlib.closing(Client(address, Secret())) as client:
        (port,) = client.request()
    at = f"127.0.0.1:{bytes(port).decode()}"
    with contextlib.closing(Client(at, Secret())) as client:
        for hello in NO_HELLOS:
            body = hello if isinstance(hello, bytes) else json.dumps(hello).encode()
            with pytest.raises(RemoteError):
                client.request(body, timeout_seconds=20)
    assert meets(zero, attend)


def test_hundreds_of_idle_callers_do_not_stop_a_job(address, attend, pool):
    zero = pool.submit(attend, 0)
    with contextlib.ExitStack() as stack:
        for number in range(300):
            idle = stack.enter_context(called(address))
            with contextlib.suppress(ConnectionError):
                idle.sendall(b"\xff" * (number % 30))
        assert meets(zero, attend)


# Without the package around it the rendezvous is there at once.
ALONE = f"""
import os, resource, sys, types
package = types.ModuleType("jaxstrategy")
package.__path__ = [{str(pathlib.Path(jaxstrategy.__file__).parent)!r}]
sys.modules["jaxstrategy"] = package
from jaxstrategy._src.processes import rendezvous
RANK = int(os.environ["JAXSTRATEGY_PROCESS_ID"])
def meet():
    return rendezvous.meet(RANK, 2, os.environ["JAXSTRATEGY_COORDINATOR"], 30)
"""


@pytest.mark.slow
def test_more_callers_than_descriptors_do_not_stop_a_job(job, tmp_path):
    go = tmp_path / "go"
    scripts = {
        0: """
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        meeting = meet()
        print("met", len(meeting.members))
        """,
        1: f"""
        import time
        while not os.path.exists({str(go)!r}):
            time.sleep(0.01)
        print("met", len(meet().members))
        """,
    }
    scripts = {rank: ALONE + textwrap.dedent(text) for rank, text in scripts.items()}
    with (
        job(scripts=scripts, started=False) as running,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(100):
            stack.enter_context(called(running.address))
        go.touch()
        assert running.wait(30) == [0, 0]
        assert [rank.last_line for rank in running.ranks] == ["met 2", "met 2"]
