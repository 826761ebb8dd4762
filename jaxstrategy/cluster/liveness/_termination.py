"""SIGTERM: it ends a process unless somebody here has asked for something else.

JAX's distributed runtime takes the signal for its own preemption service (measured on
0.10 and 0.12), which tells only who asks it: the process would run on to its end.
"""

from __future__ import annotations

import signal
import threading

import jax


def keep() -> None:
    """Let the runtime that is about to start leave SIGTERM as it is."""
    jax.config.update("jax_enable_preemption_service", False)


def take_back() -> None:
    """Let SIGTERM do what it did before a runtime that was started elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python installs handlers in the main thread only
    before = signal.getsignal(signal.SIGTERM)
    if before is not None:  # else it is of C code that was there before Python
        signal.signal(signal.SIGTERM, before)
