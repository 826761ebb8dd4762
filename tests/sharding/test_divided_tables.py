"""Steps that read and change a divided table send its rows, and never the table."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from helpers.cases import each_of

import jaxstrategy as js

ROWS, FEATURES, IDS = 1_048_576, 32, 256
REPLICAS = 8
BLOCK = ROWS // REPLICAS * FEATURES * 4
"""The bytes of one replica's part of the table."""


@pytest.fixture
def eight():
    sharding = js.StateSharding("state")
    return js.MirroredStrategy(jax.devices(), sharding=sharding)


def compiled(strategy, step, state):
    """The program of a step, of shapes alone: no table is made."""
    whole = strategy._replicas.sharding(0)

    def shape(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=whole)

    ids = jax.ShapeDtypeStruct((REPLICAS, IDS), "int32", sharding=whole)
    run = jax.jit(lambda state, ids: strategy.run(step, (state, js.PerReplica(ids))))
    return run.lower(jax.tree.map(shape, state), ids).compile()


def sent_bytes(program):
    """By kind of collective, what one device receives in the program."""
    sizes = {"s32": 4, "f32": 4}
    found = {}
    for line in program.as_text().splitlines():
        match = re.search(r"= (.*?) (all-[\w-]+|reduce-scatter|coll[\w-]+)\(", line)
        if match:
            arrays = re.findall(r"(s32|f32)\[([\d,]*)\]", match[1])
            total = sum(
                sizes[k] * np.prod([*map(int, s.split(","))]) for k, s in arrays
            )
            found[match[2]] = found.get(match[2], 0) + int(total)
    return found


def trained(table, ids):
    def loss(table):
        return (js.sharded.lookup(table, ids) ** 2).sum()

    gradient = js.get_replica_context().all_reduce("mean", jax.grad(loss)(table))
    return table - 0.1 * gradient


def updated(state, ids):
    return state.update(ids, 2 * state.lookup(ids))


TABLE = jax.ShapeDtypeStruct((ROWS, FEATURES), "float32")
ADAGRAD = js.sharded.Embedding(ROWS, FEATURES, js.sharded.Adagrad(0.1))
STATE = jax.eval_shape(ADAGRAD.init, jax.random.key(0))
# To each replica, and from it, go as many ids and rows as it looks up.
EACH_ID, EACH_ROW = REPLICAS * IDS * 4, REPLICAS * IDS * FEATURES * 4


@each_of(
    "step, state, sent",
    [
        (trained, TABLE, {"all-to-all": 2 * (EACH_ID + EACH_ROW)}),
        (
            updated,
            STATE,
            {"all-to-all": EACH_ID + EACH_ROW, "all-gather": EACH_ID + EACH_ROW},
        ),
    ],
)
def test_what_is_sent_is_in_proportion_to_the_ids(eight, step, state, sent):
    program = compiled(eight, step, state)
    assert sent_bytes(program) == sent
    memory = program.memory_analysis()
    blocks = len(jax.tree.leaves(state))
    assert memory.argument_size_in_bytes - blocks * BLOCK < 10_000
    assert memory.temp_size_in_bytes < 2_000_000  # of 134 MB of the table


@each_of("step, state, times", [(trained, TABLE, 2), (updated, STATE, 1)])
def test_explain_tells_of_rows_and_of_no_table(eight, step, state, times):
    ids = js.PerReplica(jax.ShapeDtypeStruct((REPLICAS, IDS), "int32"))
    found = eight.explain(step, (state, ids), compiled=False)
    sent = [each.nbytes for each in found.collectives if each.kind == "all_to_all"]
    assert sorted(sent) == [EACH_ID] * times + [EACH_ROW] * times
    assert found.communicated_bytes <= 2 * (EACH_ID + EACH_ROW)


SOME_IDS = np.random.default_rng(0).integers(-1, 64, (REPLICAS, 4, 3))
EVERYTHING = js.StateSharding("state", min_bytes=0)


class Embed(linen.Module):
    """A module of Flax that knows nothing of us."""

    @linen.compact
    def __call__(self, ids):
        return linen.Embed(4096, 4)(ids)


def test_the_gradient_of_few_rows_of_flax_is_not_made_whole():
    strategy = js.MirroredStrategy(jax.devices(), sharding=EVERYTHING)
    model, ids = Embed(), np.abs(SOME_IDS)

    @strategy.run
    def step(params, ids):
        gradient = jax.grad(lambda p: (model.apply(p, ids) ** 2).sum())(params)
        gradient = js.get_replica_context().all_reduce("mean", gradient)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)

    first = jax.jit(model.init)(jax.random.key(0), ids[0])
    per_replica = strategy.per_replica(ids)
    (new,) = jax.tree.leaves(step(strategy.mirror(first), per_replica))
    (table,) = jax.tree.leaves(first)
    wanted = np.array(table)
    np.subtract.at(wanted, ids, 0.1 / REPLICAS * 2 * table[ids])
    np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)
    run = jax.jit(lambda params, ids: step(params, ids))
    program = run.lower(strategy.mirror(first), per_replica).compile()
    assert "reduce-scatter" not in sent_bytes(program)


def test_rows_looked_up_in_a_loop_and_a_branch():
    strategy = js.MirroredStrategy(jax.devices(), sharding=EVERYTHING)
    table = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)

    @strategy.run
    def step(table, ids):
        def turn(total, ids):
            return total + js.sharded.lookup(table, ids).sum(0), None

        total, _ = jax.lax.scan(turn, jnp.zeros(4), ids)
        mean = js.get_replica_context().all_reduce("mean", total)
        return jax.lax.cond(
            mean[0] > 1e6, lambda: total, lambda: js.sharded.lookup(table, ids[0, 0])
        )

    rows = step(strategy.mirror(table), strategy.per_replica(SOME_IDS))
    wanted = table[SOME_IDS[:, 0, 0]] * (SOME_IDS[:, :1, 0] >= 0)
    np.testing.assert_array_equal(rows.stacked, wanted)
