"""Writing checkpoints in the background: `Saver`."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from typing import final

from jaxstrategy.checkpoint._written_state import WrittenState
from jaxstrategy.checkpoint.backends._backend import AbstractBackend
from jaxstrategy.checkpoint.folders._catalogue import Catalogue
from jaxstrategy.checkpoint.folders._checkpoint_errors import CheckpointError
from jaxstrategy.checkpoint.folders._record import Record
from jaxstrategy.checkpoint.processes import _checkpoint_agreement
from jaxstrategy.checkpoint.processes._checkpoint_agreement import first_line
from jaxstrategy.checkpoint.sorts._entries import Entry
from jaxstrategy.checkpoint.sorts._sorts import described
from jaxstrategy.processes._rendezvous import Json
from jaxstrategy.values._types import PyTree


@final
class Saver:
    """Writes one checkpoint at a time, and then deletes older ones.

    Args:
      catalogue: of the folder.
      backend: writes.
      keep: how many of the last checkpoints stay, None for all.
      asynchronous: whether `save` returns while the files are still written.

    Attributes:
      own: steps that this training has saved or restored.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        backend: AbstractBackend,
        keep: int | None,
        asynchronous: bool,
    ) -> None:
        self._catalogue = catalogue
        self._folder = catalogue.folder
        self._backend = backend
        self._keep = keep
        self._asynchronous = asynchronous
        self._thread: threading.Thread | None = None
        self._writing = 0
        self._unfinished = ""  # the folder that is written into
        self._failure: Exception | None = None
        self.own: set[int] = set()
        if asynchronous:
            _finish_at_exit(self)

    def save(
        self, step: int, state: PyTree, metrics: dict[str, float], extra: Json
    ) -> bool:
        """Write `state`; False if this training has saved or restored it before.

        Raises:
          CheckpointError: it cannot be written, or the one before could not be.
          ValueError: there is another checkpoint that is not earlier.
        """
        what = self._catalogue.what("save", step)
        self.wait()
        if self._is_saved(step, what):
            return False
        written = WrittenState(state, None)
        # Nothing is restored meanwhile by another thread.
        with written.snapshot(step):
            entries, arrays = written.saved()
            _checkpoint_agreement.compare_leaves(what, _leaves(entries))
            record = Record(step, entries, metrics, extra)
            self._unfinished = self._prepare(step, what)
            try:
                with _checkpoint_agreement.watched(what):
                    folder = self._folder.path / self._unfinished
                    self._backend.begin(folder, arrays, record)
            except (OSError, ValueError) as error:
                raise self._unwritten(step, first_line(error)) from error
            self._writing = step
            self._thread = threading.Thread(target=self._finish, name="checkpoint")
            self._thread.start()
        if not self._asynchronous:
            self.wait()
        return True

    def _is_saved(self, step: int, what: str) -> bool:
        """Whether this manager has done so already.

        Raises:
          ValueError: there is another checkpoint that is not earlier.
        """
        is_own = step in self.own and step in self._catalogue.good()
        latest = self._folder.latest(self._catalogue.damaged)
        is_own, latest = _checkpoint_agreement.agree(what, [is_own, latest])[0]
        if is_own:
            return True
        if latest is None or latest < step:
            return False
        raise ValueError(
            f"Checkpoint {step} was to be saved, but `{self._folder.path}` has "
            f"checkpoint {latest} already, of another training or another course of "
            "this one. Restore that one and go on, use another directory, or delete it "
            f"first: `manager.delete({latest})`."
        )

    def _prepare(self, step: int, what: str) -> str:
        """The name of a new folder to write into; all raise if the first cannot."""
        name = failure = None
        if _checkpoint_agreement.is_first():
            try:
                name = self._folder.begin(step, self._catalogue.damaged)
            except OSError as error:
                failure = first_line(error)
        # The name has a random part, so the first process makes it for all.
        name, failure = _checkpoint_agreement.agree(what, [name, failure])[0]
        if failure is not None:
            raise self._unwritten(step, failure)
        # `begin` has given these checkpoints other names.
        self._catalogue.damaged.clear()
        return name

    def _finish(self) -> None:
        """In the background: wait until all is written, then delete older ones."""
        step = self._writing
        try:
            self._backend.finish()
            self.own.add(step)
        # Any error counts: nobody catches it in this thread, so `wait` raises it.
        except Exception as error:
            reason = self._other_writer(step, error) or first_line(error)
            self._failure = self._unwritten(step, reason)
            # `wait` raises it, where `from error` cannot be said any more.
            self._failure.__cause__ = error
            return
        try:
            if _checkpoint_agreement.is_first():
                self._thin_out()
        except OSError as error:
            self._failure = CheckpointError(
                f"Checkpoint {step} is written, but an older one could not be deleted "
                f"in `{self._folder.path}`: {first_line(error)}"
            )
            self._failure.__cause__ = error

    def _thin_out(self) -> None:
        if self._keep is not None:
            for step in self._catalogue.surplus(self._keep):
                self._folder.delete(step)

    def _unwritten(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {step} could not be written to `{self._folder.path}`: "
            f"{reason}\nEarlier checkpoints are as they were. Is the folder "
            "writable, and is there room on the disk?"
        )

    def _other_writer(self, step: int, error: Exception) -> str | None:
        """The damage that another writer into this folder did; None if it did none."""
        if isinstance(error, FileExistsError):
            did = f"checkpoint {step} is there meanwhile"
        elif not self._folder.has(self._unfinished) and not self._folder.has(str(step)):
            did = f"`{self._unfinished}`, into which it was written, was deleted"
        else:
            return None
        return f"{did}. Does another training save to this folder? Give it another one."

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
          CheckpointError: what was being written could not be.
        """
        if self._thread is not None:
            what = f"checkpoint {self._writing} in `{self._folder.path}` to be written"
            _checkpoint_agreement.join(self._thread, what)
            self._thread = None
        self.raise_failure(is_over=True)

    def raise_failure(self, is_over: bool = False) -> None:
        """Raise what has failed in the background, if anything has.

        Args:
          is_over: whether nothing is written any more.
        """
        is_over = is_over or self._thread is None or not self._thread.is_alive()
        if is_over and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait, as `wait` does, and end the background threads."""
        try:
            self.wait()
        finally:
            self._backend.close()


def _finish_at_exit(saver: Saver) -> None:
    """Let a program that ends finish its files before Orbax's executors end.

    Executors end with the main thread, by the same function of `threading`: before what
    `atexit` calls, and before threads are waited for. Nothing public comes earlier.
    """
    alive = weakref.ref(saver)

    def finish() -> None:
        if (saver := alive()) is None or saver._thread is None:
            return
        saver._thread.join()
        try:
            saver.raise_failure(is_over=True)
        except CheckpointError as error:  # nobody is left to catch it
            print(error, file=sys.stderr)

    threading._register_atexit(finish)  # pyright: ignore[reportAttributeAccessIssue]


def _leaves(entries: Mapping[str, Entry]) -> list[str]:
    """Names with kinds."""
    return [f"`{name}` ({described(entry)})" for name, entry in entries.items()]
