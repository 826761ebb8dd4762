"""Gradients of which each number is sent in 8 bits: `EightBitNumbers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import jax

from jaxstrategy._options import ReduceOp
from jaxstrategy.reductions._compression import Compression, Sent
from jaxstrategy.reductions._eight_bits import BLOCK
from jaxstrategy.reductions._plan import AbstractPlan
from jaxstrategy.reductions._sums import Axes
from jaxstrategy.values._types import Leaf


@final
class EightBitNumbers(Compression):
    """Each number in 8 bits, with a scale for each block of them."""

    def takes(self, shape: Sequence[int]) -> bool:
        """Arrays of a block or more: of less there is little to save."""
        return math.prod(shape) >= BLOCK

    def basis(self, leaf: jax.ShapeDtypeStruct, number: int) -> None:
        """None: each reduction begins anew."""

    def reduced(
        self,
        op: ReduceOp,
        exact: Sequence[Leaf],
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array | None],
        plan: AbstractPlan,
        axes: Axes,
    ) -> tuple[list[Leaf], list[Sent]]:
        """The collectives are the plan's."""
        del bases
        sums = plan.in_eight_bits(op, arrays, axes)
        sent = [Sent(value, missed) for value, missed in sums]
        return plan.reduce(op, exact, axes), sent
