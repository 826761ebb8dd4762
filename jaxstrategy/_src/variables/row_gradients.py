"""Gradients with respect to tables of which a function looks rows up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access, sharded_variable
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.row_numbers import known_numbers
from jaxstrategy._src.variables.row_tape import Lookup, RowTape


def lookups_of(
    call: Callable[[Mapping[int, jax.Array], RowTape], object],
    variables: Mapping[int, Handle],
) -> tuple[list[Lookup], set[int]]:
    """The lookups of a function in tables, and the variables it uses in no other way.

    Args:
      call: calls it with values of variables, and what takes note of lookups.
      variables: with respect to which it will be differentiated.
    """
    tables = {key: each for key, each in variables.items() if is_table(each)}
    if not tables:
        return [], set()
    made: list[RowTape] = []

    def traced(values: dict[int, jax.Array]) -> tuple[()]:
        made.append(RowTape(tables))
        call(values, made[-1])
        return ()

    types = {
        key: jax.ShapeDtypeStruct(each.shape, each.dtype)
        for key, each in tables.items()
    }
    is_initial = access.tracing() is None  # then it must not change how they are kept
    try:
        with context.entered(is_initial=is_initial):
            jax.eval_shape(traced, types)
    except (
        Exception
    ):  # it looks at numbers; or fails, and will say so when it is called
        return [], set()
    (tape,) = made
    sparse = tape.sparse()
    return [each for each in tape.lookups if sparse.intersection(each.shards)], sparse


def is_table(variable: Handle) -> TypeGuard[AbstractVariable]:
    """Whether the gradient with respect to it is worth knowing by rows."""
    if not isinstance(variable, AbstractVariable) or not variable.ndim:
        return False
    is_float = jnp.issubdtype(variable.dtype, jnp.inexact)
    is_shard = sharded_variable.is_shard(variable)
    return is_float and (is_shard or variable._kind.has_remote_rows)


@final
class RowGradients:
    """The gradients with respect to the rows of lookups.

    Args:
      lookups: in the order in which they were made.
      ids: the rows of each, `[n]`.
      gradients: with respect to them, `[n, ...]` each.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup],
        ids: Sequence[jax.Array],
        gradients: Sequence[jax.Array],
    ) -> None:
        self._all = list(zip(lookups, ids, gradients, strict=True))

    def of(self, parts: Sequence[Handle]) -> IndexedSlices:
        """The gradient with respect to a table, of these shards.

        A row that was looked up twice is there twice. Of rows that are traced, one that
        is in another shard stands as zeros of row 0.
        """
        shards = [part for part in parts if isinstance(part, AbstractVariable)]
        keys = tuple(map(id, shards))
        lengths = [shard.shape[0] for shard in shards]
        starts = np.cumsum([0, *lengths])
        shape = (int(starts[-1]), *shards[0].shape[1:])
        indices = [jnp.zeros((0,), jnp.int32)]
        values = [jnp.zeros((0, *shape[1:]), shards[0].dtype)]
        for lookup, ids, gradient in self._all:
            for found, rows in _own(lookup, ids, gradient, keys, starts):
                indices.append(found.astype(jnp.int32))
                values.append(rows)
        return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), shape)


def _own(
    lookup: Lookup,
    ids: jax.Array,
    gradient: jax.Array,
    keys: tuple[int, ...],
    starts: np.ndarray,
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """The rows of one lookup that some shards have, as numbers of these, and theirs."""
    if lookup.shards == keys:
        yield _within(ids, gradient, 0, lookup.starts[-1], 0)
        return
    bounds = zip(lookup.shards, lookup.starts, lookup.starts[1:], strict=False)
    for shard, start, stop in bounds:
        if shard in keys:
            offset = int(starts[keys.index(shard)]) - start
            yield _within(ids, gradient, start, stop, offset)


def _within(
    ids: jax.Array, gradient: jax.Array, start: int, stop: int, offset: int
) -> tuple[jax.Array, jax.Array]:
    """The rows from `start` to `stop`, as numbers that `offset` is added to."""
    known = known_numbers(ids)
    if known is not None:
        (places,) = np.nonzero((known >= start) & (known < stop))
        if len(places) == len(known):
            return ids + offset, gradient
        return jnp.asarray(known[places] + offset), gradient[places]
    is_own = (ids >= start) & (ids < stop)
    mask = is_own.reshape(-1, *(1,) * (gradient.ndim - 1))
    return jnp.where(is_own, ids + offset, 0), jnp.where(mask, gradient, 0)
