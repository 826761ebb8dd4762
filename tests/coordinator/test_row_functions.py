"""Reads and changes of rows of tables in shards: one equation each, as NumPy has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstrategy.variables import _row_functions

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)
CUTS = {"one": [], "two": [4], "four": [3, 5, 6], "with an empty one": [3, 3]}


def shards(cuts, table=TABLE):
    return [jnp.asarray(block) for block in np.split(table, cuts)]


def equations(jaxpr):
    """All equations, those inside others too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            if hasattr(value, "jaxpr"):
                yield from equations(value.jaxpr)


def named(function, *operands):
    """The equations of ours that a function's trace has."""
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    return [
        equation
        for equation in equations(jaxpr)
        if "jaxstrategy_server" in str(equation.params.get("name"))
    ]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_rows_are_those_of_the_whole(cuts):
    ids = jnp.array([[6, 0, 3], [3, 5, 4]])
    found = _row_functions.read_rows(ids, shards(cuts))
    np.testing.assert_array_equal(found, TABLE[np.asarray(ids)])


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "bool"])
def test_what_is_no_row_is_neither_clamped_nor_wrapped(dtype):
    table = np.ones((7, 2))
    given = [block.astype(dtype) for block in shards([4], table)]
    found = _row_functions.read_rows(jnp.array([-1, 7, 0]), given)
    filled = jnp.take(given[0], jnp.array([100]), axis=0, mode="fill")[0]
    want = np.stack([filled, filled, given[0][0]]).astype(np.float64)
    np.testing.assert_array_equal(np.asarray(found, np.float64), want)


def test_ids_of_few_bits_and_of_none_are_rows():
    small = jnp.array([200, 6], jnp.uint8)
    found = _row_functions.read_rows(small, shards([4]))
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], TABLE[6])
    none = _row_functions.read_rows(jnp.zeros((0,), jnp.int32), shards([4]))
    assert none.shape == (0, 2)


def test_a_read_is_one_equation_of_ids_and_shards():
    ids = jnp.array([[6, 0, 3]])
    (found,) = named(lambda ids: _row_functions.read_rows(ids, shards([4])), ids)
    assert found.params["name"] == _row_functions.READ == "jaxstrategy_server_rows"
    types = [(var.aval.shape, var.aval.dtype.name) for var in found.invars]
    assert types == [((3,), "int32"), ((4, 2), "float32"), ((3, 2), "float32")]
    assert [var.aval.shape for var in found.outvars] == [(3, 2)]


def test_a_read_under_vmap_stays_one_equation():
    ids = jnp.array([[6, 0], [3, 3]])
    each = jax.vmap(lambda ids: _row_functions.read_rows(ids, shards([4])))
    (found,) = named(each, ids)
    assert found.invars[0].aval.shape == (4,)
    np.testing.assert_array_equal(each(ids), TABLE[np.asarray(ids)])


def test_many_tables_are_read_by_the_definition():
    blocks = [jnp.stack([block, -block]) for block in shards([4])]
    ids = jnp.array([[6, 0], [3, 3]])

    def read(ids, *blocks):
        return _row_functions.read_rows(ids, blocks)

    assert not named(jax.vmap(read), ids, *blocks)
    want = np.stack([TABLE[[6, 0]], -TABLE[[3, 3]]])
    np.testing.assert_array_equal(jax.vmap(read)(ids, *blocks), want)
    same = jax.vmap(read, in_axes=(None, 0, 0))(ids[0], *blocks)
    np.testing.assert_array_equal(same, [TABLE[[6, 0]], -TABLE[[6, 0]]])


def test_the_gradient_of_a_read_is_that_of_the_whole():
    ids, weights = jnp.array([6, 0, 0, 9, -1]), jnp.arange(10.0).reshape(5, 2)

    def loss(blocks):
        rows = _row_functions.read_rows(ids, blocks)
        return jnp.where(jnp.isnan(rows), 0, rows * weights).sum()

    first, empty, second = jax.grad(loss)(shards([4, 4]))
    assert empty.shape == (0, 2)
    want = np.zeros_like(TABLE)
    np.add.at(want, [6, 0, 0], np.asarray(weights[:3]))
    np.testing.assert_array_equal(np.concatenate([first, second]), want)


def test_a_gradient_of_something_else_makes_no_table_of_zeros():
    ids = jnp.array([6, 0, 0])

    def loss(w, blocks):
        return (w * _row_functions.read_rows(ids, blocks) ** 2).sum()

    # What is differentiated has the shards as constants, so that it can be shipped.
    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.float32(3), shards([4]))
    (found,) = named(jax.grad(loss), jnp.float32(3), shards([4]))
    assert len(found.invars) == 3
    tables = [id(var) for var in jaxpr.jaxpr.invars[1:]]
    used = [id(var) for each in jaxpr.jaxpr.eqns for var in each.invars]
    assert [used.count(table) for table in tables] == [1, 1]
    want = (TABLE[np.asarray(ids)] ** 2).sum()
    assert jax.grad(loss)(jnp.float32(3), shards([4])) == want
    assert jax.grad(jax.grad(lambda w: loss(w, shards([4])) * w))(1.0) == 2 * want


REFERENCE = {
    "add": np.add.at,
    "sub": np.subtract.at,
    "mul": np.multiply.at,
    "div": np.divide.at,
    "min": np.minimum.at,
    "max": np.maximum.at,
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("operation", REFERENCE)
def test_changes_are_those_of_the_whole(operation, cuts):
    ids = jnp.array([6, 0, 0, 3])
    values = np.array([[2, 3], [4, 5], [0.5, 2], [-7, 8]], np.float32)
    want = TABLE.copy()
    REFERENCE[operation](want, np.asarray(ids), values)
    new = _row_functions.changed_rows(operation, ids, jnp.asarray(values), shards(cuts))
    assert [each.shape for each in new] == [each.shape for each in shards(cuts)]
    np.testing.assert_allclose(np.concatenate(new), want, rtol=1e-6)


def test_an_update_takes_the_place_of_rows():
    values = jnp.array([[2.0, 3.0], [4.0, 5.0]])
    new = _row_functions.changed_rows("update", jnp.array([6, 0]), values, shards([4]))
    want = TABLE.copy()
    want[[6, 0]] = values
    np.testing.assert_array_equal(np.concatenate(new), want)


@pytest.mark.parametrize("operation", _row_functions.CHANGED)
def test_what_is_no_row_changes_nothing(operation):
    values = jnp.full((3, 2), 5.0)
    given = shards([4])
    ids = jnp.array([-1, 7, 1000])
    new = _row_functions.changed_rows(operation, ids, values, given)
    np.testing.assert_array_equal(np.concatenate(new), TABLE)


@pytest.mark.parametrize("operation", _row_functions.CHANGED)
def test_a_change_is_one_equation(operation):
    def change(ids, values):
        return _row_functions.changed_rows(operation, ids, values, shards([4]))

    (found,) = named(change, jnp.array([6, 0]), jnp.ones((2, 2)))
    assert found.params["name"] == f"jaxstrategy_server_scatter_{operation}"
    shapes = [var.aval.shape for var in found.invars]
    assert shapes == [(2,), (2, 2), (4, 2), (3, 2)]
    assert found.invars[0].aval.dtype == "int32"


def test_changes_of_many_are_each_ones_own():
    values = jnp.arange(8.0).reshape(2, 2, 2)
    ids = jnp.array([[6, 0], [3, 3]])

    def change(ids, values):
        return _row_functions.changed_rows("add", ids, values, shards([4]))

    assert not named(jax.vmap(change), ids, values)
    new = np.concatenate(jax.vmap(change)(ids, values), axis=1)
    for each, rows, own in zip(new, np.asarray(ids), np.asarray(values), strict=True):
        want = TABLE.copy()
        np.add.at(want, rows, own)
        np.testing.assert_array_equal(each, want)
