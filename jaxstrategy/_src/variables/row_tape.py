"""The lookups of a function that is differentiated: `RowTape`.

A gradient with respect to a table is zero but for the rows that were looked up. So the
function is differentiated with respect to something that is added to these: zeros.
Which lookups it makes is found out before, by tracing it once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast, final

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from jaxstrategy._src.contexts import context
from jaxstrategy._src.values.handle import Handle


class Lookup(NamedTuple):
    """One lookup.

    Attributes:
      shards: the `id` of each shard of the table.
      starts: the first row of each shard, and last the number of all rows.
      rows: the type of what it gives, `[n, ...]`.
    """

    shards: tuple[int, ...]
    starts: tuple[int, ...]
    rows: jax.ShapeDtypeStruct


@final
class RowTape:
    """The lookups of one call of a function, made while it runs.

    Args:
      watched: the `id` of each variable of whose lookups it takes note.
      added: what is added to the rows of each lookup; None while lookups are counted.

    Attributes:
      lookups: those that were made, in order.
      ids: the rows of each.
      whole: the `id` of each variable that was used by something else than lookups.
    """

    def __init__(
        self, watched: Iterable[int], added: Sequence[jax.Array] | None = None
    ) -> None:
        self._watched = set(watched)
        self._added = added
        self._trace = get_opaque_trace_state()
        self.lookups: list[Lookup] = []
        self.ids: list[jax.Array] = []
        self.whole: set[int] = set()

    def looked_up(
        self,
        shards: Sequence[Handle],
        starts: Sequence[int],
        ids: jax.Array,
        rows: jax.Array,
    ) -> jax.Array:
        """The rows, with what is added to them.

        Shapes: ids `[n]`, rows `[n, ...]` -> `[n, ...]`.
        """
        keys = tuple(map(id, shards))
        if not self._watched.intersection(keys):
            return rows
        # In a loop, or a function that is jitted, ids are that function's own.
        if get_opaque_trace_state() != self._trace:
            self.whole.update(keys)
            return rows
        like = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        self.lookups.append(Lookup(keys, tuple(starts), like))
        self.ids.append(ids)
        if self._added is None:
            return rows
        return rows + self._added[len(self.ids) - 1]

    def used_whole(self, variable: Handle) -> None:
        """Take note of another use of a variable."""
        self.whole.add(id(variable))

    def sparse(self) -> set[int]:
        """The variables that are only looked up, the shards of a table all or none."""
        whole = set(self.whole)
        for _ in self.lookups:  # each round adds a table, or is the last
            for lookup in self.lookups:
                if whole.intersection(lookup.shards):
                    whole.update(lookup.shards)
        return self._watched - whole


def current() -> RowTape | None:
    """The tape of the function that runs, None if none is."""
    return cast("RowTape | None", context.current().lookups)


def recording(tape: RowTape | None) -> contextlib.AbstractContextManager[object]:
    """A `with` block whose lookups `tape` takes note of; with None nothing does."""
    return context.entered(lookups=tape)


def zeros(lookups: Iterable[Lookup]) -> list[jax.Array]:
    """What is added to the rows of each lookup."""
    return [jnp.zeros(each.rows.shape, each.rows.dtype) for each in lookups]
