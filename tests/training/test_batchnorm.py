"""BatchNorm over the global batch; the oracle is Flax's own on one device, or NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.cases import each_of
from helpers.trees import assert_close

import jaxstrategy as js

FEATURES = 3
KINDS = ["linen", "nnx"]


def rows(n, seed=0):
    """Some that differ much between replicas, and a target."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4, FEATURES)) + np.arange(n).reshape(-1, 1, 1)
    return x.astype(np.float32), rng.normal(size=(n, 4, FEATURES)).astype(np.float32)


START = {"mean": np.float32([0.5, 0, -1]), "var": np.float32([1, 2, 0.5])}
SCALE = {"scale": np.float32([1, -2, 0.5]), "bias": np.float32([0, 1, 2])}


class Linen:
    """One form of the layer: a pure function, for linen and nnx alike."""

    def __init__(self, library, **options):
        self.layer = library.BatchNorm(momentum=0.8, **options)

    def __call__(self, scale, stats, x, mask=None, use_running_average=False):
        y, changed = self.layer.apply(
            {"params": scale, "batch_stats": stats},
            x,
            use_running_average=use_running_average,
            mask=mask,
            mutable=["batch_stats"],
        )
        return y, dict(changed["batch_stats"])


class Nnx:
    def __init__(self, library, **options):
        self.make = lambda: library.BatchNorm(
            FEATURES, momentum=0.8, rngs=nnx.Rngs(0), **options
        )

    def __call__(self, scale, stats, x, mask=None, use_running_average=False):
        layer = self.make()
        for name, value in {**scale, **stats}.items():
            getattr(layer, name)[...] = jnp.asarray(value)
        y = layer(x, use_running_average=use_running_average, mask=mask)
        return y, {name: getattr(layer, name)[...] for name in ("mean", "var")}


def ours(kind, **options):
    if kind == "linen":
        return Linen(js.flax.linen, **options)
    return Nnx(js.flax.nnx, **options)


def flaxs(kind, **options):
    return Linen(linen, **options) if kind == "linen" else Nnx(nnx, **options)


def training(layer):
    """Output, running statistics, loss and gradients of what one caller sees."""

    def step(scale, x, target, mask=None):
        def loss_fn(scale, x):
            kept = jnp.ones((len(x), 1), bool) if mask is None else mask
            total = js.get_replica_context().all_reduce("sum", kept.sum())
            y, stats = layer(scale, START, x, mask)
            loss = js.training.compute_average_loss(
                jnp.square(y - target), sample_weight=kept, global_batch_size=total
            )
            return loss, (y, stats)

        grad = jax.grad(loss_fn, argnums=(0, 1), has_aux=True)
        (grads, to_x), (y, stats) = grad(scale, x)
        return y, stats, js.get_replica_context().all_reduce("sum", grads), to_x

    return step


def joined(stacked):
    # With one replica a result is a plain array.
    array = stacked.stacked if isinstance(stacked, js.PerReplica) else stacked
    return np.asarray(array).reshape(-1, FEATURES)


@pytest.mark.slow
@each_of("kind, fast", [("linen", True), ("nnx", False)])
def test_without_a_mask_it_is_one_big_batch(four, kind, fast):
    strategy, n = four, 4
    x, target = rows(n)
    step = strategy.run(training(ours(kind, use_fast_variance=fast)))
    y, stats, grads, to_x = step(
        SCALE, strategy.per_replica(x), strategy.per_replica(target)
    )
    flat = x.reshape(-1, FEATURES), target.reshape(-1, FEATURES)
    want = jax.jit(training(flaxs(kind, use_fast_variance=fast)))(SCALE, *flat)
    assert_close((stats, grads), want[1:3])
    assert_close((joined(y), joined(to_x)), (want[0], want[3]))
    assert all(isinstance(leaf, js.Mirrored) for leaf in stats.values())


@each_of("kind", KINDS)
def test_masks_count_each_row_once(kind, real=9):
    """Also where replicas have no real row; what is left out may be anything."""
    strategy = js.MirroredStrategy(jax.devices())
    x, target = rows(8)
    mask = np.arange(32).reshape(8, 4, 1) < real
    x = np.where(mask, x, 1e9)
    step = strategy.run(training(ours(kind)))
    y, stats, grads, _ = step(SCALE, *map(strategy.per_replica, (x, target, mask)))
    flat = (a.reshape(-1, FEATURES)[:real] for a in (x, target))
    want = jax.jit(training(flaxs(kind)))(SCALE, *flat)
    assert_close((stats, grads), want[1:3])
    assert_close(joined(y)[:real], want[0])


@each_of("kind", KINDS)
def test_statistics_are_finite_where_what_is_left_out_is_not(two, kind):
    x, _ = rows(2)
    mask = np.arange(8).reshape(2, 4, 1) < 5
    layer = ours(kind)
    _, stats = two.run(
        lambda x, mask: layer(SCALE, START, x, mask),
        (two.per_replica(np.where(mask, x, np.nan)), two.per_replica(mask)),
    )
    real = x.reshape(-1, FEATURES)[:5]
    want = {"mean": real.mean(0), "var": real.var(0)}
    assert_close(stats, jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, START, want))


@each_of("kind", KINDS)
def test_a_batch_without_rows_leaves_the_statistics_unchanged(two, kind):
    x, _ = rows(2)
    mask = np.zeros((2, 4, 1), bool)
    layer = ours(kind)
    y, stats = two.run(
        lambda x, mask: layer(SCALE, START, x, mask),
        (two.per_replica(x), two.per_replica(mask)),
    )
    jax.tree.map(np.testing.assert_array_equal, stats, START)
    normal = (x - START["mean"]) / np.sqrt(START["var"] + 1e-5)
    assert_close(y.stacked, normal * SCALE["scale"] + SCALE["bias"])


@each_of("kind", KINDS)
def test_groups_have_their_own_statistics(four, kind):
    x, _ = rows(4)
    layer = ours(kind, axis_index_groups=[[0, 1], [2, 3]])
    _, stats = four.run(lambda x: layer(SCALE, START, x), (four.per_replica(x),))
    for i, group in enumerate([[0, 1], [0, 1], [2, 3], [2, 3]]):
        want = 0.8 * START["mean"] + 0.2 * x[group].mean((0, 1))
        assert_close(stats["mean"].local(i), want)


HALF, BARE = {"dtype": jnp.bfloat16}, {"use_scale": False, "use_bias": False}
SLOW, WIDE = {"use_fast_variance": False, "epsilon": 0.1}, {"axis": (0, 2), **BARE}


@each_of("average", [False, True])
@each_of(
    "kind, options",
    [
        (kind, options)
        for kind in KINDS
        for options in ({}, HALF, BARE, SLOW, WIDE)
        if (kind, options) != ("nnx", WIDE)
    ],
)
def test_outside_any_strategy_it_is_flaxs(kind, options, average):
    x, _ = rows(2)
    scale = {} if "use_scale" in options else SCALE
    start = START
    if options is WIDE:
        start = {name: np.stack([v, v]) for name, v in START.items()}
    have = ours(kind, **options)(scale, start, x, None, average)
    want = flaxs(kind, **options)(scale, start, x, None, average)
    assert jax.tree.map(jnp.result_type, have) == jax.tree.map(jnp.result_type, want)
    have, want = jax.tree.map(lambda a: np.asarray(a, np.float32), (have, want))
    assert_close(have, want, 1e-2 if options is HALF else 1e-6)


class Net(linen.Module):
    library: object = js.flax.linen

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = self.library.BatchNorm(use_running_average=False)(x)
        return linen.Dense(1)(x)


def test_init_needs_no_strategy_and_names_are_flaxs(two):
    x, key = np.ones((2, 3), np.float32), jax.random.key(0)
    plain = Net(linen).init(key, x)
    for variables in (Net().init(key, x), two.init(Net().init, key, x)):
        jax.tree.map(np.testing.assert_array_equal, variables, plain)
    with two.scope():
        Net().init(key, x)
    inside = two.run(
        lambda key, x: Net().init(key, x), (key, two.per_replica(rows(2)[0]))
    )
    jax.tree.map(
        np.testing.assert_array_equal, inside["batch_stats"], plain["batch_stats"]
    )
    kernel = plain["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(inside["params"]["Dense_0"]["kernel"], kernel)


def test_the_axis_name_is_that_of_the_step_which_costs_one_collective(two):
    layer = ours("linen")
    found = two.explain(
        lambda x: layer(SCALE, START, x), (two.per_replica(rows(2)[0]),)
    )
    assert len(found.collectives) == 1
    names = []
    two.run(lambda: names.append(js.flax.axis_name()))
    with two.scope():
        names.append(js.flax.axis_name())
    assert names == [two.mesh.axis_names[0], None] and js.flax.axis_name() is None

    @two.run
    def step(x):
        return jax.lax.psum(x, js.flax.axis_name())

    np.testing.assert_allclose(step(two.per_replica([1.0, 2.0])), 3.0)


def test_unsynchronized_statistics_are_averaged(four):
    layer = flaxs("linen")
    x, _ = rows(4)

    @four.run
    def step(x):
        _, stats = layer(SCALE, START, x)
        return stats, js.flax.average_statistics(stats)

    stats, inside = step(four.per_replica(x))
    assert all(isinstance(leaf, js.PerReplica) for leaf in stats.values())
    want = {
        "mean": 0.8 * START["mean"] + 0.2 * x.mean(1).mean(0),
        "var": 0.8 * START["var"] + 0.2 * x.var(1).mean(0),
    }
    for have in (inside, js.flax.average_statistics(stats), four.reduce("mean", stats)):
        assert_close(have, want)
        assert all(isinstance(leaf, js.Mirrored) for leaf in have.values())
    assert js.flax.average_statistics({"mean": 1.0}) == {"mean": 1.0}


def test_axis_names_are_refused():
    message = (
        "`axis_name` is 'replica'; this BatchNorm finds the replica axis by itself"
    )
    with pytest.raises(ValueError, match=message):
        js.flax.linen.BatchNorm(axis_name="replica")
    with pytest.raises(ValueError, match=message):
        js.flax.nnx.BatchNorm(3, axis_name="replica", rngs=nnx.Rngs(0))


@each_of("kind", KINDS)
def test_masks_that_do_not_fit_are_refused(kind):
    x = rows(1)[0][0]
    for mask in (np.ones(4, bool), np.ones((3, 1), bool)):
        message = (
            r"`mask` has shape \(.*\), which does not fit an input of shape \(4, 3\): "
            r".* For a mask of rows: `mask.reshape\(\(-1, 1\)\)`"
        )
        with pytest.raises(ValueError, match=message):
            ours(kind)(SCALE, START, x, mask)
