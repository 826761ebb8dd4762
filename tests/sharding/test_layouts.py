"""Layouts of replicas and devices: how they print, random steps, what is refused."""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.cores import cored
from helpers.replicas import replica
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxstrategy as js


@pytest.fixture
def of_two():
    return js.MirroredStrategy(logical_axes={"core": 2})


@pytest.fixture
def shared():
    devices = jax.devices()[:2]
    return js.MirroredStrategy(devices, replicas_per_device=3)


def cells(thing):
    """The rows of its table in a notebook, and of each the cells."""
    rows = re.findall("<tr.*?>(.*?)</tr>", thing._repr_html_())
    return [re.findall("<td.*?>(.*?)</td>", row) for row in rows][1:]


def test_a_strategy_shows_all_devices_of_each_replica(of_two, shared):
    wanted = ["cpu:0, cpu:1", "cpu:2, cpu:3", "cpu:4, cpu:5", "cpu:6, cpu:7"]
    assert cells(of_two) == [[str(i), name, "cpu"] for i, name in enumerate(wanted)]
    both = ["cpu:0"] * 3 + ["cpu:1"] * 3
    assert cells(shared) == [[str(i), name, "cpu"] for i, name in enumerate(both)]
    squares = js.MirroredStrategy(logical_axes={"row": 2, "column": 2})
    assert cells(squares) == [["0", "cpu:0..3", "cpu"], ["1", "cpu:4..7", "cpu"]]


def test_a_strategy_is_printed_with_what_replicas_and_devices_are_to_each_other(
    of_two, shared
):
    assert repr(of_two) == "MirroredStrategy(4 replicas of {'core': 2} on cpu:0..7)"
    some = js.MirroredStrategy(["CPU:3", "CPU:1"], logical_axes={"core": 2})
    assert repr(some) == "MirroredStrategy(1 replica of {'core': 2} on cpu:3, cpu:1)"
    assert repr(shared) == (
        "MirroredStrategy(6 replicas, 3 on each device, on cpu:0, cpu:1)"
    )
    central = js.experimental.CentralStorageStrategy(replicas_per_device=2)
    assert repr(central) == (
        "CentralStorageStrategy(16 replicas, 2 on each device, on cpu:0..7)"
    )
    alone = js.cluster_resolver.SimpleClusterResolver({})
    axes = {"a": 4, "b": 2}
    assert repr(js.MultiWorkerMirroredStrategy(alone, logical_axes=axes)) == (
        "MultiWorkerMirroredStrategy(1 replica of {'a': 4, 'b': 2} on cpu:0..7)"
    )


def test_versions_are_shown_where_each_lies(of_two, shared):
    of_cores = of_two.per_replica(np.ones((4, 3), np.float32))
    assert repr(of_cores) == "PerReplica(float32[3] on cpu:0..7)"
    assert cells(of_cores)[1] == ["1", "cpu:2, cpu:3", "[1., 1., 1.]"]
    of_shared = shared.per_replica(np.ones((6, 3), np.float32))
    assert repr(of_shared) == "PerReplica(float32[3] on cpu:0, cpu:1)"
    places = ["cpu:0"] * 3 + ["cpu:1"] * 3
    assert [row[:2] for row in cells(of_shared)] == [
        [str(i), name] for i, name in enumerate(places)
    ]


def test_a_deep_copy_has_the_same_replicas(of_two, shared):
    for strategy in (of_two, shared):
        twin = copy.deepcopy(strategy)
        assert repr(twin) == repr(strategy) and twin._replicas == strategy._replicas
        count = strategy.num_replicas_in_sync
        x = np.arange(count, dtype=np.float32)
        total = twin.reduce("sum", strategy.per_replica(x))
        assert total == x.sum()


# Devices of a replica and replicas of a device: what is taken, and what is refused.

KINDS = [js.MirroredStrategy, js.experimental.CentralStorageStrategy]


def multi_worker(**options):
    alone = js.cluster_resolver.SimpleClusterResolver({})
    return js.MultiWorkerMirroredStrategy(alone, **options)


@each_of(
    "given, told",
    [
        (2, "was 2; the names of axes and their sizes were wanted"),
        ([("core", 2)], r"was \[\('core', 2\)\]; the names"),
        (np.ones(2), ".*; the names of axes and their sizes were wanted, such as"),
        ({"core": 2.0}, "has 2.0 as the size of 'core'; a whole number was wanted"),
        ({"core": True}, "has True as the size of 'core'"),
        ({"core": 2, 1: 2}, "has 1 as the name of an axis; a text was wanted"),
    ],
)
@each_of("kind", KINDS)
def test_logical_axes_are_names_and_whole_numbers(kind, given, told):
    with pytest.raises(TypeError, match=f"^`logical_axes` {told}"):
        kind(logical_axes=given)


@each_of("given, told", [
    ({"core": 0}, "has 0 as the size of 'core'; at least 1 was wanted"),
    ({"": 2}, "has an empty text as the name of an axis; a name was wanted"),
    ({"replica": 2}, "has an axis 'replica', which is the name of the axis along"),
    ({"core": 3}, "was {'core': 3}: a replica has 3 devices, and 8 are no multiple"),
    ({"a": 2, "b": 3}, "was .*: a replica has 6 devices, and 8 are no multiple"),
    ({"core": 2**70}, "was .*: a replica has 1180591620717411303424 devices"),
])  # fmt: skip
@each_of("kind", KINDS)
def test_logical_axes_fit_the_devices(kind, given, told):
    with pytest.raises(ValueError, match=f"^`logical_axes` {told}"):
        kind(logical_axes=given)


@each_of("given", [2.0, True, False, None, "2", [2], {"core": 2}, np.float32(2)])
@each_of("kind", KINDS)
def test_replicas_of_a_device_are_a_whole_number(kind, given):
    with pytest.raises(TypeError, match="^`replicas_per_device` was .* whole number"):
        kind(replicas_per_device=given)


@each_of("given, told", [
    (0, "was 0; at least 1 was wanted"),
    (2**70, "there would be 9444732965739290427392 replicas, and they are numbered"),
    (2**28, "was 268435456: there would be 2147483648 replicas"),
])  # fmt: skip
@each_of("kind", KINDS)
def test_replicas_of_a_device_can_be_numbered(kind, given, told):
    with pytest.raises(ValueError, match=f"^`replicas_per_device` .*{told}"):
        kind(replicas_per_device=given)


def test_a_replica_has_several_devices_or_shares_one_and_not_both():
    for sizes in ({"core": 2}, {"core": 1}):
        with pytest.raises(ValueError, match="and `replicas_per_device` 2: .*one of"):
            js.MirroredStrategy(logical_axes=sizes, replicas_per_device=2)
        with pytest.raises(ValueError, match="and `replicas_per_device` 2: .*one of"):
            multi_worker(logical_axes=sizes, replicas_per_device=2)


def test_a_strategy_of_many_replicas_is_made_without_counting_them():
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=2**31 - 1)
    assert strategy.num_replicas_in_sync == 2**31 - 1


def test_one_device_is_one_replica():
    for more in ({"replicas_per_device": 2}, {"logical_axes": {"core": 2}}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            js.OneDeviceStrategy("CPU:0", **more)


def test_a_device_twice_is_no_way_to_have_it_shared():
    with pytest.raises(ValueError, match="with `replicas_per_device` several replicas"):
        js.MirroredStrategy(["CPU:0", "CPU:0"])


# Numbers of replicas and systems of equations where replicas have several devices.

STATE = js.StateSharding("state", min_bytes=0)


def number():
    return replica().replica_id_in_sync_group


def test_replicas_of_several_devices_solve_systems():
    strategy = cored(4, 2, sharding=STATE)
    kernel = strategy.init(lambda: 9 * jnp.eye(8))
    x = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)

    @strategy.step
    def step(kernel, x):
        return replica().all_reduce("mean", jnp.linalg.solve(kernel + x, x))

    found = step(kernel, strategy.per_replica(list(x)))
    wanted = np.mean([np.linalg.solve(9 * np.eye(8) + each, each) for each in x], 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


# Arrays whose types say how they lie on a mesh, as of `jax.make_mesh`, in `run`.

X = np.arange(16, dtype=np.float32).reshape(8, 2)
W = np.array([1.0, 10.0], np.float32)
# Of each row of X: its product with W.
ROWS = X[:, 0] + 10 * X[:, 1]


@pytest.fixture(scope="module")
def whole():
    return js.MirroredStrategy()


@pytest.fixture(scope="module")
def arrays():
    """Rows that are divided over a mesh, and weights that are whole on it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    rows = jax.device_put(X, NamedSharding(mesh, P("data")))
    return rows, jax.device_put(W, NamedSharding(mesh, P()))


def product(x, w):
    return (x * w).sum()


def test_they_are_arguments(whole, arrays):
    divided = js.MirroredStrategy(sharding=js.StateSharding("state", min_bytes=0))
    for each in (whole, divided):

        def products(x, w, each=each):
            return each.run(product, args=(js.PerReplica(x), w))

        np.testing.assert_array_equal(jax.jit(products)(*arrays).stacked, ROWS)
        np.testing.assert_array_equal(products(*arrays).stacked, ROWS)


def test_gradients_lie_as_what_they_are_of(whole, arrays):
    rows, weights = arrays

    def total(w, x):
        products = whole.run(product, args=(js.PerReplica(x), w))
        return whole.reduce("sum", products)

    by_weights, by_rows = jax.grad(total, argnums=(0, 1))(weights, rows)
    np.testing.assert_array_equal(by_weights, X.sum(0))
    np.testing.assert_array_equal(by_rows, np.tile(W, (8, 1)))
    assert by_rows.sharding.is_equivalent_to(rows.sharding, 2)
