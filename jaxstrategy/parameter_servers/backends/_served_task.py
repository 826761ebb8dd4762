"""A worker or a parameter server at its address: `ServedTask`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, final

import jax
import jax.export

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec
from jaxstrategy.parameter_servers._worker_engine import WorkerEngine
from jaxstrategy.parameter_servers.backends._cluster_session import Hello, joined
from jaxstrategy.parameter_servers.backends._reconnecting_server import (
    ReconnectingServer,
)
from jaxstrategy.parameter_servers.backends._session_host import SessionHost
from jaxstrategy.parameter_servers.store._store import Store
from jaxstrategy.parameter_servers.wire import _peer
from jaxstrategy.parameter_servers.wire._listener import Listener
from jaxstrategy.parameter_servers.wire._peer import Answer
from jaxstrategy.parameter_servers.wire._remote import ServerAnswers, WorkerAnswers
from jaxstrategy.parameter_servers.wire._stream import Stream
from jaxstrategy.processes import _secret
from jaxstrategy.processes._secret import Secret

SERVED = ("worker", "ps")


@final
class ServedTask:
    """One task of a cluster that a coordinator calls."""

    def __init__(self, spec: ClusterSpec, job: str, index: int) -> None:
        self._address = spec.task_address(job, index)
        self._name = f"{job} {index}"
        self._is_worker = job == "worker"
        self._listener: Listener | None = None
        self._host: SessionHost | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Listen at its address; a second call does nothing."""
        if self._listener is not None:
            return
        secret = checked_secret(self._address)
        if not self._is_worker:
            # GPUs of the host are those of workers.
            jax.config.update("jax_platforms", "cpu")
        try:
            listener = Listener(self._address, secret)
        except OSError as error:
            raise ClusterError(
                f"{self._name} cannot listen at its address {self._address}: {error}. "
                "It must be one of this host, with a free port."
            ) from error
        begin = _Worker(secret).begin if self._is_worker else _begun_store
        self._host = SessionHost(begin, told, not self._is_worker, self._say)
        self._listener = listener
        listener.start(self._host.take)
        self._say(f"waits for a coordinator at {self._address}")

    def join(self) -> None:
        """Serve until the process is ended, or `close` is called."""
        self.start()
        self._closed.wait()

    def close(self) -> None:
        """Listen no more, and drop what is held."""
        self._closed.set()
        if self._listener is not None:
            self._listener.close()
        if self._host is not None:
            self._host.close()

    def _say(self, text: str) -> None:
        if sys.stderr is not None:
            print(f"jaxstrategy: {self._name}: {text}", file=sys.stderr, flush=True)


def checked_secret(address: str) -> Secret:
    """The secret of the job."""
    secret = Secret.of_environment()
    if not secret and not _secret.is_network_trusted():
        raise ClusterError(
            f"A coordinator and its workers run what they send each other, and who can "
            f"reach {address} could send something too: the job needs a secret. Set "
            f"{_secret.VARIABLE} to the same random word for all its processes, in "
            "their environment and never on a command line "
            f"({_secret.HOW_TO_MAKE_ONE} makes one; `python -m jaxstrategy.launch "
            "--workers 2 --parameter-servers 1 train.py` does so by itself)."
        )
    return secret


def told() -> Mapping[str, Any]:
    """What a worker says of its devices."""
    return {
        "devices": jax.local_device_count(),
        "platform": jax.export.default_export_platform(),
    }


def _begun_store(hello: Hello) -> Answer:
    return ServerAnswers(Store())


@final
class _Worker:
    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def begin(self, hello: Hello) -> Answer:
        servers = [
            self._server(number, address, hello)
            for number, address in enumerate(hello.servers)
        ]
        engine = WorkerEngine(hello.index, servers, jax.local_devices())
        return WorkerAnswers(engine)

    def _server(self, number: int, address: str, hello: Hello) -> ReconnectingServer:
        joining = Hello("join", hello.coordinator, hello.strategy)

        def dial() -> Stream:
            return joined(address, self._secret, joining)[0]

        name = f"Parameter server {number} at {address}"
        return ReconnectingServer(name, dial, _peer.PATIENCE)
