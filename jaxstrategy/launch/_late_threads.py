"""Threads that are wanted while the interpreter ends: `started`."""

import threading


def started(thread: threading.Thread) -> bool:
    """Whether it was started: since Python 3.12 an ending interpreter starts none.

    Raises:
      RuntimeError: it could not be started for another reason.
    """
    try:
        thread.start()
    except RuntimeError:
        if threading.main_thread().is_alive():
            raise
        return False
    return True
