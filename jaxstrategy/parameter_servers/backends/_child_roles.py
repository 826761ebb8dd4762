"""What children are: a parameter server, or a worker."""

from __future__ import annotations

import socket
import threading

from jaxstrategy._errors import ParameterServerLost
from jaxstrategy.parameter_servers.backends._child import Lifeline, Task
from jaxstrategy.parameter_servers.wire._peer import Answer, Peer, Responder
from jaxstrategy.parameter_servers.wire._remote import RemoteServer
from jaxstrategy.parameter_servers.wire._stream import Door, attended

SERVER = "serve_variables"
WORKER = "run_programs"
"""The names of functions of this module."""


def serve_variables(lifeline: Lifeline, task: Task) -> None:
    """Be a parameter server, until the parent says that it is over."""
    from jaxstrategy.parameter_servers.store._store import Store
    from jaxstrategy.parameter_servers.wire._remote import ServerAnswers

    _serve(lifeline, ServerAnswers(Store()))


def run_programs(lifeline: Lifeline, task: Task) -> None:
    """Be a worker, until the parent says that it is over."""
    import jax

    from jaxstrategy.parameter_servers._worker import WorkerEngine
    from jaxstrategy.parameter_servers.wire._remote import WorkerAnswers

    _, *doors = lifeline.doors
    servers = [_server(number, door) for number, door in enumerate(doors)]
    engine = WorkerEngine(task["index"], servers, jax.local_devices())
    _serve(lifeline, WorkerAnswers(engine))


def _server(number: int, door: socket.socket) -> RemoteServer:
    name = f"Parameter server {number}"
    return RemoteServer(Peer(name, Door(door).dial, ParameterServerLost))


def _serve(lifeline: Lifeline, answer: Answer) -> None:
    responder = Responder(answer)
    own, *_ = lifeline.doors
    threading.Thread(
        target=attended, args=(own, responder.add), name="door", daemon=True
    ).start()
    lifeline.say_ready()
    lifeline.over.wait()
