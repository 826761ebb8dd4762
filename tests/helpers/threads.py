"""Threads that read ahead, and what comes true in other threads."""

import threading
import time

SECONDS = 20


def until(claim, seconds=SECONDS):
    """Wait until it is so, but not for ever."""
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.002)


def threads():
    """Those of this process that read batches ahead."""
    return [t for t in threading.enumerate() if t.name == "jaxstrategy input"]
