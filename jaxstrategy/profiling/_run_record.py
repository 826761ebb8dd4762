"""What a run did when, through all its restarts: `RunRecord`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias, final

import jax

from jaxstrategy.profiling._goodput import Goodput, RecordedStart

Event: TypeAlias = dict[str, Any]
"""A line of the file: its `event`, `time`, and the numbers named here."""

_EVENTS = {
    "start": (),
    "begin": ("step",),
    "steps": ("before", "after", "seconds"),
    "save": ("seconds",),
    "end": (),
}


@final
class RunRecord:
    """A file that tells what a run did when, and its `Goodput`, restarts included.

    Open it where the program begins, each time with the same path: lines are added. A
    training loop says by it what it does; `js.training_loop(record=)` does so by
    itself. With several processes only process 0 writes; call it in all.

    Args:
      path: of the file, whose lines are JSON; best beside the checkpoints.
      every: how many seconds of steps make a line. Of a process that is killed, the
        steps after the last line count as time in which it was down.
      clock: returns seconds that go on through restarts.

    Raises:
      ValueError: the file is not such a record.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.jsonl")
    ...     for restored in (0, 2):  # two starts of one program
    ...         with js.profiling.RunRecord(path) as run:
    ...             run.begin(restored)
    ...             for done in range(restored, restored + 3):
    ...                 run.done(done + 1)
    ...     found = js.profiling.RunRecord.read(path)
    >>> found.attempts, found.steps
    (2, 5)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._every = every
        self._clock = clock
        self._is_closed = False
        self._attempts = list(_attempts(self._path)) if self._path.exists() else []
        now = clock()
        self._attempts.append(RecordedStart(now, now))
        self._told, self._pending = now, _Pending()
        self._is_writing = jax.process_index() == 0
        if self._is_writing:
            _end_last_line(self._path)
        self._write({"event": "start", "time": now})

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Goodput:
        """The goodput that the file of a run tells, without a start of its own.

        Raises:
          ValueError: the file is not such a record.
          FileNotFoundError: there is none.
        """
        return Goodput.of(list(_attempts(Path(path))))

    def begin(self, step: int) -> None:
        """The loop begins; so many steps are done already, in earlier starts."""
        now = self._clock()
        self._tell({"event": "begin", "time": now, "step": step})
        self._pending = _Pending(now, step, step)

    def done(self, step: int) -> None:
        """So many steps are done in all.

        Raises:
          ValueError: `begin` has not been called, or they are not more than before.
        """
        attempt, pending = self._attempts[-1], self._pending
        if attempt.begin is None:
            raise ValueError(
                f"`done({step})` was called before `begin`. Call `begin(step)` before "
                "the loop, with the number of steps that are done already."
            )
        if step <= pending.after:
            raise ValueError(
                f"`done({step})` was called when {pending.after} steps were done. Give "
                "the number of steps that are done in all, after each."
            )
        now = self._clock()
        pending.seconds += now - pending.time
        pending.time, pending.after = now, step
        if not attempt.intervals or now - self._told >= self._every:
            self._tell_steps()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A `with` block in which the loop waits for a checkpoint."""
        start = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._pending.time += now - start  # no part of the next step
        self._tell_steps()
        self._tell({"event": "save", "time": now, "seconds": now - start})

    def goodput(self) -> Goodput:
        """That of the run until what was recorded last."""
        self._tell_steps()
        return Goodput.of(self._attempts)

    def close(self) -> None:
        """Write what is left, and the end of this start."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tell_steps()
        self._tell({"event": "end", "time": self._clock()})

    def _tell_steps(self) -> None:
        """Those that are done and not recorded yet."""
        done = self._pending
        if done.after == done.before:
            return
        steps = {"before": done.before, "after": done.after, "seconds": done.seconds}
        last = self._attempts[-1].last
        self._tell({"event": "steps", "time": max(done.time, last), **steps})
        self._pending = _Pending(done.time, done.after, done.after)

    def _tell(self, event: Event) -> None:
        _add(self._attempts[-1], event)
        self._write(event)

    def _write(self, event: Event) -> None:
        self._told = event["time"]
        if self._is_writing:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass
class _Pending:
    """Steps that are not recorded yet.

    Attributes:
      time: when the last one was done, later by what the loop has waited since.
      before: how many were done before them.
      after: how many are done.
      seconds: that they took.
    """

    time: float = 0.0
    before: int = 0
    after: int = 0
    seconds: float = 0.0


def _end_last_line(path: Path) -> None:
    """End it if a process was killed while it wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() not in (b"", b"\n"):
            file.write(b"\n")


def _attempts(path: Path) -> Iterator[RecordedStart]:
    """Those that a file tells of.

    Raises:
      ValueError: it is not a record.
    """
    attempt: RecordedStart | None = None
    torn: int | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        event = _event(line)
        if event is None:
            if torn is not None or number == 1:
                raise _no_record(path, torn or number)
            torn = number
            continue
        if event["event"] == "start":
            torn = None
            if attempt is not None:
                yield attempt
            attempt = RecordedStart(event["time"], event["time"])
        elif torn is not None or attempt is None:
            raise _no_record(path, torn or number)
        else:
            _add(attempt, event)
    if attempt is not None:
        yield attempt


def _event(line: str) -> Event | None:
    """A line of a record, None of another one or of a part."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") not in _EVENTS:
        return None
    names = ["time", *_EVENTS[event["event"]]]
    is_whole = all(isinstance(event.get(name), (int, float)) for name in names)
    return event if is_whole else None


def _add(attempt: RecordedStart, event: Event) -> None:
    attempt.last = event["time"]
    match event["event"]:
        case "begin":
            attempt.begin = (event["time"], event["step"])
        case "steps":
            found = event["before"], event["after"], event["seconds"]
            attempt.intervals.append(found)
        case "save":
            attempt.saving += event["seconds"]


def _no_record(path: Path, line: int) -> ValueError:
    return ValueError(
        f"`{path}` is not the record of a run: line {line} is none of its events. Give "
        "a path of its own to `RunRecord`, or remove the file."
    )
