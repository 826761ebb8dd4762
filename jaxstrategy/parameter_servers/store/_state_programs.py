"""Programs that change the array of one variable."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy.parameter_servers.store._cpu_programs import Program, compiled
from jaxstrategy.parameter_servers.store._stored_types import Type


@functools.cache
def of_whole(name: str, kind: Type, donates: bool) -> Program:
    """The program of one of `OF_WHOLE`, for arrays of a type."""
    return compiled(functools.partial(_whole, name), [kind], [kind], donates)


def _whole(name: str, old: jax.Array, operand: jax.Array) -> list[jax.Array]:
    match name:
        case "add":
            return [old + operand]
        case "subtract":
            return [old - operand]
        case _:
            return [jnp.copy(operand)]


@functools.cache
def of_rows(name: str, kind: Type, count: int, donates: bool) -> Program:
    """The program of one of `OF_ROWS` for tables of a type; see `_rows`."""
    (_, *row), dtype = kind
    numbers: Type = ((count,), np.dtype(np.int32))
    operands: list[Type] = [numbers] * (2 if name == "scatter_div" else 1)
    operands.append(((count, *row), dtype))
    change = _quotients if name == "scatter_div" else functools.partial(_rows, name)
    return compiled(change, [kind], operands, donates)


def _rows(
    name: str, table: jax.Array, rows: jax.Array, values: jax.Array
) -> list[jax.Array]:
    """A table with some rows changed; those beyond it fill up and change nothing."""
    if name == "scatter_sub":
        name, values = "scatter_add", -values
    part = table.at[rows]
    change = {
        "scatter_add": part.add,
        "scatter_mul": part.multiply,
        "scatter_min": part.min,
        "scatter_max": part.max,
        "scatter_update": part.set,
    }[name]
    return [change(values, mode="drop")]


def _quotients(
    table: jax.Array, rows: jax.Array, positions: jax.Array, values: jax.Array
) -> list[jax.Array]:
    """A table with rows divided: row `rows[positions[i]]` by `values[i]`.

    As variables elsewhere, by the product of what is given for a row.
    """
    divisors = jnp.ones_like(values).at[positions].multiply(values, mode="drop")
    # A quotient of integers keeps what is whole.
    quotients = jax.lax.div(table.at[rows].get(mode="clip"), divisors)
    return [table.at[rows].set(quotients, mode="drop")]
