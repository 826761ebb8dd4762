"""Arguments whose memory the program may reuse: `Donation`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import jax

from jaxstrategy._errors import DonatedValueError
from jaxstrategy._options import RunOptions
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing.stages._stage import Stage
from jaxstrategy.values._types import Leaf


@final
class Donation(Stage):
    """The donated arguments of a program; none may be passed twice.

    Args:
      step: the step.
      options: how it is compiled; the positions in `args` that are donated.

    Raises:
      ValueError: there is no such position.
    """

    def __init__(self, step: ReplicaStep, options: RunOptions) -> None:
        self.donated = frozenset(step.signature.donated(options.donated))
        self._step = step

    @property
    def is_active(self) -> bool:
        """Whether an argument is donated."""
        return bool(self.donated)

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice.

        Raises:
          DonatedValueError: it is.
        """
        check_once(self._step, leaves, self.donated)


def check_once(
    step: ReplicaStep, leaves: Sequence[Leaf], donated: frozenset[int]
) -> None:
    """Raises if a donated array is passed twice.

    Args:
      step: for messages.
      leaves: its arguments.
      donated: which of them are donated.

    Raises:
      DonatedValueError: naming both arguments. JAX 0.10 would end the process.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        other = first.setdefault(id(leaf), index)
        twice = other != index and isinstance(leaf, jax.Array)
        if twice and donated & {index, other}:
            raise DonatedValueError(
                f"{step.label(other)} and {step.label(index)} are one array, and "
                "it is donated: the step cannot both overwrite and read it. Pass a "
                "copy (`jnp.copy`) in one place, or do not donate."
            )
