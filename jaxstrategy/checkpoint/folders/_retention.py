"""The choice of the checkpoints that stay.

Orbax has policies for it (`ocp.checkpoint_managers.LatestN`, `BestN`), which know less:
they sort metrics as they are, so that one NaN hides the best checkpoint (measured with
Orbax 0.12: of accuracies 0.9, NaN and 0.1 `BestN` keeps 0.1), end in a `KeyError` where
a checkpoint lacks the metric, and want the time of each, while here steps decide and
clocks may go backwards. They would not know damaged checkpoints, which must not push
out good ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Self


@dataclasses.dataclass(frozen=True)
class Best:
    """The metric and the mode that find the best checkpoint.

    Attributes:
      metric: the name of the metric.
      mode: `"max"` or `"min"`.
    """

    metric: str
    mode: str

    @classmethod
    def of(cls, given: object) -> Self:
        """From a pair of a name and a mode.

        Raises:
          ValueError: it is something else.
        """
        match given:
            case (str(metric), ("max" | "min") as mode):
                return cls(metric, mode)
        raise ValueError(
            f"`best` was {given!r}; the name of a metric and 'max' or 'min' was "
            "wanted: `best=('accuracy', 'max')`."
        )

    def among(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best step, the latest of equal ones; None if no step has the metric."""
        sign = 1 if self.mode == "max" else -1
        ranked = [
            (sign * values[self.metric], step)
            for step, values in metrics.items()
            if not math.isnan(values.get(self.metric, math.nan))
        ]
        return max(ranked)[1] if ranked else None


def surplus(steps: Sequence[int], keep: int | None, best: int | None) -> list[int]:
    """The steps that are neither among the last `keep` nor the best one."""
    if keep is None:
        return []
    return [step for step in sorted(steps)[:-keep] if step != best]
