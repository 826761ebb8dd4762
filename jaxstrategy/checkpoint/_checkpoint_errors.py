"""What can go wrong with checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.text._lists import and_more


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were."""


class MismatchError(ValueError):
    """A checkpoint does not hold what was asked of it.

    Attributes:
      missing: names of values that the checkpoint has not.
      unexpected: names of values that only the checkpoint has.
      differing: one sentence for each value of another kind, dtype or shape.
    """

    _NAMED = 8  # of each sort; the others are counted

    def __init__(
        self,
        where: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        differing: Sequence[str] = (),
    ) -> None:
        super().__init__(where, missing, unexpected, differing)
        self._where = where
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.differing = tuple(differing)

    def __str__(self) -> str:
        lines = [f"{self._where} does not fit what it is restored into:"]
        lines += self._listed("", self.differing)
        lines += self._listed("missing in the checkpoint: ", self.missing)
        lines += self._listed("only in the checkpoint: ", self.unexpected)
        if not self.differing:
            lines.append(
                "Restore into the structure that was saved, or only what both have: "
                "`restore(..., partial=True)`."
            )
        return "\n".join(lines)

    def _listed(self, head: str, items: Sequence[str]) -> list[str]:
        quote = "`" if head else ""
        lines = [f"  {head}{quote}{item}{quote}" for item in items[: self._NAMED]]
        more = and_more(len(items), self._NAMED, before=f"  {head}")
        return [*lines, more] if more else lines


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged and an earlier one is used; it says which, and why."""
