"""16-bit computing: casts, agreement on what is finite, and the loss scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js


def test_only_real_floats_are_cast():
    tree = {
        "w": np.ones(2, np.float32),
        "h": jnp.ones(2, jnp.float16),
        "n": np.int32(3),
        "z": np.complex64(1j),
        "b": np.array(True),
        "f": 0.5,
        "s": "relu",
        "k": jax.random.key(0),
    }
    have = js.training.cast_floating(tree, jnp.bfloat16)
    assert have["w"].dtype == have["h"].dtype == jnp.bfloat16
    for same in "nzbfsk":
        assert have[same] is tree[same]


@each_of("dtype", ["int32", "complex64"])
def test_casts_to_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match=f"`dtype` is {dtype}; a type of floating-poin"):
        js.training.cast_floating({}, dtype)
    with pytest.raises(TypeError, match=r"`dtype` is '\\ud800'; a type of floating"):
        js.training.cast_floating({}, "\ud800")


@each_of("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_on_one_replica_is_seen_by_all(four, bad):
    strategy, n = four, 4
    x = np.ones((n, 3), np.float32)
    step = strategy.run(lambda x, i: js.training.all_finite({"x": x, "i": i}))
    count = np.int32(7)
    assert step(strategy.per_replica(x), count) == np.True_
    x[n - 1, 1] = bad
    have = step(strategy.per_replica(x), count)
    assert isinstance(have, js.Mirrored) and not have


def test_it_sees_all_replicas_in_merge_call_and_works_outside_of_run(two):
    def step(x):
        return js.get_replica_context().merge_call(
            lambda _, x: js.training.all_finite(x), (x,)
        )

    have = two.run(step, (two.per_replica([1.0, np.nan]),))
    assert isinstance(have, js.Mirrored) and not have
    assert not js.training.all_finite(two.per_replica([1.0, np.nan]))
    assert js.training.all_finite({}) and js.training.all_finite([1.0, 2])
    assert not js.training.all_finite([1.0, np.inf])
    with two.scope():
        assert not js.training.all_finite([1.0, np.inf])


def reference(scale, finite, period, factor, least):
    """The rule in plain Python: the scales before each step, and after the last."""
    scales, run = [scale], 0
    for good in finite:
        if not good:
            scale, run = max(scale / factor, least), 0
        elif run + 1 == period:
            scale, run = scale * factor, 0
        else:
            run += 1
        scales.append(scale)
    return scales


def test_the_scale_follows_the_rule():
    finite = np.random.default_rng(0).random(60) < 0.7
    start = js.training.DynamicLossScale(8.0, period=3, factor=2.0, min_loss_scale=0.5)

    def step(loss_scale, good):
        loss_scale = loss_scale.adjust(good)
        return loss_scale, loss_scale.loss_scale

    start = jax.tree.map(jnp.asarray, start)
    start = start.adjust(True)  # as it will be carried: arrays of fixed dtypes
    _, have = jax.lax.scan(step, start, finite)
    want = reference(8.0, [True, *finite], 3, 2.0, 0.5)[2:]
    np.testing.assert_array_equal(have, np.float32(want))
    assert 0.5 in have and max(have) > 8  # both limits were met


def test_the_scale_has_a_limit_and_is_undone_in_float32():
    largest = js.training.DynamicLossScale(2.0**127, period=1).adjust(True)
    assert largest.loss_scale == 2.0**127
    loss_scale = js.training.DynamicLossScale(2.0**20)
    tiny = jnp.asarray([2.0**-24, 1.0], jnp.float16)
    scaled = loss_scale.scale(tiny)
    assert scaled.dtype == jnp.float32
    np.testing.assert_array_equal(scaled, [2.0**-4, 2.0**20])
    back = loss_scale.unscale({"w": jnp.asarray([2.0**-4], jnp.float16)})
    np.testing.assert_array_equal(back["w"], np.float32([2.0**-24]))


@each_of(
    "arguments, message",
    [
        ({"period": 0}, "`period` is 0; at least 1 step is wanted"),
        ({"factor": 1.0}, "`factor` is 1.0; more than 1 is wanted"),
    ],
)
def test_rules_that_lead_nowhere_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        js.training.DynamicLossScale(**arguments)


def test_replicas_agree_to_skip_what_overflows_on_one(four):
    """float16: one replica's gradients are too large at first, and then train well."""

    @four.run(options=js.RunOptions(expect_mirrored=True))
    def step(w, loss_scale, x):
        def loss_fn(w):
            half = js.training.cast_floating(w, "float16") * x.astype("float16")
            return loss_scale.scale(half.astype("float32").sum())

        grad = loss_scale.unscale(jax.grad(loss_fn)(w))
        finite = js.training.all_finite(grad)  # of this replica's own gradients
        grad = js.get_replica_context().all_reduce("mean", grad)
        return jnp.where(finite, w - grad, w), loss_scale.adjust(finite)

    x = four.per_replica(np.float32([1, 1, 1, 5]))  # 5 * 2**14 is infinite in float16
    state = four.mirror((np.float32(1), js.training.DynamicLossScale(2.0**14)))
    seen = []
    for _ in range(4):
        state = step(*state, x)
        seen.append((float(state[0]), float(state[1].loss_scale)))
    assert seen == [(1.0, 2.0**13), (-1.0, 2.0**13), (-3.0, 2.0**13), (-5.0, 2.0**13)]


def test_a_step_with_a_loss_scale_is_compiled_once(two, compilations):
    step = two.run(lambda loss_scale: loss_scale.adjust(js.training.all_finite(1.0)))
    loss_scale = step(js.training.DynamicLossScale(8.0))
    assert compilations() > 0
    step(step(loss_scale))
    assert compilations() == 0
