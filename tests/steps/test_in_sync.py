"""`assert_in_sync`: which arrays differ between the replicas, and which replicas."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers.cases import each_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxstrategy as js

SHAPE = (3, 5)

DTYPES = (
    "bool int4 int8 uint16 int32 uint64 float4_e2m1fn float8_e4m3fn bfloat16 float32 "
    "float64 complex64 complex128"
).split()


def assembled(strategy, copies):
    """A mirrored array whose copy on replica i is `copies[i]`, put together by hand."""
    with jax.enable_x64(True):
        placed = [
            jax.device_put(jnp.asarray(copy), device)
            for copy, device in zip(copies, strategy.devices, strict=True)
        ]
    sharding = NamedSharding(strategy.mesh, P())
    return jax.make_array_from_single_device_arrays(copies[0].shape, sharding, placed)


def drifted(strategy, array, change, *replica_ids):
    """`array` mirrored, with `change(array)` as the copy of some replicas."""
    return assembled(
        strategy,
        [
            change(array.copy()) if i in replica_ids else array
            for i in range(strategy.num_replicas_in_sync)
        ],
    )


def differing(strategy, tree, name="tree"):
    """`leaves` of the error that is raised, `{}` if none is."""
    try:
        strategy.assert_in_sync(tree, name)
    except js.errors.OutOfSyncError as error:
        return error.leaves
    return {}


def bits_of(dtype):
    if dtype == "bool":
        return 1
    if dtype.startswith("complex"):
        return jnp.dtype(dtype).itemsize * 8
    kind = jnp.finfo if "float" in dtype else jnp.iinfo
    return kind(dtype).bits


def flip(array, element, bit):
    """One bit of one element turned; `array` itself is changed."""
    octets = array.reshape(-1).view(np.uint8).reshape(array.size, -1)
    octets[element, bit // 8] ^= 1 << bit % 8  # little-endian
    return array


# One strategy for all tests: its programs are compiled once.
@pytest.fixture(scope="module")
def strategy():
    return js.MirroredStrategy(jax.devices()[:4])


@pytest.fixture(scope="module")
def host():
    """An array of every dtype, of random bits."""
    rng = np.random.default_rng(0)

    def draw(dtype):
        octets = rng.integers(0, 256, (15, jnp.dtype(dtype).itemsize), np.uint8)
        if bits_of(dtype) < 8:
            octets &= 2 ** bits_of(dtype) - 1
        return octets.reshape(-1).view(jnp.dtype(dtype)).reshape(SHAPE)

    return {dtype: draw(dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def mirrored(strategy, host):
    """All of them mirrored; a random key, an empty array and a scalar too."""
    tree = {dtype: drifted(strategy, array, None) for dtype, array in host.items()}
    tree["key"] = strategy.mirror(jax.random.key(0))
    tree["empty"] = strategy.mirror(np.zeros((2, 0), np.float32))
    tree["scalar"] = strategy.mirror(np.float32(1))
    return tree


def test_nothing_differs(strategy, mirrored):
    assert strategy.assert_in_sync(mirrored) is None


@each_of("dtype", DTYPES)
def test_one_bit_of_any_dtype(strategy, mirrored, host, dtype):
    for bit in {0, bits_of(dtype) // 2, bits_of(dtype) - 1}:
        array = drifted(strategy, host[dtype], lambda a, b=bit: flip(a, 7, b), 2)
        assert array.dtype == dtype
        tree = {**mirrored, dtype: array}
        assert differing(strategy, tree) == {f"tree['{dtype}']": ((0, 1, 3), (2,))}


def test_bits_are_compared_not_numbers(strategy, mirrored):
    zeros = np.zeros(SHAPE, np.float32)
    nans = np.full(SHAPE, np.nan, np.float32)
    signalling = np.full(SHAPE, 0x7F800001, np.uint32).view(np.float32)
    for a, b, same in (
        (zeros, zeros, True),
        (zeros, -zeros, False),
        (nans, nans, True),
        (nans, -nans, False),
        (nans, signalling, False),
        (signalling, signalling, True),
    ):
        tree = {**mirrored, "float32": assembled(strategy, [a, b, b, b])}
        expected = {} if same else {"tree['float32']": ((1, 2, 3), (0,))}
        assert differing(strategy, tree) == expected


def test_versions_of_a_per_replica(strategy):
    row = np.arange(4.0, dtype=np.float32)
    equal = strategy.per_replica([row, row, row, row])
    other = strategy.per_replica([row, -row, row, -row])
    three = strategy.per_replica([row, -row, 2 * row, row])
    by_hand = js.PerReplica(np.stack([row, row, row, 2 * row]))  # still on the host
    assert differing(strategy, {"a": equal, "b": equal}) == {}
    assert differing(strategy, {"a": equal, "b": other, "c": three}) == {
        "tree['b']": ((0, 2), (1, 3)), "tree['c']": ((0, 3), (1,), (2,)),
    }  # fmt: skip
    assert differing(strategy, {"a": by_hand, "b": equal}) == {
        "tree['a']": ((0, 1, 2), (3,))
    }


def test_an_array_on_a_mesh_of_the_users(strategy):
    row = np.arange(4.0, dtype=np.float32)
    mesh = Mesh(np.asarray(strategy.devices), ("data",))
    array = jax.device_put(row, NamedSharding(mesh, P()))
    assert differing(strategy, array) == {}
    shards = [
        shard.data * 2 if i == 1 else shard.data
        for i, shard in enumerate(array.addressable_shards)
    ]
    array = jax.make_array_from_single_device_arrays((4,), array.sharding, shards)
    assert differing(strategy, array) == {"tree": ((0, 2, 3), (1,))}


def test_an_object_around_an_array(strategy):
    class Variable:
        def __init__(self, array):
            self.array = array

        def __jax_array__(self):
            return self.array

    array = drifted(strategy, np.ones(4, np.float32), np.negative, 2)
    assert differing(strategy, [Variable(array)]) == {"tree[0]": ((0, 1, 3), (2,))}


def test_what_has_one_copy(strategy, compilations):
    tree = [1, 2.0, True, "text", None, len, object(), np.ones(3), np.float32(1)]
    tree += [jnp.ones(3), jax.device_put(1.0, strategy.devices[2])]
    tree += [jax.device_put(1.0, jax.devices()[7])]
    compilations()
    strategy.assert_in_sync(tree)
    strategy.assert_in_sync({})
    assert compilations() == 0


def test_one_replica_agrees_with_itself(compilations):
    for one in (js.OneDeviceStrategy("CPU:1"), js.MirroredStrategy(["CPU:0"])):
        tree = {"w": one.mirror(np.ones(3)), "v": one.per_replica([1.0]), "s": "text"}
        compilations()
        one.assert_in_sync(tree)
        assert compilations() == 0
    js.get_strategy().assert_in_sync({"w": jnp.ones(3), "n": 1})


def train_state():
    params = {"dense": {"w": np.ones(4, np.float32), "b": np.ones(2, np.float32)}}
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(apply_fn=len, params=params, tx=tx)


def test_paths_are_as_the_user_would_write_them(strategy):
    state = strategy.mirror(train_state())
    strategy.assert_in_sync(state)
    bad = drifted(strategy, np.ones(4, np.float32), np.negative, 3)

    def replaced(path, leaf):
        return bad if "'w'" in jax.tree_util.keystr(path) else leaf

    found = differing(strategy, jax.tree.map_with_path(replaced, state), "state")
    assert found == {
        "state.params['dense']['w']": ((0, 1, 2), (3,)),
        "state.opt_state[0].trace['dense']['w']": ((0, 1, 2), (3,)),
    }


def test_message_of_one_replica(strategy):
    bad = drifted(strategy, np.ones(4, np.float32), np.negative, 2)
    with pytest.raises(js.errors.OutOfSyncError) as raised:
        strategy.assert_in_sync({"w": bad}, "state")
    first, second, advice = str(raised.value).split("\n")
    assert first == "1 array is not equal, bit by bit, on all replicas:"
    assert second == "  `state['w']`: replica 2 differs from the other 3"
    for words in (
        "`run` gives back as one array only what it has proved equal",
        "A PerReplica differs if something it was computed from was not reduced",
        "restore a checkpoint, or mirror the copies of one replica i that you trust",
        "`strategy.mirror(tree, replica=i)`",
    ):
        assert words in advice


@each_of("groups, words", [(((0, 1, 3), (2,)), "replica 2 differs from the other 3"),
     (((0, 1, 3, 4, 6, 7), (2, 5)), "replicas 2, 5 differ from the other 6"),
     (((0, 3, 4), (2,), (1,)), "replicas 1, 2 differ from the other 3"),
     (((0, 1), (2,), (3,)), "replicas 0, 1 | 2 | 3"),
     (((0,), (1,)), "replicas 0 | 1"),
     (((0, 2), (1, 3)), "replicas 0, 2 | 1, 3"),
     ((tuple(range(9, 32)), tuple(range(9))),
      "replicas 0, 1, 2, 3, 4, 5, 6, 7 and 1 more differ from the other 23"),
     (tuple((i,) for i in range(10)),
      "replicas 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 and 2 more")])  # fmt: skip
def test_who_differs_from_whom(groups, words):
    told = str(js.errors.OutOfSyncError({"tree": groups})).split("\n")[1]
    assert told == f"  `tree`: {words}"


def test_the_error_can_be_copied_and_pickled():
    error = js.errors.OutOfSyncError({"tree['w']": ((0, 1), (2,))})
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (twin.leaves, str(twin)) == (error.leaves, str(error))
    assert isinstance(error, RuntimeError)


def test_arrays_of_another_strategy(strategy, two):
    array = two.mirror(np.ones(4, np.float32))
    words = r"`state\['w'\]` lies on several devices, as NamedSharding.* but not whole "
    words += r"on each of this strategy's, cpu:0\.\.3: there are no copies to compare"
    with pytest.raises(js.errors.PlacementError, match=words):
        strategy.assert_in_sync({"w": array}, "state")
    with pytest.raises(js.errors.PlacementError, match="Use the strategy it belongs"):
        js.get_strategy().assert_in_sync(array)


def test_a_plain_array_split_over_the_replicas(strategy):
    split = strategy.per_replica([1, 2, 3, 4]).stacked
    words = "if entry i belongs to replica i, pass `PerReplica"
    with pytest.raises(js.errors.PlacementError, match=words):
        strategy.assert_in_sync(split)


def test_a_per_replica_of_another_strategy(strategy, two):
    with pytest.raises(js.errors.PlacementError, match=r"`tree\[0\]` is a PerReplica"):
        strategy.assert_in_sync([two.per_replica([1, 1])])
    others = js.MirroredStrategy(jax.devices()[4:])
    with pytest.raises(js.errors.PlacementError, match="PerReplica of another strateg"):
        strategy.assert_in_sync([others.per_replica([1, 1, 1, 1])])


def test_a_donated_array(strategy):
    step = strategy.run(options=js.RunOptions(donate_argnums=0))(lambda w: w + 1)
    old = strategy.mirror({"w": np.ones(4, np.float32)})
    strategy.assert_in_sync(old)
    step(old["w"])
    with pytest.raises(js.errors.DonatedValueError, match=r"`tree\['w'\]` was donated"):
        strategy.assert_in_sync(old)


def test_inside_a_step(strategy):
    array = strategy.mirror(np.ones(4, np.float32))
    with pytest.raises(js.errors.ContextError, match="assert_in_sync` was called"):
        strategy.run(lambda: strategy.assert_in_sync(array))

    def merge(x):
        return js.get_replica_context().merge_call(js.Strategy.assert_in_sync, (x,))

    with pytest.raises(js.errors.ContextError, match="`merge_call`, while a step is"):
        strategy.run(merge, (array,))


def test_inside_a_function_that_jax_traces(strategy):
    array = strategy.mirror(np.ones(4, np.float32))
    versions = strategy.per_replica([1.0, 1.0, 1.0, 1.0])

    def check(tree):
        strategy.assert_in_sync(tree)
        return 0.0

    words = r"`assert_in_sync` cannot look at `tree\['w'\]` while JAX traces the fun"
    for tree in ({"w": array}, {"w": versions}):
        with pytest.raises(js.errors.TracedValueError, match=words):
            jax.jit(check)(tree)
    with pytest.raises(js.errors.TracedValueError, match="Call it outside, between"):
        jax.grad(check)(array)
    with pytest.raises(js.errors.TracedValueError, match="cannot look at `tree` while"):
        jax.jit(lambda: check(array))()


def test_nothing_is_compiled_twice_and_nothing_changes(strategy, compilations):
    tree = {"w": strategy.mirror(np.arange(6.0, dtype=np.float32)), "name": "net"}
    tree["v"] = strategy.per_replica([3, 3, 3, 3])
    tree["empty"] = strategy.mirror(np.zeros(0, np.float32))
    strategy.assert_in_sync(tree)
    assert compilations() > 0
    before = [id(leaf) for leaf in jax.tree.leaves(tree)]
    for name in ("tree", "state"):
        strategy.assert_in_sync(tree, name)
    assert compilations() == 0
    assert before == [id(leaf) for leaf in jax.tree.leaves(tree)]
    assert tree["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert tree["v"].stacked.tolist() == [3, 3, 3, 3]
