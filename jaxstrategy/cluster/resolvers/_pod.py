"""A pod of Kubernetes as a task of a cluster: `Pod`."""

from __future__ import annotations

import dataclasses
import datetime
from typing import final

RUNNING = "Running"
_HOSTNAME = 63  # characters; Kubernetes makes the hostname of a longer name so


@final
@dataclasses.dataclass(frozen=True)
class Pod:
    """What is known of one pod.

    Attributes:
      name: it is the only one of this name in its namespace.
      namespace: empty where a stand-in does not say.
      hostname: what the pod calls itself, if it is not its name.
      phase: `"Running"`, or what else it does.
      is_ending: whether it is being deleted.
      ip: its address; empty if it has none yet.
    """

    name: str
    namespace: str
    hostname: str
    phase: str
    is_ending: bool
    ip: str

    @staticmethod
    def of(listed: object) -> Pod:
        """A pod as a client lists it: a `V1Pod`, or a stand-in."""
        metadata = getattr(listed, "metadata", None)
        status = getattr(listed, "status", None)
        ended = getattr(metadata, "deletion_timestamp", None)
        return Pod(
            _text(metadata, "name"),
            _text(metadata, "namespace"),
            _text(getattr(listed, "spec", None), "hostname"),
            _text(status, "phase"),
            isinstance(ended, datetime.datetime | str),
            _ip(status),
        )

    @property
    def is_running(self) -> bool:
        """Whether it can take part in a job."""
        return self.phase == RUNNING and not self.is_ending

    @property
    def state(self) -> str:
        """The phase, for messages."""
        return f"{self.phase}, being deleted" if self.is_ending else self.phase

    def is_called(self, own: str) -> bool:
        """Whether a program for which this is the name of its host runs in it."""
        return own in (self.name, self.hostname, self.name[:_HOSTNAME].rstrip("-."))


def _ip(status: object) -> str:
    """The address of the pod itself, not of its node as in TensorFlow.

    Two pods of a node have one `host_ip`, at which none of them can listen; with
    `hostNetwork`, both addresses are the same. Stand-ins that were made for TensorFlow
    know `host_ip` only.
    """
    own = getattr(status, "pod_ip", NotImplemented)
    if own is None or isinstance(own, str):
        return own or ""
    return _text(status, "host_ip")


def _text(holder: object, name: str) -> str:
    """An attribute that is text; empty if it is not there, or something else."""
    found = getattr(holder, name, None)
    return found if isinstance(found, str) else ""
