"""Servers and workers in processes of their own, which are stopped and killed."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import harness
import numpy as np
import pytest
from helpers.processes import stop

import jaxstrategy as js
from jaxstrategy.parameter_servers._operations import Read
from jaxstrategy.parameter_servers.wire._door import Door
from jaxstrategy.parameter_servers.wire._peer import Peer
from jaxstrategy.parameter_servers.wire._remote_server import RemoteServer

CHILD = """
import os, socket, sys, time
sys.path.insert(0, os.environ["HELPERS"])
from helpers.peers import PlainServer
from jaxstrategy.parameter_servers.wire._door import attended
from jaxstrategy.parameter_servers.wire._responder import Responder
from jaxstrategy.parameter_servers.wire._server_answers import ServerAnswers

class Server(PlainServer):
    def versions(self, numbers):
        print("asked", flush=True)
        time.sleep(sum(numbers))
        return [0]

responder = Responder(ServerAnswers(Server()))
attended(socket.socket(fileno=int(sys.argv[1])), responder.add)
print("the door is closed", flush=True)
responder.close()
"""


class Child:
    """A parameter server that this process has started."""

    def __init__(self, path, patience):
        here, there = socket.socketpair()
        self.path = path
        with open(path, "wb") as out, there:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", CHILD, str(there.fileno())],
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
                env={**os.environ, "HELPERS": str(pathlib.Path(__file__).parents[1])},
            )
        self.door = Door(here)
        self.peer = Peer(
            "Parameter server 0",
            self.door.dial,
            js.ParameterServerLost,
            patience,
            path.read_text,
        )
        self.server = RemoteServer(self.peer)

    @property
    def output(self):
        return self.path.read_text()


@pytest.fixture
def child(tmp_path):
    """Starts a parameter server with that patience."""
    with contextlib.ExitStack() as after:

        def started(patience=10.0):
            found = Child(tmp_path / "out.txt", patience)
            after.callback(found.process.wait)
            after.callback(found.process.kill)
            after.callback(found.door.close)
            after.callback(found.server.close)
            found.peer.wait_until_up(60)
            return found

        yield started


def test_a_stopped_server_is_noticed_and_ends_when_its_parent_goes(child):
    found = child(patience=2.0)
    found.server.create(1, np.ones(3_000_000))
    assert found.server.versions([3]) == [0]  # longer than the patience, and not lost
    stop(found.process.pid)
    with pytest.raises(
        js.ParameterServerLost, match="no sign of life for 2 s.\n.*\nas"
    ):
        found.server.read([Read(1)])
    found.process.send_signal(signal.SIGCONT)
    with pytest.raises(js.ParameterServerLost, match="no sign of life"):
        found.server.read([Read(1)])
    found.door.close()
    assert found.process.wait(60) == 0
    assert found.output.endswith("the door is closed\n")


@pytest.mark.slow
def test_a_killed_server_is_noticed_at_once_by_all_who_ask(child):
    found = child(patience=600.0)
    caught = []

    def ask():
        with pytest.raises(js.ParameterServerLost, match="Parameter server 0 is lost"):
            found.server.versions([600])
        caught.append(True)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    harness.until(lambda: found.output.count("asked") == 3)
    found.process.kill()
    for thread in threads:
        thread.join(60)
    assert caught == [True] * 3
    with pytest.raises(js.ParameterServerLost, match="it ended, or closed the conn"):
        found.server.read([Read(1)])
