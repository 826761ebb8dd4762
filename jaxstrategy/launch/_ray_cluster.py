"""A connection to a Ray cluster, or to a Ray that was started for it."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import ClassVar, final

from jaxstrategy._errors import ClusterError, MissingExtraError
from jaxstrategy.launch import _ray_head
from jaxstrategy.launch._ray_options import ADDRESS

_MODE, _TOKEN, _TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@final
class RayCluster:
    """Ray, as this process is connected to it.

    Args:
      address: `host:port`, or "auto"; None: what this process is connected to already,
        or `RAY_ADDRESS`, or a Ray of this machine that is started and ended with this.
      cpus: that are wanted of a Ray that is started; it has those of the machine, too.
      working_dir: a folder that is copied to all machines.

    Raises:
      MissingExtraError: Ray is not installed.
      ClusterError: it does not answer.
    """

    def __init__(
        self, address: str | None, cpus: int, working_dir: str | None = None
    ) -> None:
        self._head: _Head | None = None
        self._is_connected_here = False
        loaded = sys.modules.get("ray")
        if loaded is not None and loaded.is_initialized():
            if address or working_dir:
                raise ClusterError(
                    "This process is connected to Ray already, which is used where no "
                    "other address and no folder to copy are given."
                )
            self.ray: ModuleType = loaded
            return
        address = address or os.environ.get(ADDRESS, "")
        if not address:
            self._head = _Head(max(cpus, os.cpu_count() or 1))
            address = self._head.address
        try:
            self.ray = imported()
            _connect(self.ray, address, working_dir)
        except BaseException:
            self.close()
            raise
        self._is_connected_here = True

    @property
    def is_own(self) -> bool:
        """Whether it was started for this, so that nobody will ever add machines."""
        return self._head is not None

    def machines(self) -> list[str]:
        """The identifiers of the machines that it has now."""
        return [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]

    def close(self) -> None:
        """End what was started and connected here; may be called twice."""
        if self._is_connected_here:
            self._is_connected_here = False
            self.ray.shutdown()
        if self._head is not None:
            self._head.close()


@final
class _Head:
    """The process of `_ray_head.py`, for the time that this one lives."""

    has_token: ClassVar[bool] = False  # Ray reads it once in a process

    def __init__(self, cpus: int) -> None:
        _Head._choose_token()
        imported()
        with tempfile.TemporaryFile() as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(_ray_head.__file__)), str(cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # Ctrl-C of a terminal does not end it
                text=True,
            )
            assert self._process.stdout is not None
            with self._process.stdout as printed:
                self.address: str = printed.readline().strip()
            if not self.address:
                self.close()
                said.seek(0)
                *_, last = ["", *said.read().decode(errors="replace").splitlines()]
                raise ClusterError(
                    f"Ray does not start on this machine: {last}. Start one by "
                    f"`ray start --head`, and give its address, or set {ADDRESS}."
                )

    @classmethod
    def _choose_token(cls) -> None:
        """Have Ray ask for a token that only this process and that Ray know.

        Else it writes one to a file. Ray looks at these variables when it is imported.
        """
        if _MODE in os.environ or cls.has_token:
            return
        if sys.modules.get("ray") is not None:
            raise ClusterError(
                "Ray was imported before, and takes no new token then, so that none is "
                "started here. Connect first, by `ray.init()`, which will be used; or "
                f"set {ADDRESS}."
            )
        os.environ[_MODE] = "token"
        if not {_TOKEN, _TOKEN_PATH} & set(os.environ):
            os.environ[_TOKEN] = secrets.token_hex(32)
        cls.has_token = True

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def imported() -> ModuleType:
    """The module `ray`.

    Raises:
      MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as missing:
        raise MissingExtraError(
            "Ray is not installed, on which the processes should run. Install the "
            'extra: pip install "jaxstrategy[ray]"'
        ) from missing


def _connect(ray: ModuleType, address: str, working_dir: str | None) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            runtime_env={"working_dir": working_dir} if working_dir else None,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (
        ConnectionError,
        RuntimeError,
        ValueError,
        ray.exceptions.RayError,
    ) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ClusterError(
            f"Ray at {address} does not answer: {first}. Is the address that of its "
            f"head, and has a Ray that asks for a token {_MODE}=token and {_TOKEN} "
            "here as well?"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # Ray takes it for itself; a job that saves its state when it comes needs it.
        signal.signal(signal.SIGTERM, handler)
