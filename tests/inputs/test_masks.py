"""Padded rows: which of them are real, and that the others have no influence."""

import dataclasses
import functools
import gc
import re
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.replicas import mirrored

import jaxstrategy as js


@functools.cache
def kinds():
    """Strategies of every kind."""
    central = js.experimental.CentralStorageStrategy(
        jax.devices()[:2], jax.devices()[7]
    )
    return [js.get_strategy(), central, mirrored(8)]


def one(strategy, batch, **options):
    """The only batch of a dataset."""
    options = js.InputOptions(experimental_per_replica_buffer_size=0, **options)
    (out,) = strategy.experimental_distribute_dataset([batch], options)
    return out


def last(strategy, rows, whole=None):
    """The padded second batch of two, `rows` of `whole`."""
    whole = whole or 2 * strategy.num_replicas_in_sync
    x = np.arange(whole + rows, dtype=np.float32)
    options = js.InputOptions(experimental_per_replica_buffer_size=0)
    batches = [x[:whole], x[whole:]]
    _, out = strategy.experimental_distribute_dataset(batches, options)
    return out, x[whole:]


@each_of("kind", range(3))
def test_sums_means_and_counts_are_numpys(kind):
    strategy, rows = kinds()[kind], 3
    batch, x = last(strategy, rows, whole=16)
    assert strategy.reduce("sum", strategy.run(js.masked_sum, (batch,))) == x.sum()
    mean = strategy.reduce("mean", strategy.run(js.masked_mean, (batch,)))
    np.testing.assert_allclose(mean, x.mean(), rtol=1e-6)
    masks = strategy.gather(strategy.run(js.batch_mask, (batch,)))
    # One replica is given the rows that there are.
    given = rows if strategy.num_replicas_in_sync == 1 else 16
    np.testing.assert_array_equal(masks, np.arange(given) < rows)
    np.testing.assert_array_equal(strategy.gather(batch), x)
    own = strategy.experimental_local_results(batch)
    assert len(own) == strategy.num_replicas_in_sync
    np.testing.assert_array_equal(np.concatenate(own), x)
    assert strategy.reduce("sum", batch, axis=0) == x.sum()
    mean = strategy.reduce("mean", batch, axis=0)
    np.testing.assert_allclose(mean, x.mean(), rtol=1e-6)


def test_all_batches_have_one_shape_and_one_program(four, compilations):
    batches = [np.ones((8, 3)), np.ones((5, 3)), np.ones((1, 3)), np.ones((8, 3))]
    dataset = four.experimental_distribute_dataset(batches)
    traced = []

    def step(batch):
        traced.append(batch.shape)
        return js.masked_sum(batch).sum()

    sums = []
    for number, batch in enumerate(dataset):
        sums.append(four.reduce("sum", four.run(step, (batch,))).item())
        if number == 0:
            compilations()
    assert sums == [24, 15, 3, 24]
    assert traced == [(2, 3)]
    assert compilations() == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Example:
    x: jax.Array
    y: jax.Array


X, Y = np.arange(5.0, dtype=np.float32), np.arange(10.0, 15.0, dtype=np.float32)
CONTAINERS = {
    "nested": {"a": {"x": X}, "b": [(Y,)]},
    "dataclass": Example(X, Y),
}


@each_of("batch", CONTAINERS.values())
def test_the_mask_comes_with_any_container(four, batch):
    def step(local):
        return jax.tree.map(js.masked_sum, local)

    out = four.run(step, (one(four, batch),))
    total = four.reduce("sum", out)
    assert jax.tree.structure(total) == jax.tree.structure(batch)
    assert jax.tree.leaves(total) == [X.sum(), Y.sum()]


def test_in_loops_branches_and_maps_of_a_step(four):
    batch = one(four, X)

    def step(x):
        def turn(total, factor):
            return total + js.masked_sum(factor * x), js.masked_mean(factor * x)

        scanned, means = jax.lax.scan(turn, jnp.zeros(()), jnp.arange(3.0))
        mapped = jax.vmap(lambda factor: js.masked_sum(factor * x))(jnp.arange(3.0))
        chosen = jax.lax.cond(True, lambda: js.masked_sum(x), lambda: 0.0)
        jitted = jax.jit(js.masked_sum)(x)
        saved = jax.checkpoint(js.masked_sum)(x)
        return scanned, mapped.sum(), chosen, jitted, saved, means.sum()

    *sums, means = four.run(step, (batch,))
    assert four.reduce("sum", sums) == [3 * X.sum()] * 2 + [X.sum()] * 3
    np.testing.assert_allclose(four.reduce("mean", means), 3 * X.mean(), rtol=1e-6)


@each_of("rows", [5, 16])
def test_the_parts_of_an_accumulated_step(four, rows):
    batch, x = last(four, rows, whole=16)
    traced = []

    def step(batch):
        @four.accumulate(2)
        def part(x):
            traced.append(x.shape)
            return js.masked_mean(x), js.masked_sum(x)

        return part(batch)

    mean, _ = four.run(step, (batch,))
    assert set(traced) == {(2,)}
    np.testing.assert_allclose(four.reduce("mean", mean), x.mean(), rtol=1e-6)


def test_nan_in_rows_that_are_not_real_has_no_influence(four):
    batch = one(four, X)

    def step(x):
        nan = jnp.where(js.batch_mask(x), 0, jnp.nan)
        mean, slope = jax.value_and_grad(lambda w: js.masked_mean(w * x + nan))(2.0)
        return js.masked_sum(x + nan), mean, slope

    total, mean, slope = four.run(step, (batch,))
    assert four.reduce("sum", total) == X.sum()
    np.testing.assert_allclose(four.reduce("mean", mean), 2 * X.mean(), rtol=1e-6)
    np.testing.assert_allclose(four.reduce("mean", slope), X.mean(), rtol=1e-6)


def test_a_mask_of_ones_own(four):
    x = four.per_replica([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])

    def step(x):
        mask = x > 3
        return js.masked_mean(x, mask=mask), js.masked_sum(x, mask=mask)

    mean, total = four.run(step, (x,))
    assert four.reduce("mean", mean) == 6
    assert four.reduce("sum", total) == 30
    nothing = four.run(lambda x: js.masked_mean(x, mask=x > 99), (x,))
    assert four.reduce("mean", nothing) == 0


def test_without_a_dataset_all_rows_are_real(four):
    x = four.per_replica([[1.0, 3.0]] * 4)
    masks = four.run(js.batch_mask, (x,))
    np.testing.assert_array_equal(masks, [True, True])
    assert four.reduce("mean", four.run(js.masked_mean, (x,))) == 2
    assert js.masked_mean(jnp.array([1.0, 3.0])) == 2
    assert js.masked_mean(jnp.array([[1.0, 3.0], [5.0, 7.0]]), axis=None) == 4
    assert js.masked_mean(jnp.array([1.0, 3.0]), mask=jnp.array([True, False])) == 1
    assert js.masked_sum(jnp.array([True, True, False])) == 2


def test_means_keep_the_dtype(two):
    x = np.array([1, 2, 3], np.int32)
    halves = jnp.asarray(x, jnp.bfloat16)
    mean = two.run(js.masked_mean, (one(two, x),))
    assert (mean.dtype, two.reduce("mean", mean)) == (jnp.float32, 2)
    mean = two.run(js.masked_mean, (one(two, halves),))
    assert (mean.dtype, two.reduce("mean", mean)) == (jnp.bfloat16, 2)


@each_of(
    "function, text",
    [
        (
            lambda x: js.masked_mean(x.sum()),
            "`masked_mean` was given a scalar; an arra",
        ),
        (lambda x: js.masked_sum(x.sum()), "`masked_sum` was given a scalar"),
        (lambda x: js.batch_mask(x.sum()), "`batch_mask` was given a scalar"),
        (
            lambda x: js.masked_sum(x, mask=jnp.ones(3, bool)),
            "`mask` has shape (3,); one entry for each of the 2 rows was wanted.",
        ),
        (
            lambda x: js.masked_mean(x[:1]),
            "An array with 1 rows was given, but the batches of this step have 2 on "
            "each replica, so it is not known which of its rows are real. Pass "
            "`mask=`, made from `batch_mask(array)` of an array of the batch.",
        ),
    ],
)
def test_what_has_no_mask(four, function, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        four.run(function, (one(four, X),))


def test_padded_rows_that_a_step_does_not_ask_for_are_said_once(four):
    def step(batch):
        return batch.sum()

    full, padded = np.ones(8), np.ones(3)
    dataset = four.experimental_distribute_dataset([full, full, padded, padded])
    first, second, third, fourth = dataset
    four.run(step, (first,))
    four.run(step, (second,))
    with pytest.warns(js.errors.PaddedRowsWarning) as caught:
        four.run(step, (third,))
    assert len(caught) == 1
    assert str(caught[0].message) == (
        "`step` was given a batch that is filled up with copies of its last row, and "
        "never asked which rows are real, so that the copies count in its sums and "
        "means. Use `masked_mean` or `masked_sum` for them, or `batch_mask`; or leave "
        'out the rest with `InputOptions(remainder="drop")`.'
    )
    assert caught[0].filename == __file__
    four.run(step, (fourth,))
    four.run(step, (third,))


def test_what_was_said_elsewhere_is_said_again_of_a_batch_that_a_trace_captures(two):
    batch = one(two, X)

    def careless(batch):
        return batch.sum()

    def total(batch):
        return two.reduce("sum", two.run(careless, (batch,)), axis=None)

    with pytest.warns(js.errors.PaddedRowsWarning, match="`careless` is given batches"):
        jax.jit(total)(batch)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`careless` was given a batc"):
        total(batch)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`careless` was given a batc"):
        jax.jit(lambda: total(batch))()
    jax.jit(lambda: total(batch) + 1)()  # said of this step


TWO = (
    "`step` was given `a`, `b`, of different batches with equal numbers of rows, and "
    "asked which rows of something computed from them are real. Say which batch is "
    "meant, with an argument of the step itself: `masked_mean(losses, "
    "mask=batch_mask(images))`."
)


@each_of("is_traced_first", [False, True])
def test_two_batches_in_one_step(four, is_traced_first):
    def step(a, b):
        return js.masked_mean(a * b)

    a, b = one(four, X), one(four, Y[:3].repeat(2))
    if is_traced_first:
        four.run(step, (a, a))
    with pytest.raises(ValueError, match=re.escape(TWO)):
        four.run(step, (a, b))


def test_two_batches_and_which_is_meant(four):
    def step(a, b):
        own = js.masked_mean(a), js.masked_mean(b)
        return own, js.masked_mean(a + b, mask=js.batch_mask(b))

    y = Y[:3].repeat(2)
    means, both = four.run(step, (one(four, X), one(four, y)))
    found = four.reduce("mean", (*means, both))
    filled = np.append(X, X[-1]) + y
    wanted = [X.mean(), y.mean(), filled.mean()]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@each_of(
    "function", [lambda x: 2 * x, lambda x: x[..., None], lambda x: x.astype(np.int32)]
)
def test_a_function_mapped_over_a_batch_is_found_out(four, function):
    changed = jax.tree.map(function, one(four, {"x": X}))
    with pytest.raises(
        ValueError,
        match=re.escape("`batch['x']` is a batch of shape (4, ")
        + r".*the mask of its rows is .*: a function was mapped over the batch, and so "
        "over the mask. Change batches inside the step, or before they are divided",
    ):
        four.run(lambda batch: js.masked_sum(batch["x"]), (changed,))


def test_what_a_step_is_traced_with_is_gone_after_it(four):
    traced = []

    def step(batch):
        traced.append(weakref.ref(batch))
        return js.masked_mean(batch)

    gc.disable()
    try:
        four.run(step, (last(four, 3)[0],))
        assert traced and all(ref() is None for ref in traced)
    finally:
        gc.enable()


def test_batches_may_be_donated(four):
    step = four.run(
        lambda batch: jax.tree.map(lambda x: x + js.masked_mean(x), batch),
        options=js.RunOptions(donate_argnums=0),
    )
    dataset = four.experimental_distribute_dataset([X, Y, X[:2], X, Y])
    means = []
    with warnings.catch_warnings():
        # What cannot be donated on this platform is said by JAX.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        for batch in dataset:
            means.append(four.gather(step(batch)))
            assert batch.stacked.is_deleted()
    assert len(means) == 5
    again = next(iter(dataset))
    assert four.reduce("sum", again, axis=0) == X.sum()


def test_weights(four):
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    w = np.array([[1, 0], [2, 1], [0, 0], [1, 3]], np.float32)
    value, weights = js.PerReplica(x), js.PerReplica(w)
    mean = (x * w).sum() / w.sum()
    assert four.reduce("mean", value, axis=0, weights=weights) == mean
    assert four.reduce("sum", value, axis=0, weights=weights) == (x * w).sum()
    known = js.PerReplica(w > 0)
    assert four.reduce("mean", value, axis=0, weights=known) == x[w > 0].mean()
    np.testing.assert_allclose(
        four.reduce("mean", value, weights=js.PerReplica(w + 1)),
        (x * (w + 1)).sum(0) / (w + 1).sum(0),
        rtol=1e-6,
    )
    for alone in (four, js.get_strategy()):
        of = value if alone is four else x[0]
        wanted = x[:, 1].mean() if alone is four else x[0, 1]
        assert alone.reduce("mean", of, axis=0, weights=[0.0, 1.0]) == wanted
    for op in ("min", "max"):
        with pytest.raises(ValueError, match=f"given for {op.upper()}, which has none"):
            four.reduce(op, value, axis=0, weights=weights)
    for shape in ((4, 3), (4, 2, 1)):
        told = f"`weights` have shape {shape[1:]} on each replica, and a value has (2,)"
        wrong = js.PerReplica(np.ones(shape, np.float32))
        with pytest.raises(ValueError, match=re.escape(told)):
            four.reduce("sum", value, axis=0, weights=wrong)


def test_what_weighs_nothing_has_no_influence(two):
    x = js.PerReplica(np.array([[1.0, np.nan], [3.0, np.inf]], np.float32))
    weights = js.PerReplica(np.array([[True, False], [True, False]]))
    assert two.reduce("mean", x, axis=0, weights=weights) == 2
    assert two.reduce("sum", x, axis=0, weights=weights) == 4


@each_of("weights", ["batch", "array", "number", "mask"])
def test_weights_of_a_padded_batch(four, weights):
    """Rows that are not real weigh nothing, whatever the weights say."""
    w = np.array([1, 2, 3, 4, 5], np.float32)
    batch = one(four, {"x": X, "w": w})
    given, counted = {
        "batch": (batch["w"], w),
        "array": (np.array([3.0, 1.0], np.float32), np.array([3, 1, 3, 1, 3])),
        "number": (2.0, np.full(5, 2.0)),
        "mask": (js.PerReplica(np.ones((4, 2), bool)), np.ones(5)),
    }[weights]
    total = four.reduce("sum", batch["x"], axis=0, weights=given)
    np.testing.assert_allclose(total, (X * counted).sum(), rtol=1e-6)
    mean = four.reduce("mean", batch["x"], axis=0, weights=given)
    np.testing.assert_allclose(mean, (X * counted).sum() / counted.sum(), rtol=1e-6)


def test_reductions_over_the_rows_of_a_padded_batch(four):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(5, 3)).astype(np.float32)
    batch = one(four, {"x": x, "n": np.arange(5)})
    mean = four.reduce("mean", batch, axis=0)
    np.testing.assert_allclose(mean["x"], x.mean(0), rtol=1e-6)
    assert mean["n"] == 2
    total = four.reduce("sum", batch["x"], axis=(0, 1))
    np.testing.assert_allclose(total, x.sum(), rtol=1e-6)
    np.testing.assert_allclose(four.reduce("sum", batch["x"], axis=-2), x.sum(0), 1e-6)
    np.testing.assert_array_equal(four.reduce("max", batch["x"], axis=0), x.max(0))
    np.testing.assert_array_equal(four.reduce("min", batch["x"], axis=0), x.min(0))


# Rows that only fill up a batch are left out of what is gathered, or told of.

replica = js.get_replica_context


def last_batch(strategy, array, size=8, **options):
    options = js.InputOptions(experimental_per_replica_buffer_size=0, **options)
    *_, out = strategy.experimental_distribute_dataset(js.batches(array, size), options)
    return out


def full(strategy, array, size=8, **options):
    return last_batch(strategy, array[:size], size, **options)


def test_rows_are_left_out_however_their_axis_is_named(four):
    x, y = np.arange(10.0), np.arange(30.0).reshape(10, 3)
    np.testing.assert_array_equal(four.gather(last_batch(four, x), 0), x[8:])
    np.testing.assert_array_equal(four.gather(last_batch(four, x), -1), x[8:])
    np.testing.assert_array_equal(four.gather(last_batch(four, y), -2), y[8:])


def test_so_it_is_in_a_step_that_knows_of_rows(four):
    @four.run
    def step(x):
        merged = replica().merge_call(lambda strategy, x: strategy.gather(x), (x,))
        return merged, replica().all_reduce("mean", js.masked_mean(x))

    x = np.arange(10.0)
    step(full(four, x))
    words = "and gathers an array of it in `merge_call`, where shapes are static"
    with pytest.warns(js.errors.PaddedRowsWarning, match=words):
        gathered, mean = step(last_batch(four, x))
    assert gathered.shape == (8,) and mean == 8.5
    step(last_batch(four, x))  # once is enough


def test_under_jit_it_is_told_that_they_stay(four):
    batch = last_batch(four, np.arange(10.0))
    gather = jax.jit(four.gather)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`gather` was given a batch"):
        assert gather(batch).shape == (8,)
    local = jax.jit(four.experimental_local_results)
    with pytest.warns(js.errors.PaddedRowsWarning, match="`experimental_local_results"):
        assert [rows.shape for rows in local(batch)] == [(2,)] * 4


@each_of("remainder", ["drop", "error"])
def test_where_all_rows_are_real_it_is_not(four, remainder):
    batch = full(four, np.arange(8.0), remainder=remainder)
    assert batch.mask is None
    np.testing.assert_array_equal(jax.jit(four.gather)(batch), np.arange(8.0))
    sums = jax.jit(lambda b: four.run(lambda x: x.sum(), (b,)))(batch)
    assert four.reduce("sum", sums) == 28
    assert four.gather(four.run(js.batch_mask, (batch,))).all()
    assert four.reduce("mean", four.run(js.masked_mean, (batch,))) == 3.5


@each_of("axis", [1, -1, True, (0, 1)])
def test_other_axes_are_refused(two, axis):
    for mean in (js.masked_mean, js.masked_sum):
        words = f"`axis` of `{mean.__name__}` was .*; 0 for the rows or None for all"
        with pytest.raises(ValueError, match=words):
            two.run(lambda x, mean=mean: mean(x, axis=axis), (np.ones((2, 3)),))


@each_of("axis", [True, [1], 1.0, None])
def test_gather_refuses_another_axis_than_a_number_whatever_came_before(axis):
    strategy = js.MirroredStrategy(jax.devices()[:2])
    x = strategy.per_replica(np.ones((2, 3, 4), np.float32))
    for way in (strategy, js.get_strategy()):
        assert way.gather(x if way is strategy else np.ones((3, 4)), 1).shape[0] == 3
        with pytest.raises(TypeError, match="`axis` was .*; a whole number was wanted"):
            way.gather(x if way is strategy else np.ones((3, 4)), axis)


# BatchNorm of batches that are filled up; the oracle is NumPy on the real rows.


def rows(n):
    x = np.random.default_rng(n).normal(size=(n, 2, 3)) + np.arange(n).reshape(-1, 1, 1)
    return x.astype(np.float32)


def linen_layer():
    layer = js.flax.linen.BatchNorm(use_running_average=False, momentum=0.0)
    stats = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    scale = {"scale": jnp.ones(3), "bias": jnp.zeros(3)}

    def normalized(x):
        y, changed = layer.apply(
            {"params": scale, "batch_stats": stats}, x, mutable=["batch_stats"]
        )
        return y, changed["batch_stats"]["mean"], changed["batch_stats"]["var"]

    return normalized


def nnx_layer():
    def normalized(x):
        layer = js.flax.nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
        return layer(x), layer.mean[...], layer.var[...]

    return normalized


@each_of("layer", [linen_layer, nnx_layer])
def test_rows_that_fill_up_a_batch_do_not_count_unasked(four, layer):
    normalized = layer()

    @four.run
    def step(x):
        y, mean, var = normalized(x)
        return js.masked_sum(y.sum((1, 2)) ** 2), mean, var

    x = rows(5)
    total, mean, var = step(one(four, x))
    np.testing.assert_allclose(mean, x.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(var, x.var((0, 1)), rtol=1e-4)
    want = (x - x.mean((0, 1))) / np.sqrt(x.var((0, 1)) + 1e-5)
    np.testing.assert_allclose(
        four.reduce("sum", total), (want.sum((1, 2)) ** 2).sum(), rtol=1e-4
    )


def test_the_layer_asks_nothing_for_the_step(four):
    normalized = nnx_layer()

    @four.run
    def step(x):
        return js.get_replica_context().all_reduce("mean", normalized(x)[0].mean())

    with pytest.warns(js.errors.PaddedRowsWarning, match="never asked which rows are"):
        step(one(four, rows(5)))


# `compute_average_loss` of batches with filled-up rows; the oracle is NumPy.

ROWS = np.random.default_rng(1).normal(size=11).astype(np.float32)


def summed(strategy, loss_of, source):
    """The sum over the replicas of each batch's loss, and of its gradient by w = 1."""

    @strategy.run
    def step(w, batch):
        loss, grad = jax.value_and_grad(lambda w: loss_of((w * batch) ** 2))(w)
        return js.get_replica_context().all_reduce("sum", (loss, grad))

    return [
        np.stack(step(1.0, batch))
        for batch in strategy.experimental_distribute_dataset(source)
    ]


def wanted(rows, size=None):
    mean = (rows.astype(np.float64) ** 2).sum() / (size or len(rows))
    return np.array([mean, 2 * mean])


def test_filled_up_rows_do_not_count(strategy):
    source = [ROWS[:8], ROWS[8:]]
    found = summed(strategy, js.training.compute_average_loss, source)
    for got, rows in zip(found, source, strict=True):
        np.testing.assert_allclose(got, wanted(rows), rtol=1e-5)


def test_they_do_not_count_with_a_size_or_weights(four):
    def sized(losses):
        return js.training.compute_average_loss(losses, global_batch_size=8)

    (got,) = summed(four, sized, [ROWS[:5]])
    np.testing.assert_allclose(got, wanted(ROWS[:5], 8), rtol=1e-5)

    def weighted(losses):
        return js.training.compute_average_loss(losses, sample_weight=2.0)

    (got,) = summed(four, weighted, [ROWS[:5]])
    np.testing.assert_allclose(got, 2 * wanted(ROWS[:5]), rtol=1e-5)


def test_a_mask_takes_their_place(two):
    def step(x):
        loss = js.training.compute_average_loss(x, mask=x > 1)
        return js.get_replica_context().all_reduce("sum", loss)

    x = two.per_replica([[0.0, 1.0], [2.0, 4.0]])
    assert two.run(step, (x,)) == 3
    with pytest.raises(ValueError, match=r"`mask` has shape \(3,\)"):
        two.run(
            lambda x: js.training.compute_average_loss(x, mask=np.ones(3, bool)), (x,)
        )
