"""Replicas with several devices each: values, variables, collectives, and places."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import COLUMNS, all_gathers, cored, drawn, lies, over
from helpers.replicas import replica
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

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


# Variables of replicas with several devices: they lie over these as they were made.

V = drawn(16, 8)


def variable(strategy, value=V, **options):
    """One that lies over the cores."""
    with strategy.scope():
        return js.Variable(over(strategy, value, None, "core"), **options)


def rows(strategy, *shape):
    n = strategy.num_replicas_in_sync
    return strategy.per_replica([drawn(*shape, seed=i) for i in range(n)])


@pytest.mark.slow
def test_assigning_outside_of_steps_leaves_it_over_the_cores():
    strategy = cored()
    w = variable(strategy)
    assert lies(w) == COLUMNS and isinstance(w, js.Mirrored)
    for change, wanted in [
        (lambda: w.assign(2 * V), 2 * V),
        (lambda: w.assign_add(V), 3 * V),
        (
            lambda: w.assign_sub(over(strategy, V, None, "core")),
            2 * V,
        ),
        (lambda: w.assign_add(jnp.ones_like(w)), 2 * V + 1),
        (lambda: w[1:3].assign(V[1:3]), None),
        (lambda: w[:, 2].assign(V[:, 2]), None),
        (lambda: w.scatter_add(js.IndexedSlices(V[:2], [5, 5])), None),
    ]:
        assert lies(change()) == COLUMNS
        assert lies(w.value()) == COLUMNS
        if wanted is not None:
            np.testing.assert_allclose(w, wanted, rtol=1e-6, atol=1e-6)
    wanted = 2 * V + 1
    wanted[1:3] = V[1:3]
    wanted[:, 2] = V[:, 2]
    wanted[5] += V[0] + V[1]
    np.testing.assert_allclose(w, wanted, rtol=1e-6, atol=1e-6)


def test_a_variable_that_is_made_anywhere_can_say_how_it_lies():
    strategy = cored()
    with strategy.scope():
        w = js.Variable(lambda: jnp.ones((16, 8)), sharding=COLUMNS)
        b = js.Variable(V, sharding=P())
        plain = js.Variable(over(strategy, V, None, "core"), sharding="whole")
        numbers = js.Variable(over(strategy, V, None, "core"), sharding=P("core"))
    assert lies(w) == lies(w.value()) == COLUMNS
    assert lies(b) == P()
    assert lies(plain) == COLUMNS  # each replica has the whole of it
    assert lies(numbers) == lies(numbers.value()) == P("core")
    np.testing.assert_array_equal(w, np.ones((16, 8)))
    np.testing.assert_array_equal(numbers, V)
    assert js.Variable(V, sharding=COLUMNS).numpy().tolist() == V.tolist()  # ordinary


@each_of(
    ("spec", "error", "words"),
    [
        (P("expert"), ValueError, "names an axis 'expert', but a replica has 'core'"),
        (P("replica"), ValueError, "names 'replica', the axis along which"),
        (P(None, None, "core"), ValueError, r"3 entries for an array .*\(3, 4\)"),
        (P("core"), ValueError, "dimension 0 of its .* is 3, no multiple of 2"),
        ("core", TypeError, "a `PartitionSpec` over logical axes was wanted"),
    ],
)
def test_a_placement_that_cannot_be(spec, error, words):
    with cored().scope(), pytest.raises(error, match=words):
        js.Variable(np.zeros((3, 4)), name="table", sharding=spec)


def test_a_step_gathers_nothing_over_the_cores():
    strategy = cored()
    large = drawn(256, 130)
    w = variable(strategy, large, aggregation="mean")
    copies = variable(
        strategy, large, synchronization="on_read", aggregation="only_first_replica"
    )

    def step(x):
        gradient = x * w.value()
        w.assign_sub(0.5 * gradient)
        copies.assign_add(gradient)

    x = rows(strategy, 256, 1)
    assert all_gathers(strategy, step, x) == 0
    strategy.run(step, (x,))
    mean = np.mean([each * large for each in x.values], 0)
    np.testing.assert_allclose(w, large - 0.5 * mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(copies, large + x.local(0) * large, rtol=1e-4, atol=1e-5)
    assert lies(copies.distributed()) == P("replica", None, "core")
    assert lies(copies.value()) == COLUMNS


@pytest.mark.slow
@each_of("aggregation", ["sum", "mean", "only_first_replica"])
def test_copies_that_are_combined_when_read(aggregation):
    strategy = cored()
    v = variable(strategy, synchronization="on_read", aggregation=aggregation)
    assert lies(v) == P("replica", None, "core")
    x = rows(strategy, 16, 8)
    strategy.run(lambda x: v.assign_add(x), (x,))
    copies = V + np.stack(x.values)
    combined = {
        "sum": copies.sum(0),
        "mean": copies.mean(0),
        "only_first_replica": copies[0],
    }
    np.testing.assert_allclose(v, combined[aggregation], rtol=1e-5, atol=1e-5)
    assert lies(v.value()) == COLUMNS
    v.assign(V)
    np.testing.assert_allclose(v, V, rtol=1e-5, atol=1e-6)
    assert lies(v.distributed()) == P("replica", None, "core")
    v[2].assign(V[3])
    assert lies(v.distributed()) == P("replica", None, "core")


EVERYTHING = js.StateSharding("state", min_bytes=0)


@pytest.mark.slow
@each_of(
    ("choice", "lies_as"),
    [
        (None, P("replica", "core")),
        (lambda shape, dtype: [1, 2], P(None, "core")),
        ("whole", P(None, "core")),
        (P("core"), P("core", "replica")),
    ],
)
def test_replicas_and_their_devices_divide_different_dimensions(choice, lies_as):
    strategy = cored(sharding=EVERYTHING)
    w = variable(strategy, sharding=choice)
    assert lies(w) == lies(w.value()) == lies_as
    assert w.numpy().tolist() == V.tolist()
    x = rows(strategy, 16, 8)

    def step(x):
        w.assign_sub(0.5 * replica().all_reduce("mean", x * w.value()))

    wanted = V
    for _ in range(2):
        strategy.run(step, (x,))
        wanted = wanted - 0.5 * np.mean([each * wanted for each in x.values], 0)
        np.testing.assert_allclose(w, wanted, rtol=1e-4, atol=1e-5)
        assert lies(w.value()) == lies_as
    assert lies(w.assign_add(V)) == lies_as
    np.testing.assert_allclose(w, wanted + V, rtol=1e-4, atol=1e-5)


def test_a_dimension_that_the_cores_divide_is_refused():
    with pytest.raises(ValueError, match="was 1, the dimension that the devices of"):
        variable(cored(), name="table", sharding=1)


# Steps of replicas with several devices: numbers and checks are those of one each.


def test_a_branch_that_cores_take_differently_is_no_business_of_replicas():
    """LOG-23: inside a nested `shard_map` over the cores."""
    strategy = cored(4, 2)

    def of_core(x):
        is_first = lax.axis_index("core") == 0
        return lax.cond(is_first, lambda x: x * 2, lambda x: x * 3, x)

    def step(x):
        divided = jax.shard_map(
            of_core,
            in_specs=P("core"),
            out_specs=P("core"),
            axis_names={"core"},
            check_vma=False,
        )
        return replica().all_reduce("sum", divided(x))

    x = strategy.per_replica([drawn(4, seed=i) for i in range(4)])
    total = np.sum(np.stack(x.values), 0)
    np.testing.assert_allclose(
        strategy.run(step, (x,)), total * [2, 2, 3, 3], rtol=1e-5, atol=1e-6
    )


def test_advice_for_a_divided_array_counts_replicas_and_not_devices():
    strategy = cored(4, 2)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(drawn(8, 2), jax.sharding.NamedSharding(mesh, P("x")))
    with pytest.raises(js.errors.PlacementError, match=r"`\[4, \.\.\.\]`, entry i for"):
        strategy.run(lambda x: x, (x,))


# A single replica of several devices computes what a single device does.

X = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.fixture(scope="module")
def lone():
    return js.MirroredStrategy(jax.devices(), logical_axes={"core": 8})


def each_collective(x):
    """All that a replica can do with the others, over an operand that is divided."""
    name = "replica"
    x = lax.with_sharding_constraint(x, P(None, "core"))
    return {
        "sum": lax.psum(x, name),
        "bfloat16": lax.psum(x.astype(jnp.bfloat16), name),
        "bool": lax.psum(x > 3, name),
        "mean": lax.pmean(x, name),
        "largest": lax.pmax(x, name),
        "smallest": lax.pmin(x, name),
        "gathered": lax.all_gather(x, name),
        "second": lax.all_gather(x, name, axis=1),
        "tiled": lax.all_gather(x, name, tiled=True),
        "scattered": lax.psum_scatter(x[None], name),
        "scattered tiled": lax.psum_scatter(x, name, tiled=True),
        "own": lax.ppermute(x, name, [(0, 0)]),
        "nobody's": lax.ppermute(x, name, []),
        "exchanged": lax.all_to_all(x[None], name, 0, 1),
        "exchanged tiled": lax.all_to_all(x, name, 0, 1, tiled=True),
        "index": lax.axis_index(name),
        "grouped": lax.psum(x, name, axis_index_groups=[[0]]),
    }


def test_each_collective_of_one_replica(lone):
    found = jax.tree.map(np.asarray, lone.run(each_collective, (X,)))
    wanted = dict.fromkeys(found, X)
    wanted |= {
        "bool": (X > 3).astype(int),
        "gathered": X[None],
        "second": X[:, None],
        "nobody's": np.zeros_like(X),
        "exchanged": X[:, None],
        "index": np.asarray(0),
    }
    for what, value in wanted.items():
        assert found[what].shape == value.shape, what
        np.testing.assert_array_equal(found[what].astype(value.dtype), value, what)
    assert found["bfloat16"].dtype == jnp.bfloat16


# Which devices each replica has, and what each has of an array, in all layouts.


def layouts():
    """Of each a strategy, and the numbers of the devices of each replica."""
    devices = jax.devices()
    yield js.MirroredStrategy(devices[::-1]), [[i] for i in reversed(range(8))]
    axes = {"row": 2, "column": 2}
    yield js.MirroredStrategy(logical_axes=axes), [[0, 1, 2, 3], [4, 5, 6, 7]]
    three = js.MirroredStrategy(devices[:2], replicas_per_device=3)
    yield three, [[i // 3] for i in range(6)]


def test_replicas_have_their_devices_their_entries_and_their_numbers():
    for strategy, wanted in layouts():
        n = len(wanted)
        assert strategy.num_replicas_in_sync == n, strategy
        assert [d.id for d in strategy.devices] == [row[0] for row in wanted]
        x = np.arange(n * 6.0, dtype=np.float32).reshape(-1, 2, 3)
        for given in (x, list(x)):
            value = strategy.per_replica(given)
            np.testing.assert_array_equal(value.stacked, x)
            for version, row, devices in zip(value.values, x, wanted, strict=True):
                np.testing.assert_array_equal(version, row)
                assert {d.id for d in version.devices()} == set(devices), strategy
        # Versions that lie elsewhere come to their replicas.
        elsewhere = [jax.device_put(row, jax.devices()[5]) for row in x]
        np.testing.assert_array_equal(strategy.per_replica(elsewhere).stacked, x)

        def step(x):
            context = js.get_replica_context()
            number = context.replica_id_in_sync_group
            return number, context.all_reduce("sum", 2**number), x.sum()

        number, total, sums = strategy.run(step, (strategy.per_replica(x),))
        assert np.asarray(number.stacked).tolist() == list(range(n))
        assert total == 2**n - 1
        np.testing.assert_array_equal(sums.stacked, x.sum((1, 2)))
        copies = strategy.experimental_local_results(strategy.mirror(x[0]))
        assert len(copies) == n
        for copy in copies:
            np.testing.assert_array_equal(copy, x[0])


def test_an_array_divided_along_another_dimension_is_no_replicas(four):
    columns = NamedSharding(four.mesh, P(None, "replica"))
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    value = js.PerReplica(jax.device_put(x, columns))
    for version, row in zip(value.values, x, strict=True):
        np.testing.assert_array_equal(version, row)
