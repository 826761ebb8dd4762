"""Agreement of processes about what they do with a checkpoint."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import final

import jax

from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes import job
from jaxstrategy._src.processes.rendezvous import Json

_TICK_SECONDS = 0.5
_MOST_SECONDS = 1200  # that processes wait for each other to write


class ElsewhereError(OSError):
    """Another process could not write its part; the text says which, and why."""


def current() -> job.Processes | None:
    """The processes that take part; None if there is but one."""
    return None if jax.process_count() == 1 else job.start()


def agree(what: str, said: Json) -> list[Json]:
    processes = current()
    if processes is None:
        return [said]
    return processes.operations.agree(what, said)


def compare_leaves(what: str, leaves: Sequence[str], said: Json = None) -> list[Json]:
    """What each process says besides, if all of them have the same leaves."""
    whole = "\n".join(leaves).encode()
    told = agree(what, [len(leaves), zlib.crc32(whole), said])
    prints = [each[:2] for each in told]
    if prints.count(prints[0]) == len(prints):
        return [each[2] for each in told]
    # All have heard the same, so all come here; names are sent only if they differ.
    listed = agree(what, list(leaves))
    other = next(k for k, each in enumerate(listed) if each != listed[0])
    lacking = [
        next((leaf for leaf in one if leaf not in set(two)), "nothing else")
        for one, two in ((listed[0], listed[other]), (listed[other], listed[0]))
    ]
    processes = current()
    assert processes is not None, "there is another one"
    raise processes.operations.refusal(
        f"The processes have different states in {what}: process 0 has {lacking[0]}, "
        f"process {other} has {lacking[1]}. All processes must give a state of the "
        "same structure, dtypes and shapes."
    )


@contextlib.contextmanager
def watched(what: str, busy: str | None = None) -> Iterator[None]:
    processes = current()
    if processes is None:
        yield
        return
    with processes.watchdog.waiting(what, busy):
        yield


@final
class Background:
    """Work in a thread, one piece after the other; errors wait to be raised."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._what = ""
        self._failure: Exception | None = None

    def start(self, name: str, what: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # any: nobody catches it in this thread
                self._failure = error

        self._what, self.thread = what, threading.Thread(target=run, name=name)
        self.thread.start()

    def join(self) -> None:
        """Wait until it is done; raise what it raised."""
        if self.thread is not None and (processes := current()) is not None:
            with processes.watchdog.waiting(self._what) as activity:
                while self.thread.is_alive():
                    self.thread.join(_TICK_SECONDS)
                    if _is_written(processes):
                        activity.progress()
        if self.thread is not None:
            self.thread.join()
        self.thread = None
        self.check()

    def check(self) -> None:
        """Raise what it raised, if it is done."""
        is_over = self.thread is None or not self.thread.is_alive()
        if is_over and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure


def _is_written(processes: job.Processes) -> bool:
    """Whether this process, or another one, still writes files."""
    if processes.watchdog.writes is not None:
        return True
    with contextlib.suppress(ClusterError):  # nothing is heard of them
        return any(state.writes is not None for state in processes.store.states())
    return False


def together(
    topic: str, work: Callable[[], Json], writes: str | None = None
) -> list[Json]:
    """What a part of some work returns in each process.

    Raises:
      ElsewhereError: it failed in another process.
    """
    done = failure = None
    try:
        done = work()
    except Exception as error:  # any error: the others wait for this process
        failure = error
    told: list[Json] = [[None, done]]
    if (processes := current()) is not None:
        if writes is not None:
            processes.watchdog.writes = None  # it waits for those that still do
        reason = None if failure is None else first_line(failure)
        try:
            told = processes.agreement(topic).exchange([reason, done], _MOST_SECONDS)
        except ClusterError:
            if failure is None:
                raise
        if writes is not None:
            processes.watchdog.writes = writes
    if failure is not None:
        raise failure
    for process, (reason, _) in enumerate(told):
        if reason is not None:
            raise ElsewhereError(f"process {process}: {reason}")
    return [each for _, each in told]


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
