"""`strategy.local_steps`: the oracle is a loop over workers, and then a mean."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from helpers.replicas import replica
from helpers.trees import assert_close

import jaxstrategy as js

PARAMS = {"w": np.float32([0.5, -1.0, 2.0]), "b": np.float32(0.3)}
OPTIMIZER = optax.adam(0.05)


def loss_of(params, batch):
    return js.masked_mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def train(state, batch):
    """The step of all replicas together: nothing in it knows of local steps."""
    params, memory = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    loss, grads = replica().all_reduce("mean", (loss, grads))
    updates, memory = OPTIMIZER.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), loss


def descend(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    loss, grads = replica().all_reduce("mean", (loss, grads))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def start():
    return PARAMS, OPTIMIZER.init(PARAMS)


def data(n, steps, rows=5):
    """The rows of each step and replica."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(steps, n, rows, 3)).astype(np.float32)
    return [{"x": each, "y": each.sum(-1) + 1} for each in x]


def of(batch, r):
    return jax.tree.map(lambda a: a[r], batch)


def given(strategy, batches):
    return tuple(strategy.per_replica(batch) for batch in batches)


def mean(*each):
    floats = jnp.issubdtype(jnp.asarray(each[0]).dtype, jnp.floating)
    return np.mean(each, 0) if floats else each[0]


def workers(step, state, batches, n):
    """The mean of the states after these steps, and each worker's losses."""
    ends, losses = [], []
    for r in range(n):
        own, seen = state, []
        for batch in batches:
            own, loss = step(own, of(batch, r))
            seen.append(loss)
        ends.append(own)
        losses.append(np.array(seen))
    return jax.tree.map(mean, *ends), np.array(losses)


@pytest.mark.slow
@each_of("n, sharding", [(1, None), (2, None), (3, js.StateSharding(min_bytes=0))])
def test_rounds_are_those_of_workers_alone(n, sharding):
    strategy = js.MirroredStrategy(jax.devices()[:n], sharding=sharding)
    state, want = strategy.mirror(start()), start()
    local = strategy.local_steps(train)
    for batches in (data(n, 6)[:3], data(n, 6)[3:]):
        state, losses = local(state, given(strategy, batches))
        want, seen = workers(train, want, batches, n)
        assert_close(state, want)
        assert_close(losses, seen.mean(0))
        kinds = js.Mirrored, js.Sharded
        assert all(isinstance(leaf, kinds) for leaf in leaves(state))
        assert isinstance(state[0]["w"], kinds[sharding is not None])


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, js.PerReplica))


def test_the_state_is_sent_once(four):
    local = four.local_steps(train)
    found = four.explain(local, (start(), given(four, data(4, 5))))
    # Parameters and two moments of four numbers each, and five losses.
    (sent,) = found.collectives
    assert (sent.nbytes, sent.loops, sent.in_branch) == (3 * 16 + 20, (), False)
    assert sent.line.code == "def train(state, batch):"


def test_what_no_step_changes_is_not_sent(two):
    def step(state, batch):
        params, loss = descend(state["params"], batch)
        return {**state, "params": params}, loss

    state = {"params": PARAMS, "rate": jnp.float32(0.1), "old": np.ones(50)}
    local = two.local_steps(step)
    (sent,) = two.explain(local, (state, given(two, data(2, 1)))).collectives
    assert sent.nbytes == 16 + 4
    have, _ = local(state, given(two, data(2, 1)))
    assert_close(have, {**state, "params": have["params"]}, tolerance=0)


def test_what_is_reduced_and_returned_is_reduced_over_all(four):
    def step(total, batch):
        reduce, own = replica().all_reduce, batch["y"].sum()
        count = jnp.int32(len(batch["y"])) + replica().replica_id_in_sync_group
        found = {
            "mean": reduce("mean", own),
            "sum": reduce("sum", own),
            "max": reduce("max", own),
            "min": reduce("MIN", own),
            "count": reduce("sum", count),
            "mean count": reduce("mean", count),
            "groups": reduce("sum", own, groups=[[0, 2], [1, 3]]),
            "own": own,
            "made of it": 2 * reduce("mean", own),
        }
        return total + reduce("sum", own), found

    batches = data(4, 3)
    total, found = four.local_steps(step)(0.0, given(four, batches))
    own = np.array([batch["y"].sum(1) for batch in batches])
    assert_close(total, own.sum())
    assert_close(found["mean"], own.mean(1))
    assert_close(found["sum"], own.sum(1))
    assert_close(found["max"], own.max(1))
    assert_close(found["min"], own.min(1))
    assert found["count"].dtype == jnp.int32
    assert found["count"].tolist() == [4 * 5 + 6] * 3
    assert found["mean count"].tolist() == [6.5] * 3
    in_groups = np.stack([own[:, [0, 2, 0, 2]], own[:, [2, 0, 2, 0]]]).sum(0)
    in_groups[:, [1, 3]] = own[:, [1, 3]].sum(1, keepdims=True)
    assert_close(found["groups"].stacked, in_groups.T)
    assert_close(found["own"].stacked, own.T)
    assert_close(found["made of it"].stacked, 2 * own.T)


def test_functions_jitted_by_the_user_are_traced_again(two):
    """What such a function does is kept by JAX; here it does something else."""

    @jax.jit
    def reduced(grads):
        return replica().all_reduce("mean", grads)

    def step(params, batch):
        grads = reduced(jax.grad(loss_of)(params, batch))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    batches = data(2, 3)
    want, _ = workers(descend, PARAMS, batches, 2)
    together = PARAMS
    for batch in batches:
        rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)
        together, _ = descend(together, rows)
    for _ in range(2):
        assert_close(two.several(step)(PARAMS, given(two, batches)), together)
        assert_close(two.local_steps(step)(PARAMS, given(two, batches)), want)


def test_rows_of_tables_stay_sparse(two):
    table, ids = np.zeros((6, 2), np.float32), np.int32([[0, 1], [1, 4]])

    def step(table, ids):
        ones = js.IndexedSlices(jnp.ones((2, 2)), ids, (6, 2))
        total, mean = (replica().all_reduce(op, ones) for op in ("sum", "mean"))
        return table.at[total.indices].add(total.values + mean.values)

    have = two.local_steps(step)(table, (two.per_replica(ids),) * 3)
    own = np.zeros((2, 6, 2))
    for r in range(2):
        own[r, ids[r]] = 3 * (2 + 1)
    assert_close(have, own.mean(0))

    def extreme(table, ids):
        ones = js.IndexedSlices(jnp.ones((2, 2)), ids, (6, 2))
        return replica().all_reduce("max", ones).to_dense()

    with pytest.raises(ValueError, match="MAX of IndexedSlices is not defined"):
        two.local_steps(extreme)(table, (two.per_replica(ids),))


def test_variables_become_the_mean_of_their_copies(two):
    with two.scope():
        w = js.Variable(0.0, name="w")
        count = js.Variable(0, name="count")
        total = js.Variable(0.0, aggregation="sum")
        rows = js.Variable(0, synchronization="on_read", aggregation="sum")
        other = js.Variable(7.0, name="read only")

    def step(goal):
        grad = js.grad(lambda: (w - goal) ** 2 / 2, w)()
        w.assign_sub(0.5 * replica().all_reduce("mean", grad) * (other / 7.0))
        count.assign_add(1)
        total.assign_add(goal)
        rows.assign_add(5)

    goals = two.per_replica([4.0, 8.0])
    local = two.local_steps(step)
    (sent,) = two.explain(local, ((goals, goals),)).collectives
    assert sent.nbytes == 8
    local((goals, goals))
    assert (float(w), int(count), float(total), int(rows)) == (4.5, 2, 24.0, 20)
    two.assert_in_sync([w, count, total])


def test_whole_numbers_that_differ_are_told(two):
    def step(state, batch):
        seen = state["seen"] + jnp.sum(batch["y"] > 0)
        return {"seen": seen, "w": state["w"] + 1.0}

    local, state = two.local_steps(step), {"seen": np.int32(0), "w": 0.0}
    with pytest.warns(js.errors.NotMirroredWarning, match=r"returns `step\(...\)\['se"):
        state = local(state, given(two, data(2, 2)))
    assert isinstance(state["seen"], js.PerReplica) and float(state["w"]) == 2.0
    with two.scope():
        seen = js.Variable(0, name="seen")

    def count(batch):
        seen.assign_add(jnp.sum(batch["y"] > 0))

    with pytest.raises(
        js.errors.NotMirroredVariableError, match="'seen' is mirrored, but"
    ):
        two.local_steps(count)(given(two, data(2, 2)))


def test_what_is_sent_by_hand_is_refused(two):
    def step(w, batch):
        return w - jax.lax.pmean(batch["y"].sum(), "replica")

    told = (
        r"`step` communicates in local steps, where each replica is by itself\.\n"
        r"  the `pmean`: .*test_local_steps.py:\d+: return w - jax.lax.pmean\(.*\n"
        r"Reduce with `get_replica_context\(\).all_reduce\(...\)`"
    )
    with pytest.raises(js.errors.ContextError, match=told):
        two.local_steps(step)(0.0, given(two, data(2, 2)))


def test_gathering_is_refused(two):
    def step(w, batch):
        return w + replica().all_gather(batch["y"], 0).sum()

    told = "`all_gather` was called in local steps, where each replica is by itself"
    with pytest.raises(js.errors.ContextError, match=told):
        two.local_steps(step)(0.0, given(two, data(2, 2)))


def test_only_a_step_is_taken(two):
    told = re.escape(
        "`local_steps` was given 3, which cannot be called. Give the step: "
        "`many = strategy.local_steps(step)`."
    )
    with pytest.raises(TypeError, match=told):
        two.local_steps(3)
    with pytest.raises(TypeError, match="a `RunOptions` was wanted"):
        two.local_steps(descend, options=3)
    with pytest.raises(js.errors.ContextError, match="`strategy.run` was called"):
        two.run(
            lambda b: two.local_steps(descend)(PARAMS, (b,)), (given(two, data(2, 1)))
        )
