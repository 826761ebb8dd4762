"""Which rows of its batches are real, while a step is traced.

A batch that does not divide is filled up with copies of its last row, so that all
batches have one shape. Its mask goes into the step with it, unseen, and is found again
by the arrays it belongs to, or by their number of rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxstrategy._errors import PaddedRowsWarning
from jaxstrategy.contexts import _context
from jaxstrategy.replicas import _mesh
from jaxstrategy.text import _user_code


@dataclasses.dataclass(frozen=True)
class Batch:
    """An array of a batch that a step was given.

    Attributes:
      array: what the step sees of it, `[rows, ...]`.
      mask: which rows are real on each replica, `bool[replica, rows]`.
      place: the number of the mask among the arrays of the call.
    """

    array: Any
    mask: Any
    place: int


@dataclasses.dataclass(frozen=True)
class RealRows:
    """Which rows are real.

    Attributes:
      mask: this replica's, `bool[rows]`.
      share: what a sum over them is to be multiplied by, so that the mean over the
        replicas, and over the parts of the batch, is the mean over all real rows.
    """

    mask: jax.Array
    share: jax.Array


class Batches:
    """The batches of one call, as its trace sees them.

    Attributes:
      asked: whether the step asked which rows are real.
      kept: whether it gathers arrays of a batch, rows that are not real included.
      alike: the places of masks that the step took for one.
    """

    def __init__(self, given: Sequence[Batch]) -> None:
        self._given = given
        self.asked = False
        self.kept = False
        self.alike: set[tuple[int, ...]] = set()

    @property
    def any(self) -> bool:
        """Whether there are some."""
        return bool(self._given)

    def owns(self, array: Any) -> bool:
        """Whether `array` is one that the step was given."""
        return any(batch.array is array for batch in self._given)

    def of(self, array: Any) -> Batch | None:
        """What is known of `array`, if it is one that the step was given."""
        return next((batch for batch in self._given if batch.array is array), None)

    def others(self, arrays: Sequence[Any]) -> list[Batch]:
        """What is known of arrays that are not among these."""
        known = set(map(id, arrays))
        return [batch for batch in self._given if id(batch.array) not in known]

    def fit(self, rows: int, parts: int) -> bool:
        """Whether one of them has so many rows in each of its parts."""
        return any(batch.mask.shape[1] == rows * parts for batch in self._given)

    def find(
        self, array: Any, parts: int, part: Any, asks: bool = True
    ) -> RealRows | None:
        """Those of `array`, `[rows, ...]`; None if no batch has a mask.

        Args:
          array: computed from a batch, row by row.
          parts: how many parts the batch is worked on in.
          part: which one it is.
          asks: whether it is the step that asks.

        Raises:
          ValueError: no batch has as many rows.
        """
        if not self._given:
            return None
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
        mask = whole[jax.lax.axis_index(_mesh.REPLICA_AXIS)]
        mask = jax.lax.dynamic_slice_in_dim(mask, part * rows, rows)
        real = jnp.maximum(jnp.sum(whole), 1)
        return RealRows(mask, replicas * parts / real.astype(jnp.float32))


def _now() -> tuple[Batches, int, Any] | None:
    """The batches of the step being traced, the number of their parts, and which."""
    return cast("tuple[Batches, int, Any] | None", _context.current().batches)


def _entered(
    batches: tuple[Batches, int, Any] | None,
) -> contextlib.AbstractContextManager[object]:
    return _context.entered(batches=batches)


def given(batches: Batches) -> contextlib.AbstractContextManager[object]:
    """A block in which a step with these batches is traced.

    Inside another one a step without batches has those of the other.
    """
    now = _now()
    return _entered((batches, 1, 0) if batches.any or now is None else now)


def part(index: Any, parts: int) -> contextlib.AbstractContextManager[object]:
    """A block in which arrays hold part `index` of so many of a batch."""
    now = _now()
    if now is None:
        return _entered(None)
    batches, before, outer = now
    return _entered((batches, before * parts, outer * parts + index))


class Turns:
    """The batches of several steps that are traced as one loop.

    Args:
      columns: for each array of a batch that of each step.

    Attributes:
      masks: of the arrays that have one, by their number: `bool[step, replica, rows]`.
        The loop gives each step its own.
    """

    def __init__(self, columns: Sequence[Sequence[Any]]) -> None:
        now: tuple[Batches, int, Any] = _now() or (Batches(()), 1, 0)
        self._outer, self._parts, self._part = now
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
    def turn(self, arrays: Sequence[Any], masks: dict[int, Any]) -> Iterator[None]:
        """A block in which a step with these arrays, and these masks, is traced."""
        own = [Batch(arrays[n], mask, _numbered(n)) for n, mask in masks.items()]
        batches = Batches([*own, *self._others])
        try:
            with _entered((batches, self._parts, self._part)):
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


def real_rows(array: Any) -> RealRows | None:
    """Which rows of `array` are real; None where nothing is said about that.

    Raises:
      ValueError: the step has batches, but none with as many rows.
    """
    now = _now()
    return None if now is None else now[0].find(array, *now[1:])


def known_rows(array: Any) -> jax.Array | None:
    """Which rows of `array` are real, if a batch of the step has as many.

    For a layer that leaves the others out unasked. The step goes on to be one that has
    not asked: what it computes from the layer's results counts them still.
    """
    now = _now()
    if now is None or not fits(array):
        return None
    found = now[0].find(array, *now[1:], asks=False)
    return None if found is None else found.mask


def fits(array: Any) -> bool:
    """Whether a batch of the step has as many rows as `array`."""
    now = _now()
    return now is not None and now[0].fit(array.shape[0], now[1])


def of_argument(array: Any) -> jax.Array | None:
    """Which rows of `array` are real, if it is one that the step was given."""
    now = _now()
    if now is None or not now[0].owns(array):
        return None
    found = now[0].find(array, *now[1:])
    return None if found is None else found.mask


def not_needed() -> None:
    """The code that is traced gives each row a result of its own."""
    if (now := _now()) is not None:
        now[0].asked = True


def keeps_rows(arrays: Sequence[Any]) -> None:
    """The code that is traced gathers these arrays, and cannot leave out rows."""
    now = _now()
    if now is not None and any(now[0].owns(array) for array in arrays):
        now[0].kept = True


def warn_of_traced(method: str) -> None:
    """Warn that `strategy.method` keeps all rows of a batch while JAX traces."""
    _user_code.warn(
        f"`{method}` was given a batch of a dataset inside a function that JAX traces "
        "(`jax.jit`), where shapes are static, so that rows that only fill up the "
        f"batch stay in the result. Call `{method}` outside that function; or gather "
        "`strategy.run(js.batch_mask, (array,))` as well, which says which rows are "
        'real; or choose `InputOptions(remainder="drop")` or `"error"`, with which '
        "all rows are.",
        PaddedRowsWarning,
    )


# The masks of batches that were filled up, as long as they live.
_padded: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def note(mask: jax.Array) -> None:
    """`mask` has rows that are not real."""
    _padded[id(mask)] = mask


def is_noted(mask: Any) -> bool:
    """Whether it is known that `mask` has rows that are not real."""
    return mask is not None and _padded.get(id(mask)) is mask
