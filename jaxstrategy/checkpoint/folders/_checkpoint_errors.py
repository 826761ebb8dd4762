"""Errors and warnings about checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.text._lists import and_more
from jaxstrategy.text._units import with_noun


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were.

    >>> import pathlib, tempfile
    >>> import jaxstrategy as js
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with js.checkpoint.CheckpointManager(folder) as manager:
    ...     _ = manager.save(1, {"w": np.ones(3)})
    ...     manager.wait()
    ...     _ = (folder / "1" / "jaxstrategy.json").write_text("{")
    ...     try:
    ...         manager.restore({"w": np.ones(3)}, step=1)
    ...     except js.checkpoint.CheckpointError as error:
    ...         print(str(error).partition(": ")[2].partition(". ")[0])
    its `jaxstrategy.json` is cut or overwritten
    """


class MismatchError(ValueError):
    """A checkpoint does not hold what was asked of it.

    Attributes:
      missing: names of values that the checkpoint has not.
      unexpected: names of values that only the checkpoint has.
      differing: one sentence for each value of another kind, dtype or shape.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with js.checkpoint.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     _ = manager.save(1, {"w": np.ones(3, np.float32)})
    ...     try:
    ...         manager.restore({"w": np.ones(4, np.float32)})
    ...     except js.checkpoint.MismatchError as error:
    ...         print(error.differing[0])
    `w` is float32[3] in the checkpoint, and float32[4] was wanted
    """

    _NAMED = 8  # of each sort; the others are counted

    def __init__(
        self,
        where: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        differing: Sequence[str] = (),
        partial: bool = False,
    ) -> None:
        super().__init__(where, missing, unexpected, differing, partial)
        self._where = where
        self._is_partial = partial
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.differing = tuple(differing)

    def __str__(self) -> str:
        lines = [f"{self._where} does not fit what it is restored into:"]
        lines += self._listed("", self.differing)
        if self._is_partial:  # the rest is as it may be
            return "\n".join(lines)
        lines += self._listed("missing in the checkpoint: ", self.missing)
        # Many more than are missing are no renamed ones, and hide what matters.
        is_other = self.differing or len(self.unexpected) > len(self.missing) > 0
        if self.unexpected and is_other:
            values = with_noun(len(self.unexpected), "value")
            lines.append(f"  only in the checkpoint: {values}")
        else:
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
    """A checkpoint is damaged and an earlier one is used; it says which, and why.

    >>> import pathlib, tempfile, warnings
    >>> import jaxstrategy as js
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with js.checkpoint.CheckpointManager(folder) as manager:
    ...     saved = [manager.save(step, {"w": np.ones(3)}) for step in (1, 2)]
    ...     manager.wait()
    ...     _ = (folder / "2" / "jaxstrategy.json").write_text("{")
    ...     with warnings.catch_warnings(record=True) as told:
    ...         warnings.simplefilter("always")
    ...         state, step = manager.restore_or_init({"w": np.zeros(3)})
    >>> print(told[0].category.__name__, step)
    DamagedCheckpointWarning 1
    """
