"""Entries of variables by TensorFlow's indices; the oracle is NumPy."""

import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

ROWS = np.arange(6.0, dtype=np.float32).reshape(3, 2)
INDICES = np.array([[0, 1], [2, 0]])


@pytest.fixture(params=["mirrored", "ordinary"])
def variable(request, two):
    if request.param == "ordinary":
        return js.Variable(ROWS)
    with two.scope():
        return js.Variable(ROWS)


@pytest.mark.slow
def test_entries_are_read(variable):
    np.testing.assert_array_equal(variable.gather_nd(INDICES), [1, 4])
    np.testing.assert_array_equal(variable.gather_nd([[[2]]]), [[[4, 5]]])
    np.testing.assert_array_equal(variable.sparse_read([2, 0, 2]), ROWS[[2, 0, 2]])


@each_of("wrong", [3, -1])
def test_what_is_no_row_is_an_error(variable, wrong):
    text = rf"Row {wrong} of variable 'Variable'.*the rows \[0, 3\)"
    with pytest.raises(IndexError, match=text):
        variable.sparse_read([0, wrong])
    with pytest.raises(TypeError, match="whole numbers were wanted"):
        variable.sparse_read([0.5])


@each_of("change", ["add", "sub", "update"])
def test_entries_are_changed(variable, change):
    variable.assign(want := ROWS.copy())
    for (row, column), number in zip(INDICES, [10, 20], strict=True):
        new = {"add": want[row, column] + number, "sub": want[row, column] - number}
        want[row, column] = new.get(change, number)
    method = getattr(variable, f"scatter_nd_{change}")
    np.testing.assert_array_equal(method(INDICES, [10.0, 20.0]), want)
    np.testing.assert_array_equal(variable.numpy(), want)


def test_in_a_step_the_copies_stay_equal(two):
    with two.scope():
        v = js.Variable(ROWS)
    x = two.per_replica([1.0, 2.0])

    @two.run
    def step(x):
        total = js.get_replica_context().all_reduce("sum", x)
        v.scatter_nd_add([[1, 1]], total[None])

    step(x)
    assert v.numpy()[1, 1] == 6
    with pytest.raises(ValueError, match="may differ between replicas"):
        two.run(lambda x: v.scatter_nd_add([[1, 1]], x[None]), (x,))


def test_rows_of_each_batch_are_replaced(variable):
    new = js.IndexedSlices([[10.0], [20.0], [30.0]], [[1], [0], [1]])
    want = [[0, 10], [20, 3], [4, 30]]
    np.testing.assert_array_equal(variable.batch_scatter_update(new), want)
    whole = js.IndexedSlices([[7.0, 8.0]], [2])
    variable.batch_scatter_update(whole, use_locking=True, name="rows")
    np.testing.assert_array_equal(variable, [[0, 10], [20, 3], [7, 8]])
    with pytest.raises(TypeError, match="`batch_scatter_update` was given 3, a int"):
        variable.batch_scatter_update(3)
