"""Rows of a variable, or of the shards of one, by their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.reductions.rows import table_rows
from jaxstrategy._src.variables import access, given_values, row_tape
from jaxstrategy._src.variables.abstract_variable import AbstractVariable
from jaxstrategy._src.variables.row_functions import read_rows, row_numbers
from jaxstrategy._src.variables.row_numbers import known_numbers


def looked_up(shards: Sequence[Any], ids: jax.Array) -> jax.Array:
    """The rows with these numbers, of all shards one after the other.

    Shapes: ids `[...]`, shards `[length, ...]` -> `[*ids.shape, ...]`.

    Args:
      shards: one or more, all variables or all arrays.
      ids: numbers of rows; what is no row gives what `jnp.take` fills in, but is an
        error of a server.
    """
    flat = ids.reshape(-1)
    if all(isinstance(shard, AbstractVariable) for shard in shards):
        rows = _of_variables(shards, flat)
    else:
        rows = _of_values(shards, flat)
    return rows.reshape(*ids.shape, *shards[0].shape[1:])


def _of_variables(shards: Sequence[AbstractVariable], ids: jax.Array) -> jax.Array:
    starts = starts_of(shards)
    known = known_numbers(ids)
    if known is not None and are_elsewhere(shards):
        rows = _of_servers(shards, starts, known)
    else:
        with row_tape.recording(None):  # a lookup is no use of the whole
            values = [shard.value() for shard in shards]
        is_remote = all(shard._kind.has_remote_rows for shard in shards)
        rows = read_rows(ids, values) if is_remote else _of_values(values, ids)
    tape = row_tape.current()
    return rows if tape is None else tape.looked_up(shards, starts, ids, rows)


def starts_of(shards: Sequence[Any]) -> list[int]:
    """The first row of each shard, and last the number of all rows."""
    return list(itertools.accumulate((each.shape[0] for each in shards), initial=0))


def are_elsewhere(shards: Sequence[AbstractVariable]) -> bool:
    """Whether rows can be had without the others, and are not part of a trace."""
    if access.tracing() is not None or any(map(given_values.is_given, shards)):
        return False
    return all(shard._kind.has_remote_rows for shard in shards)


def _of_servers(
    shards: Sequence[AbstractVariable], starts: Sequence[int], ids: np.ndarray
) -> jax.Array:
    rows = np.zeros((len(ids), *shards[0].shape[1:]), shards[0].dtype)
    owners = np.searchsorted(starts, ids, side="right") - 1
    for number, shard in enumerate(shards):
        is_own = owners == number
        if is_own.any():
            rows[is_own] = shard._rows(ids[is_own] - starts[number])
    return jnp.asarray(rows)


def _of_values(values: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    """Rows of arrays, which go between replicas that have some rows each."""
    starts = starts_of(values)
    numbers = row_numbers(ids, starts[-1])
    is_none = (numbers < 0) | (numbers >= starts[-1])
    rows = jnp.zeros(())
    for number, value in enumerate(values):
        start, stop = starts[number : number + 2]
        is_own = (numbers >= start) & (numbers < stop)
        # To `table_rows` -1 is no row, and the length beyond all rows.
        own = jnp.where(is_own, numbers - start, -1)
        if not number:
            rows = _rows_of(value, jnp.where(is_none, stop, own))
            continue
        mask = is_own.reshape(-1, *(1,) * (rows.ndim - 1))
        rows = jnp.where(mask, _rows_of(value, own), rows)
    return rows


def _rows_of(value: jax.Array, own: jax.Array) -> jax.Array:
    if not len(value):  # of which JAX gathers nothing
        value = jnp.zeros((1, *value.shape[1:]), value.dtype)
        own = jnp.where(own < 0, own, 1)
    return table_rows(value, own)
