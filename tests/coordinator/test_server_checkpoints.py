"""Checkpoints of variables on parameter servers, and pauses to take them in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.clusters import Cluster

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)


def on_servers(count):
    return js.ParameterServerStrategy(
        workers=2, parameter_servers=count, backend="threads"
    )


def in_shards(servers, shards):
    return js.ParameterServerStrategy(
        variable_partitioner=js.experimental.partitioners.FixedShardsPartitioner(
            shards
        ),
        workers=1,
        parameter_servers=servers,
        backend="threads",
    )


def mirrored():
    return js.MirroredStrategy(jax.devices()[:2])


def state_in(strategy, value=0.0):
    with strategy.scope():
        return {
            "table": js.Variable(jnp.full((3, 2), value)),
            "deep": [js.Variable(jnp.int32(value)), js.Variable(jnp.full(5, value))],
            "epoch": int(value),
        }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: on_servers(3), lambda: in_shards(2, 3)),
        (lambda: in_shards(3, 3), mirrored),
        (mirrored, lambda: on_servers(2)),
    ],
)
def test_any_number_of_servers_restores_what_any_other_saved(tmp_path, before, after):
    state = state_in(before(), 7.0)
    state["table"].assign(TABLE)
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(4, state)
    new = state_in(after())
    with CheckpointManager(tmp_path) as manager:
        got, step = manager.restore_or_init(new)
        # One entry of the whole shape for each variable, whatever keeps it.
        assert set(manager.record(4).leaves) == {"table", "deep/0", "deep/1", "epoch"}
    assert step == 4 and got["epoch"] == 7
    assert got["table"] is new["table"] and got["deep"][1] is new["deep"][1]
    np.testing.assert_array_equal(new["table"].value(), TABLE)
    assert new["deep"][0].value() == 7
    np.testing.assert_array_equal(new["deep"][1].value(), np.full(5, 7.0))


def test_another_shape_is_refused_before_a_server_changes(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state_in(on_servers(2), 3.0))
    other = on_servers(2)
    new = state_in(other)
    with other.scope():
        new["deep"][1] = js.Variable(jnp.zeros(4))
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(js.checkpoint.MismatchError, match="deep/1"),
    ):
        manager.restore(new)
    np.testing.assert_array_equal(new["table"].value(), np.zeros((3, 2)))


def test_variables_of_workers_are_refused(tmp_path):
    with on_servers(1).scope():
        own = js.Variable(0.0, name="mine", per_worker_variable=True)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match=r"`own`, variable 'mine', has a copy on each"),
    ):
        manager.save(1, {"own": own})


class Counting(Cluster):
    """Two variables on two servers that each function changes together."""

    def __init__(self):
        super().__init__(2, servers=2)
        self.pair = [self.variable(jnp.zeros(1000)) for _ in range(2)]

    def step(self):
        for variable in self.pair:
            variable.assign_add(jnp.ones(1000))
        return 1

    def times(self, count):
        return [self.schedule(self.step) for _ in range(count)]

    def totals(self):
        return [float(variable.value()[0]) for variable in self.pair]


@pytest.fixture
def counting():
    with Counting() as made:
        yield made


def test_in_a_pause_nothing_runs_and_afterwards_all_does(counting):
    values = counting.times(100)
    values[3].fetch()
    with counting.coordinator.paused():
        seen = counting.totals()
        assert seen[0] == seen[1] >= 4
        ended = [
            value.status is js.coordinator.RemoteValueStatus.READY for value in values
        ]
        assert seen == [sum(ended)] * 2
        late = counting.times(1)
        assert counting.totals() == seen
        with counting.coordinator.paused():  # in itself
            pass
        assert counting.totals() == seen
    counting.coordinator.join()
    assert late[0].fetch() == 1
    assert counting.totals() == [101, 101]


def test_waiting_in_a_pause_is_an_error_and_no_deadlock(counting):
    counting.coordinator.join()
    with counting.coordinator.paused():
        counting.coordinator.join()  # there is nothing to wait for
        assert counting.coordinator.done()
        (value,) = counting.times(1)
        for wait in (
            counting.coordinator.join,
            value.fetch,
            value.get,
            lambda: counting.coordinator.fetch(value),
        ):
            with pytest.raises(RuntimeError, match=r"block of `coordinator.paused\(\)"):
                wait()
    assert value.fetch() == 1


def test_what_is_saved_while_functions_run_is_of_one_moment(counting, tmp_path):
    counting.times(300)
    with CheckpointManager(tmp_path, keep=None) as manager:
        for step in range(1, 6):
            assert manager.save(step, counting.pair)
        counting.coordinator.join()
        saved = []
        for step in range(1, 6):
            like = [jax.ShapeDtypeStruct((1000,), np.float32)] * 2
            first, second = manager.restore(like, step)
            np.testing.assert_array_equal(first, second)
            saved.append(float(first[0]))
    assert saved == sorted(saved)
    assert counting.totals() == [300, 300]
