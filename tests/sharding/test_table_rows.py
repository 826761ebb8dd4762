"""Rows of a divided table, from parts: NumPy's numbers, whichever ids there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxstrategy.reductions import _shard_functions, _table_rows
from jaxstrategy.reductions._rows_by_id import summed_by_id
from jaxstrategy.reductions._table_rows import table_rows

AXES = ("replica",)
WHOLE, PARTS = PartitionSpec(), PartitionSpec(AXES)
ROWS = 24


def on_parts(function, replicas, specs, result):
    """`function` of each replica's parts, on the first of the simulated devices."""
    mesh = Mesh(np.asarray(jax.devices()[:replicas]), AXES)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=result, check_vma=False
    )
    return jax.jit(mapped)


def equation(function, *operands):
    (found,) = jax.make_jaxpr(function)(*operands).eqns
    return found


def called(eqn):
    operands = [each.aval for each in eqn.invars]
    results = [each.aval for each in eqn.outvars]
    return _shard_functions.called_by(eqn.params["name"], operands, results)


def taking(rank=2):
    return _table_rows._taking(rank)


# Ids of each replica: of all kinds, all the same, all of one owner, none a row.
def ids_of(replicas, case):
    random = np.random.default_rng(3)
    ids = {
        "mixed": random.integers(-1, ROWS + 1, (replicas, 30)),
        "same": np.full((replicas, 5), 7),
        "one owner": random.integers(0, ROWS // replicas, (replicas, 40)),
        "no rows": np.tile([-1, ROWS], (replicas, 2)),
        "none": np.zeros((replicas, 0)),
    }
    return ids[case].astype(np.int32)


CASES = [(8, "mixed"), (8, "same"), (4, "one owner"), (8, "no rows"), (4, "none")]


def looked_up(table, ids):
    """NumPy's rows: zeros for -1, NaN beyond the table."""
    beyond = np.full_like(table[:1], np.nan)
    return np.concatenate([table, beyond, np.zeros_like(beyond)])[ids]


def summed(ids, rows):
    table = np.zeros((ROWS, *rows.shape[ids.ndim :]))
    for id_, row in zip(ids.ravel(), rows.reshape(-1, *table.shape[1:]), strict=True):
        if 0 <= id_ < ROWS:
            table[id_] += row
    return table


@pytest.mark.parametrize("replicas, case", CASES)
def test_rows_come_from_their_owners(replicas, case):
    table = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    ids = ids_of(replicas, case)

    def take(block, ids):
        return taking().of_parts(block, ids[0], axes=AXES)[None]

    rows = on_parts(take, replicas, (PARTS, PARTS), PARTS)(table, ids)
    np.testing.assert_array_equal(rows, looked_up(table, ids))


@pytest.mark.parametrize("replicas, case", CASES)
def test_rows_are_added_up_at_their_owners(replicas, case):
    ids = ids_of(replicas, case)
    # Whole numbers, of which every order of additions has the same sum.
    rows = np.random.default_rng(1).integers(-9, 9, (*ids.shape, 3)).astype(np.float32)

    def add(ids, rows):
        return _table_rows.part_of_sum(
            (ROWS, 3), ids[0, :, None], rows[0], axes=AXES, dtype="float32"
        )

    table = on_parts(add, replicas, (PARTS, PARTS), PARTS)(ids, rows)
    np.testing.assert_array_equal(table, summed(ids, rows))


def test_tables_of_other_ranks_and_dtypes():
    ids = ids_of(4, "mixed")
    for table in (
        np.arange(ROWS * 6.0, dtype=np.float16).reshape(ROWS, 2, 3),
        np.arange(ROWS, dtype=np.float32),
    ):

        def take(block, ids, rank=table.ndim):
            return taking(rank).of_parts(block, ids[0], axes=AXES)[None]

        rows = on_parts(take, 4, (PARTS, PARTS), PARTS)(table, ids)
        np.testing.assert_array_equal(rows, looked_up(table, ids))


def test_axes_may_be_several():
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
    both = PartitionSpec(("a", "b"))
    table = np.arange(ROWS * 2.0, dtype=np.float32).reshape(ROWS, 2)
    ids = ids_of(8, "mixed")

    def take(block, ids):
        return taking().of_parts(block, ids[0], axes=("a", "b"))[None]

    mapped = jax.shard_map(
        take, mesh=mesh, in_specs=(both, both), out_specs=both, check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(mapped)(table, ids), looked_up(table, ids))


def test_whole_tables_have_the_same_rows_and_sums():
    table = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    ids = ids_of(1, "mixed")[0]
    rows, back = jax.vjp(lambda table: table_rows(table, jnp.asarray(ids)), table)
    np.testing.assert_array_equal(rows, looked_up(table, ids))
    ones = np.ones((ids.size, 3), np.float32)
    np.testing.assert_array_equal(back(jnp.asarray(ones))[0], summed(ids, ones))


def test_derivatives_of_first_and_second_order():
    table = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
    ids = jnp.array([5, 5, -1, 0, 3])

    def cubes(table):
        return (table_rows(table, ids) ** 3).sum()

    def sum_of_gradient(table):
        return jax.grad(cubes)(table).sum()

    times = np.zeros((ROWS, 1))
    times[[0, 3, 5]] = [[1], [1], [2]]
    first, second = jax.grad(cubes)(table), jax.grad(sum_of_gradient)(table)
    np.testing.assert_allclose(first, times * 3 * table**2, rtol=1e-6)
    np.testing.assert_allclose(second, times * 6 * table, rtol=1e-6)


def test_forward_derivatives_and_those_of_many_tables():
    table = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    ids = jnp.array([5, 5, -1])

    def squares(table):
        return (table_rows(table, ids) ** 2).sum()

    _, tangent = jax.jvp(squares, (table,), (np.ones_like(table),))
    np.testing.assert_allclose(tangent, 4 * table[5].sum(), rtol=1e-6)
    many = jnp.stack([table, 2 * table])
    gradients = jax.vmap(jax.grad(squares))(many)
    np.testing.assert_allclose(gradients[1], 2 * gradients[0], rtol=1e-6)
    np.testing.assert_allclose(gradients[0][5], 4 * table[5], rtol=1e-6)


def test_the_gradient_of_many_examples_is_one_table():
    table = jnp.ones((1000, 4))
    ids = jnp.arange(256).reshape(64, 4)

    def total(table):
        return jax.vmap(lambda ids: table_rows(table, ids).sum())(ids).sum()

    program = jax.jit(jax.grad(total)).lower(table).compile()
    assert program.memory_analysis().temp_size_in_bytes < table.nbytes
    gradient = jax.grad(total)(table)
    np.testing.assert_array_equal(gradient[:, 0], np.arange(1000) < 256)


def test_a_row_beyond_the_table_has_no_gradient():
    def total(table):
        return table_rows(table, jnp.array([4, 1])).sum()

    value, gradient = jax.value_and_grad(total)(jnp.ones((4, 2)))
    assert np.isnan(value)
    np.testing.assert_array_equal(gradient, [[0, 0], [1, 1], [0, 0], [0, 0]])


# How a trace tells.


def test_a_call_is_one_equation_that_is_found():
    table, ids = jnp.ones((ROWS, 2)), jnp.arange(3)
    found = equation(taking(), table, ids)
    assert found.primitive.name == "jit"
    assert called(found) is taking()


def test_another_equation_of_the_name_is_not_found():
    table, ids = jnp.ones((ROWS, 2)), jnp.arange(3)
    many = jnp.stack([ids, ids])
    batched = equation(jax.vmap(taking(), (None, 0)), table, many)
    assert batched.params["name"] == taking().name
    assert called(batched) is None
    tangents = equation(
        jax.jit(lambda t: jax.jvp(lambda t: taking()(t, ids), [t], [t])), table
    )
    inner = [e for e in tangents.params["jaxpr"].eqns if e.primitive.name == "jit"]
    assert inner and all(called(each) is None for each in inner)
    assert called(equation(jax.jit(jnp.sin), table)) is None


def test_rows_of_one_id_are_added_in_order():
    ids = jnp.array([4, 1, 4, -1, 1, 4])
    rows = jnp.asarray([[1e8], [1.0], [1.0], [7.0], [2.0], [-1e8]])
    different, sums = summed_by_id(ids, rows)
    np.testing.assert_array_equal(different, [-1, 1, 4, -1, -1, -1])
    np.testing.assert_array_equal(sums.ravel(), [7, 3, 0, 0, 0, 0])
