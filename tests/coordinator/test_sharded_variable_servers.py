"""Tables in shards on parameter servers: only the rows that are used travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sharded import slices

import jaxstrategy as js
from jaxstrategy.experimental import embedding_lookup, partitioners

TABLE = np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.fixture
def strategy():
    strategy = js.ParameterServerStrategy(
        variable_partitioner=partitioners.FixedShardsPartitioner(2),
        workers=2,
        parameter_servers=2,
        backend="threads",
    )
    yield strategy
    strategy.close()


@pytest.fixture
def coordinator(strategy):
    with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        yield coordinator


@pytest.fixture
def table(strategy):
    with strategy.scope():
        return js.Variable(TABLE, name="table")


@pytest.fixture
def pulled(strategy, monkeypatch):
    """The numbers of rows that each read has asked for; None: all of a variable."""
    seen = []
    for server in strategy.backend.servers:

        def read(reads, server=server, before=server.read):
            seen.extend(None if r.rows is None else r.rows.tolist() for r in reads)
            return before(reads)

        monkeypatch.setattr(server, "read", read, raising=True)
    return seen


def run(coordinator, function, *args):
    value = coordinator.schedule(coordinator.function(function), args)
    coordinator.join()
    return value.fetch()


def devices(variable):
    return [shard.device for shard in variable.variables]


def task(number):
    return f"/job:ps/replica:0/task:{number}/device:CPU:0"


def test_shards_go_round_the_servers(strategy):
    partitioner = partitioners.FixedShardsPartitioner(4)
    strategy._variable_policy.partitioner = partitioner
    with strategy.scope():
        first = js.Variable(np.zeros((10, 2)), name="first")
        scalar = js.Variable(1.0)
        second = js.Variable(np.zeros((3, 2)), name="second")
    assert [shard.shape[0] for shard in first.variables] == [3, 3, 2, 2]
    assert devices(first) == [task(0), task(1), task(0), task(1)]
    assert scalar.device == task(0)
    assert devices(second) == [task(1), task(0), task(1)]
    with pytest.raises(AttributeError, match="'first/part_1' on /job:ps.*task:1/"):
        _ = first.device


def test_beside_a_shard_it_is_on_the_same_server(strategy, table):
    with strategy.scope():
        with strategy.extended.colocate_vars_with(table.variables[1]):
            beside = js.Variable(np.ones((4, 2)))
    assert isinstance(beside, js.Variable)
    assert beside.device == table.variables[1].device == task(1)


def test_the_coordinator_reads_rows_alone(table, pulled):
    np.testing.assert_array_equal(embedding_lookup(table, [4, 0, 4]), TABLE[[4, 0, 4]])
    assert pulled == [[0], [1, 1]]
    pulled.clear()
    np.testing.assert_array_equal(table[3], TABLE[3])
    np.testing.assert_array_equal(table[1:4, 1], TABLE[1:4, 1])
    assert pulled == [[0], [1, 2], [0]]
    pulled.clear()
    np.testing.assert_array_equal(table.variables[1].sparse_read([1]), TABLE[[4]])
    assert pulled == [[1]]
    with pytest.raises(IndexError, match=r"Row 5 of variable 'table'.*\[0, 5\)"):
        embedding_lookup(table, [5])
    with pytest.raises(IndexError, match=r"Row 2 of variable 'table/part_1'"):
        table.variables[1].sparse_read([2])


def test_the_coordinator_changes_rows_alone(table, pulled):
    want = TABLE.copy()
    assert table.scatter_add(slices([4, 0, 4], np.ones((3, 2)))) is table
    np.add.at(want, [4, 0, 4], 1)
    table.scatter_max(slices([1], [[9, 9]]))
    want[1] = 9
    table[2:4].assign_sub(1.0)
    want[2:4] -= 1
    table[0, 1].assign(7.0)
    want[0, 1] = 7
    np.testing.assert_array_equal(table.numpy(), want)
    table.assign(TABLE).assign_add(TABLE)
    np.testing.assert_array_equal(table.numpy(), 2 * TABLE)
    with pytest.raises(IndexError, match="Row 5 of variable 'table'"):
        table.scatter_add(slices([0, 5], np.ones((2, 2))))
    with pytest.raises(ValueError, match=r"shape \(5, 2\) and was given \(4, 2\)"):
        table.assign(TABLE[:4])
    np.testing.assert_array_equal(table.numpy(), 2 * TABLE)


def test_the_coordinator_takes_gradients(table):
    gradient = js.grad(lambda: (embedding_lookup(table, [4, 0, 4]) ** 2).sum(), table)()
    assert gradient.indices.tolist() == [4, 0, 4]
    np.testing.assert_array_equal(gradient.values, 2 * TABLE[[4, 0, 4]])
    gradient = js.grad(lambda: (table.value() ** 2).sum(), table)()
    np.testing.assert_array_equal(gradient, 2 * TABLE)
    one = table.variables[1]
    gradient = js.grad(lambda: embedding_lookup(one, [1, 1]).sum(), one)()
    assert gradient.indices.tolist() == [1, 1]


def test_tensorflows_lookup_and_subtraction(coordinator, table, pulled):
    def step(ids):
        rows = embedding_lookup(table, ids)
        table.scatter_sub(js.IndexedSlices(jnp.ones((3, 2)), ids))
        return rows

    found = run(coordinator, step, np.array([0, 4, 4]))
    assert found.tolist() == [[0, 1], [8, 9], [8, 9]]
    assert None not in pulled
    assert {row for rows in pulled for row in rows} <= {0, 1}
    want = TABLE.copy()
    np.subtract.at(want, [0, 4, 4], 1)
    np.testing.assert_array_equal(table.numpy(), want)


def test_a_gradient_of_lookups_travels_as_rows(coordinator, table, pulled):
    def step(ids):
        def loss():
            groups = embedding_lookup(table, ids, combiner="sum")
            return (groups**2).sum()

        gradient = js.grad(loss, table)()
        table.scatter_sub(gradient)
        return gradient

    ids = np.array([[0, 4], [1, -1]])
    gradient = run(coordinator, step, ids)
    assert None not in pulled and gradient.values.shape == (4, 2)

    def loss(table):
        return ((table[0] + table[4]) ** 2 + table[1] ** 2).sum()

    want = TABLE - jax.grad(loss)(jnp.asarray(TABLE))
    np.testing.assert_allclose(table.numpy(), want, rtol=1e-6)
