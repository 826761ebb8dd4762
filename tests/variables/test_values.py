"""`PerReplica`, `Mirrored`, the ways to build them, and their local versions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import versions

import jaxstrategy as js


@pytest.fixture
def x(four):
    return four.per_replica([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])


def test_what_a_per_replica_is(x):
    assert (x.shape, x.dtype, x.num_replicas) == ((2,), jnp.float32, 4)
    assert versions(x) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert x.local(2).tolist() == [4, 5]
    assert x.stacked.shape == (4, 2)
    assert [v.devices() for v in x.values] == [{d} for d in jax.devices()[:4]]
    assert [s.data.shape for s in x.stacked.addressable_shards] == [(1, 2)] * 4
    for wrong in (4, -1):
        with pytest.raises(IndexError, match=f"Replica {wrong} was asked .* 0 to 3"):
            x.local(wrong)


def test_a_per_replica_is_a_pytree(x, four):
    leaves, treedef = jax.tree.flatten({"a": x})
    assert len(leaves) == 1 and leaves[0].shape == (4, 2)
    assert versions(jax.tree.unflatten(treedef, leaves)["a"]) == versions(x)
    plus = jax.tree.map(lambda v: v + 10, x)
    assert versions(plus) == [[10, 11], [12, 13], [14, 15], [16, 17]]
    assert versions(jax.jit(lambda v: v)(x)) == versions(x)
    traces = []

    @jax.jit
    def jitted(v):
        traces.append(1)
        return v

    jitted(x), jitted(plus)
    assert traces == [1]
    branch = jax.lax.cond(True, lambda: x, lambda: plus)
    assert versions(branch) == versions(x)
    assert jax.tree.map(lambda v: "leaf", x) is not None


def test_how_a_per_replica_prints(x, four):
    assert repr(x) == "PerReplica(float32[2] on cpu:0..3)"
    assert repr(four.per_replica([1, 2, 3, 4])) == "PerReplica(int32[] on cpu:0..3)"
    assert repr(js.PerReplica(np.zeros((4, 3)))) == "PerReplica(float64[3] x 4)"
    odd = js.MirroredStrategy(["CPU:1", "CPU:4", "CPU:6"]).per_replica([1, 2, 3])
    assert repr(odd) == "PerReplica(int32[] on cpu:1, cpu:4, cpu:6)"
    assert repr(js.PerReplica("s")) == "PerReplica('s')"
    seen = []
    jax.jit(lambda v: seen.append(repr(v)))(x)
    assert seen == ["PerReplica(float32[2] x 4)"]
    four.run(
        lambda v: js.get_replica_context().merge_call(
            lambda s, u: seen.append(repr(u)), (v,)
        ),
        (x,),
    )
    assert seen[1] == "PerReplica(float32[2], inside merge_call)"


def cells(thing):
    """Of its table in a notebook."""
    return re.findall(r"<td.*?>(.*?)</td>", thing._repr_html_())


def test_html(x, four):
    assert cells(x)[:6] == ["0", "cpu:0", "[0., 1.]", "1", "cpu:1", "[2., 3.]"]
    assert js.PerReplica(np.zeros(4))._repr_html_() == (
        "<code>PerReplica(float64[] x 4)</code>"
    )
    assert cells(four)[:3] == ["0", "cpu:0", "cpu"] and len(cells(four)) == 12


def test_values_are_shown_where_they_fit(four):
    small = four.per_replica(np.array([0.1, 2, 3, 4], np.float32))
    assert (
        str(small)
        == f"{small}"
        == "PerReplica(float32[] on cpu:0..3: 0.1, 2.0, 3.0, 4.0)"
    )
    assert repr(small) == "PerReplica(float32[] on cpu:0..3)"
    large = four.per_replica(np.zeros((4, 13), np.float32))
    assert str(large) == repr(large) == "PerReplica(float32[13] on cpu:0..3)"
    assert cells(large)[2::3] == ["float32[13]"] * 4
    keys = four.per_replica(list(jax.random.split(jax.random.key(0), 4)))
    assert str(keys) == repr(keys) and cells(keys)[2] == "key&lt;fry&gt;[]"
    small.stacked.delete()
    assert "donated to an earlier call" in str(small)
    assert "donated to an earlier call" in small._repr_html_()


def test_types(x, four):
    mirrored = four.mirror(1.0)
    for value, is_mirrored, is_distributed in (
        (x, False, True),
        (mirrored, True, True),
        (x.stacked, False, False),
        (jnp.ones(2), False, False),
        (np.ones(2), False, False),
        (1.0, False, False),
    ):
        assert isinstance(value, js.Mirrored) is is_mirrored
        assert isinstance(value, js.DistributedValues) is is_distributed
    assert issubclass(js.PerReplica, js.DistributedValues)
    assert isinstance(js.OneDeviceStrategy("CPU:3").mirror(1.0), js.Mirrored)
    seen = []
    jax.jit(lambda v: seen.append(isinstance(v, js.Mirrored)))(mirrored)
    assert seen == [False]


def test_mirrored_places_a_pytree(four):
    with four.scope():
        state = js.Mirrored({"w": np.ones(3), "n": 1, "name": "net", "on": True})
    assert isinstance(state["w"], js.Mirrored) and isinstance(state["n"], js.Mirrored)
    assert (state["name"], state["on"]) == ("net", True)
    assert state["w"].devices() == set(jax.devices()[:4])
    alone = js.Mirrored(1.0)
    assert isinstance(alone, js.Mirrored) and alone.devices() == {jax.devices()[0]}


def test_mirror_copies_nothing_that_is_mirrored(four):
    once = four.mirror(jnp.ones(3))
    assert four.mirror(once) is once


def test_mirror_takes_random_keys_and_arrays_of_any_place(four):
    key = four.mirror(jax.random.key(3))
    assert isinstance(key, js.Mirrored)
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(3))).all()
    split = js.MirroredStrategy(jax.devices()[2:6]).per_replica([1, 2, 3, 4]).stacked
    assert four.mirror(split).tolist() == [1, 2, 3, 4]


def test_a_per_replica_cannot_be_mirrored(x, four):
    with pytest.raises(TypeError, match=r"`tree\['a'\]` is a PerReplica.*reduce"):
        four.mirror({"a": x})


def test_per_replica_of_lists_and_of_stacked_arrays(four):
    tree = {
        "list": [1, 2, 3, 4],
        "stacked": np.arange(8).reshape(4, 2),
        "trees": [{"a": (i, [float(i), 0.0])} for i in range(4)],
        "pair": (np.zeros((4, 1)), jnp.ones(4)),
        "there": four.per_replica([0, 0, 0, 0]),
    }
    out = four.per_replica(tree)
    assert versions(out["list"]) == [1, 2, 3, 4]
    assert versions(out["stacked"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert versions(out["trees"]["a"][0]) == [0, 1, 2, 3]
    assert versions(out["trees"]["a"][1]) == [[0, 0], [1, 0], [2, 0], [3, 0]]
    assert versions(out["pair"][0]) == [[0]] * 4 and versions(out["pair"][1]) == [1] * 4
    assert out["there"] is tree["there"]


def test_per_replica_keeps_jaxs_dtypes(two):
    assert two.per_replica([1.0, 2.0]).dtype == jnp.float32
    assert two.per_replica(np.zeros(2)).dtype == jnp.float32
    assert two.per_replica([np.int64(1), np.int64(2)]).dtype == jnp.int32
    assert two.per_replica([True, False]).dtype == jnp.bool_
    half = two.per_replica([jnp.bfloat16(1), jnp.bfloat16(2)])
    assert half.dtype == jnp.bfloat16


@each_of(
    "tree, error, words",
    [({"a": [1, 2, 3]}, ValueError, r"`value\['a'\]` has 3 versions for 2 replicas"),
     (np.zeros((3, 2)), ValueError, r"`value` has shape \(3, 2\).* replicas, 2"),
     ((1.0, 2.0), ValueError, r"`value\[0\]` has shape \(\).*per_replica\(\[v0"),
     ([np.ones(2), np.ones(3)], ValueError, r"differs in shape.*32\[2\], float32\[3\]"),
     ([np.float32(1), 2], ValueError, r"differs in shape or dtype.*float32\[\], int32"),
     ([{"a": 1}, {"b": 1}], ValueError, "another structure on replica 1"),
     (["a", "b"], TypeError, "`value` is 'a', which is not an array or a number"),
     ([None, 1.0], ValueError, "another structure on replica 1")])  # fmt: skip
def test_per_replica_errors(two, tree, error, words):
    with pytest.raises(error, match=words):
        two.per_replica(tree)


def test_values_from_a_function(four):
    contexts = []

    def value_fn(context):
        contexts.append(
            (context.replica_id_in_sync_group, context.num_replicas_in_sync)
        )
        i = context.replica_id_in_sync_group
        return {"i": range(10)[i], "same": 3.0, "row": np.full(2, i, np.float32)}

    out = four.experimental_distribute_values_from_function(value_fn)
    assert contexts == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert versions(out["i"]) == [0, 1, 2, 3]
    assert versions(out["same"]) == [3, 3, 3, 3]  # equal values stay four versions
    squares = four.run(lambda v: v["row"] ** 2, (out,))
    assert versions(squares) == [[0, 0], [1, 1], [4, 4], [9, 9]]


def test_values_from_a_function_must_agree(two):
    with pytest.raises(ValueError, match="differs in shape or dtype"):
        two.experimental_distribute_values_from_function(
            lambda context: np.ones(context.replica_id_in_sync_group)
        )
    with pytest.raises(TypeError, match="not an array or a number"):
        two.experimental_distribute_values_from_function(lambda context: "text")


def test_init_builds_mirrored_state_with_one_call(four):
    calls = []

    def build(key, width, *, name="net"):
        calls.append(js.in_cross_replica_context())
        w = jax.random.normal(key, (width, 2))
        return {"w": w, "step": 0, "name": name, "count": jnp.zeros((), jnp.int32)}

    state = four.init(build, jax.random.key(1), 3)
    assert calls == [True]
    expected = jax.random.normal(jax.random.key(1), (3, 2))
    np.testing.assert_array_equal(state["w"], expected)
    assert isinstance(state["w"], js.Mirrored) and isinstance(
        state["count"], js.Mirrored
    )
    assert (state["step"], state["name"]) == (0, "net")
    assert state["w"].devices() == set(jax.devices()[:4])


def test_init_errors(four, x):
    with pytest.raises(TypeError, match="`init` was given 3, which cannot be called"):
        four.init(3)
    with pytest.raises(TypeError, match="`init` was given a PerReplica"):
        four.init(lambda v: v, x)
    with pytest.raises(TypeError, match=r"`build\(\.\.\.\)\['a'\]` is .*a generator"):

        def build():
            return {"a": (i for i in [1])}

        four.init(build)


@each_of("size", [64, 4096, 1 << 18, 1 << 20])
def test_what_was_placed_stays_when_numpy_changes_its_array(two, size):
    plain, stacked = np.zeros(size, np.float32), np.zeros((2, size), np.float32)
    mirrored, versions = two.mirror(plain), two.per_replica(stacked)
    plain[:], stacked[:] = 7, 7
    assert not np.asarray(mirrored).any() and not np.asarray(versions.stacked).any()


# `experimental_local_results` gives what can be computed with each other.


def per_replica(strategy, shape=(), dtype=np.float32):
    n = strategy.num_replicas_in_sync
    values = np.arange(n * int(np.prod(shape))).reshape(n, *shape).astype(dtype)
    return strategy.per_replica(values), values


def test_so_are_mirrored_arrays_and_containers(four):
    x, _ = per_replica(four)
    w = four.mirror(np.ones((300, 300), np.float32))
    versions = four.experimental_local_results({"x": x, "w": w, "n": 3})
    total = sum(v["x"] * v["w"][0, 0] * v["n"] for v in versions)
    assert total == 18
    assert all(v["w"] is w for v in versions)  # nothing is copied
    assert sum(four.experimental_local_results(w)).shape == (300, 300)


def test_large_versions_are_not_copied(four):
    x, host = per_replica(four, (17000,))
    versions = four.experimental_local_results(x)
    assert [v.devices() for v in versions] == [{device} for device in four.devices]
    np.testing.assert_array_equal(np.stack(jax.device_get(versions)), host)
    with pytest.raises(ValueError, match="incompatible devices"):
        sum(versions)
    together = [jax.device_put(v, four.devices[0]) for v in versions]
    np.testing.assert_array_equal(sum(together), host.sum(0))


def test_random_keys_and_real_rows(four):
    keys = four.run(lambda: js.get_replica_context().fold_in(jax.random.key(0)))
    versions = four.experimental_local_results(keys)
    wanted = [jax.random.fold_in(jax.random.key(0), i) for i in range(4)]
    for version, key in zip(versions, wanted, strict=True):
        assert (jax.random.key_data(version) == jax.random.key_data(key)).all()
    _, batch = four.experimental_distribute_dataset(js.batches(np.arange(10.0), 8))
    rows = four.experimental_local_results(batch)
    np.testing.assert_array_equal(jnp.concatenate(rows), [8, 9])
