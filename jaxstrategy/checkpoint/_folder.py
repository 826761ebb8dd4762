"""The checkpoints of one folder: `Folder`."""

from __future__ import annotations

import re
from typing import Any, final

from jaxstrategy.checkpoint import _record
from jaxstrategy.checkpoint._record import Damage, Record

# Orbax writes into such folders, and renames them when all is there; and what is being
# deleted was renamed.
_UNFINISHED = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted)")


@final
class Folder:
    """Checkpoints, each in a folder named like its step.

    Args:
      path: an `epath.Path`; it need not exist.
    """

    def __init__(self, path: Any) -> None:
        self.path = path
        self._known: set[int] = set()

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

    def clear(self, damaged: set[int]) -> None:
        """Take away what stands in the way of new checkpoints.

        What was not written or deleted to its end is deleted. Damaged checkpoints are
        renamed, as a person may still get something out of them.
        """
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                (self.path / name).rmtree()
        for step in self.named():
            if step in damaged or not self._was_complete(step):
                self._set_aside(step)

    def _set_aside(self, step: int) -> None:
        self._known.discard(step)
        taken = set(self._names())
        name = f"{step}.damaged"
        while name in taken:
            name += "-again"
        self.of(step).rename(self.path / name)

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`."""
        self._known.discard(step)
        # Renamed first: what is left if this is killed is no checkpoint.
        left = self.path / f"{step}.deleted"
        if left.exists():
            left.rmtree()
        self.of(step).rename(left)
        left.rmtree()
