"""Tables of which replicas have some rows each: the numbers of whole tables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from helpers.cases import each_of, slow

import jaxstrategy as js
from jaxstrategy.sharded import SGD, Adagrad, Embedding, lookup

EVERYTHING = js.StateSharding("state", min_bytes=0)


def strategy_of(replicas, divides):
    sharding = EVERYTHING if divides else None
    return js.MirroredStrategy(jax.devices()[:replicas], sharding=sharding)


@pytest.fixture(params=[False, True], ids=["whole", "divided"])
def four_either(request):
    return strategy_of(4, request.param)


@pytest.fixture(params=[False, True], ids=["whole", "divided"])
def eight_either(request):
    return strategy_of(8, request.param)


def table_of(rows):
    """Row i is [i, 10 i]."""
    return np.arange(rows, dtype=np.float32)[:, None] * np.float32([1, 10])


def test_ids_of_any_shape_and_of_no_row(four_either):
    table = four_either.mirror(table_of(8))

    @four_either.run
    def step(table, ids):
        return js.sharded.lookup(table, ids)

    ids = np.random.default_rng(0).integers(-2, 10, (4, 2, 3, 2))
    rows = step(table, four_either.per_replica(ids))
    known = table_of(8)[ids % 8]
    known[ids < 0] = 0
    known[ids >= 8] = np.nan
    np.testing.assert_array_equal(rows.stacked, known)


@pytest.mark.slow
@each_of("combiner", ["sum", "mean", "sqrtn"])
def test_weights_and_their_gradients_are_those_of_a_loop(combiner):
    table = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)
    ids = np.array([[0, 4, 4], [3, -1, -1], [-1, -1, -1]])
    weights = np.float32([[0.5, 2, 1], [3, 7, 7], [1, 1, 1]])

    def plainly(table, weights):
        groups = []
        for group, weight in zip(ids, weights, strict=True):
            pairs = [(i, w) for i, w in zip(group, weight, strict=True) if i >= 0]
            total = sum((w * table[i] for i, w in pairs), jnp.zeros(2))
            if pairs and combiner == "mean":
                total = total / sum(w for _, w in pairs)
            if pairs and combiner == "sqrtn":
                total = total / jnp.sqrt(sum(w**2 for _, w in pairs))
            groups.append(total)
        return jnp.stack(groups)

    def ours(table, weights):
        return js.sharded.lookup(table, ids, combiner, weights=weights)

    def with_gradients(lookup):
        def loss(table, weights):
            rows = lookup(table, weights)
            return (rows**2).sum(), rows

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(table, weights)

    found, wanted = with_gradients(ours), with_gradients(plainly)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_tables_of_whole_numbers_and_of_16_bits():
    table = np.array([[1, 2], [4, 5]])
    np.testing.assert_array_equal(js.sharded.lookup(table, [1, -1]), [[4, 5], [0, 0]])
    sums = js.sharded.lookup(table, [[0, 1]], "sum")
    assert sums.dtype == jnp.int32
    np.testing.assert_array_equal(sums, [[5, 7]])
    means = js.sharded.lookup(table, [[0, 1]], "mean")
    np.testing.assert_array_equal(means, [[2.5, 3.5]])
    half = jnp.ones((2, 2), "bfloat16")
    many = js.sharded.lookup(half, np.zeros((1, 300), int), "mean")
    assert many.dtype == half.dtype
    np.testing.assert_array_equal(many.astype("float32"), [[1, 1]])


def test_ids_of_64_bits_do_not_wrap():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**32 + 1, 1, -(2**32) + 1], "int64")
        rows = js.sharded.lookup(jnp.arange(4.0), ids)
        np.testing.assert_array_equal(rows, [np.nan, 1, 0])


def test_lookups_in_transformations():
    table = jnp.asarray(table_of(8))
    ids = np.array([[1, 2, 2], [7, 0, -1]])
    wanted = js.sharded.lookup(table, ids)

    def row_by_row(ids):
        return js.sharded.lookup(table, ids)

    np.testing.assert_array_equal(jax.vmap(row_by_row)(jnp.asarray(ids)), wanted)
    columns = jax.vmap(row_by_row, in_axes=1, out_axes=1)(jnp.asarray(ids))
    np.testing.assert_array_equal(columns, wanted)
    np.testing.assert_array_equal(jax.jit(row_by_row)(ids), wanted)

    def total(ids):
        return jax.grad(lambda table: js.sharded.lookup(table, ids).sum())(table)

    times = np.zeros((2, 8, 2))
    for group, row in np.argwhere(ids >= 0):
        times[group, ids[group, row]] += 1
    np.testing.assert_array_equal(jax.vmap(total)(jnp.asarray(ids)), times)


def mean_gradient(strategy, table, ids, op="mean"):
    """The gradient of the sum of what each replica looks up, reduced."""

    @strategy.run
    def step(table, ids):
        def total(table):
            return js.sharded.lookup(table, ids).sum()

        return js.get_replica_context().all_reduce(op, jax.grad(total)(table))

    return step(table, strategy.per_replica(ids))


def test_what_is_no_row_has_no_gradient(four_either):
    ids = np.tile([-1, 8, 3, -7, 100], (4, 1))
    wanted = np.zeros((8, 2))
    wanted[3] = 1
    gradient = mean_gradient(four_either, four_either.mirror(table_of(8)), ids)
    np.testing.assert_array_equal(gradient, wanted)


def test_all_ids_of_one_owner_lose_no_row(eight_either):
    table = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 8, (8, 50))  # the first replica's rows

    @eight_either.run
    def step(table, ids):
        return js.sharded.lookup(table, ids)

    rows = step(eight_either.mirror(table), eight_either.per_replica(ids))
    np.testing.assert_array_equal(rows.stacked, table[ids])


# Steps that read and change a divided table send its rows, and never the table.

ROWS, FEATURES, IDS = 1_048_576, 32, 256
REPLICAS = 8
BLOCK = ROWS // REPLICAS * FEATURES * 4
"""The bytes of one replica's part of the table."""


@pytest.fixture
def dividing():
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


@pytest.mark.slow
@each_of("step, state, sent", [
    (trained, TABLE, {"all-to-all": 2 * (EACH_ID + EACH_ROW)}),
    (updated, STATE,
     {"all-to-all": EACH_ID + EACH_ROW, "all-gather": EACH_ID + EACH_ROW}),
])  # fmt: skip
def test_what_is_sent_is_in_proportion_to_the_ids(dividing, step, state, sent):
    program = compiled(dividing, step, state)
    assert sent_bytes(program) == sent
    memory = program.memory_analysis()
    blocks = len(jax.tree.leaves(state))
    assert memory.argument_size_in_bytes - blocks * BLOCK < 10_000
    assert memory.temp_size_in_bytes < 2_000_000  # of 134 MB of the table


@each_of("step, state, times", [(trained, TABLE, 2), (updated, STATE, 1)])
def test_explain_tells_of_rows_and_of_no_table(dividing, step, state, times):
    ids = js.PerReplica(jax.ShapeDtypeStruct((REPLICAS, IDS), "int32"))
    found = dividing.explain(step, (state, ids), compiled=False)
    sent = [each.nbytes for each in found.collectives if each.kind == "all_to_all"]
    assert sorted(sent) == [EACH_ID] * times + [EACH_ROW] * times
    assert found.communicated_bytes <= 2 * (EACH_ID + EACH_ROW)


SOME_IDS = np.random.default_rng(0).integers(-1, 64, (REPLICAS, 4, 3))


class Embed(linen.Module):
    """A module of Flax that knows nothing of us."""

    @linen.compact
    def __call__(self, ids):
        return linen.Embed(4096, 4)(ids)


@pytest.mark.slow
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


# Updates of the rows that were looked up: Optax's numbers with whole gradients.

COUNT, WIDTH = 40, 3
OPTIMIZERS = {
    "sgd": (js.sharded.SGD(0.1), optax.sgd(0.1)),
    "adagrad": (js.sharded.Adagrad(0.1), optax.adagrad(0.1)),
}


def some_rows():
    return np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)


def some_ids(*shape, highest=COUNT):
    return np.random.default_rng(1).integers(0, highest, shape)


def loss(rows):
    return (rows**2).sum(-1).mean()


def on_one_device(optimizer, table, ids, steps, op="mean"):
    """Optax with the whole gradient of NumPy's rows."""
    state = optimizer.init(table)
    factor = 1 if op == "mean" else ids.shape[0]

    def total(table):
        return factor * loss(jnp.asarray(table)[ids.reshape(-1)])

    @jax.jit
    def step(table, state):
        updates, state = optimizer.update(jax.grad(total)(table), state)
        return optax.apply_updates(table, updates), state

    for _ in range(steps):
        table, state = step(table, state)
    return table


@pytest.mark.slow
@each_of("name", OPTIMIZERS)
def test_sparse_steps_are_those_of_the_whole_gradient(eight_either, name):
    sparse, dense = OPTIMIZERS[name]
    embedding = js.sharded.Embedding(COUNT, WIDTH, sparse)
    state = eight_either.init(embedding.from_rows, some_rows())

    @eight_either.run
    def step(state, ids):
        rows = state.lookup(ids)
        return state.update(ids, jax.grad(loss)(rows))

    ids = some_ids(8, 6, highest=7)  # of which many are there several times
    for _ in range(5):
        state = step(state, eight_either.per_replica(ids))
    wanted = on_one_device(dense, some_rows(), ids, 5)
    np.testing.assert_allclose(state.table, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(state.table[7:], some_rows()[7:])
    for slot in state.slots.values():
        assert slot.sharding == state.table.sharding
        changed = np.asarray(slot != np.float32(0.1)).any(-1)
        np.testing.assert_array_equal(changed, np.isin(np.arange(COUNT), ids))


@each_of("op", ["mean", "sum"])
def test_the_replicas_rows_are_reduced_as_is_said(op):
    two = js.MirroredStrategy(jax.devices()[:2])
    embedding = js.sharded.Embedding(COUNT, WIDTH, js.sharded.SGD(0.1))
    state = two.init(embedding.from_rows, some_rows())

    @two.run
    def step(state, ids):
        return state.update(ids, jax.grad(loss)(state.lookup(ids)), op=op)

    ids = some_ids(2, 6)
    new = step(state, two.per_replica(ids))
    wanted = on_one_device(optax.sgd(0.1), some_rows(), ids, 1, op)
    assert isinstance(new.table, js.Mirrored)
    np.testing.assert_allclose(new.table, wanted, rtol=1e-5, atol=1e-6)


def test_outside_of_a_strategy_there_is_one_replica():
    embedding = js.sharded.Embedding(COUNT, WIDTH, js.sharded.Adagrad(0.1))
    state = embedding.from_rows(some_rows())
    ids = some_ids(2, 3)
    for update in (
        lambda state: state.update(ids, jax.grad(loss)(state.lookup(ids))),
        jax.jit(lambda state: state.update(ids, jax.grad(loss)(state.lookup(ids)))),
    ):
        wanted = on_one_device(optax.adagrad(0.1), some_rows(), ids, 1)
        np.testing.assert_allclose(update(state).table, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combiner", ["mean", *slow("sum", "sqrtn")])
def test_groups_are_updated_as_they_are_looked_up(combiner):
    embedding = js.sharded.Embedding(COUNT, WIDTH, js.sharded.SGD(0.1))
    state = embedding.from_rows(some_rows())
    ids = np.array([[1, 2, 2], [4, -1, -1], [-1, -1, -1]])
    weights = np.float32([[1, 2, 3], [4, 5, 6], [7, 8, 9]])

    def total(state):
        return loss(state.lookup(ids, combiner, weights=weights))

    whole = jax.grad(total)(state).table
    groups = state.lookup(ids, combiner, weights=weights)
    new = state.update(ids, jax.grad(loss)(groups), combiner, weights=weights)
    np.testing.assert_allclose(new.table, some_rows() - 0.1 * whole, rtol=1e-5)


def test_a_gradient_that_is_reduced_already_is_applied(eight_either):
    embedding = js.sharded.Embedding(COUNT, WIDTH, js.sharded.SGD(0.1))
    state = eight_either.init(embedding.from_rows, some_rows())

    @eight_either.run
    def step(state, ids):
        slices = state.gradient(ids, jax.grad(loss)(state.lookup(ids)))
        return state.apply(js.get_replica_context().all_reduce("mean", slices))

    ids = some_ids(8, 6)
    new = step(state, eight_either.per_replica(ids))
    wanted = on_one_device(optax.sgd(0.1), some_rows(), ids, 1)
    np.testing.assert_allclose(new.table, wanted, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_reduced_is_told_of(two):
    embedding = js.sharded.Embedding(COUNT, WIDTH, js.sharded.SGD(0.1))
    state = two.init(embedding.from_rows, some_rows())

    def step(state, ids):
        slices = state.gradient(ids, jax.grad(loss)(state.lookup(ids)))
        return state.apply(slices)

    with pytest.warns(js.errors.NotMirroredWarning, match=r"state.table"):
        two.run(step, (state, two.per_replica(some_ids(2, 6))))


# Odd tables, ids, rows and optimizers are refused with what was wanted.

ONES = np.ones((4, 2), np.float32)
SLICES = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))


def state(optimizer=None):
    return Embedding(4, 2, optimizer).from_rows(ONES)


def returning(value):
    return Embedding(4, 2, initializer=lambda key, shape, dtype: value)


KEY = np.zeros(2, np.uint32)
REFUSED = [
    (lambda: lookup("words", [0]), TypeError, "`table` was 'words'; an array of num"),
    (lambda: lookup(3.0, [0]), ValueError, r"`table` has shape \(\); one of \[rows"),
    (lambda: lookup(ONES[:0], [0]), ValueError, "with at least one row was wanted"),
    (lambda: lookup(state(), [0]), TypeError, "`table` was Emb.*, such as `state.tabl"),
    (lambda: lookup(ONES, [0.5]), TypeError, r"`ids` are float32\[1\]; whole numbers"),
    (lambda: lookup(ONES, [True]), TypeError, "`ids` was .*; an array of numbers, wit"),
    (lambda: lookup(ONES, [[0], [1, 2]]), TypeError, "filled up with -1"),
    (lambda: lookup(ONES, np.array([2**40])), ValueError, "int32 holds"),
    (lambda: lookup(ONES, [0], "max"), ValueError, "`combiner` was 'max'; 'sum', 'm"),
    (lambda: lookup(ONES, [0], ["sum"]), ValueError, r"`combiner` was \['sum'\]; "),
    (lambda: lookup(ONES, 0, "sum"), ValueError, "for one id; ids .* were wanted"),
    (lambda: lookup(ONES, [0], weights=[1.0]), ValueError, "without a `combiner`"),
    (lambda: lookup(ONES, [0], "sum", weights=[1.0, 2.0]), ValueError,
     r"`weights` have shape \(2,\) and `ids` \(1,\); one weight for each"),
    (lambda: lookup(ONES, [0], "sum", weights=[1j]), TypeError,
     "`weights` are complex64; real numbers were wanted"),
    (lambda: Embedding(0, 2), ValueError, "`rows` was 0; a whole number from 1"),
    (lambda: Embedding(4, 2.0), TypeError, "`features` was 2.0; a whole number"),
    (lambda: Embedding(4, 2, multiple=-1), ValueError, "`multiple` was -1; a whole"),
    (lambda: Embedding(4, 2, "sgd"), TypeError, "`optimizer` was 'sgd'; `js.sharded"),
    (lambda: Embedding(4, 2, initializer=0), TypeError, "`initializer` was 0; a funct"),
    (lambda: Embedding(4, 2, dtype="int32"), TypeError, "`dtype` was 'int32'; a type"),
    (lambda: Embedding(4, 2, dtype="word"), TypeError, "`dtype` was 'word'; a type"),
    (lambda: returning(ONES.T).init(KEY), ValueError,
     r"`initializer` gave an array of shape \(2, 4\); \(4, 2\), rows and feat"),
    (lambda: returning("x").init(KEY), TypeError, "`initializer` was 'x'; an array"),
    (lambda: Embedding(5, 2).from_rows(ONES), ValueError, r"`rows` gave .* \(5, 2\)"),
    (lambda: SGD("fast"), TypeError, "`learning_rate` was 'fast'; a number was wanted"),
    (lambda: SGD(jnp.float32(1)), TypeError, r"`update\(..., learning_rate=\)`"),
    (lambda: SGD(-0.1), ValueError, "`learning_rate` was -0.1; a finite number from 0"),
    (lambda: Adagrad(0.1, -1), ValueError, "`initial_accumulator_value` was -1; a"),
    (lambda: Adagrad(0.1, epsilon=np.nan), ValueError, "`epsilon` was nan; a finite"),
    (lambda: state().update([0], ONES[:1]), ValueError,
     r"has no optimizer, which `update` uses. Make it with one, as in `js.sharded"),
    (lambda: state(SGD(0.1)).update([0], ONES), ValueError,
     r"`row_gradients` have shape \(4, 2\); \(1, 2\) was wanted, .* shape \(1,\)\."),
    (lambda: state(SGD(0.1)).update([[0]], ONES, "mean"), ValueError,
     r"`row_gradients` have .* \(1, 1\) with the combiner 'mean'"),
    (lambda: state(SGD(0.1)).update([0], ONES[:1], op="max"), ValueError,
     "`op` was MAX; 'mean' or 'sum' was wanted"),
    (lambda: state(SGD(0.1)).update([0], ONES[:1], learning_rate=[1.0]), ValueError,
     r"`learning_rate` was \[1.0\]; a number or a scalar was wanted"),
    (lambda: state(SGD(0.1)).apply(ONES), TypeError, r"`gradient` was array.*; `Index"),
    (lambda: state(SGD(0.1)).apply(js.IndexedSlices(ONES, np.arange(4), (9, 2))),
     ValueError,
     r"dense_shape \(9, 2\); the gradient of a table of shape \(4, 2\) was wanted"),
    (lambda: state().apply(SLICES), ValueError, "has no optimizer"),
]  # fmt: skip


@each_of("call, error, text", REFUSED)
def test_odd_arguments_are_refused_with_what_was_wanted(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_versions_of_all_replicas_are_no_ids(two):
    ids = two.per_replica([0, 1])
    with pytest.raises(TypeError, match="PerReplica"):
        lookup(ONES, ids)


def test_an_update_across_replicas_says_where_it_belongs(two):
    def step(x):
        def merge(strategy, x):
            return state(SGD(0.1)).update([0], ONES[:1])

        return js.get_replica_context().merge_call(merge, (x,))

    with pytest.raises(js.errors.ContextError, match="`update` was called in `merge_c"):
        two.run(step, (1.0,))
    with two.scope():
        with pytest.raises(js.errors.ContextError, match="`update` was called in `mer"):
            state(SGD(0.1)).update([0], ONES[:1])
