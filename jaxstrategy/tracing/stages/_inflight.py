"""How many steps may be running before the next one is dispatched.

On simulated CPU devices with jaxlib older than 0.12, steps that communicate and are
dispatched without ever waiting use up a pool of threads, then hang, then abort the
process (measured: 500 steps on 4 or 8 devices never finish, 32 steps in flight always
do). There, and where several processes take each step together, a step waits for the
one `DEPTH` calls back; that costs nothing when it is done. Elsewhere nothing is
counted.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from importlib import metadata

import jax
from jax.core import Tracer
from jax.sharding import Mesh

DEPTH = 8

# One window for the process: all strategies share the threads.
_running: collections.deque[jax.Array] = collections.deque()


def needed(mesh: Mesh) -> bool:
    """Whether steps on `mesh` must be bounded, or others are told of them."""
    if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        return True
    if mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return False
    return _version(metadata.version("jaxlib")) < (0, 12)


_observers: list[Callable[[jax.Array], None]] = []


def on_dispatch(observer: Callable[[jax.Array], None]) -> None:
    """Let `observer` be called with one of the results of each step that is counted."""
    if observer not in _observers:
        _observers.append(observer)


def dispatched(token: jax.Array) -> None:
    """Count a step, known by one of its results; wait for the one `DEPTH` back."""
    if isinstance(token, Tracer):
        return  # part of a larger program, which its caller dispatches
    for observer in _observers:
        observer(token)
    _running.append(token)
    if len(_running) > DEPTH:
        # A step that failed says so to whoever reads its results, not to this one.
        with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError):
            _running.popleft().block_until_ready()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
