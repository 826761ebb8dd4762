"""A bound on the steps that are running when the next one is dispatched.

On simulated CPU devices with jaxlib older than 0.12, steps that communicate and are
dispatched without ever waiting use up a pool of threads, then hang, then abort the
process (measured: 500 steps on 4 or 8 devices never finish, 32 steps in flight always
do). There, and where several processes take each step together, each step of `DEPTH`
waits for the `DEPTH` before the last `DEPTH`, so that twice as many are in flight at
most. To ask at each step costs several microseconds more, where two processes share two
cores. Elsewhere nothing is counted.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._options import RunOptions
from jaxstrategy.replicas._devices import Device
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._trace import Evaluate
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values._types import Leaf

DEPTH = 8

# One window for the process: all strategies share the threads.
_running: collections.deque[jax.Array] = collections.deque()


@final
class InFlight(Stage):
    """Counts the calls of a program, and waits until few enough are running.

    Args:
      step: the step.
      options: not asked.
    """

    def __init__(self, step: ReplicaStep, options: RunOptions) -> None:
        self._is_needed = needed(step.replicas.all_devices)

    @property
    def is_active(self) -> bool:
        """Whether there is a bound."""
        return self._is_needed

    def within(self, step: TracedStep, evaluate: Evaluate) -> Evaluate:
        """Adds an output that is ready when the step is done."""

        def with_token(
            inputs: Sequence[Leaf],
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, outputs = evaluate(inputs)
            return arrays, [jnp.zeros((), jnp.int8), *outputs]

        return with_token

    def after(self, output: jax.Array) -> None:
        """Counts the call, and waits for an earlier one."""
        dispatched(output)


def needed(devices: Iterable[Device]) -> bool:
    """Whether steps on `devices` must be bounded, or others are told of them."""
    devices = list(devices)
    if any(d.process_index != jax.process_index() for d in devices):
        return True
    if len(devices) == 1 or devices[0].platform != "cpu":
        return False
    return _version(metadata.version("jaxlib")) < (0, 12)


_observers: list[Callable[[jax.Array], None]] = []


def on_dispatch(observer: Callable[[jax.Array], None]) -> None:
    """Let `observer` be called with one of the results of each step that is counted."""
    if observer not in _observers:
        _observers.append(observer)


def dispatched(token: jax.Array) -> None:
    """Count a step, known by one of its results; sometimes wait for earlier ones."""
    if isinstance(token, Tracer):
        return  # part of a larger program, which its caller dispatches
    for observer in _observers:
        observer(token)
    _running.append(token)
    if len(_running) >= 2 * DEPTH:
        _wait_for_earlier()


def _wait_for_earlier() -> None:
    """Wait for the `DEPTH` steps that have been running longest."""
    for _ in range(DEPTH):
        # A step that failed says so to whoever reads its results, not to this one; and
        # another thread may be waiting for them already.
        with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError):
            _running.popleft().block_until_ready()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
