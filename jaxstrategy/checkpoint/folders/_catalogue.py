"""The checkpoints of a folder, the same to all processes: `Catalogue`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, final

from jaxstrategy.checkpoint.folders import _retention
from jaxstrategy.checkpoint.folders._checkpoint_errors import CheckpointError
from jaxstrategy.checkpoint.folders._folder import Folder
from jaxstrategy.checkpoint.folders._record import (
    Damage,
    Record,
)
from jaxstrategy.checkpoint.folders._retention import Best
from jaxstrategy.checkpoint.processes import _checkpoint_agreement

_T = TypeVar("_T")


@final
class Catalogue:
    """The checkpoints of a folder.

    What the first process finds counts for all: on a network file system the others may
    see a new folder seconds later.

    Args:
      folder: where they are.
      best: how the best of them is found.

    Attributes:
      folder: where they are.
      damaged: steps whose checkpoints have turned out to be damaged.
    """

    def __init__(self, folder: Folder, best: Best | None) -> None:
        self.folder = folder
        self.damaged: set[int] = set()
        self._best = best

    def what(self, doing: str, step: int | None = None) -> str:
        """Something that is done, in the words by which the processes compare it."""
        which = "" if step is None else f" checkpoint {step}"
        return f"{doing}{which} in `{self.folder.path}`"

    def named(self, what: str) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return _checkpoint_agreement.agree(what, self.folder.named())[0]

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return self._of_first("list the checkpoints", list(self.good()))

    def latest(self) -> int | None:
        """The last step whose checkpoint is complete; None if there is none."""
        newest = self.folder.newest(self.damaged)
        return self._of_first("find the latest checkpoint", newest)

    def best(self) -> int | None:
        """The step that is best by the metric; None if no checkpoint has it.

        Raises:
          ValueError: nothing says what is best.
        """
        if self._best is None:
            raise ValueError(
                "The manager was not told what is best: "
                "`CheckpointManager(..., best=('accuracy', 'max'))`."
            )
        return self._of_first("find the best checkpoint", self._best_of(self.good()))

    def _of_first(self, doing: str, found: _T) -> _T:
        """The first process's finding, in all processes."""
        return _checkpoint_agreement.agree(self.what(doing), found)[0]

    def good(self) -> dict[int, Record]:
        """The complete checkpoints that have not turned out to be damaged."""
        records = self.folder.records()
        return {s: each for s, each in records.items() if s not in self.damaged}

    def surplus(self, keep: int) -> list[int]:
        """The steps that are neither among the last `keep` nor the best."""
        records = self.good()
        return _retention.surplus(list(records), keep, self._best_of(records))

    def _best_of(self, records: Mapping[int, Record]) -> int | None:
        if self._best is None:
            return None
        return self._best.among({s: each.metrics for s, each in records.items()})

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise ValueError if the metric is not among them that says what is best."""
        if self._best is not None and metrics and self._best.metric not in metrics:
            raise ValueError(
                f"`metrics` has {', '.join(metrics)}, but the best checkpoint is "
                f"chosen by {self._best.metric!r}."
            )

    def record(self, step: int) -> Record:
        """The record of a checkpoint.

        Raises:
          CheckpointError: it is damaged.
        """
        try:
            return self.folder.record(step)
        except Damage as damage:
            raise CheckpointError(
                f"Checkpoint {step} in `{self.folder.path}` is damaged: {damage}."
            ) from None

    def require(self, step: int, named: list[int]) -> None:
        """Raise FileNotFoundError unless `step` is one of those that there are."""
        if step not in named:
            has = ", ".join(map(str, named)) if named else "none"
            raise FileNotFoundError(
                f"There is no checkpoint {step} in `{self.folder.path}`; it has: {has}."
            )

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`.

        Raises:
          FileNotFoundError: there is none.
        """
        what = self.what("delete", step)
        self.require(step, self.named(what))
        if _checkpoint_agreement.is_first():
            self.folder.delete(step)
        # No process goes on before it is deleted.
        _checkpoint_agreement.agree(what, None)
