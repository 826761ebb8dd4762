"""The checkpoints of one folder: `Folder`."""

from __future__ import annotations

import re
from typing import Any, final

from jaxstrategy.checkpoint import _record
from jaxstrategy.checkpoint._record import Damage, Record

# Orbax writes into such folders, and renames them when all is there.
_UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")


@final
class Folder:
    """Checkpoints, each in a folder named like its step.

    Args:
      path: an `epath.Path`; it need not exist.
    """

    def __init__(self, path: Any) -> None:
        self.path = path
        self._known: dict[int, Record] = {}

    def of(self, step: int) -> Any:
        """Where the checkpoint of `step` is."""
        return self.path / str(step)

    def named(self) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def records(self) -> dict[int, Record]:
        """The complete checkpoints, in order; what is in their files is not looked at.

        A file that is missing or cut since the last look is seen.
        """
        found = {}
        for step in self.named():
            try:
                found[step] = self.record(step)
            except Damage:
                continue
        return found

    def record(self, step: int) -> Record:
        """That of `step`.

        Raises:
          Damage: it is not complete.
        """
        record = _record.read(self.of(step))
        if record.step != step:
            raise Damage(f"it is the checkpoint of step {record.step}, renamed")
        return record

    def sizes_of(self, step: int) -> Record:
        """The record of `step`, not read again if it was complete before."""
        if step not in self._known:
            self._known[step] = self.record(step)
        return self._known[step]

    def clear(self, damaged: set[int]) -> None:
        """Take away what stands in the way of new checkpoints.

        What was not written to its end is deleted. Damaged checkpoints are renamed, as
        a person may still get something out of them.
        """
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                (self.path / name).rmtree()
        for step in self.named():
            try:
                if step not in damaged:
                    self.sizes_of(step)
                    continue
            except Damage:
                pass
            self._set_aside(step)

    def _set_aside(self, step: int) -> None:
        taken = set(self._names())
        name = f"{step}.damaged"
        while name in taken:
            name += "-again"
        self.of(step).rename(self.path / name)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`."""
        self._known.pop(step, None)
        # The record first: what is left of a deletion that is killed is no checkpoint.
        (self.of(step) / _record.FILE).unlink(missing_ok=True)
        self.of(step).rmtree()
