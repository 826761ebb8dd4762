"""The masks of several steps that are one loop: `LoopMasks`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import final

import jax
import jax.numpy as jnp

from jaxstrategy._src.masks import step_masks
from jaxstrategy._src.masks.step_masks import BatchArray, CurrentMasks, StepMasks


@final
class LoopMasks:
    """The masks of several steps' batches, where the steps are traced as one loop."""

    def __init__(self, columns: Sequence[Sequence[jax.Array]]) -> None:
        self._current = step_masks.current() or CurrentMasks(StepMasks(()))
        self._outer = self._current.masks
        self._others = self._outer.others([a for column in columns for a in column])
        self._places: dict[int, list[int | None]] = {}
        self.masks: dict[int, jax.Array] = {}
        for number, column in enumerate(columns):
            found = [self._outer.of(array) for array in column]
            known = next((batch.mask for batch in found if batch), None)
            if known is not None:
                # A batch without one among those with one has real rows only.
                masks = [b.mask if b else jnp.ones_like(known) for b in found]
                self.masks[number] = jnp.stack(masks)
                self._places[number] = [b.place if b else None for b in found]

    @contextlib.contextmanager
    def turn(
        self, arrays: Sequence[jax.Array], masks: dict[int, jax.Array]
    ) -> Iterator[None]:
        """A `with` block in which a step with these arrays and masks is traced."""
        own = [BatchArray(arrays[n], mask, _numbered(n)) for n, mask in masks.items()]
        batches = StepMasks([*own, *self._others])
        try:
            with dataclasses.replace(self._current, masks=batches).entered():
                yield
        finally:
            self._outer.asked |= batches.asked
            self._outer.kept |= batches.kept
            for places in batches.alike:
                self._outer.alike |= self._in_each_step(places)

    def _in_each_step(self, places: tuple[int, ...]) -> set[tuple[int, ...]]:
        """The places of masks that a step took for one, in the call."""
        steps = max(map(len, self._places.values()), default=1)
        columns = [
            [place] * steps if place >= 0 else self._places[_numbered(place)]
            for place in places
        ]
        rows = zip(*columns, strict=True)
        known = (tuple(p for p in row if p is not None) for row in rows)
        return {row for row in known if len(row) == len(places)}


def _numbered(number: int) -> int:
    """A place that no mask of the call has, for one that goes through a loop; or back.

    >>> _numbered(3), _numbered(_numbered(3))
    (-4, 3)
    """
    return -1 - number
