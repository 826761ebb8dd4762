"""Variables on parameter servers: where they are, and what changes them."""

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstrategy as js
from jaxstrategy.coordinator import Threads
from jaxstrategy.experimental import embedding_lookup


def strategy_of(workers=1, servers=2, devices=1):
    return js.ParameterServerStrategy(backend=Threads(workers, servers, devices))


@pytest.fixture
def strategy():
    return strategy_of()


def variable(strategy, value=1.0, **options):
    with strategy.scope():
        return js.Variable(value, **options)


def server_of(v):
    return int(v.device.partition("task:")[2].partition("/")[0])


def test_variables_go_round_the_servers(strategy):
    for servers, expected in [(3, [0, 1, 2, 0]), (2, [0, 1, 0, 1])]:
        other = strategy_of(servers=servers)
        assert [server_of(variable(other)) for _ in range(4)] == expected
    v = variable(strategy, name="v")
    assert v.device == "/job:ps/replica:0/task:0/device:CPU:0"
    assert "on parameter server 0" in repr(v)


def test_a_colocated_variable_does_not_count(strategy):
    with strategy.scope():
        a, b = js.Variable(1.0), js.Variable(1.0)
        with strategy.extended.colocate_vars_with(a):
            c = js.Variable(1.0)
        d = js.Variable(1.0)
    assert [server_of(v) for v in (a, b, c, d)] == [0, 1, 0, 0]


def test_a_variable_that_is_gone_is_dropped():
    strategy = strategy_of(servers=1)
    (server,) = strategy.server_pool.servers
    v = variable(strategy)
    number = v.cell.number
    del v
    variable(strategy)
    with pytest.raises(LookupError):
        server.versions([number])


# The coordinator reads and writes them, in the scope and out of it.


def test_the_coordinator_reads_and_writes(strategy):
    v = variable(strategy, 3.0)
    assert float(v) == 3.0
    v.assign(9.0)
    with strategy.scope():
        assert v.assign_add(1.0) == 10.0
    assert v.assign_sub(4.0) == 6.0
    assert v.update(lambda old, x: old * x, 2.0) == 12.0


# A step of one replica, or of several, on the coordinator: what a worker does, too.


def pushed(strategy, v, step, *args):
    """The names of the operations by which `step` changes `v`, and what it returns."""
    names = []
    (server,) = strategy.server_pool.servers
    push = server.push

    def recorded(operations, call=None):
        names.extend(
            each.name for each in operations if v.cell.number in each.variables
        )
        return push(operations, call)

    server.push = recorded
    returned = strategy.run(step, args)
    server.push = push
    return names, returned


def in_a_loop(v, x):
    def body(i, _):
        v.assign_add(x)
        v.assign_sub(1.0)
        return v.value()

    return jax.lax.fori_loop(0, 5, body, 0.0)


def in_a_branch(v, x):
    jax.lax.cond(x > 0, lambda: v.assign(x), lambda: v.value())
    return v.assign_add(1.0)


CHANGES = [
    (lambda v, x: v.assign_add(x), 2.0, ["add"], 5.0),
    (lambda v, x: v.assign_sub(x), 2.0, ["subtract"], 1.0),
    (lambda v, x: v.assign(x), 2.0, ["set"], 2.0),
    (lambda v, x: (v.assign(1.0), v.assign_add(x)), 2.0, ["set", "add"], 3.0),
    (lambda v, x: v.update(lambda old: 2 * old), 2.0, ["update"], 6.0),
    (lambda v, x: v.update(lambda old: x * old), 2.0, ["update"], 6.0),
    (lambda v, x: v.update(lambda old, y: x + y * old, x), 2.0, ["update"], 8.0),
    (lambda v, x: v.value(), 2.0, [], 3.0),
    (lambda v, x: jax.jit(lambda: v.assign_add(x))(), 2.0, ["add"], 5.0),
    (in_a_loop, 2.0, ["add"], 8.0),
    (in_a_branch, 10.0, ["set"], 11.0),
    (in_a_branch, -10.0, ["add"], 4.0),
]


def test_what_is_pushed_is_the_operation():
    strategy = strategy_of(servers=1)
    for number, (change, x, operations, expected) in enumerate(CHANGES):
        v = variable(strategy, 3.0)

        def step(x, change=change, v=v):
            change(v, x)
            return v.value()

        found, after = pushed(strategy, v, step, x)
        assert found == operations, number
        assert float(v) == float(after) == expected, number


def test_other_changes_in_loops_are_refused(strategy):
    v = variable(strategy, 1.0, name="v")

    def step():
        def body(i, carry):
            v.update(lambda old: 2 * old)
            return carry

        return jax.lax.fori_loop(0, 3, body, 0)

    with pytest.raises(ValueError, match="variable 'v' in a branch or a loop, by `upd"):
        strategy.run(step)
    assert float(v) == 1.0


def table(strategy, rows=10, **options):
    value = np.arange(2.0 * rows, dtype="float32").reshape(rows, 2)
    return variable(strategy, value, name="table", **options)


def test_only_the_rows_that_are_used_travel():
    strategy = strategy_of(servers=1)
    t = table(strategy, 1000)
    (server,) = strategy.server_pool.servers
    sizes = []
    read = server.read

    def recorded(reads):
        values = read(reads)
        sizes.extend(value.shape for value in values)
        return values

    server.read = recorded

    def step(ids):
        rows = embedding_lookup(t, ids)
        t.scatter_sub(js.IndexedSlices(jnp.ones_like(rows), ids))
        return rows, embedding_lookup(t, ids)

    before, after = strategy.run(step, (np.array([0, 4, 4]),))
    assert sizes == [(2, 2)]
    assert np.asarray(before).tolist() == [[0, 1], [8, 9], [8, 9]]
    assert np.asarray(after).tolist() == [[-1, 0], [6, 7], [6, 7]]
    server.read = read
    expected = np.arange(2000.0).reshape(1000, 2)
    expected[0] -= 1
    expected[4] -= 2
    np.testing.assert_array_equal(t.numpy(), expected)


STEPS = [
    (lambda t, ids: (embedding_lookup(t, ids), t.value().sum()), None),
    (
        lambda t, ids: embedding_lookup(
            t, embedding_lookup(t, ids)[:, 0].astype("int32") % 10
        ),
        "asks for rows whose numbers depend on rows that it has read",
    ),
    (lambda t, ids: jax.lax.map(lambda i: embedding_lookup(t, i[None]), ids), None),
    (lambda t, ids: (t.assign_add(jnp.ones((10, 2))), embedding_lookup(t, ids)), None),
    (
        lambda t, ids: (
            jax.lax.fori_loop(
                0,
                2,
                lambda i, c: (
                    t.scatter_add(js.IndexedSlices(jnp.ones((3, 2)), ids)),
                    c,
                )[1],
                0,
            ),
            embedding_lookup(t, ids),
        ),
        None,
    ),
]


@pytest.mark.slow
def test_what_needs_more_than_rows_is_right_too(strategy):
    ids = np.array([1, 3, 3])
    given = np.arange(20.0, dtype="float32").reshape(10, 2)
    for number, (step, warned) in enumerate(STEPS):
        t, ordinary = table(strategy), js.Variable(given)
        told = pytest.warns(js.errors.WholeTableWarning, match=warned)
        with contextlib.nullcontext() if warned is None else told:
            found = strategy.run(lambda ids, t=t, s=step: s(t, ids), (ids,))
        wanted = step(ordinary, jnp.array(ids))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        np.testing.assert_array_equal(t.numpy(), ordinary.numpy(), err_msg=str(number))


def test_replicas_of_a_worker_make_one_write():
    strategy = strategy_of(servers=1, devices=2)
    v = variable(strategy, np.zeros(3, "float32"), aggregation="sum")
    first = variable(strategy, 0.0, aggregation="only_first_replica")

    def step():
        i = js.get_replica_context().replica_id_in_sync_group
        v.assign(jnp.array([10.0, 1.0, 2.0]) + i * jnp.array([1.0, 0.0, 0.0]))
        first.assign_add(3.0)

    assert pushed(strategy, v, step) == (["set"], None)
    assert v.numpy().tolist() == [21, 2, 4]
    assert float(first) == 3.0


def test_replicas_that_differ_are_refused():
    strategy = strategy_of(devices=2)
    v = variable(strategy, 0.0)

    def step():
        v.assign_add(js.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(js.errors.NotMirroredVariableError):
        strategy.run(step)
    assert float(v) == 0.0


def test_what_is_refused_changes_nothing(strategy):
    v = variable(strategy, np.zeros(3, "float32"), name="v")
    ones, key = np.ones(3, "float32"), jax.random.key(0)
    for call, error, text in [
        (lambda: v.assign(ones[:2]), ValueError, r"shape \(3,\) and was given \(2,\)"),
        (lambda: v.assign_add(ones * 1j), TypeError, "would lose something"),
        (lambda: variable(strategy, key), TypeError, "keys, which parameter servers d"),
        (
            lambda: variable(strategy, ones, sharding=0),
            ValueError,
            "`variable_partitioner`, which divides",
        ),
        (
            lambda: jax.jit(lambda: v + 1)(),
            js.errors.ContextError,
            "'v' is on a parameter server, a",
        ),
        (lambda: copy.copy(strategy), RuntimeError, "cop"),
        (lambda: copy.deepcopy(strategy), RuntimeError, "cop"),
        (lambda: copy.deepcopy(v), RuntimeError, "server 0, and cannot be cop"),
        (lambda: Threads(1, 1, 99), ValueError, "`devices_per_worker` was 99"),
    ]:
        with pytest.raises(error, match=text):
            call()
    assert v.numpy().tolist() == [0, 0, 0]
