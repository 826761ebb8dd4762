"""`reduce`, `gather`, `experimental_local_results` and the `extended` reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids

import jaxstrategy as js


def squares(strategy):
    base = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    n = strategy.num_replicas_in_sync
    return js.PerReplica(np.stack([base + 10 * i for i in range(n)]))


@each_of("axis, dims", [(None, 0), (0, (0, 1)), ([1], (0, 2)), ((0, -1), (0, 1, 2))])
def test_reduce_gives_numpys_numbers(strategy, axis, dims):
    x = squares(strategy)
    for op in ("sum", "mean", "min", "max"):
        out = strategy.reduce(op.upper(), x, axis)
        expected = getattr(np, op)(np.asarray(x.stacked), axis=dims)
        np.testing.assert_allclose(out, expected, rtol=1e-6)
        assert isinstance(out, js.Mirrored)


def test_reduce_of_what_every_replica_holds(strategy):
    n = strategy.num_replicas_in_sync
    mirrored = strategy.run(lambda: jnp.array([1.0, 2.0]))
    for value in (mirrored, np.array([1.0, 2.0]), jnp.array([1.0, 2.0])):
        np.testing.assert_allclose(strategy.reduce("sum", value), [n, 2 * n])
        np.testing.assert_allclose(strategy.reduce("mean", value), [1, 2])
        assert strategy.reduce("sum", value, axis=0) == 3 * n
        assert strategy.reduce("mean", value, axis=0) == 1.5
    assert strategy.reduce("sum", 5.0) == 5.0 * n
    assert strategy.reduce("sum", 0) == 0


def test_reduce_is_the_same_under_jit(four):
    x = ids(four)

    def whole(v, k):
        return four.reduce("sum", v), four.reduce("sum", k), four.reduce("mean", k)

    assert whole(x, 3.0) == jax.jit(whole)(x, 3.0) == (6, 12, 3)


@each_of(
    "axis, error, words",
    [(2, ValueError, "`axis` is 2, out of range for a value with 2 dimensions"),
     (-3, ValueError, "`axis` is -3, out of range"),
     ((0, -2), ValueError, "names one dimension more than once"),
     (0.5, TypeError, "`axis` was 0.5; None, a whole number"),
     (True, TypeError, "`axis` was True")])  # fmt: skip
def test_axes_that_make_no_sense(four, axis, error, words):
    with pytest.raises(error, match=words):
        four.reduce("sum", squares(four), axis)
    with pytest.raises(ValueError, match="every replica's value is a scalar"):
        four.reduce("sum", ids(four), axis=0)


def test_gather(four):
    x = squares(four)
    for axis in (0, 1, -1):
        out = four.gather(x, axis)
        np.testing.assert_array_equal(out, np.concatenate(x.stacked, axis))
        assert isinstance(out, js.Mirrored)
    out = four.gather({"flag": four.per_replica([[True]] * 4), "same": jnp.ones(2)})
    assert out["flag"].tolist() == [True] * 4 and out["same"].tolist() == [1] * 8


def test_local_results_of_mirrored_and_plain_values(four):
    mirrored = four.mirror(2.0)
    results = four.experimental_local_results(mirrored)
    assert [float(v) for v in results] == [2, 2, 2, 2]
    for plain in (3.0, "text", None, np.float32(1.0)):
        assert four.experimental_local_results(plain) == (plain,)
    assert four.experimental_local_results({"a": 1, "b": 2}) == ({"a": 1, "b": 2},) * 4
    assert four.experimental_local_results((1, 2)) == ((1, 2),) * 4
    assert four.experimental_local_results(()) == ((),) * 4


def test_local_results_of_another_strategys_value(two, four):
    with pytest.raises(ValueError, match="PerReplica with 2 versions .* 4 replicas"):
        four.experimental_local_results(ids(two))


def devices(value):
    return sorted(device.id for device in value.devices())


def test_reduce_to_destinations(four):
    x, mirrored = ids(four), four.mirror(0.0)
    on_one = jax.device_put(0.0, jax.devices()[6])
    everywhere = [0, 1, 2, 3]
    for destinations, expected in (
        ("CPU:1", [1]),
        ("/cpu:5", [5]),
        (jax.devices()[2], [2]),
        (["CPU:0", jax.devices()[7]], [0, 7]),
        (x, everywhere),
        (mirrored, everywhere),
        (on_one, [6]),
    ):
        out = four.extended.reduce_to("sum", x, destinations)
        assert (out, devices(out)) == (6, expected)
    assert float(mirrored) == 0.0
    assert isinstance(four.extended.reduce_to("max", x, x), js.Mirrored)


def test_batch_reduce_to(four):
    x = ids(four)
    doubled = four.run(lambda v: 2 * v, (x,))
    out = four.extended.batch_reduce_to("mean", [(x, x), ({"d": doubled}, "CPU:3")])
    assert out[0] == 1.5 and out[1]["d"] == 3.0
    assert devices(out[0]) == [0, 1, 2, 3] and devices(out[1]["d"]) == [3]
    assert four.extended.batch_reduce_to("sum", []) == []


@each_of("pairs", [[1, 2], [(1.0, "CPU:0", 3)], 1.0, [[1.0]]])
def test_pairs_that_are_none(two, pairs):
    with pytest.raises(ValueError, match="should be a tuple of a value and its dest"):
        two.extended.batch_reduce_to("sum", pairs)


@each_of(
    "destinations, error, words",
    [(None, TypeError, "`destinations` was None; a device"),
     (3.5, TypeError, "`destinations` was 3.5"),
     ([], ValueError, "The list of devices is empty"),
     ("CPU:99", ValueError, "Unknown device 'CPU:99'"),
     (["CPU:0", "CPU:0"], ValueError, "No duplicates")])  # fmt: skip
def test_destinations_that_are_none(two, destinations, error, words):
    with pytest.raises(error, match=words):
        two.extended.reduce_to("sum", 1.0, destinations)


def test_reduce_to_takes_communication_options(two):
    options = js.experimental.CommunicationOptions(implementation="ring")
    x = two.per_replica([1.0, 2.0])

    def step(x):
        def merge(strategy, x):
            return strategy.extended.batch_reduce_to("sum", [(x, x)], options)[0]

        return js.get_replica_context().merge_call(merge, (x,))

    kinds = [c.kind for c in two.explain(step, (x,)).collectives]
    assert kinds == ["reduce_scatter", "all_gather"]
    assert float(two.extended.reduce_to("mean", x, x, options)) == 1.5
    with pytest.raises(TypeError, match="a `CommunicationOptions` was wanted"):
        two.extended.reduce_to("mean", x, x, "ring")
