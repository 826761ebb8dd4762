"""Numbers and objects that no function can use: a message that has them in it."""

import jax
import numpy as np
import optax
import pytest
from helpers.cases import each

import jaxstrategy as js

HUGE = 10**400


@pytest.fixture(scope="module")
def strategy(two):
    return two


TOO_LARGE = {
    "mirror": lambda strategy: strategy.mirror(2**40),
    "variable": lambda strategy: js.Variable(0).assign(2**40),
    "finite": lambda strategy: js.training.all_finite({"a": 2**40}),
    "adjust": lambda strategy: js.training.DynamicLossScale().adjust(2**40),
    "gather": lambda strategy: strategy.gather(2**40, 0),
    "argument": lambda strategy: strategy.run(lambda x: x, (2**40,)),
    "sparse_read": lambda strategy: vector().sparse_read(2**40),
    "scatter_add": lambda strategy: vector().scatter_add(rows([2**40])),
    "added_to": lambda strategy: rows(np.zeros(1, int)).added_to(2**40),
    "weight": lambda strategy: js.training.compute_average_loss(
        [1.0], sample_weight=[2**40]
    ),
    "weights": lambda strategy: strategy.reduce("sum", 1.0, None, weights=2**40),
    # JAX itself keeps the lower 32 bits of these, without a word.
    "numpy": lambda strategy: strategy.mirror(np.int64(2**40)),
    "numpy argument": lambda strategy: strategy.run(lambda x: x, (np.int64(2**40),)),
    "batch": lambda strategy: next(
        iter(strategy.experimental_distribute_dataset([np.full(2, 2**40)]))
    ),
}


def vector():
    return js.Variable([1.0, 2.0, 3.0])


def rows(indices):
    return js.IndexedSlices(np.ones(1, np.float32), indices, (3,))


def test_integers_that_jax_does_not_hold_are_told(strategy):
    for _, use in each(TOO_LARGE):
        told = r"1099511627776\]* was given, and int32 holds -2147483648 to 2147483647."
        with pytest.raises(ValueError, match=told):
            use(strategy)


def test_numbers_that_a_dtype_does_not_hold_are_told():
    for dtype, told in (
        ("uint8", "and uint8 holds 0 to 255. Give an array of a dtype that holds it, "),
        ("float32", r"and float32 holds -3.40282e\+38 to 3.40282e\+38. Give an array"),
    ):
        with pytest.raises(ValueError, match=f"'v': 1000.* was given, {told}"):
            js.Variable(HUGE, dtype=dtype, name="v")


def test_loss_scales_keep_to_what_their_dtypes_hold():
    for number in (-HUGE, np.inf, np.nan):
        with pytest.raises(ValueError, match="`period` is .*; at least 1 step is"):
            js.training.DynamicLossScale(period=number)
        with pytest.raises(ValueError, match="`factor` is .*; more than 1 is wanted,"):
            js.training.DynamicLossScale(factor=number)
        with pytest.raises(ValueError, match="`min_loss_scale` is .*; a number that"):
            js.training.DynamicLossScale(min_loss_scale=number)


def test_shapes_of_sparse_rows_that_cannot_be_are_refused():
    for shape in ((-1,), (HUGE,), (1.5,), 3, "ab"):
        with pytest.raises(ValueError, match="`dense_shape` was .*; a shape, such as"):
            js.IndexedSlices([1.0], [0], shape)


CONTEXTS = [
    ((1, 0, 0), "`num_replicas_in_sync` was 0; a whole number from 1 on was wanted"),
    ((0, 0, 1), "`num_input_pipelines` was 0; a whole number from 1 on was wanted"),
    ((2, 2, 1), "`input_pipeline_id` was 2; a whole number from 0 to 1 was wanted"),
    ((1, -1, 1), "`input_pipeline_id` was -1; a whole number from 0 to 0 was wa"),
]


def test_input_contexts_that_cannot_be_are_refused():
    for given, told in CONTEXTS:
        with pytest.raises(ValueError, match=told):
            js.InputContext(*given)


def test_input_contexts_have_whole_numbers():
    for given in ("2", 1.0, None, True):
        with pytest.raises(TypeError, match="`num_replicas_in_sync` was .*whole"):
            js.InputContext(1, 0, given)
        with pytest.raises(TypeError, match="`global_batch_size` was .*whole number"):
            js.InputContext(1, 0, 2).get_per_replica_batch_size(given)


def test_metrics_are_numbers_by_name(tmp_path):
    for metrics in (5, [1], {"a": "b"}, {"a": None}, {"a": HUGE}):
        with js.checkpoint.CheckpointManager(tmp_path) as manager:
            with pytest.raises(TypeError, match="`metrics` was .*; numbers by name"):
                manager.save(1, {"a": 1}, metrics)


def test_chains_that_are_none_are_refused(strategy):
    with pytest.raises(TypeError, match="`transformation` was 5; a transformation of"):
        js.optax.check_chain(5, {"w": np.ones(2)}, strategy=strategy)
    with pytest.raises(TypeError, match="`transformation` was {}; a transformation of"):
        js.optax.check_chain({}, {"w": np.ones(2)}, strategy=strategy)
    with pytest.raises(TypeError, match="`strategy` was 5; a strategy was wanted"):
        js.optax.check_chain(optax.sgd(0.1), {"w": np.ones(2)}, strategy=5)


def test_a_strategy_of_no_devices_is_refused():
    with pytest.raises(TypeError, match="`devices` has .*5.*; devices were wanted"):
        js.Strategy([5])
    device = jax.devices()[0]
    for devices in ([], [[]], [[device]], [device, device]):
        with pytest.raises(ValueError, match="`devices` was .*; a list of one or more"):
            js.Strategy(devices)


def test_integers_that_no_dtype_holds_are_told(two):
    for use in (
        lambda: two.run(lambda x: x, ({"a": [-(2**70)]},)),
        lambda: two.step(lambda x: x)(2**70),
        lambda: two.compile(lambda x: x, (2**70,)),
        lambda: two.explain(lambda x: x, ((1, np.int64(-(2**40))),)),
        lambda: two.reduce("sum", 10**400),
        lambda: two.per_replica([2**70, 2**70]),
        lambda: two.mirror(10**400),
        lambda: js.Variable(np.uint64(2**63)),
        lambda: js.Variable(np.uint32(1)).assign(np.uint64(2**63)),
    ):
        with pytest.raises(ValueError, match=r"was given, and u?int32 holds"):
            use()


def test_masks_of_numpy_are_not_dropped(two):
    masked = np.ma.masked_equal(np.arange(2.0), 1)
    for make in (
        lambda: two.per_replica(masked),
        lambda: two.per_replica([masked, masked]),
        lambda: two.experimental_distribute_values_from_function(lambda _: masked),
    ):
        with pytest.raises(ValueError, match="is a masked array of NumPy, and its"):
            make()
    nothing_masked = two.per_replica(np.ma.masked_equal(np.arange(2.0), 5))
    np.testing.assert_array_equal(
        two.experimental_local_results(nothing_masked), [0, 1]
    )


def test_a_number_is_placed_anew_where_64_bits_are_on(two):
    def same(x):
        return x

    for bits, dtype in ((False, np.float32), (True, np.float64), (False, np.float32)):
        with jax.enable_x64(bits):
            found = two.run(same, (0.1,))
        assert found.dtype == dtype and found == dtype(0.1)
