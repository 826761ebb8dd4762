"""The real rows of a step's batches, while the step is traced.

A batch that does not divide is filled up with copies of its last row, so that all
batches have one shape. Its mask goes into the step with it, unseen, and is found again
by the arrays it belongs to, or by their number of rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxstrategy._src.contexts import context, trace_numbers


@dataclasses.dataclass(frozen=True)
class BatchArray:
    """An array of a batch that a step was given."""

    array: jax.Array
    mask: jax.Array
    place: int


@dataclasses.dataclass(frozen=True)
class RealRows:
    """The real rows of one replica."""

    mask: jax.Array
    share: jax.Array


class StepMasks:
    """The masks of one call's batches, as its trace sees them."""

    def __init__(self, given: Sequence[BatchArray]) -> None:
        self._given = given
        self.asked = False
        self.kept = False
        self.alike: set[tuple[int, ...]] = set()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self._given)

    def owns(self, array: jax.Array) -> bool:
        """Whether `array` is one that the step was given."""
        return any(batch.array is array for batch in self._given)

    def of(self, array: jax.Array) -> BatchArray | None:
        """The mask of `array`, with its place, if the step was given it."""
        return next((batch for batch in self._given if batch.array is array), None)

    def others(self, arrays: Sequence[jax.Array]) -> list[BatchArray]:
        """The masks of the arrays that are not among these."""
        known = set(map(id, arrays))
        return [batch for batch in self._given if id(batch.array) not in known]

    def fit(self, rows: int, parts: int) -> bool:
        """Whether one of them has so many rows in each of its parts."""
        return any(batch.mask.shape[1] == rows * parts for batch in self._given)

    def find(
        self, array: jax.Array, parts: int, part: ArrayLike, asks: bool = True
    ) -> RealRows | None:
        """Those of `array`, `[rows, ...]`; None if no batch has a mask."""
        if not self._given:
            return None
        context.check_unstaged("The mask of a batch")
        rows = array.shape[0]
        own = [batch for batch in self._given if batch.array is array][:1]
        found = own or [b for b in self._given if b.mask.shape[1] == rows * parts]
        if not found:
            known = sorted({b.mask.shape[1] // parts for b in self._given})
            raise ValueError(
                f"An array with {rows} rows was given, but the batches of this step "
                f"have {' or '.join(map(str, known))} on each replica, so it is not "
                "known which of its rows are real. Pass `mask=`, made from "
                "`batch_mask(array)` of an array of the batch."
            )
        self.asked |= asks
        if len(found) > 1:
            self.alike.add(tuple(batch.place for batch in found))
        whole = found[0].mask
        replicas = whole.shape[0]
        mask = whole[_this_replica()]
        mask = jax.lax.dynamic_slice_in_dim(mask, part * rows, rows)
        real = jnp.maximum(jnp.sum(whole), 1)
        return RealRows(mask, replicas * parts / real.astype(jnp.float32))


def _this_replica() -> jax.Array | int:
    strategy = context.current().strategy
    assert strategy is not None, "only steps have masks"
    return context.replica_index(strategy)


@dataclasses.dataclass(frozen=True)
class CurrentMasks:
    """The masks that the code which is traced may ask about."""

    masks: StepMasks
    parts: int = 1
    part: ArrayLike = 0

    def find(self, array: jax.Array, asks: bool = True) -> RealRows | None:
        """As `StepMasks.find`, for this part."""
        return self.masks.find(array, self.parts, self.part, asks)

    def fits(self, array: jax.Array) -> bool:
        """Whether a batch has as many rows, in this part, as `array`."""
        return self.masks.fit(array.shape[0], self.parts)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A `with` block in which code is traced that may ask about these."""
        if not self.masks.any:
            with context.entered(batches=self):
                yield
            return
        # A jitted function that asks is kept with masks of this trace only.
        trace = trace_numbers.new_trace()
        try:
            with context.entered(batches=self, trace=trace):
                yield
        finally:
            trace_numbers.forget_jitted()


def current() -> CurrentMasks | None:
    """The masks that the code which is traced may ask about; None outside of steps."""
    return cast("CurrentMasks | None", context.current().batches)


def given(masks: StepMasks) -> contextlib.AbstractContextManager[object]:
    """A `with` block in which a step with these masks is traced."""
    now = current()
    return (CurrentMasks(masks) if masks.any or now is None else now).entered()


def part(index: ArrayLike, parts: int) -> contextlib.AbstractContextManager[object]:
    """A `with` block in which arrays hold part `index` of so many of a batch."""
    now = current()
    if now is None:
        return contextlib.nullcontext()
    # Parts may be divided again: this is a part of one that is traced already.
    return CurrentMasks(
        now.masks, now.parts * parts, now.part * parts + index
    ).entered()


def real_rows(array: jax.Array) -> RealRows | None:
    """The real rows of `array`; None where no mask tells them."""
    now = current()
    return None if now is None else now.find(array)


def known_rows(array: jax.Array) -> jax.Array | None:
    """The mask of the rows of `array`, if a batch of the step has as many."""
    now = current()
    if now is None or not now.fits(array):
        return None
    found = now.find(array, asks=False)
    return None if found is None else found.mask


def fits(array: jax.Array) -> bool:
    """Whether a batch of the step has as many rows as `array`."""
    now = current()
    return now is not None and now.fits(array)


def of_argument(array: jax.Array) -> jax.Array | None:
    """The mask of the rows of `array`, if the step was given it."""
    now = current()
    if now is None or not now.masks.owns(array):
        return None
    found = now.find(array)
    return None if found is None else found.mask


def not_needed() -> None:
    """Note that the step gives each row a result of its own, so that none counts."""
    if (now := current()) is not None:
        now.masks.asked = True


def keeps_rows(arrays: Sequence[jax.Array]) -> None:
    """Note that the step gathers these arrays, and cannot leave out rows."""
    now = current()
    if now is not None and any(now.masks.owns(array) for array in arrays):
        now.masks.kept = True
