"""Gradients of which each number is sent in 8 bits: `EightBitNumbers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import jax

from jaxstrategy.reductions._compression import Compression, Sent, Sums
from jaxstrategy.reductions._eight_bits import BLOCK
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
        exact: Sequence[Leaf],
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array | None],
        sums: Sums,
    ) -> tuple[list[Leaf], list[Sent]]:
        """Apart, because what is exact has other dtypes."""
        del bases
        sent = [Sent(*each) for each in sums.in_eight_bits(arrays)]
        return sums.exact(exact), sent
