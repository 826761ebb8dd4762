"""What is wrong with reads and operations, said before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxstrategy.parameter_servers._operations import (
    OF_ROWS,
    OF_WHOLE,
    ServerOperation,
)
from jaxstrategy.parameter_servers.store._stored_types import Type, shown, types_of
from jaxstrategy.parameter_servers.store._stored_variable import StoredVariable

if TYPE_CHECKING:
    from jaxstrategy.parameter_servers.store._update_program import UpdateProgram

# What neither JAX nor NumPy computes of booleans.
_NOT_OF_BOOL = (
    *("subtract", "scatter_add", "scatter_sub", "scatter_mul"),
    "scatter_div",
)


def check_initial(number: int, value: np.ndarray, is_table: bool) -> None:
    """See that a variable can hold this.

    Raises:
      TypeError: a dtype that JAX does not have.
      ValueError: a table without rows, or with too many.
    """
    dtype = value.dtype
    # bfloat16 and its kin are of kind V, as what has no number is.
    is_number = dtype.kind in "biufcV" and dtype.type is not np.void
    is_long = dtype in (np.longdouble, np.clongdouble)
    if not is_number or is_long or not dtype.isnative:
        raise TypeError(
            f"Variable {number} cannot hold {shown((value.shape, dtype))}: JAX has "
            "no arrays of this dtype. Random keys are kept as `jax.random.key_data`."
        )
    if is_table:
        _check_table(number, (value.shape, dtype))


def check_rows(variable: StoredVariable, rows: np.ndarray) -> None:
    """See that a variable has these rows.

    Raises:
      TypeError: no whole numbers.
      ValueError: no vector; or the variable has no rows, or too many.
      IndexError: a row that it has not.
    """
    if rows.dtype.kind not in "iu":
        raise TypeError(
            f"Rows of variable {variable.number} are whole numbers, not "
            f"{shown((rows.shape, rows.dtype))}."
        )
    if rows.ndim != 1:
        raise ValueError(
            f"Numbers of rows of variable {variable.number} are a vector, not "
            f"{shown((rows.shape, rows.dtype))}."
        )
    count = _check_table(variable.number, variable.kind)
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        bad = rows[(rows < 0) | (rows >= count)][0]
        raise IndexError(
            f"Row {bad} is not in [0, {count}), the rows of variable "
            f"{variable.number}, {shown(variable.kind)}."
        )


def _check_table(number: int, kind: Type) -> int:
    """How many rows it has."""
    if not kind[0]:
        raise ValueError(f"Variable {number} is a scalar, {shown(kind)}, of no rows.")
    count = kind[0][0]
    if count > np.iinfo(np.int32).max:
        raise ValueError(
            f"Variable {number}, {shown(kind)}, has {count} rows. Only 2**31 - 1 "
            "can be changed each by itself: divide it into several variables."
        )
    return count


def check_operation(
    operation: ServerOperation,
    variables: Sequence[StoredVariable],
    programs: Mapping[str, UpdateProgram],
) -> None:
    """See that an operation can be applied.

    Raises:
      LookupError: an update by a program that is not there.
      TypeError: dtypes that it has not.
      ValueError: no such operation, or shapes that it has not.
      IndexError: a row that the variable has not.
    """
    name, operands = operation.name, operation.operands
    if name == "update":
        _check_update(operation, variables, programs)
        return
    if name not in (*OF_WHOLE, *OF_ROWS):
        raise ValueError(
            f"There is no operation {name!r}; there are "
            f"{', '.join((*OF_WHOLE, *OF_ROWS))} and update."
        )
    wanted = 1 if name in OF_WHOLE else 2
    if len(variables) != 1 or len(operands) != wanted:
        raise ValueError(
            f"{name!r} changes one variable and has {wanted} operands, not "
            f"{len(variables)} and {len(operands)}."
        )
    (variable,) = variables
    shape, dtype = variable.kind
    if dtype.kind == "b" and name in _NOT_OF_BOOL:
        raise TypeError(f"Variable {variable.number} is bool, which has no {name!r}.")
    if name in OF_ROWS:
        check_rows(variable, operands[0])
        shape = (len(operands[0]), *shape[1:])
    _check_operand(name, variable, operands[-1], (shape, dtype))


def _check_operand(
    name: str, variable: StoredVariable, operand: np.ndarray, wanted: Type
) -> None:
    if (operand.shape, operand.dtype) == wanted:
        return
    error = TypeError if operand.dtype != wanted[1] else ValueError
    raise error(
        f"{name!r} of variable {variable.number}, {shown(variable.kind)}, takes "
        f"{shown(wanted)}, not {shown((operand.shape, operand.dtype))}."
    )


def _check_update(
    operation: ServerOperation,
    variables: Sequence[StoredVariable],
    programs: Mapping[str, UpdateProgram],
) -> None:
    program = programs.get(operation.program)
    if program is None:
        raise LookupError(
            f"There is no update {operation.program!r} on this server; `define` it."
        )
    if not variables or len({*operation.variables}) != len(variables):
        raise ValueError(
            "An update changes different variables, at least one, not "
            f"{operation.variables}."
        )
    kinds = [variable.kind for variable in variables]
    program.check(kinds, types_of(operation.operands))
