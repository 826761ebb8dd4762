"""The checkpoints of one folder: `Folder`."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Hashable
from typing import final

from jaxstrategy.checkpoint.folders import (
    _files,
    _record,
)
from jaxstrategy.checkpoint.folders._files import (
    AbstractFiles,
    Path,
)
from jaxstrategy.checkpoint.folders._record import (
    Damage,
    Record,
)

# As `str` writes numbers: `007` and digits of other scripts are names like any other.
_STEP = re.compile("0|[1-9][0-9]*")
# What is being written has such a name, and is renamed when all is there; Orbax looks
# for it. What is being deleted was renamed before.
_WRITING = ".orbax-checkpoint-tmp"
_UNFINISHED = re.compile(
    rf"({_STEP.pattern})({re.escape(_WRITING)}.*|(\.[0-9a-f]+)?\.deleted)"
)


@final
class Folder:
    """Checkpoints, each in a folder named like its step.

    A checkpoint may be a link to where somebody moved it. Nothing behind a link is ever
    deleted or renamed, only the link.

    Args:
      path: an `epath.Path`; it need not exist.
      files: does what is done on the disk.
    """

    def __init__(self, path: Path, files: AbstractFiles | None = None) -> None:
        self.path = path
        self.files = _files.files_of(path) if files is None else files
        self._base = os.fspath(path)
        self._known: set[int] = set()
        self._read: dict[int, tuple[Hashable, Record]] = {}

    def of(self, step: int) -> Path:
        """The path of the checkpoint of `step`."""
        return self.path / str(step)

    def _text(self, step: int) -> str:
        return f"{self._base}/{step}"

    def named(self) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return sorted(int(name) for name in self._names() if _STEP.fullmatch(name))

    def has(self, name: str) -> bool:
        """Whether anything has that name; not if the disk does not say."""
        try:
            return name in self._names()
        except OSError:
            return False

    def _names(self) -> list[str]:
        return self.files.names(self.path)

    def records(self) -> dict[int, Record]:
        """The complete checkpoints, in order; what is in their files is not looked at.

        A file that is missing or cut since the last look is seen.
        """
        found = {}
        for step in self.named():
            try:
                found[step] = self._seen(step)
            except Damage:
                continue
        return found

    def _seen(self, step: int) -> Record:
        """The record of `step`, read only if it is another than the last time."""
        folder = self._text(step)
        try:
            version = self.files.version(f"{folder}/{_record.FILE}")
        except OSError:
            return self.record(step)
        before, record = self._read.get(step, (None, None))
        if record is None or before != version:
            record = self.record(step)
            self._read[step] = version, record
        else:
            _record.check_sizes(self.files, folder, record)
        return record

    def record(self, step: int) -> Record:
        """The record of `step`.

        Raises:
          Damage: it is not complete, or cannot be read.
        """
        record = _record.read(self.files, self._text(step))
        if record.step != step:
            raise Damage(f"it is the checkpoint of step {record.step}, renamed")
        return record

    def newest(self, damaged: set[int]) -> int | None:
        """The last step whose checkpoint is complete now, in `records`."""
        for step in reversed(self.named()):
            if step not in damaged:
                with contextlib.suppress(Damage):
                    self._seen(step)
                    return step
        return None

    def latest(self, damaged: set[int]) -> int | None:
        """The last step whose checkpoint was complete when it was first looked at."""
        for step in reversed(self.named()):
            if step not in damaged and self._was_complete(step):
                return step
        return None

    def _was_complete(self, step: int) -> bool:
        if step not in self._known:
            try:
                self.record(step)
            except Damage:
                return False
            self._known.add(step)
        return True

    def begin(self, step: int, damaged: set[int]) -> str:
        """Make room for a checkpoint, and a folder to write it into; returns its name.

        No two writers have the same one, so that they do not write into each other's
        files. What was not written or deleted to its end is deleted. Damaged
        checkpoints are renamed, as a person may still get something out of them.
        """
        self.files.make(self.path)
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                self.files.remove(self.path / name)
        for other in self.named():
            if other in damaged or self._is_in_the_way(other):
                self._set_aside(other)
        name = f"{step}{_WRITING}-{secrets.token_hex(4)}"
        self.files.make(self.path / name)
        return name

    def _is_in_the_way(self, step: int) -> bool:
        if step in self._known:
            return False
        try:
            self.record(step)
        except Damage as damage:
            return not damage.is_unread
        self._known.add(step)
        return False

    def _set_aside(self, step: int) -> None:
        self._known.discard(step)
        taken = set(self._names())
        name = f"{step}.damaged"
        while name in taken:
            name += "-again"
        self.files.rename(self.of(step), self.path / name)

    def finish(self, name: str) -> None:
        """Give what was written into the folder of that name its name in the end."""
        self.files.rename(self.path / name, self.final(name))

    def final(self, name: str) -> Path:
        """The final path of the checkpoint that is written under that name."""
        return self.path / name.partition(".")[0]

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`; another writer may have done it."""
        self._known.discard(step)
        self._read.pop(step, None)
        # Renamed first: what is left if this is killed is no checkpoint.
        left = self.path / f"{step}.{secrets.token_hex(4)}.deleted"
        try:
            self.files.rename(self.of(step), left)
        except FileNotFoundError:
            return
        self.files.remove(left)
