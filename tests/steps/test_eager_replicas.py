"""Steps that run eagerly, each replica in a thread, compute what compiled ones do."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxstrategy as js

DEVICES = js.simulate(8)
# A replica is late when the machine is busy, whatever it does.
pytestmark = pytest.mark.filterwarnings("ignore::jaxstrategy.errors.LateReplicaWarning")


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("replica ")]


def replica():
    return js.get_replica_context()


STRATEGIES = {
    "mirrored": lambda: js.MirroredStrategy(DEVICES[:3]),
    "shared devices": lambda: js.MirroredStrategy(DEVICES[:2], replicas_per_device=2),
    "several devices": lambda: js.MirroredStrategy(
        DEVICES[:4], logical_axes={"core": 2}
    ),
}


@pytest.fixture(params=STRATEGIES, scope="module")
def strategy(request):
    return STRATEGIES[request.param]()


def rows(strategy):
    count = strategy.num_replicas_in_sync
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2)


def versions(value, strategy):
    return [np.asarray(each) for each in strategy.experimental_local_results(value)]


def test_collectives_are_those_of_numpy(strategy):
    x = rows(strategy)

    def step(x, w):
        total = replica().all_reduce("sum", {"x": x, "w": w})
        mean = replica().all_reduce("mean", x)
        both = replica().all_gather(x, 0)
        return total, mean, both, x * w, replica().all_reduce("max", x)

    with js.experimental.eager_replicas():
        total, mean, both, own, most = strategy.run(step, (js.PerReplica(x), 2.0))
    np.testing.assert_array_equal(total["x"], x.sum(0))
    np.testing.assert_array_equal(total["w"], 2 * len(x))
    np.testing.assert_array_equal(mean, x.mean(0))
    np.testing.assert_array_equal(both, x.reshape(-1))
    np.testing.assert_array_equal(most, x.max(0))
    for each, row in zip(versions(own, strategy), x, strict=True):
        np.testing.assert_array_equal(each, 2 * row)


def test_a_merge_call_is_made_once_for_all(strategy):
    x = rows(strategy)
    calls = []

    def merge(strategy, x, word):
        calls.append(word)
        return strategy.reduce("sum", x, axis=None), x

    def step(x):
        total, own = replica().merge_call(merge, (x,), {"word": "once"})
        return total, own + 1

    with js.experimental.eager_replicas():
        total, own = strategy.run(step, (js.PerReplica(x),))
    assert calls == ["once"]
    np.testing.assert_array_equal(total, x.sum(0))
    for each, row in zip(versions(own, strategy), x, strict=True):
        np.testing.assert_array_equal(each, row + 1)


@pytest.mark.slow
def test_variables_are_read_and_assigned(strategy):
    x = rows(strategy)
    with strategy.scope():
        total = js.Variable(np.zeros(2, np.float32), aggregation="sum")
        mean = js.Variable(np.zeros(2, np.float32), aggregation="mean")
        first = js.Variable(np.zeros(2, np.float32), aggregation="only_first_replica")
        equal = js.Variable(5.0)
        own = js.Variable(1.0, synchronization="on_read", aggregation="sum")

    @strategy.run
    def step(x):
        total.assign_add(x)
        mean.assign(x)
        first.assign(x + 1)
        equal.assign_sub(1.0)
        own.assign_add(x[1])
        return total.value(), own.value()

    with js.experimental.eager_replicas():
        now, mine = step(js.PerReplica(x))
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(now, x.sum(0))
    np.testing.assert_array_equal(mean, x.mean(0))
    np.testing.assert_array_equal(first, x[0] + 1)
    assert float(equal) == 4
    np.testing.assert_allclose(own, len(x) + x[:, 1].sum())
    np.testing.assert_array_equal(versions(mine, strategy), 1 + x[:, 1])
    step(js.PerReplica(x))  # compiled again, from what is there
    np.testing.assert_array_equal(total, 2 * x.sum(0))
    assert float(equal) == 3


@pytest.mark.slow
def test_training_of_divided_state_is_that_of_compiled_steps():
    sharding = js.StateSharding("state", 0)
    strategy = js.MirroredStrategy(DEVICES[:2], sharding=sharding)
    optimizer, x = optax.sgd(0.1, momentum=0.9), rows(strategy)

    @strategy.run
    def step(state, x):
        params, moments = state

        def loss(params):
            return jnp.mean((x @ params["w"] + params["b"] - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        value, grads = replica().all_reduce("mean", (value, grads))
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {"w": jnp.ones(2), "b": jnp.float32(0)}
    eager = compiled = params, optimizer.init(params)
    for _ in range(2):
        compiled, loss = step(compiled, js.PerReplica(x))
        with js.experimental.eager_replicas(disable_jit=False):
            eager, same = step(eager, js.PerReplica(x))
        np.testing.assert_allclose(same, loss, rtol=1e-5)
    assert jax.tree.structure(eager) == jax.tree.structure(compiled)
    for one, other in zip(*map(jax.tree.leaves, (eager, compiled)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def both_ways(strategy, step, *args):
    compiled = strategy.run(step, args)
    with js.experimental.eager_replicas():
        return compiled, strategy.run(step, args)


NUMBERS = {
    "the mean of integers": lambda x: replica().all_reduce("mean", 3),
    "ids": lambda x: replica().all_reduce("sum", replica().replica_id_in_sync_group),
    "groups": lambda x: replica().all_reduce("sum", x, groups=[[0], [1]]),
    "the least": lambda x: jax.grad(lambda x: replica().all_reduce("min", x).sum())(x),
    "gathered": lambda x: jax.grad(
        lambda x: (replica().all_gather(x, 0) * jnp.arange(4.0)).sum()
    )(x),
    "forward": lambda x: jax.jvp(lambda x: replica().all_reduce("sum", x), (x,), (x,)),
    "second": lambda x: jax.grad(
        jax.grad(lambda a: replica().all_reduce("mean", (a * x[0]) ** 3))
    )(2.0),
    "mapped and gathered": lambda x: jax.vmap(
        lambda a: replica().all_gather(a[None], 0), out_axes=1
    )(x),
    "in a loop": lambda x: jax.lax.scan(
        lambda c, a: (c + replica().all_reduce("sum", a), c), 0.0, x
    ),
    "jitted": lambda x: jax.jit(lambda a: replica().all_reduce("sum", a))(x),
    "checkpointed": lambda x: jax.grad(
        jax.checkpoint(lambda x: replica().all_reduce("mean", x**2).sum())
    )(x),
    "rows": lambda x: (
        replica()
        .all_reduce(
            "sum",
            js.IndexedSlices(
                x[:, None], jnp.arange(2) + replica().replica_id_in_sync_group, (3, 1)
            ),
        )
        .to_dense()
    ),
    "a wide number": lambda x: (
        x.astype(jnp.bfloat16) * replica().all_reduce("sum", 2.0)
    ),
    "a callback": lambda x: jax.pure_callback(
        lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct((2,), jnp.float32), x
    ),
    "no array": lambda x: ("text", None, 3, x),
}


@pytest.mark.slow
def test_values_types_and_kinds_are_the_compiled_ones(two):
    def step(x):
        return {name: function(x) for name, function in NUMBERS.items()}

    def is_whole(node):
        return isinstance(node, js.PerReplica)

    x = two.per_replica([[1.0, 2.0], [5.0, 3.0]])
    compiled, eager = both_ways(two, step, x)
    found, structure = jax.tree.flatten_with_path(compiled, is_leaf=is_whole)
    others, other = jax.tree.flatten(eager, is_leaf=is_whole)
    assert structure == other
    for (path, have), want in zip(found, others, strict=True):
        assert type(have) is type(want), path
        if is_whole(have):
            have, want = have.stacked, want.stacked
        if isinstance(have, jax.Array):
            assert (have.shape, have.dtype) == (want.shape, want.dtype), path
            np.testing.assert_allclose(
                *(np.asarray(each, np.float32) for each in (have, want)),
                rtol=1e-6,
                err_msg=str(path),
            )
        else:
            assert have == want, path


def test_shapes_may_depend_on_data(two):
    x = two.per_replica([[1.0, -1.0, 2.0], [-1.0, -2.0, 3.0]])

    def step(x):
        kept = x[x > 0]
        return kept, replica().all_reduce("sum", kept.sum()), f"{len(kept)} rows"

    with js.experimental.eager_replicas():
        kept, total, words = two.run(step, (x,))
    assert isinstance(kept, js.experimental.Versions)
    assert [each.tolist() for each in kept] == [[1.0, 2.0], [3.0]]
    assert two.experimental_local_results(kept) == kept.values
    assert kept.local(1).tolist() == [3.0]
    assert float(total) == 6
    assert words.values == ("2 rows", "1 rows")
    with pytest.raises(IndexError, match="Replica 2 was asked of a value of which"):
        words.local(2)


def test_what_differed_once_is_a_per_replica_from_then_on(two):
    def step(x):
        return x + 1

    equal, other = two.per_replica([1.0, 1.0]), two.per_replica([1.0, 2.0])
    with js.experimental.eager_replicas():
        assert float(two.run(step, (equal,))) == 2  # equal, so it is one array
        assert two.run(step, (other,)).local(1) == 3
        assert two.run(step, (equal,)).local(1) == 2
    with js.experimental.eager_replicas():
        assert isinstance(two.run(step, (equal,)), jax.Array)
        assert isinstance(two.run(lambda x: x, (equal,)), js.PerReplica)


@pytest.mark.slow
def test_several_steps_are_a_loop_in_python(two):
    seen = []

    @two.run
    def step(total, batch):
        seen.append(float(batch[0]))
        mean = replica().all_reduce("mean", batch.sum())
        return total + mean, mean

    many, local = two.several(step), two.local_steps(step)
    batches = tuple(two.per_replica([[1.0], [k]]) for k in (2.0, 4.0))
    with js.experimental.eager_replicas():
        total, means = many(0.0, batches)
        assert seen == [1.0, 2.0, 1.0, 4.0]
        state, parts = local(0.0, batches)
    assert float(total) == 1.5 + 2.5
    np.testing.assert_array_equal(means, [1.5, 2.5])
    assert float(state) == (2 + 6) / 2
    np.testing.assert_array_equal(parts, [1.5, 2.5])


def test_a_batch_in_parts_is_worked_on_part_by_part(two):
    seen = []

    def of_part(rows):
        seen.append(rows.tolist())
        return rows.sum(), rows.max()

    def step(x):
        return two.accumulate(2, has_aux=True)(of_part)(x)

    x = two.per_replica([[1.0, 2.0], [3.0, 4.0]])
    with js.experimental.eager_replicas():
        mean, most = two.run(step, (x,))
    assert seen == [[1.0], [2.0], [3.0], [4.0]]
    assert [float(each) for each in mean.values] == [1.5, 3.5]
    assert most.local(1).tolist() == [3.0, 4.0]


@pytest.mark.slow
def test_compressed_sums_go_on_with_what_was_not_sent(two):
    options = js.experimental.CommunicationOptions(compression="int8")
    grads = two.per_replica(np.linspace(0, 1, 4000).reshape(2, 2000))
    state = two.compression_state(np.zeros(2000, np.float32), options)

    def step(grads, state):
        return replica().all_reduce_compressed("mean", grads, state, options)

    (mean, owed), (eager, eager_owed) = both_ways(two, step, grads, state)
    np.testing.assert_array_equal(mean, eager)
    np.testing.assert_array_equal(owed.errors.stacked, eager_owed.errors.stacked)


def test_constraints_along_inner_axes_are_kept():
    strategy = STRATEGIES["several devices"]()

    def step(x):
        big = jnp.ones((4, 2)) * x[None]
        big = jax.lax.with_sharding_constraint(big, jax.P("core"))
        return replica().all_reduce("sum", big @ jnp.ones(2))

    with js.experimental.eager_replicas():
        found = strategy.run(step, (js.PerReplica(rows(strategy)),))
    np.testing.assert_array_equal(found, np.full(4, rows(strategy).sum()))
