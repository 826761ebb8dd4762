"""Losses: TensorFlow's numbers, and its traps closed."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js


def in_run(strategy, function, *args):
    """One replica's result, from a `run` in which all give the same."""
    return strategy.run(lambda *args: function(*args), args)


def test_scaled_regularization_of_tensorflow(four):
    x = np.array([1.0, 2.0], np.float32)
    np.testing.assert_allclose(
        in_run(four, js.training.scale_regularization_loss, x), 0.75
    )
    np.testing.assert_allclose(js.training.scale_regularization_loss(x), 3.0)


@each_of(
    "shape, weights",
    [
        ((4,), ()),
        ((4, 3), None),
        ((4, 3), (4,)),
        ((4, 3), (4, 1)),
        ((4, 3), (1, 3)),
        ((4, 3, 2), (4, 3)),
    ],
)
def test_any_shape_of_losses_and_weights_is_numpys(shape, weights):
    rng = np.random.default_rng(0)
    loss = rng.normal(size=shape).astype(np.float32)
    weight = None if weights is None else rng.normal(size=weights)
    have = js.training.compute_average_loss(loss, sample_weight=weight)
    wide = (
        1
        if weight is None
        else np.expand_dims(weight, tuple(range(len(weights), len(shape))))
    )
    np.testing.assert_allclose(have, (loss * wide).sum() / 4, rtol=1e-5)
    assert have.shape == ()


@each_of(
    "given, returned",
    [
        ("int32", "float32"),
        ("bool", "float32"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_dtypes_are_kept_and_integers_become_floats(given, returned):
    have = js.training.compute_average_loss(
        jnp.ones(4, given), sample_weight=np.full(4, 2)
    )
    assert have.dtype == returned
    np.testing.assert_allclose(have, 2.0)


def test_halves_are_summed_in_float32():
    # The sum, 100,000, is infinite in float16.
    have = js.training.compute_average_loss(jnp.full(1000, 100.0, jnp.float16))
    np.testing.assert_allclose(have, 100.0)


def test_the_sum_over_replicas_is_the_mean_over_real_examples(strategy):
    n = strategy.num_replicas_in_sync
    loss = np.random.default_rng(1).normal(size=(n, 3)).astype(np.float32)
    mask = np.arange(3 * n).reshape(n, 3) < 3 * n - 2

    @strategy.run
    def step(loss, mask):
        replica = js.get_replica_context()
        size = replica.all_reduce("sum", mask.sum())
        part = js.training.compute_average_loss(
            loss, sample_weight=mask, global_batch_size=size
        )
        return replica.all_reduce("sum", part)

    have = step(strategy.per_replica(loss), strategy.per_replica(mask))
    np.testing.assert_allclose(have, loss[mask].mean(), rtol=1e-5)


@each_of("name", ["compute_average_loss", "scale_regularization_loss"])
def test_cross_replica_context_is_refused(two, name):
    message = f"`{name}` was called in cross-replica context, .* call it inside `run`"
    with two.scope(), pytest.raises(js.errors.ContextError, match=message):
        getattr(js.training, name)(np.ones(2))
    with pytest.raises(RuntimeError, match=message):  # as TensorFlow's
        two.run(
            lambda x: js.get_replica_context().merge_call(
                lambda _, x: getattr(js.training, name)(np.ones(2)), (x,)
            ),
            (np.ones(2),),
        )


def test_a_per_replica_loss_is_refused(two):
    x = two.per_replica(np.ones((2, 3)))
    with pytest.raises(TypeError, match="`per_example_loss` is a PerReplica, which"):
        js.training.compute_average_loss(x)
    with pytest.raises(TypeError, match="`sample_weight` is a PerReplica, which"):
        js.training.compute_average_loss(np.ones(3), sample_weight=x)
    with pytest.raises(TypeError, match="`regularization_loss` is a PerReplica, which"):
        js.training.scale_regularization_loss(x)


THREE, DOES_NOT_FIT = (
    np.ones((3, 2)),
    (
        r"`sample_weight` has shape \(.*\), which does not fit losses of shape "
        r"\(3, 2\): give one weight per example, shape \(3,\), or one per loss"
    ),
)


@each_of(
    "arguments, options, error, message",
    [
        (
            ([1.0, 2.0], 16),
            {},
            TypeError,
            "`compute_average_loss` was given 2 arguments by position, where only the "
            "loss is taken: .* Write `sample_weight=` or `global_batch_size=`.",
        ),
        ((1.0,), {}, ValueError, "is a scalar; one loss per example is wanted"),
        *(
            ((THREE,), {"sample_weight": np.ones(shape)}, ValueError, DOES_NOT_FIT)
            for shape in [(2,), (3, 4), (3, 2, 1, 1), (2, 1)]
        ),
        *(
            (([1.0, 2.0],), {"global_batch_size": size}, error, message)
            for size, error, message in [
                (4.0, TypeError, "`global_batch_size` is 4.0; an integer is wanted"),
                (True, TypeError, "`global_batch_size` is True; an integer is wanted"),
                (np.ones(()), TypeError, "`global_batch_size` is of dtype float64; an"),
                (np.array([4]), ValueError, r"has shape \(1,\); one number is wanted"),
                (0, ValueError, "The global batch size is 0; it must be positive"),
                (-2, ValueError, "The global batch size is -2; it must be positive"),
            ]
        ),
    ],
)
def test_losses_that_mean_nothing_are_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        js.training.compute_average_loss(*arguments, **options)
