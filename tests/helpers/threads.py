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


class Started:
    """The threads that live, of those that have started since this was made."""

    def __init__(self, name=""):
        self._name = name
        self._others = set(threading.enumerate())

    def __call__(self):
        return [
            thread
            for thread in threading.enumerate()
            if thread not in self._others and thread.name.startswith(self._name)
        ]


INPUT = "jaxstrategy input"
"""The name of those that read batches ahead."""


def in_threads(*functions):
    """Call them at once; raises what one of them raises."""
    errors = []
    start = threading.Barrier(len(functions))

    def called(function):
        try:
            start.wait(SECONDS)
            function()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=called, args=(f,)) for f in functions]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started), "they wait for ever"
    if errors:
        raise errors[0]
