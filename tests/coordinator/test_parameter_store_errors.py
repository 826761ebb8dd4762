"""Wrong reads and pushes of a parameter server say what is wrong and change nothing."""

import numpy as np
import pytest

from jaxstrategy.parameter_servers._operations import Read, ServerOperation
from jaxstrategy.parameter_servers.store._store import Store

ROW = np.ones((1, 2), np.float32)
TABLE = r"variable 1, float32\[3,2\]"


def operation(name, *operands, variables=(1,), program=""):
    return ServerOperation(name, variables, tuple(operands), program)


def rows(*numbers):
    return np.array(numbers, np.int64)


def store():
    """A number, a table, booleans, and no rows at all."""
    found = Store()
    found.create(0, np.zeros((), np.int32))
    found.create(1, np.zeros((3, 2), np.float32), is_table=True)
    found.create(2, np.zeros(2, bool))
    found.create(3, np.zeros((0, 2), np.float32))
    return found


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (
            operation("scatter_add", rows(3), ROW),
            IndexError,
            f"Row 3 is not in .*{TABLE}",
        ),
        (operation("scatter_add", rows(3), ROW), IndexError, r"in \[0, 3\)"),
        (
            operation("scatter_sub", rows(-1), ROW),
            IndexError,
            r"Row -1 is not in \[0, 3",
        ),
        (
            operation("scatter_add", rows(0), ROW, variables=(3,)),
            IndexError,
            r"Row 0 is not in \[0, 0\)",
        ),
        (
            operation("scatter_add", rows(0, 1), ROW),
            ValueError,
            rf"'scatter_add' of {TABLE}, takes float32\[2,2\], not float32\[1,2\]",
        ),
        (
            operation("scatter_add", rows(0), ROW.astype(np.float64)),
            TypeError,
            r"takes float32\[1,2\], not float64\[1,2\]",
        ),
        (
            operation("scatter_add", np.array([0.0]), ROW),
            TypeError,
            r"Rows of variable 1 are whole numbers, not float64\[1\]",
        ),
        (
            operation("scatter_add", np.array([True]), ROW),
            TypeError,
            r"are whole numbers, not bool\[1\]",
        ),
        (
            operation("scatter_add", np.array(0), ROW),
            ValueError,
            r"are a vector, not int64\[\]",
        ),
        (
            operation("scatter_add", rows(0), np.ones(1, np.int32), variables=(0,)),
            ValueError,
            r"Variable 0 is a scalar, int32\[\], of no rows",
        ),
        (
            operation("add", ROW),
            ValueError,
            rf"'add' of {TABLE}, takes float32\[3,2\], not float32\[1,2\]",
        ),
        (
            operation("set", np.zeros((3, 2), np.int32)),
            TypeError,
            r"takes float32\[3,2\], not int32\[3,2\]",
        ),
        (
            operation("mul", ROW),
            ValueError,
            "no operation 'mul'; there are set, add",
        ),
        (operation("add"), ValueError, "one variable and has 1 operands, not 1 and 0"),
        (operation("add", ROW, ROW), ValueError, "has 1 operands, not 1 and 2"),
        (
            operation("add", ROW, variables=(0, 1)),
            ValueError,
            "1 operands, not 2 and 1",
        ),
        (operation("scatter_add", ROW), ValueError, "has 2 operands, not 1 and 1"),
        (
            operation("add", ROW, variables=(8,)),
            LookupError,
            "no variable 8 on this server: it was never created here, or was dropped",
        ),
        (
            operation("update", program="no"),
            LookupError,
            "no update 'no' on this",
        ),
        *(
            (
                operation(name, *operands, variables=(2,)),
                TypeError,
                f"Variable 2 is bool, which has no '{name}'",
            )
            for name, operands in {
                "subtract": (np.ones(2, bool),),
                "scatter_add": (rows(0), np.ones(1, bool)),
                "scatter_sub": (rows(0), np.ones(1, bool)),
                "scatter_mul": (rows(0), np.ones(1, bool)),
                "scatter_div": (rows(0), np.ones(1, bool)),
            }.items()
        ),
    ],
    ids=str,
)
def test_wrong_pushes(wrong, error, text):
    found = store()
    good = operation("add", np.ones((3, 2), np.float32))
    with pytest.raises(error, match=text):
        found.push([good, wrong, good])
    assert not any(value.any() for value in found.read([Read(n) for n in range(4)]))
    assert found.versions(range(4)) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (Read(1, rows(0, 3)), IndexError, rf"Row 3 is not in \[0, 3\).*{TABLE}"),
        (Read(1, rows(-1)), IndexError, r"Row -1 is not in \[0, 3\)"),
        (Read(0, rows(0)), ValueError, "Variable 0 is a scalar"),
        (Read(1, np.zeros(1)), TypeError, "are whole numbers, not float64"),
        (Read(9), LookupError, "no variable 9 on this server"),
    ],
    ids=str,
)
def test_wrong_reads(wrong, error, text):
    with pytest.raises(error, match=text):
        store().read([Read(0), wrong])


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([None]),
        np.zeros(2, np.longdouble),
        np.zeros(2, ">f4"),
        np.zeros(2, "m8[s]"),
        np.zeros(2, "V8"),
        np.zeros(2, [("a", np.int32)]),
    ],
    ids=lambda value: str(value.dtype),
)
def test_values_that_no_variable_can_hold(value):
    with pytest.raises(TypeError, match="Variable 7 cannot hold .* JAX has no arrays"):
        Store().create(7, value)


def test_tables_without_rows():
    with pytest.raises(ValueError, match=r"Variable 7 is a scalar, float32\[\]"):
        Store().create(7, np.zeros((), np.float32), is_table=True)


def test_more_rows_than_programs_can_count():
    many = np.broadcast_to(np.zeros(1, np.int8), (2**31,))
    with pytest.raises(ValueError, match="has 2147483648 rows. Only 2.*31 - 1"):
        Store().create(7, many, is_table=True)


def test_numbers_are_used_once():
    found = store()
    with pytest.raises(ValueError, match="Variable 1 is on this server already"):
        found.create(1, np.ones(2, np.float32))
    assert found.read([Read(1)])[0].shape == (3, 2)
    found.drop([1, 1, 77])
    found.create(1, np.ones(2, np.float32))
    assert (found.read([Read(1)])[0] == 1).all() and found.versions([1]) == [0]


def test_versions_of_what_is_not_there():
    with pytest.raises(LookupError, match="no variable 5 on this server"):
        store().versions([0, 5])
