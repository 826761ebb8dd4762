"""A function called ahead of its use, in a thread of its own: `Ahead`."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxstrategy.contexts import _context

_T = TypeVar("_T")

# A thread that waits for a source is left behind at the end of the program.
_PATIENCE_SECONDS = 2.0


class Ahead(Iterator[_T]):
    """The results of a function, one after the other, called some calls ahead.

    The thread begins with `start` or the first `next`. It ends when the function
    raises, and when this object is closed, is collected or the program ends. What the
    function raised is raised here, after all that it returned before, at each further
    `next`.

    The thread knows for which worker of a coordinator it reads, as its maker does.

    Args:
      make: called in the thread. Must not refer to this object.
      depth: how many calls ahead.
    """

    def __init__(self, make: Callable[[], _T], depth: int) -> None:
        # Of this kind because its methods may be interrupted by the collector, which
        # may call `_end` in the midst of any of them.
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._wanted.put(None)
        self._stop = threading.Event()
        self._raised: BaseException | None = None
        self._thread = threading.Thread(
            target=_work,
            args=(
                make,
                self._wanted,
                self._results,
                self._stop,
                _context.current().worker,
            ),
            name="jaxstrategy input",
            daemon=True,
        )
        # Also called at the end of the program.
        self._finalizer = weakref.finalize(
            self, _end, self._thread, self._wanted, self._results, self._stop
        )

    def __next__(self) -> _T:
        if self._raised is not None:
            raise self._raised
        if self._stop.is_set():
            raise StopIteration
        self.start()
        result, error = self._results.get()
        if error is not None:
            self._raised = error
            self.close()
            raise error
        self._wanted.put(None)
        return result

    def start(self) -> None:
        """Begin, if it has not begun."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> bool:
        """End the thread. It may be called twice.

        Returns:
          Whether it has ended: it does not while its function waits for something.
        """
        self._finalizer()
        return not self._thread.is_alive()


def _work(
    make: Callable[[], _T],
    wanted: queue.SimpleQueue[None],
    results: queue.SimpleQueue[Any],
    stop: threading.Event,
    worker: object,
) -> None:
    while True:
        wanted.get()
        if stop.is_set():
            return
        try:
            with _context.entered(worker=worker):
                result = make(), None
        except BaseException as error:
            # Of any kind: who waits for the result would otherwise wait for ever.
            result = None, error
        results.put(result)
        if result[1] is not None:
            return


def _end(
    thread: threading.Thread,
    wanted: queue.SimpleQueue[None],
    results: queue.SimpleQueue[Any],
    stop: threading.Event,
) -> None:
    stop.set()
    wanted.put(None)  # the thread may wait for it
    with contextlib.suppress(queue.Empty):
        while True:
            results.get_nowait()
    results.put((None, StopIteration()))  # somebody may wait for it in another thread
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_PATIENCE_SECONDS)
