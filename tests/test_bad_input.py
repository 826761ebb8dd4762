"""Numbers and objects that no function can use: a message that has them in it."""

import numpy as np
import optax
import pytest

import jaxstrategy as js
from jaxstrategy._errors import shown

HUGE = 10**400


@pytest.fixture(scope="module")
def strategy():
    return js.MirroredStrategy(js.simulate(8)[:2])


def test_values_are_shown_on_one_short_line_whatever_they_are():
    class Unprintable:
        def __repr__(self):
            raise RuntimeError

    assert shown([1, "a\nb"]) == r"[1, 'a\nb']"
    assert len(shown("x" * 5000)) == 200 and shown("x" * 5000).endswith("...")
    assert shown(10**5000) == "an int of 16610 bits"
    assert shown(-(10**5000)) == "a negative int of 16610 bits"
    assert shown(Unprintable()) == "a Unprintable that cannot be printed"


TOO_LARGE = {
    "mirror": lambda strategy: strategy.mirror(2**40),
    "reduce": lambda strategy: strategy.reduce("sum", 2**40, axis=None),
    "variable": lambda strategy: js.Variable(0).assign(2**40),
    "loss": lambda strategy: js.scale_regularization_loss(2**40),
    "finite": lambda strategy: js.all_finite({"a": 2**40}),
    "unscale": lambda strategy: js.DynamicLossScale().unscale({"a": 2**40}),
}


@pytest.mark.parametrize("use", TOO_LARGE)
def test_integers_that_jax_does_not_hold_are_told(strategy, use):
    told = "1099511627776 was given, and int32 holds -2147483648 to 2147483647. Give an"
    with pytest.raises(ValueError, match=told):
        TOO_LARGE[use](strategy)


@pytest.mark.parametrize("number", [HUGE, 10**5000], ids=["400", "5000"])
def test_links_of_absurd_speed_are_refused(number):
    for given in ((number, 1e-6, 2), (1e9, number, 2)):
        with pytest.raises(ValueError, match="was .* wanted. Give"):
            js.Topology(*given)
    with pytest.raises(ValueError, match="`nbytes` was .*; a finite number"):
        js.Topology(1e9, 1e-6, 2).fastest("all_reduce", number)


@pytest.mark.parametrize(
    "given, told",
    [
        (
            (1, 0, 0),
            "`num_replicas_in_sync` was 0; a whole number from 1 on was wanted",
        ),
        ((0, 0, 1), "`num_input_pipelines` was 0; a whole number from 1 on was wanted"),
        ((2, 2, 1), "`input_pipeline_id` was 2; a whole number from 0 to 1 was wanted"),
        ((1, -1, 1), "`input_pipeline_id` was -1; a whole number from 0 to 0 was wa"),
    ],
)
def test_input_contexts_that_cannot_be_are_refused(given, told):
    with pytest.raises(ValueError, match=told):
        js.InputContext(*given)


@pytest.mark.parametrize("given", ["2", 1.0, None, True, [1]])
def test_input_contexts_have_whole_numbers(given):
    with pytest.raises(TypeError, match="`num_replicas_in_sync` was .*whole number"):
        js.InputContext(1, 0, given)
    with pytest.raises(TypeError, match="`global_batch_size` was .*whole number"):
        js.InputContext(1, 0, 2).get_per_replica_batch_size(given)


def test_rows_are_added_to_arrays_of_numpy():
    slices = js.IndexedSlices(np.ones((1, 2)), np.array([2]), (3, 2))
    found = slices.added_to(np.zeros((3, 2)))
    np.testing.assert_array_equal(found, [[0, 0], [0, 0], [1, 1]])


@pytest.mark.parametrize("metrics", [5, [1], {"a": "b"}, {"a": None}, {"a": HUGE}])
def test_metrics_are_numbers_by_name(tmp_path, metrics):
    with js.checkpoint.CheckpointManager(tmp_path) as manager:
        with pytest.raises(TypeError, match="`metrics` was .*; numbers by name were"):
            manager.save(1, {"a": 1}, metrics)


def test_chains_that_are_none_are_refused(strategy):
    with pytest.raises(TypeError, match="`transformation` was 5; a transformation of"):
        js.optax.check_chain(5, {"w": np.ones(2)}, strategy=strategy)
    with pytest.raises(TypeError, match="`strategy` was 5; a strategy was wanted"):
        js.optax.check_chain(optax.sgd(0.1), {"w": np.ones(2)}, strategy=5)


def test_a_per_replica_of_a_number_has_no_replicas():
    with pytest.raises(TypeError, match="A PerReplica of .* has no dimension of rep"):
        _ = js.PerReplica(np.float32(5)).num_replicas


def test_a_strategy_of_no_devices_is_refused():
    with pytest.raises(TypeError, match="`devices` has .*5.*; devices were wanted"):
        js.Strategy([5])
