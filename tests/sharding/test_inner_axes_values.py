"""Values of replicas with several devices: what lies over these stays there.

The oracle is NumPy; where an array lies is asked of JAX.
"""

import jax
import numpy as np
import pytest
from helpers.cores import COLUMNS, all_gathers, cored, drawn, lies, over
from helpers.replicas import replica
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

W = drawn(16, 6)
STACKED = drawn(4, 16, 6, seed=1)


def test_mirror_leaves_an_array_over_the_cores():
    strategy = cored()
    w = over(strategy, W, None, "core")
    mirrored = strategy.mirror({"w": w, "b": np.ones(3, np.float32)})
    assert mirrored["w"] is w or lies(mirrored["w"]) == COLUMNS
    assert lies(mirrored["b"]) == P()
    assert isinstance(mirrored["w"], js.Mirrored)
    assert not isinstance(mirrored["w"], js.Sharded)


def test_versions_are_joined_on_the_devices_of_their_replica():
    strategy = cored()
    value = js.PerReplica(over(strategy, STACKED, "replica", None, "core"))
    for i, version in enumerate(value.values):
        assert lies(version) == COLUMNS
        devices = set(jax.devices()[2 * i : 2 * i + 2])
        assert version.sharding.device_set == devices
        np.testing.assert_array_equal(version, STACKED[i])
    np.testing.assert_array_equal(value.local(2), STACKED[2])


def test_a_donated_value_leaves_the_versions_it_was_made_of():
    strategy = cored()
    versions = js.PerReplica(over(strategy, STACKED, "replica", None, "core")).values
    value = strategy.per_replica(list(versions))
    options = js.RunOptions(donate_argnums=0)
    doubled = strategy.run(lambda x: 2 * x, (value,), options=options)
    np.testing.assert_array_equal(np.stack(versions), STACKED)
    np.testing.assert_array_equal(np.stack(doubled.values), 2 * STACKED)


def test_reductions_and_gathers_leave_a_value_over_the_cores():
    strategy = cored()
    value = js.PerReplica(over(strategy, STACKED, "replica", None, "core"))

    def step(x):
        return replica().all_reduce("sum", x)

    assert all_gathers(strategy, step, value) == 0
    w = over(strategy, W, None, "core")
    reduce_to = strategy.extended.batch_reduce_to
    there, first = reduce_to("sum", [(value, w), (value, "CPU:3")])
    assert first.devices() == {jax.devices()[3]}
    np.testing.assert_allclose(first, STACKED.sum(0), rtol=1e-5, atol=1e-5)
    for found, wanted in (
        (strategy.run(step, (value,)), STACKED.sum(0)),
        (there, STACKED.sum(0)),
        (strategy.reduce("mean", value), STACKED.mean(0)),
        (strategy.reduce("max", value), STACKED.max(0)),
        (strategy.gather(value), STACKED.reshape(-1, 6)),
    ):
        assert lies(found) == COLUMNS
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    across = strategy.gather(value, axis=1)
    np.testing.assert_array_equal(across, np.concatenate(STACKED, 1))


def test_local_results_are_one_for_each_replica():
    strategy = cored()
    value = js.PerReplica(over(strategy, STACKED, "replica", None, "core"))
    versions = strategy.experimental_local_results(value)
    assert [lies(version) for version in versions] == [COLUMNS] * 4
    w = over(strategy, W, None, "core")
    np.testing.assert_allclose(
        sum(versions) + w, STACKED.sum(0) + W, rtol=1e-5, atol=1e-6
    )
    assert len(strategy.experimental_local_results(w)) == 4
    assert len(cored(2, 4).experimental_local_results(w)) == 4  # that has other ones


def put_by_hand(strategy, versions, *spec):
    """An array "equal on all replicas" of which each has what is given."""
    like = over(strategy, versions[0], *spec)
    parts = [
        jax.device_put(versions[i // 2][shard.index], shard.device)
        for i, shard in enumerate(like.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def test_replicas_are_compared_and_their_cores_are_not():
    strategy = cored()
    right = put_by_hand(strategy, [W] * 4, None, "core")
    strategy.assert_in_sync({"w": right})
    other = W.copy()
    other[3, 5] += 1  # in what the second core has
    wrong = put_by_hand(strategy, [W, W, other, W], None, "core")
    with pytest.raises(js.errors.OutOfSyncError, match="replica 2 differs") as found:
        strategy.assert_in_sync({"w": wrong, "b": strategy.mirror(1.0)})
    assert found.value.leaves == {"tree['w']": ((0, 1, 3), (2,))}
    for trusted, copy in ((0, W), (2, other)):  # as the error advises
        again = strategy.mirror(wrong, replica=trusted)
        assert lies(again) == COLUMNS
        np.testing.assert_array_equal(again, copy)


def test_own_copies_stay_over_the_cores():
    strategy = cored()
    w = over(strategy, W, None, "core")
    copies = js.optax.own_copies({"w": w}, strategy=strategy)["w"]
    assert lies(copies) == P("replica", None, "core")
    np.testing.assert_array_equal(copies.stacked, np.stack([W] * 4))


def test_compression_states_lie_as_what_is_reduced():
    strategy = cored()
    options = js.experimental.CommunicationOptions(compression="int8")
    given = over(strategy, drawn(4, 64, 32), "replica", None, "core")
    params = {"w": over(strategy, drawn(64, 32), None, "core"), "b": np.float32(1)}
    state = strategy.compression_state(params, options)
    assert lies(state.errors["w"]) == P("replica", None, "core")
    assert state.errors["b"] is None

    def step(gradients, state):
        return replica().all_reduce_compressed("sum", gradients, state, options)

    gradients = {"w": js.PerReplica(given), "b": strategy.mirror(1.0)}
    for _ in range(2):
        sums, state = strategy.run(step, (gradients, state))
        error = np.sum(np.stack(state.errors["w"].values), 0)
        # What was not sent now is owed, no more and no less.
        wanted = np.sum(given, 0)
        np.testing.assert_allclose(sums["w"], wanted, atol=0.2)
        assert np.abs(error).max() < 0.2
