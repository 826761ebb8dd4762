"""The end of a process: by itself, by an exception, or because another ended."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import final

import jax

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import stragglers
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.store import ProcessState, Store
from jaxstrategy._src.processes.watchdog import Watchdog, finish, speaking
from jaxstrategy._src.text import users_line

# So long the user's own exception may take to be printed before the death of another
# process is; process 0's end is told at once, since JAX aborts all others.
_OWN_WORDS_SECONDS = 0.5
# After an exception, how long to wait for news that another process has died, which
# may be the reason; after an error of JAX's it often is.
_NEWS_SECONDS, _NEWS_SECONDS_OF_JAX = 0.3, 2.0
# A process that ends by a `ClusterError` was perhaps given it together with all others:
# so long they have to end by it, too, and process 0 stays for them.
_COMMON_SECONDS = 8.0
_NOTE_SECONDS = 60.0  # of waiting at the end of the script, before a line about it


@final
class Ending:
    """The end of this process: by itself, by an exception, or because another ended.

    JAX's own way is a barrier that waits for processes that will not come: after an
    exception in one process all of them hang in it until `shutdown_timeout_seconds`,
    300 by default, and are then aborted. When process 0 ends, all others are aborted
    within 0.1 s, whatever they do (measured with 0.10 and 0.12, on CPU).
    """

    def __init__(self, store: Store, watchdog: Watchdog) -> None:
        self._store = store
        self._watchdog = watchdog
        self._pid = os.getpid()
        self.is_over = False
        self._has_raised = threading.Event()
        store.status = watchdog.status
        os.register_at_fork(after_in_child=self._forked)
        store.on_departure(self._departed)

    def install(self) -> None:
        """Take part in how Python ends."""
        self._chained = sys.excepthook
        sys.excepthook = self._raised
        # After JAX's own, so that it runs before it.
        atexit.register(self._exiting)

    def _forked(self) -> None:
        self.is_over = True
        # A child is no process of the job: it must neither leave nor end it.
        self._store.close_in_forked_child()

    def _departed(self, departure: ProcessState) -> None:
        if departure.end == "left" or self.is_over:
            return  # a leaver is the watchdog's business, if anyone waits for it
        is_ours = departure.text.startswith(ClusterError.__name__)
        if is_ours and self._has_raised.wait(_COMMON_SECONDS):
            return
        self._follow(departure, _OWN_WORDS_SECONDS if departure.member.index else None)

    def _follow(self, departure: ProcessState, pause_seconds: float | None) -> None:
        """End because another process did."""
        finish(
            ExitCode.PEER_DIED,
            f"{self._late}\njaxstrategy: process {self._store.index} (last begun: "
            f"{self._watchdog.told()}) ends with exit code {ExitCode.PEER_DIED}, "
            "because the job cannot go on:\n"
            f"jaxstrategy: {departure}",
            pause_seconds=pause_seconds,
        )

    def _raised(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        # Whether Python goes on after an exception that nobody caught.
        interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
        if self.is_over or interactive or os.getpid() != self._pid:
            self._chained(kind, error, trace)
            return
        self._has_raised.set()
        with speaking:
            self._chained(kind, error, trace)
        interrupted = isinstance(error, KeyboardInterrupt)
        is_common = str(error) == self._store.common_error
        if not interrupted and not is_common:
            # On CPU, what a lost connection raises is a ValueError.
            jaxs = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
            seconds = _NEWS_SECONDS_OF_JAX if jaxs else _NEWS_SECONDS
            if cause := self._store.wait_for_departure(seconds):
                self._follow(cause, None)
        text = described(error.with_traceback(trace))
        finish(
            # What shells say of a process that SIGINT has ended: 128 and its number.
            130 if interrupted else 1,
            f"{self._late}jaxstrategy: process {self._store.index} ends, and with it "
            "the job",
            lambda: self._store.fail(text, 2 * _COMMON_SECONDS if is_common else None),
            pause_seconds=None,
        )

    @property
    def _late(self) -> str:
        """The line of process 0 about late processes; empty in the others."""
        return stragglers.at_the_end(self._store.known_states())

    def _exiting(self) -> None:
        """Wait until all have finished: JAX's barrier would give up after a time.

        With which code the script ends, Python tells nobody here.
        """
        if self.is_over or os.getpid() != self._pid:
            return
        try:
            self._store.leave(self._watchdog.status())
        except ClusterError:
            pass  # somebody has died; `_departed` ends this process in a moment
        since, has_noted = time.monotonic(), False
        while not self._store.wait_for_all_left(1.0):
            if not has_noted and time.monotonic() - since > _NOTE_SECONDS:
                has_noted = True
                print(
                    f"jaxstrategy: process {self._store.index} has finished and waits "
                    "for the others to.",
                    file=sys.stderr,
                    flush=True,
                )
        print(self._late, end="", file=sys.stderr, flush=True)
        self.is_over = True
        self._watchdog.stop()
        self._store.close()


def described(error: BaseException) -> str:
    """An exception in one line: its type, text and the user's line."""
    said = " ".join(str(error).split())
    said = said[:500] + ("..." if len(said) > 500 else "")
    line = users_line(error.__traceback__)
    told = type(error).__name__ + (f": {said}" if said else "")
    return f"{told} ({line})" if line else told


def keep_sigterm() -> None:
    """Let the runtime that is about to start leave SIGTERM as it is."""
    jax.config.update("jax_enable_preemption_service", False)


def take_back_sigterm() -> None:
    """Let SIGTERM do what it did before a runtime that was started elsewhere."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python installs handlers in the main thread only
    before = signal.getsignal(signal.SIGTERM)
    if before is not None:  # else it is of C code that was there before Python
        signal.signal(signal.SIGTERM, before)
