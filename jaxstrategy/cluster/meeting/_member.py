"""A process of the job, and what it says of itself when all meet."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from collections.abc import Mapping
from importlib import metadata

from jaxstrategy.cluster.connections._fields import Message
from jaxstrategy.cluster.connections._wire import Connection

SAME = ("jaxstrategy", "jax", "jaxlib")
"""Packages of which all processes must have the same version."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process of the job; prints as `process 1 (host a, pid 17)`."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host}, pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The outcome of a meeting, in one process.

    Attributes:
      members: all processes, by their ids.
      connections: to the others, by their ids, on process 0; to process 0, elsewhere.
    """

    index: int
    members: tuple[Member, ...]
    connections: Mapping[int, Connection]

    def close(self) -> None:
        """Hang up."""
        for connection in self.connections.values():
            connection.close()


def facts() -> Message:
    """The facts that a process tells of itself: host, pid, versions."""
    versions = {name: _version(name) for name in SAME}
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": os.environ.get("JAXSTRATEGY_JOB", ""),
        "versions": {**versions, "Python": platform.python_version()},
    }


def _version(name: str) -> str:
    try:
        # What runs from its source tree, and was not installed, has no metadata.
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def member(hello: Message) -> Member:
    """The process that says this."""
    return Member(hello["index"], hello.get("host", "?"), hello.get("pid", 0))
