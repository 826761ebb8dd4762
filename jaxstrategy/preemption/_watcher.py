"""Notices that the machine of this process is wanted back: `PreemptionWatcher`."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import final

_POLL_SECONDS = 1.0


@final
class PreemptionWatcher:
    """Looks for the notice that this process is to end.

    Args:
      watcher_fn: returns whether it is; asked each second in a thread. By default the
        signal SIGTERM is the notice: it no longer ends the process.

    Raises:
      RuntimeError: signals can be handled only in the main thread.

    >>> import jaxstrategy as js
    >>> watcher = js.experimental.PreemptionWatcher(lambda: False)
    >>> watcher.preemption_message is None
    True
    >>> watcher.close()
    """

    def __init__(self, watcher_fn: Callable[[], bool] | None = None) -> None:
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self._message: str | None = None
        self._raised: BaseException | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._is_installed = watcher_fn is None
        if watcher_fn is None:
            self._install()
        else:
            thread = threading.Thread(
                target=_poll,
                args=(watcher_fn, weakref.ref(self), self._closed),
                name="jaxstrategy preemption",
                daemon=True,
            )
            thread.start()

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "A signal can be handled only in the main thread, and this is another. "
                "Make the PreemptionWatcher there, or give a `termination_watcher_fn`."
            )
        self._before = signal.signal(signal.SIGTERM, self._signalled)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.notice(f"signal {signal.Signals(number).name}")

    def notice(self, message: str) -> None:
        """Let this be the notice; `preemption_message` is then `message`."""
        self._message = self._message or message
        self._noticed.set()

    def failed(self, error: BaseException) -> None:
        """Raise the watcher function's error where the notice is waited for."""
        self._raised = error
        self._noticed.set()

    @property
    def preemption_message(self) -> str | None:
        """The text of the notice, None as long as there is none.

        Raises:
          Exception: what the watcher function raised.
        """
        if self._raised is not None:
            raise self._raised
        return self._message

    @property
    def has_failed(self) -> bool:
        """Whether the watcher function raised something."""
        return self._raised is not None

    def wait(self, timeout_seconds: float) -> bool:
        """Whether there is a notice, now or within the time."""
        return self._noticed.wait(timeout_seconds)

    def block_until_worker_exit(self) -> None:
        """Do nothing until there is a notice."""
        while not self._noticed.wait(_POLL_SECONDS):
            pass

    def close(self) -> None:
        """Stop looking; SIGTERM does again what it did before."""
        self._closed.set()
        if self._is_installed:
            self._is_installed = False
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def _poll(
    watcher_fn: Callable[[], bool],
    get_watcher: Callable[[], PreemptionWatcher | None],
    closed: threading.Event,
) -> None:
    while not closed.wait(_POLL_SECONDS / 4):
        watcher = get_watcher()
        if watcher is None:
            return
        try:
            if watcher_fn():
                watcher.notice("`termination_watcher_fn` returned True")
                return
        # SystemExit, too, which ends a thread silently: then nothing would be noticed.
        except BaseException as error:
            watcher.failed(error)
            return
        del watcher
