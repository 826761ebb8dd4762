"""Checkpoints have tables in shards as one array, for any number of shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.sharded import sharded

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

TABLE = np.arange(14, dtype=np.float32).reshape(7, 2)


def mirrored():
    return js.MirroredStrategy(jax.devices()[:2])


def nobody():
    return None


def on_servers():
    return js.ParameterServerStrategy(workers=1, parameter_servers=2, backend="threads")


def plain(strategy, value):
    if strategy is None:
        return js.Variable(value)
    with strategy.scope():
        return js.Variable(value)


def made(how, strategy, value):
    if how == "plain":
        return plain(strategy, value)
    if how == "array":
        return jnp.asarray(value)
    if how == "host array":
        return np.array(value)
    return sharded(value, how, strategy)


def saved(path, state):
    with CheckpointManager(path) as manager:
        manager.save(0, state)


def restored(path, state, **choices):
    with CheckpointManager(path) as manager:
        return manager.restore(state, **choices)


WAYS = [[], [3, 5], [1], [1, 2, 3, 4, 5, 6], "plain", "array", "host array"]


@each_of("before, after", [*(([4], after) for after in WAYS), ("plain", [3, 5])])
def test_it_is_restored_into_any_number_of_shards(tmp_path, before, after):
    saved(tmp_path, {"w": made(before, mirrored(), TABLE)})
    target = made(after, None, np.zeros_like(TABLE))
    found = restored(tmp_path, {"w": target})["w"]
    np.testing.assert_array_equal(np.asarray(found), TABLE)
    if not isinstance(after, str) or after == "plain":
        assert found is target


@each_of(
    "before, after", [(on_servers, mirrored), (nobody, on_servers), (mirrored, nobody)]
)
def test_it_goes_from_each_strategy_to_each(tmp_path, before, after):
    saved(tmp_path, {"a": sharded(TABLE, [3, 5], before()), "b": 2})
    table = sharded(np.zeros_like(TABLE), [2], after())
    found = restored(tmp_path, {"a": table, "b": 0})
    assert found["a"] is table and found["b"] == 2
    np.testing.assert_array_equal(table.numpy(), TABLE)
    one = plain(after(), np.zeros_like(TABLE))
    np.testing.assert_array_equal(restored(tmp_path, {"a": one, "b": 0})["a"], TABLE)


def test_slots_of_an_optimizer_go_with_it(tmp_path):
    def state(cuts, value):
        table = sharded(value, cuts)
        return {"w": table, "slot": jax.tree.map(lambda x: 3 * x, table)}

    saved(tmp_path, state([3, 5], TABLE))
    found = restored(tmp_path, state([2], np.zeros_like(TABLE)))
    assert [len(part) for part in found["slot"].variables] == [2, 5]
    assert all(isinstance(part, jax.Array) for part in found["slot"].variables)
    np.testing.assert_array_equal(found["slot"].numpy(), 3 * TABLE)
    np.testing.assert_array_equal(found["w"].numpy(), TABLE)


@each_of(
    "other, text",
    [
        (TABLE[:6], r"`w` is float32\[7,2\] in the .*, and float32\[6,2\] was wanted"),
        (TABLE.astype(int), r"and int32\[7,2\] was wanted"),
    ],
)
def test_another_table_is_no_such_table(tmp_path, other, text):
    saved(tmp_path, {"w": sharded(TABLE, [3])})
    table = sharded(other, [3])
    with pytest.raises(js.checkpoint.MismatchError, match=text):
        restored(tmp_path, {"w": table})
    np.testing.assert_array_equal(table.numpy(), other)


def test_copies_without_a_value_are_not_saved(tmp_path):
    table = sharded(TABLE, [3], mirrored(), synchronization="on_read")
    with pytest.raises(ValueError, match="'table/part_0', has a copy per replica"):
        saved(tmp_path, {"w": table})
    choices = {"synchronization": "on_read", "aggregation": "sum"}
    table = sharded(TABLE, [3], mirrored(), **choices)
    saved(tmp_path, {"w": table})
    into = sharded(np.zeros_like(TABLE), [5], mirrored(), **choices)
    np.testing.assert_array_equal(restored(tmp_path, {"w": into})["w"], 2 * TABLE)
