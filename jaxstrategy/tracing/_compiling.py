"""Tells the watchdog when a new step has been compiled, and waits for others again.

One call of a jitted function compiles, which takes long in one process alone, and then
waits for all processes. JAX says by an event when the first is over.
"""

from __future__ import annotations

import functools
import threading

import jax.monitoring

from jaxstrategy.processes._watchdog import COMPILES, Watchdog

# Measured with JAX 0.10 and 0.12; its argument `fun_name` is `jit(name)`. Without such
# an event, the whole first call counts as compiling.
_COMPILED = "/jax/core/compile/backend_compile_duration"

# Of the thread that compiles: whom to tell, and the name of the function.
_own = threading.local()


def begin(watchdog: Watchdog, name: str) -> None:
    """From now until the function `name` is compiled, this process is busy."""
    _listen()
    _own.watched = watchdog, name.rpartition(".")[2]
    watchdog.step_busy(COMPILES)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **told: object) -> None:
    watched = getattr(_own, "watched", None)
    if event != _COMPILED or watched is None:
        return
    watchdog, name = watched
    if told.get("fun_name") == f"jit({name})":
        _own.watched = None
        watchdog.step_busy(None)
