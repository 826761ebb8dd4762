"""Ending a process with the reason as its last words."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

_OWN_THREADS = "jaxstrategy-"
_once = threading.Lock()
# Held while an exception is printed, which then comes first.
speaking = threading.Lock()
_SPEAKING_SECONDS = 5.0


def finish(
    code: int,
    text: str,
    before: Callable[[], None] | None = None,
    pause_seconds: float | None = 0.3,
) -> None:
    """Print `text` after all that was printed so far, and end the process with `code`.

    Nothing runs after it: no `finally`, no `atexit`, where JAX would wait for the
    others. The first caller wins; any other thread that comes here stays here.

    Args:
      before: done first, for example to tell the others.
      pause_seconds: for what other threads have to say about the same event; None
        when JAX is about to end the process itself.
    """
    _once.acquire()
    try:
        if before is not None:
            before()
        if pause_seconds is not None:
            time.sleep(pause_seconds)
            speaking.acquire(timeout=_SPEAKING_SECONDS)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        pass  # a closed pipe or stream; the text still has a way
    try:
        text = text if text.endswith("\n") else f"{text}\n"
        os.write(2, text.encode(errors="replace"))
    finally:
        os._exit(code)


def stacks() -> str:
    """The stacks of this process's Python threads, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    told = []
    for ident, frame in sorted(
        sys._current_frames().items(), key=lambda item: item[0] != main
    ):
        name = names.get(ident, f"thread {ident}")
        if not name.startswith(_OWN_THREADS):
            lines = "".join(traceback.format_stack(frame)).rstrip()
            told.append(f"{name}, the innermost call last:\n{lines}")
    return "\n".join(told)
