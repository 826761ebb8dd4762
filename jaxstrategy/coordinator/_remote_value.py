"""What a scheduled function will return: `RemoteValue`."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.values._types import PyTree

_Build = Callable[[], PyTree]


class RemoteValueStatus(enum.Enum):
    """What is known of a `RemoteValue`.

    >>> import jaxstrategy as js
    >>> js.coordinator.RemoteValueStatus.READY.name
    'READY'
    """

    NOT_READY = "NOT_READY"
    """The function is queued, or runs."""
    READY = "READY"
    """The function has ended, and its results are here."""
    ABORTED = "ABORTED"
    """The function has raised, or was cancelled."""


@final
class RemoteValue:
    """The results of a scheduled function, which need not have run yet.

    Made by `ClusterCoordinator.schedule`. The results stay here, whatever happens to
    the worker afterwards; without them, an error stays here in the same way.

    >>> import jaxstrategy as js
    >>> value = js.coordinator.RemoteValue("step")
    >>> value
    <RemoteValue of step: NOT_READY>
    """

    def __init__(
        self,
        name: str,
        observe: Callable[[float], None] | None = None,
        check_waiting: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._check_waiting = check_waiting
        self._observe = observe
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._build: _Build | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._host: PyTree = None
        self._device: PyTree = None
        self._is_on_device = False

    def fetch(self) -> PyTree:
        """What the function returned, with NumPy arrays, once it has ended.

        Arrays without a dimension are NumPy's scalars; the others cannot be written to.
        What is no array, such as a string, is as the function returned it.

        Raises:
          BaseException: what the function has raised; the same object each time.
          CancelledError: it was cancelled, because another one had failed.
          RuntimeError: it has not ended, in a block of `ClusterCoordinator.paused`.
        """
        began = time.perf_counter()
        if self._check_waiting is not None and not self._event.is_set():
            self._check_waiting()
        self._event.wait()
        if self._error is not None:
            # Always from where it came: the traceback of one object would only grow.
            raise self._error.with_traceback(self._traceback)
        with self._lock:
            if self._build is not None:
                self._host = jax.tree.map(_on_host, self._build())
                self._build = None
                if self._observe is not None:
                    self._observe(time.perf_counter() - began)
        return self._host

    def get(self) -> PyTree:
        """What the function returned, with JAX's arrays, once it has ended.

        Each call returns the same object. Raises as `fetch` does.
        """
        host = self.fetch()
        with self._lock:
            if not self._is_on_device:
                self._device = jax.tree.map(_on_device, host)
                self._is_on_device = True
        return self._device

    @property
    def status(self) -> RemoteValueStatus:
        """Whether the function has ended, and how; does not wait."""
        if not self._event.is_set():
            return RemoteValueStatus.NOT_READY
        failed = self._error is not None
        return RemoteValueStatus.ABORTED if failed else RemoteValueStatus.READY

    def set_results(self, build: _Build) -> None:
        """The function has ended: `build` makes what it returned, when it is asked for.

        What has ended stays as it is.
        """
        if not self._event.is_set():
            self._build = build
            self._event.set()

    def set_error(self, error: BaseException) -> None:
        """The function has raised, or will not run; what has ended stays as it is."""
        if not self._event.is_set():
            self._error, self._traceback = error, error.__traceback__
            self._event.set()

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._name}: {self.status.name}>"


def _on_host(leaf: object) -> object:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not leaf.ndim:
        return leaf[()]
    leaf.flags.writeable = False
    return leaf


def _on_device(leaf: object) -> object:
    # A copy: what `fetch` returned is not to change with it, or be kept by it.
    return jnp.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf
