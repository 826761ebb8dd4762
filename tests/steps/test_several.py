"""Several steps in one call, batches in parts: the oracle is a loop in Python."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cases import each, each_of
from helpers.replicas import mirrored, replica

import jaxstrategy as js


def loss_of(w, batch):
    return js.masked_mean((batch["x"] @ w - batch["y"]) ** 2)


OPTIMIZER = optax.adam(0.1)


def train(state, batch):
    """One step with a mirrored and a per-replica result, a random key and a count."""
    loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
    loss, grads = replica().all_reduce("mean", (loss, grads))
    updates, memory = OPTIMIZER.update(grads, state["memory"])
    key, noise = jax.random.split(state["key"])
    state = {
        "w": optax.apply_updates(state["w"], updates),
        "memory": memory,
        "key": key,
        "count": state["count"] + 1,
    }
    own = {"rows": js.batch_mask(batch["y"]).sum(), "first": batch["x"][0]}
    return state, {"loss": loss, "noise": jax.random.uniform(noise), "own": own}


def start():
    w = jnp.zeros(3)
    return {
        "w": w,
        "memory": OPTIMIZER.init(w),
        "key": jax.random.key(1),
        "count": jnp.int32(0),
    }


def data(rows=39, size=8):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return js.batches({"x": x, "y": x.sum(1)}, size)


def distributed(strategy, source):
    options = js.InputOptions(experimental_per_replica_buffer_size=0)
    return strategy.experimental_distribute_dataset(source, options)


def numbers(strategy, rows):
    """Batches `[1 row]` on each replica, all different."""
    n = strategy.num_replicas_in_sync
    return [
        strategy.per_replica(np.arange(n, dtype=np.float32).reshape(n, 1) + 10 * i)
        for i in range(rows)
    ]


def on_host(strategy, tree, step=...):
    """Plain arrays, of one of several steps; of a `PerReplica` one row per replica."""

    def read(leaf):
        if isinstance(leaf, js.PerReplica):
            versions = strategy.experimental_local_results(leaf)
            return np.stack([np.asarray(version)[step] for version in versions])
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)[step]

    return jax.tree.map(read, tree, is_leaf=lambda x: isinstance(x, js.PerReplica))


def assert_same(have, want):
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(have), jax.tree.leaves(want), strict=True
    ):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), path
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=str(path))


@each_of("make, k", [(lambda: mirrored(2), 3), (js.get_strategy, 5)])
def test_a_training_is_that_of_a_loop(make, k):
    strategy = make()
    # 39 rows in batches of 8: the last batch is filled up; of 5 batches, 3 and 2.
    step = strategy.run(train)
    state, wanted = strategy.mirror(start()), []
    for batch in distributed(strategy, data()):
        state, out = step(state, batch)
        wanted.append(on_host(strategy, out))
    want = on_host(strategy, state)

    many = strategy.several(train)
    state, found, sizes = strategy.mirror(start()), [], []
    for batches in js.experimental.grouped(distributed(strategy, data()), k):
        state, out = many(state, batches)
        sizes.append(len(batches))
        found += [on_host(strategy, out, i) for i in range(len(batches))]
    assert sizes == {3: [3, 2], 5: [5]}[k]
    assert_same(on_host(strategy, state), want)
    assert int(state["count"]) == 5
    for a, b in zip(found, wanted, strict=True):
        assert_same(a, b)


def test_masks_of_different_batches_are_not_taken_for_one(two):
    x, y = (list(distributed(two, js.batches(np.arange(rows), 4))) for rows in (7, 6))

    def step(batch):
        x, y = batch
        return js.masked_mean(x + y)

    with pytest.raises(ValueError, match="of different batches with equal numbers"):
        two.several(step)(tuple(zip(x, y, strict=True)))
    whole = list(distributed(two, js.batches(np.arange(8), 4)))
    assert two.several(step)(tuple(zip(whole, whole, strict=True))).shape == (2,)


def test_variables_count_the_steps(two):
    with two.scope():
        steps = js.Variable(0)
        total = js.Variable(0.0, synchronization="on_read", aggregation="sum")

    @two.several
    def step(batch):
        steps.assign_add(1)
        total.assign_add(batch[0])
        return steps

    np.testing.assert_array_equal(step(numbers(two, 3)), [1, 2, 3])
    assert (steps.numpy(), total.numpy()) == (3, 0 + 1 + 10 + 11 + 20 + 21)


def test_several_states_one_state_alone_and_none(two):
    batches = tuple(numbers(two, 3))

    @two.several
    def both(a, b, batch):
        return a + 1, b + batch.mean(), a, "kept"

    a, b, before, text = both(1.0, two.per_replica([0.0, 0.0]), batches)
    assert (float(a), text) == (4.0, "kept")
    np.testing.assert_array_equal(b.stacked, [30.0, 33.0])
    np.testing.assert_array_equal(before, [1.0, 2.0, 3.0])

    @two.several
    def alone(state, batch):
        return state[0] + replica().all_reduce("sum", batch[0]), state[1]

    total, fixed = alone((0.0, jnp.ones(2)), batches)
    assert float(total) == 63.0
    assert fixed.shape == (2,)

    sums = two.several(lambda batch: batch.sum())(batches)
    np.testing.assert_array_equal(sums.stacked, [[0, 10, 20], [1, 11, 21]])


def test_what_is_the_same_in_all_steps(two):
    @two.several
    def step(kind, w, batch, *, rate, flip):
        assert (kind, flip, batch["kind"]) == ("plain", True, "a")
        return w - rate * replica().all_reduce("mean", batch["x"])

    batches = [{"x": x, "kind": "a"} for x in numbers(two, 2)]
    w = step("plain", jnp.zeros(1), batches, rate=0.5, flip=True)
    np.testing.assert_allclose(w, [-0.5 * (0.5 + 10.5)])
    batches[1]["kind"] = "b"
    told = r"`step`: `batches\[1\]\['kind'\]` is 'b', and `batches\[0\]"
    with pytest.raises(ValueError, match=told):
        step("plain", jnp.zeros(1), batches, rate=0.5, flip=True)


def test_one_program_for_each_number_of_batches(two, compilations):
    many = two.several(lambda total, batch: total + batch[0])
    total = two.per_replica([0.0, 0.0])
    batches = numbers(two, 5)
    compilations()
    counts = []
    for group in (batches[:2], batches[2:4], batches[4:], batches[:2]):
        total = many(total, tuple(group))
        counts.append(compilations())
    assert counts == [1, 0, 1, 0]
    np.testing.assert_array_equal(total.stacked, [110, 117])


def test_options_are_those_of_the_step(two):
    @two.run(options=js.RunOptions(donate_argnums=0))
    def step(total, batch):
        return total + replica().all_reduce("mean", batch)

    total = two.mirror(np.zeros(1, np.float32))
    two.several(step)(total, numbers(two, 2))
    assert total.is_deleted()
    total = two.mirror(np.zeros(1, np.float32))
    two.several(step, options=js.RunOptions())(total, numbers(two, 2))
    assert not total.is_deleted()


def test_explain_tells_of_the_loop(four):
    many = four.several(train)
    batches = tuple(distributed(four, data()))
    found = four.explain(many, (start(), batches), compiled=False)
    assert found.name == "train"
    assert {each.times for each in found.collectives} == {5}
    paths = {value.path for value in found.per_replica}
    assert paths == {f"train(...)[1]['own']['{n}']" for n in ("rows", "first")}
    whys = [value.why for value in found.per_replica]
    assert any("`batches[0]['x']`, a PerReplica" in why for why in whys)
    assert [value.path for value in found.donatable][0] == "state['count']"


class Total(nnx.Module):
    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))
        self.calls = 0

    def add(self, batch):
        self.total[...] += replica().all_reduce("sum", batch.sum())


@pytest.mark.parametrize(
    ("make", "sum_"), [(lambda: mirrored(2), 22.0), (js.get_strategy, 10.0)]
)
def test_objects_beside_a_state_and_by_keyword(make, sum_):
    strategy = make()

    @strategy.several
    def step(total, state, batch, *, other):
        total.add(batch)
        other.add(2 * batch)
        return state + 1, batch.mean()

    total, other = Total(), Total()
    state, means = step(total, 0, numbers(strategy, 2), other=other)
    sums = float(total.total[...])
    assert (int(state), sums, float(other.total[...])) == (2, sum_, 2 * sum_)
    assert means.shape == ((2,))


def test_what_objects_in_a_loop_cannot_do(two):
    def returned(total, batch):
        return total, batch

    def counted(total, batch):
        total.calls += 1

    def wide(total, batch):
        total.total.set_value(jnp.zeros(2))

    for step, error, words in (
        (returned, js.errors.ObjectError, "`returned` returned an object of Flax NNX"),
        (counted, js.errors.ObjectError, "`counted` changes `calls` of an object of F"),
        (wide, TypeError, r"`total` of an object is float32\[\] before a step and flo"),
    ):
        with pytest.raises(error, match=words):
            two.several(step)(Total(), numbers(two, 2))


def same_shapes(state, batch):
    return {"w": state["w"].astype(jnp.int32)}, batch


def other_keys(state, batch):
    return {"v": state["w"]}, batch


def no_pair(state, batch):
    return batch


REFUSED_STEPS = [
    (
        same_shapes,
        r"`same_shapes`: `state\['w'\]` is float32\[1\] before a step and "
        r"int32\[1\] after it",
    ),
    (other_keys, r"`other_keys` was given `state` and returned something else in its"),
    (
        no_pair,
        r"`no_pair` goes on with state, so each step is to return "
        r"`\(state, \.\.\.\)`, the new ones first. It returned float32\[1\]",
    ),
]


def test_a_step_returns_what_it_goes_on_with(two):
    for step, words in each(REFUSED_STEPS):
        with pytest.raises(TypeError, match=words):
            two.several(step)({"w": np.zeros(1, np.float32)}, numbers(two, 2))


BAD_BATCHES = [
    ((), ValueError, "`step` was given no batches, and each step needs one"),
    (np.ones(3), TypeError, r"takes a tuple of batches .* was given float32\[3\]"),
    ({"x": 1.0}, TypeError, r"given a dict; write `\(batch,\)` for one step"),
    ((1.0, {"x": 1.0}), ValueError, r"`batches\[1\]` has another structure than"),
    (({"x": np.ones((2, 3))}, {"x": np.ones((2, 2))}), ValueError,
     r"`batches\[1\]\['x'\]` is float32\[2,2\], and `batches\[0\]\['x'\]` is"),
    ((np.ones(2), np.ones(2, np.int32)), ValueError,
     r"`batches\[1\]` is int32\[2\], and `batches\[0\]` is float32\[2\]"),
]  # fmt: skip


@each_of("batches, error, words", BAD_BATCHES)
def test_bad_batches(two, batches, error, words):
    def step(state, batch):
        return state, None

    with pytest.raises(error, match=words):
        two.several(step)(0.0, batches)
    with pytest.raises(TypeError, match="`<lambda>` was called without batches"):
        two.several(lambda *given: given)()
    with pytest.raises(TypeError, match="`several` was given 10, which cannot be"):
        two.several(10)


def test_groups_of_batches_pass_after_pass():
    groups = js.experimental.grouped(range(7), 3)
    assert len(groups) == 3
    for _ in range(2):
        assert list(groups) == [(0, 1, 2), (3, 4, 5), (6,)]
    assert list(js.experimental.grouped([], 3)) == []
    assert list(js.experimental.grouped(iter("abcd"), 2)) == [("a", "b"), ("c", "d")]


def test_batches_before_an_error_are_given():
    def source():
        yield from range(4)
        raise OSError("the disk is gone")

    groups = iter(js.experimental.grouped(source(), 3))
    assert [next(groups), next(groups)] == [(0, 1, 2), (3,)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(groups)


def test_the_state_is_the_one_after_the_group(two):
    dataset = distributed(two, data(32, 4))
    iterator = iter(dataset)
    groups = iter(js.experimental.grouped(iterator, 3))
    next(groups)
    state = iterator.get_state()
    rest = iter(dataset)
    rest.set_state(state)
    wanted = [np.asarray(b["x"].stacked) for b in list(dataset)[3:]]
    found = [np.asarray(b["x"].stacked) for b in rest]
    np.testing.assert_array_equal(found, wanted)


BAD_GROUPS = [
    ([], 0, ValueError, "`k` was 0; a tuple has at least one batch"),
    ([], 2.0, TypeError, "`k` was 2.0; the number of batches in a tuple was wanted"),
    (3, 2, TypeError, "`dataset` was 3, which cannot be iterated over"),
]


def test_bad_groups():
    for dataset, k, error, words in each(BAD_GROUPS):
        with pytest.raises(error, match=re.escape(words)):
            js.experimental.grouped(dataset, k)


# `strategy.accumulate`: a large batch in several small ones.


def loss(w, x, y):
    return ((x @ w - y) ** 2).mean()


@pytest.fixture
def whole_batch(strategy):
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 12, 3)).astype(np.float32)
    return x, x.sum(-1) + 1


def numpys_gradient(w, x, y):
    """Of the mean over all rows of all replicas."""
    x, y = x.reshape(-1, 3), y.reshape(-1)
    return 2 * x.T @ (x @ w - y) / len(x)


@pytest.mark.parametrize("k", [1, 3])
def test_the_gradient_is_that_of_the_whole_batch(strategy, whole_batch, k):
    @strategy.run
    def step(w, x, y):
        gradient = strategy.accumulate(k)(lambda x, y: jax.grad(loss)(w, x, y))
        return replica().all_reduce("mean", gradient(x, y))

    w = np.array([1.0, -2.0, 0.5], np.float32)
    found = step(w, *map(strategy.per_replica, whole_batch))
    np.testing.assert_allclose(found, numpys_gradient(w, *whole_batch), rtol=1e-5)


def test_sums_and_what_is_kept_of_each_part(two):
    def step(x):
        @two.accumulate(3, op="sum", has_aux=True)
        def total(x):
            return x.sum(), {"first": x[0], "whole": x}

        return total(x)

    x = np.arange(12.0, dtype=np.float32).reshape(2, 6)
    total, aux = two.run(step, (two.per_replica(x),))
    np.testing.assert_array_equal(total.stacked, x.sum(1))
    np.testing.assert_array_equal(aux["first"].stacked, x[:, ::2])
    np.testing.assert_array_equal(aux["whole"].stacked, x.reshape(2, 3, 2))


def test_random_keys_differ_from_part_to_part(two):
    def step(key):
        @two.accumulate(4, has_aux=True)
        def draw(key):
            return 0.0, jax.random.uniform(key)

        return draw(key)[1]

    drawn = np.asarray(two.run(step, (jax.random.key(7),)))
    expected = [
        jax.random.uniform(jax.random.fold_in(jax.random.key(7), i)) for i in range(4)
    ]
    np.testing.assert_array_equal(drawn, expected)
    assert len(set(drawn.tolist())) == 4


def test_numbers_of_16_bits_are_summed_in_32(two):
    def step(x):
        return two.accumulate(256, op="sum")(lambda x: x.sum())(x)

    x = two.per_replica(np.full((2, 256), 1.0078125, jnp.bfloat16))
    found = two.run(step, (x,))
    assert found.dtype == jnp.bfloat16
    # One by one in bfloat16 the sum would stop growing at 256.
    np.testing.assert_allclose(np.asarray(found.stacked, np.float32), 258.0, rtol=0.004)


def test_the_mean_of_whole_numbers_is_a_float(two):
    found = two.run(lambda x: two.accumulate(2)(jnp.sum)(x), (jnp.arange(4),))
    assert (found.dtype, float(found)) == (jnp.float32, 3.0)


def test_memory_is_that_of_one_part(two):
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    x = js.PerReplica(jax.ShapeDtypeStruct((2, 1024, 256), jnp.float32))

    def deep(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def temporary(k):
        def step(w, x):
            return two.accumulate(k)(lambda x: jax.grad(deep)(w, x))(x)

        return two.explain(step, (w, x)).memory.temporary

    assert temporary(16) < temporary(1) / 4


def test_variables_count_the_parts(two):
    with two.scope():
        parts = js.Variable(0, synchronization="on_read", aggregation="sum")

    @two.run
    def step(x):
        @two.accumulate(3)
        def gradient(x):
            parts.assign_add(1)
            return x.sum()

        return gradient(x)

    step(two.per_replica(np.ones((2, 6), np.float32)))
    assert parts.numpy() == 6


def test_it_works_with_no_strategy_at_all():
    total = js.get_strategy().accumulate(2, op="sum")(jnp.sum)
    assert total(jnp.arange(4)) == 6


def test_bad_numbers_of_parts(two):
    with pytest.raises(ValueError, match="`k` was 0; a batch has at least one part"):
        two.accumulate(0)
    with pytest.raises(TypeError, match="`k` was 1.5; the number of parts of a batch"):
        two.accumulate(1.5)
    with pytest.raises(ValueError, match="`op` was 'max'; parts of a batch are summed"):
        two.accumulate(2, op="max")


def test_rows_that_do_not_divide_are_named(two):
    with pytest.raises(ValueError, match=r"argument \[0\]\['x'\] has 6 rows on each"):
        two.run(
            lambda b: two.accumulate(4)(lambda b: b["x"].sum())(b),
            ({"x": two.per_replica(np.ones((2, 6)))},),
        )


def test_sparse_results_are_refused(two):
    def step(x):
        def rows(x):
            return js.IndexedSlices(x[:, None], jnp.zeros(len(x), int), (3, 1))

        return two.accumulate(2)(rows)(x)

    with pytest.raises(TypeError, match="returns IndexedSlices"):
        two.run(step, (np.ones(4, np.float32),))
