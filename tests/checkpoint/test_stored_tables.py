"""Tables at rest: rows that fill them up, first values, checkpoints of other counts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager

EVERYTHING = js.StateSharding("state", min_bytes=0)


def divided(replicas):
    return js.MirroredStrategy(jax.devices()[:replicas], sharding=EVERYTHING)


@each_of(
    "rows, stored",
    [(1, 1), (8, 8), (31, 31), (32, 32), (33, 34), (1000, 1024), (50_257, 51_200)],
)
def test_a_table_is_stored_with_at_most_a_sixteenth_more_rows(rows, stored):
    assert js.sharded.Embedding(rows, 1).stored_rows == stored <= rows * 17 / 16


def test_first_values_are_those_of_flax_and_each_device_has_its_rows():
    wanted = linen.Embed(100, 4).embedding_init(jax.random.key(1), (100, 4))
    embedding = js.sharded.Embedding(100, 4)
    for replicas in 1, 4:
        state = divided(replicas).init(embedding.init, jax.random.key(1))
        np.testing.assert_array_equal(state.table[:100], wanted)
        assert not state.table[100:].any()
    embedding = js.sharded.Embedding(100, 4, js.sharded.Adagrad(0.1))
    state = divided(4).init(embedding.init, jax.random.key(0))
    for array in (state.table, state.slots["accumulator"]):
        assert isinstance(array, js.Sharded)
        assert {each.data.shape for each in array.addressable_shards} == {(25, 4)}


def test_no_id_reaches_the_rows_that_fill_a_table_up():
    embedding = js.sharded.Embedding(33, 1, js.sharded.SGD(1.0))
    state = embedding.from_rows(np.ones((33, 1)))
    assert state.table.shape == (34, 1)
    np.testing.assert_array_equal(
        state.lookup([32, 33, 34]).ravel(), [1, np.nan, np.nan]
    )
    gradient = jax.grad(lambda state: state.lookup([32, 33, 34]).sum())(state).table
    np.testing.assert_array_equal(gradient[31:].ravel(), [0, 1, 0])
    new = state.update([32, 33, 34], np.ones((3, 1)))
    np.testing.assert_array_equal(new.table[31:].ravel(), [1, 0, 0])


def test_a_checkpoint_is_restored_on_another_number_of_replicas(tmp_path):
    embedding = js.sharded.Embedding(40, 2, js.sharded.Adagrad(0.1))
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    four = divided(4)
    state = four.init(embedding.from_rows, rows)
    state = four.run(lambda state: state.update([3], jnp.ones((1, 2))), (state,))
    CheckpointManager(tmp_path).save(0, {"words": state})
    for replicas in 1, 8:
        other = divided(replicas)
        template = {"words": other.init(embedding.init, jax.random.key(0))}
        restored = CheckpointManager(tmp_path).restore(template)["words"]
        assert restored.table.sharding == template["words"].table.sharding
        np.testing.assert_array_equal(restored.table, state.table)
        for name, slot in state.slots.items():
            np.testing.assert_array_equal(restored.slots[name], slot)
