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


def test_a_wrong_shape_changes_nothing(strategy):
    v = variable(strategy, np.zeros(3, "float32"))
    with pytest.raises(ValueError, match=r"has shape \(3,\) and was given \(2,\)"):
        v.assign(np.ones(2, "float32"))
    with pytest.raises(TypeError, match="would lose something"):
        v.assign_add(np.ones(3, "complex64"))
    assert v.numpy().tolist() == [0, 0, 0]


# A step of one replica, or of several, on the coordinator: what a worker does, too.


def test_changes_in_loops_are_added_up(strategy):
    v = variable(strategy, np.float32(1.0))

    def step(n):
        def body(i, _):
            v.assign_add(2.0)
            v.assign_sub(1.0)
            return v.value()

        return jax.lax.fori_loop(0, n, body, 0.0)

    assert float(strategy.run(step, (5,))) == 6.0
    assert float(v) == 6.0


def test_an_assignment_that_may_be_made_before_an_addition(strategy):
    v = variable(strategy, 3.0)

    def step(x):
        jax.lax.cond(x > 0, lambda: v.assign(x), lambda: v.value())
        v.assign_add(1.0)

    for x, expected in [(10.0, 11.0), (-10.0, 12.0)]:
        strategy.run(step, (x,))
        assert float(v) == expected


def pushed(strategy, v, step, *args):
    """The names of the operations by which `step` changes `v`."""
    names = []
    (server,) = strategy.server_pool.servers
    push = server.push

    def recorded(operations, call=None):
        names.extend(
            each.name for each in operations if v.cell.number in each.variables
        )
        return push(operations, call)

    server.push = recorded
    strategy.run(step, args)
    server.push = push
    return names


CHANGES = [
        (lambda v: v.assign_add(1.0), ["add"]),
        (lambda v: v.assign_sub(1.0), ["subtract"]),
        (lambda v: v.assign(1.0), ["set"]),
        (lambda v: (v.assign(1.0), v.assign_add(1.0)), ["set", "add"]),
        (lambda v: v.update(lambda old: 2 * old), ["update"]),
        (lambda v: v.value(), []),
        (lambda v: jax.jit(lambda: v.assign_add(1.0))(), ["add"]),
        (lambda v: jax.lax.fori_loop(0, 3, lambda i, c: (v.assign_add(1.0), c)[1], 0),
         ["add"]),
]  # fmt: skip


def test_what_is_pushed_is_the_operation():
    strategy = strategy_of(servers=1)
    for number, (change, expected) in enumerate(CHANGES):
        v = variable(strategy, 1.0)

        def step(change=change, v=v):
            change(v)

        assert pushed(strategy, v, step) == expected, number


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


def test_random_keys_in_variables_are_refused(strategy):
    with pytest.raises(TypeError, match="holds random keys, which parameter servers d"):
        variable(strategy, jax.random.key(0))


def test_replicas_of_a_worker_make_one_write():
    strategy = strategy_of(servers=1, devices=2)
    v = variable(strategy, np.zeros(3, "float32"), aggregation="sum")
    first = variable(strategy, 0.0, aggregation="only_first_replica")

    def step():
        i = js.get_replica_context().replica_id_in_sync_group
        v.assign(jnp.array([10.0, 1.0, 2.0]) + i * jnp.array([1.0, 0.0, 0.0]))
        first.assign_add(3.0)

    assert pushed(strategy, v, step) == ["set"]
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


def test_a_jitted_function_that_nobody_schedules_is_refused(strategy):
    v = variable(strategy, name="v")
    with pytest.raises(js.errors.ContextError, match="'v' is on a parameter server, a"):
        jax.jit(lambda: v + 1)()


def test_sharding_is_for_partitioners(strategy):
    with pytest.raises(ValueError, match="`variable_partitioner`, which divides"):
        variable(strategy, np.zeros(4, "float32"), sharding=0)


def test_a_strategy_with_processes_is_not_copied(strategy):
    v = variable(strategy)
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="cop"):
            copied(strategy)
    with pytest.raises(RuntimeError, match="on parameter server 0, and cannot be cop"):
        copy.deepcopy(v)


def test_a_worker_has_no_more_devices_than_the_coordinator():
    with pytest.raises(ValueError, match="`devices_per_worker` was 99"):
        Threads(1, 1, 99)
