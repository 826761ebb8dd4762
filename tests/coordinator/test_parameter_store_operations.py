"""What each operation of a parameter server makes of each dtype, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxstrategy.parameter_servers._operations import (
    OF_ROWS,
    OF_WHOLE,
    Read,
    ServerOperation,
)
from jaxstrategy.parameter_servers.store._store import Store

DTYPE_NAMES = [
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64"),
    *("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("int64", "uint64", "bool", "complex64", "complex128"),
]
DTYPES = [jnp.dtype(name) for name in DTYPE_NAMES]
NOT_OF_BOOL = {"subtract", "scatter_add", "scatter_sub", "scatter_mul", "scatter_div"}


# The others are marked slow: each program is compiled.
QUICK = {"float32", "bfloat16", "int32"}


def cases(names):
    return [
        pytest.param(n, d, marks=[pytest.mark.slow] * (d.name not in QUICK))
        for n in names
        for d in DTYPES
        if d.kind != "b" or n not in NOT_OF_BOOL
    ]


def store(value, is_table=False):
    found = Store()
    found.create(0, value, is_table)
    return found


def value_of(found, rows=None):
    (value,) = found.read([Read(0, rows)])
    return value


def operation(name, *operands, variables=(0,), program=""):
    return ServerOperation(name, variables, tuple(operands), program)


def small(shape, dtype, seed=0):
    """Numbers that each dtype holds, and their sums and products too."""
    numbers = np.random.default_rng(seed).integers(1, 3, shape)
    return numbers.astype(dtype)


WHOLE = {"set": lambda a, b: b, "add": np.add, "subtract": np.subtract}


@pytest.mark.parametrize("is_table", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("name", "dtype"), cases(OF_WHOLE), ids=str)
def test_whole(name, is_table, dtype):
    for shape in [(3, 2), (1,), (0, 2)] + [()] * (not is_table):
        old, operand = small(shape, dtype, 1), small(shape, dtype, 2)
        found = store(old, is_table)
        assert found.push([operation(name, operand)])
        new = value_of(found)
        assert new.dtype == dtype and new.shape == shape
        wanted = np.asarray(WHOLE[name](old, operand))
        np.testing.assert_array_equal(new.astype(complex), wanted.astype(complex))


def rows_changed(name, table, rows, values):
    """A plain loop; quotients are by the product of what is given for a row."""
    new = table.copy()
    divisors = {}
    for row, value in zip(rows, values, strict=True):
        match name:
            case "scatter_add":
                new[row] = new[row] + value
            case "scatter_sub":
                new[row] = new[row] - value
            case "scatter_mul":
                new[row] = new[row] * value
            case "scatter_div":
                divisors[row] = divisors.get(row, np.ones_like(value)) * value
            case "scatter_min":
                new[row] = np.minimum(new[row], value)
            case "scatter_max":
                new[row] = np.maximum(new[row], value)
            case "scatter_update":
                new[row] = value
    for row, divisor in divisors.items():
        if np.issubdtype(table.dtype, np.integer) or "int" in table.dtype.name:
            new[row] = table[row].astype(np.int64) // divisor.astype(np.int64)
        else:
            new[row] = table[row] / divisor
    return new


@pytest.mark.parametrize(("name", "dtype"), cases(OF_ROWS), ids=str)
def test_rows(name, dtype):
    table, rows = small((5, 2), dtype, 1), np.array([4, 0, 4, 2], np.int64)
    values = small((4, 2), dtype, 2)
    found = store(table, is_table=True)
    assert found.push([operation(name, rows, values)])
    new = value_of(found)
    assert new.dtype == dtype
    wanted = rows_changed(name, table, rows, values)
    np.testing.assert_array_equal(new.astype(complex), wanted.astype(complex))
    taken = value_of(found, rows)
    np.testing.assert_array_equal(taken.astype(complex), wanted[rows].astype(complex))


@pytest.mark.parametrize("name", ["scatter_add", "scatter_div", "scatter_update"])
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(0, 3), max_size=8), seed=st.integers(0, 99))
def test_any_rows(name, rows, seed):
    # One shape of tables, as each is compiled with each power of two of rows.
    random = np.random.default_rng(seed)
    table = random.integers(-50, 50, (4, 2)).astype(np.float32)
    values = random.choice([-4, -0.5, 2, 3], (len(rows), 2)).astype(np.float32)
    found = store(table)
    found.push([operation(name, np.array(rows, np.int32), values)])
    wanted = rows_changed(name, table, rows, values)
    np.testing.assert_allclose(value_of(found), wanted, rtol=1e-6)


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows_of_other_shapes(name):
    for table, rows in [
        (np.arange(1, 7, dtype=np.float32), [5, 0, 5]),
        (np.arange(1.0, 25).reshape(2, 3, 4), [1]),
        (np.zeros((0, 2), np.float32), []),
    ]:
        table = table.astype(np.float32)
        values = np.full((len(rows), *table.shape[1:]), 2, np.float32)
        found = store(table)
        found.push([operation(name, np.array(rows, np.uint8), values)])
        wanted = rows_changed(name, table, rows, values)
        np.testing.assert_array_equal(value_of(found), wanted)


def test_rows_as_tensorflow_has_them():
    found = store(np.zeros((7, 2), np.float32), is_table=True)
    two = np.ones((3, 2), np.float32)
    found.push([operation("scatter_add", np.array([0, 0, 6]), two)])
    assert value_of(found)[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 1]
    with pytest.raises(IndexError, match=r"Row 7 is not in \[0, 7\)"):
        found.push([operation("scatter_add", np.array([0, 7, 6]), two)])
    assert value_of(found)[:, 0].tolist() == [2, 0, 0, 0, 0, 0, 1]
    for name, row, number, wanted in [
        ("update", 2, 9, 9),
        ("mul", 2, 2, 18),
        ("div", 2, 2, 9),
        ("max", 4, 5, 5),
        ("min", 4, 0, 0),
        ("sub", 4, 3, -3),
    ]:
        values = np.full((1, 2), number, np.float32)
        found.push([operation(f"scatter_{name}", np.array([row]), values)])
        assert value_of(found)[row].tolist() == [wanted, wanted]


def test_quotients_of_integers_keep_what_is_whole():
    found = store(np.array([-7, 7, 7, 100], np.int8), is_table=True)
    rows, divisors = np.array([0, 1, 2, 3, 3]), np.array([2, -2, 2, 3, 5], np.int8)
    found.push([operation("scatter_div", rows, divisors)])
    assert value_of(found).tolist() == [-3, -3, 3, 6]


@pytest.mark.parametrize("is_table", [False, True], ids=["host", "device"])
def test_integers_go_round_and_floats_go_to_infinity(is_table):
    for dtype, old, more, wanted in [
        (np.int8, 127, 1, -128),
        (np.uint8, 255, 2, 1),
        (np.float32, 3e38, 3e38, np.inf),
    ]:
        found = store(np.array([old], dtype), is_table)
        found.push([operation("add", np.array([more], dtype))])
        assert value_of(found)[0] == wanted
    found = store(np.array([1], np.uint8), is_table)
    found.push([operation("subtract", np.array([2], np.uint8))])
    found.push([operation("scatter_sub", np.array([0]), np.array([250], np.uint8))])
    assert value_of(found)[0] == 5


def test_nan_is_the_smallest_and_the_largest():
    found = store(np.zeros((2, 1), np.float32), is_table=True)
    nan = np.full((1, 1), np.nan, np.float32)
    found.push([operation("scatter_min", np.array([0]), nan)])
    found.push([operation("scatter_max", np.array([1]), nan)])
    assert np.isnan(value_of(found)).all()
