"""State that is divided over the replicas: outside of steps, and how it is built."""

import copy
import gc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers.cases import each_of
from helpers.divided import lies, sharded, whole as mirrored
from jax.sharding import NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing import init


@each_of("limit", [mesh._AT_ONCE_BYTES, 16])
@each_of("before", ["host", "one device", "every device", "rows"])
def test_all_placements_are_divided_without_a_share_in_their_memory(
    before, limit, monkeypatch
):
    monkeypatch.setattr(mesh, "_AT_ONCE_BYTES", limit)
    strategy, whole = sharded(4), np.arange(64.0, dtype=np.float32).reshape(2, 32)
    given = {
        "host": lambda: whole,
        "one device": lambda: jnp.asarray(whole),
        "every device": lambda: mirrored(4).mirror(whole),
        "rows": lambda: jax.device_put(
            whole,
            NamedSharding(mirrored(2).mesh, PartitionSpec("replica")),
        ),
    }[before]()
    placed = strategy.mirror(given)
    assert strategy._replicas.dimension_of(placed) == 1
    held = np.array(placed)
    if isinstance(given, jax.Array):
        given.delete()
    np.testing.assert_array_equal(placed, held)
    np.testing.assert_array_equal(placed, whole)


def test_the_chosen_dimension_hears_the_path_and_no_numbers():
    replies = []

    def choose(path, leaf):
        replies.append((path, leaf.shape))
        return 1 if "kernel" in path else None

    strategy = sharded(2, dimension=choose)
    state = {"kernel": np.ones((4, 6)), "bias": np.ones(4), "step": 3, "n": np.int32(0)}
    placed = strategy.mirror(state)
    assert lies(strategy, placed) == {
        "['bias']": None, "['kernel']": 1, "['n']": None, "['step']": None
    }  # fmt: skip
    assert sorted(replies) == [("['bias']", (4,)), ("['kernel']", (4, 6))]


def test_a_mirrored_strategy_refuses_to_run_on_parts():
    placed = sharded(4).mirror(np.arange(8.0))
    plain = mirrored(4)
    for strategy in (plain, sharded(2), js.MirroredStrategy(jax.devices()[2:6])):
        with pytest.raises(js.errors.PlacementError, match=r"state that another strat"):
            strategy.run(lambda w: w * 2, (placed,))
        found = strategy.run(lambda w: w * 2, (strategy.mirror(placed),))
        np.testing.assert_array_equal(found, 2 * np.arange(8.0))


@each_of("size", [8, 40_000])
def test_steps_may_refer_to_parts_from_outside(size):
    strategy, whole = sharded(4), np.arange(float(size), dtype=np.float32)
    w = strategy.mirror(whole)
    x = strategy.per_replica([1.0, 2.0, 3.0, 4.0])
    for found, factor in zip(
        strategy.run(lambda x: x * w, (x,)).values, (1, 2, 3, 4), strict=True
    ):
        np.testing.assert_array_equal(found, factor * whole)
    plain = mirrored(4)
    with pytest.raises(js.errors.PlacementError, match="captures, float32.*is split"):
        plain.run(lambda x: x * w, (x,))


def test_traced_arrays_are_divided():
    strategy, x = sharded(4), jnp.arange(8.0)
    divided = jax.jit(strategy.mirror)(x)
    assert isinstance(divided, js.Sharded)
    np.testing.assert_array_equal(divided, x)
    _, tangent = jax.jvp(strategy.mirror, (x,), (x,))
    np.testing.assert_array_equal(tangent, x)
    grad = jax.grad(lambda x: (strategy.mirror(x) ** 2).sum())(x)
    np.testing.assert_array_equal(grad, 2 * x)
    rows = jnp.arange(16.0).reshape(2, 8)
    np.testing.assert_array_equal(jax.vmap(strategy.mirror)(rows), rows)


class Momentum(NamedTuple):
    """The state of a transformation of the user's own."""

    trace: Any


class Weights(NamedTuple):
    """Parameters, as some users keep them."""

    w: Any
    b: Any


def own():
    return optax.GradientTransformation(
        lambda params: Momentum(jax.tree.map(jnp.zeros_like, params)),
        lambda updates, state, params=None: (updates, state),
    )


def leaf_kinds(state):
    strategy = sharded(2, "optimizer")
    placed = strategy.mirror(state)
    return {
        path: "part" if dimension is not None else "whole"
        for path, dimension in lies(strategy, placed).items()
        if "count" not in path
    }


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "one by itself": optax.scale_by_adam,
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "own before one by itself": lambda: optax.chain(own(), optax.scale_by_adam()),
    "own, nested": lambda: optax.chain(optax.chain(own(), optax.trace(0.9)), own()),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "several": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.chain(own(), optax.sgd(0.1, 0.9))},
        {"w": "a", "b": "b"},
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(own(), 3),
}


@each_of("name", OPTIMIZERS)
@each_of("kind", ["dict", "named tuples", "TrainState", "pair"])
def test_all_of_an_optimizers_state_is_divided_and_no_parameter(name, kind):
    params, optimizer = {"w": jnp.ones((8, 4)), "b": jnp.ones(8)}, OPTIMIZERS[name]()
    if kind == "named tuples" and name != "several":
        params = Weights(**params)
    opt_state = optimizer.init(params)
    state = {
        "dict": {"params": params, "opt": opt_state, "stats": jnp.zeros(8)},
        "named tuples": (params, opt_state),
        "TrainState": TrainState(0, None, params, optimizer, opt_state),
        "pair": (params, opt_state, jnp.zeros(8)),
    }[kind]
    kinds = leaf_kinds(state)
    placed = jax.tree.leaves_with_path(state)
    own = {id(leaf) for leaf in jax.tree.leaves(opt_state) if leaf.shape}
    for path, leaf in placed:
        name = jax.tree_util.keystr(path)
        if name in kinds:
            assert kinds[name] == ("part" if id(leaf) in own else "whole"), name
    assert own


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def test_the_variables_of_an_optimizer_of_nnx_are_divided_and_not_the_models():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(own(), optax.adam(0.1)), wrt=nnx.Param)
    strategy = sharded(2, "optimizer")
    found = lies(strategy, strategy.mirror((model, optimizer)))
    divided = {path for path, dimension in found.items() if dimension is not None}
    assert divided == {
        path for path in found if "opt_state" in path and "count" not in path
    }
    assert len(divided) == 12  # a trace and two moments of four parameters
    state = nnx.state(optimizer)  # the same as a pytree
    found = lies(strategy, strategy.mirror(state))
    assert {v for k, v in found.items() if "mu" in k} == {0, 1}


@pytest.fixture
def divided():
    strategy = sharded(4)
    return strategy, strategy.mirror(np.arange(8.0, dtype=np.float32))


def test_reductions_of_parts_are_those_of_the_whole(divided):
    strategy, w = divided
    whole = np.arange(8.0)
    np.testing.assert_array_equal(strategy.reduce("sum", w), 4 * whole)
    for op in ("mean", "min", "max"):
        np.testing.assert_array_equal(strategy.reduce(op, w), whole)
    assert strategy.reduce("sum", w, axis=0) == 4 * whole.sum()
    assert strategy.reduce("mean", w, axis=0) == whole.mean()


def tampered(array, replica):
    parts = [shard.data for shard in array.addressable_shards]
    device = parts[replica].devices().pop()
    parts[replica] = jax.device_put(parts[replica] + 1, device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@each_of("shard", ["state", "optimizer"])
def test_whole_leaves_are_compared_and_parts_are_not(shard):
    strategy = sharded(4, shard)
    whole = mirrored(4).mirror
    divided = jax.device_put(np.arange(8.0), strategy._replicas.sharding(0))
    strategy.assert_in_sync({"parts": divided})
    strategy.assert_in_sync({"parts": divided, "big": whole(np.ones(8)), "n": 3})
    state = {"parts": tampered(divided, 2), "big": whole(np.ones(8))}
    strategy.assert_in_sync(state)  # each part is the only one
    state["big"] = tampered(state["big"], 3)
    with pytest.raises(js.errors.OutOfSyncError) as caught:
        strategy.assert_in_sync(state, "state")
    assert caught.value.leaves == {"state['big']": ((0, 1, 2), (3,))}


def test_a_strategy_says_what_it_divides():
    assert (
        repr(sharded(2))
        == "MirroredStrategy(2 replicas on cpu:0, cpu:1, sharding='state')"
    )
    twin = copy.deepcopy(sharded(2, "optimizer"))
    assert repr(twin).endswith("sharding='optimizer')")
    moments = optax.adam(0.1).init({"w": jnp.ones(8)})
    assert isinstance(twin.mirror(moments)[0].mu["w"], js.Sharded)


# State that is built in parts: the bits of whole state, and never all of it.


def bits(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, jax.Array)
    }


def check_like_whole(strategy, build, *args):
    """The state that `strategy` builds; its bits are those of whole state."""
    whole = js.MirroredStrategy(strategy.devices).init(build, *args)
    found = strategy.init(build, *args)
    assert bits(found) == bits(whole)
    return found


def divided_paths(strategy, tree):
    return {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, js.Sharded)
    }


def draws(key):
    """Numbers that are rounded, in shapes whose parts end where whole rows do not."""
    normal = jax.random.normal(key, (16, 33))
    return {
        "normal": normal,
        "columns": jax.nn.initializers.lecun_normal()(key, (7, 24)),
        "orthogonal": jax.nn.initializers.orthogonal()(key, (16, 9)),
        "of unit length": normal / jnp.linalg.norm(normal, axis=0, keepdims=True),
        "joined": jnp.concatenate([normal * 0, -normal * 0]),
        "zeros": jnp.zeros((8, 3)),
        "numbers": jnp.arange(16),
        "odd": jax.random.normal(key, (3, 5)),
        "turns": jax.lax.map(lambda k: jax.random.normal(k, (3,)),
                             jax.random.split(key, 8)),
        "key": jax.random.fold_in(key, 3),
        "text": "as it is",
    }  # fmt: skip


@pytest.mark.slow
def test_the_bits_are_those_of_whole_state():
    strategy = sharded(8)
    state = check_like_whole(strategy, draws, jax.random.key(3))
    assert state["text"] == "as it is"
    whole = {"['odd']", "['key']", "['text']"}
    assert divided_paths(strategy, state) == {f"['{name}']" for name in state} - whole


def nnx_state():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@pytest.mark.slow
def test_objects_of_nnx_are_built_in_parts():
    strategy = sharded(8)
    model, optimizer = check_like_whole(strategy, nnx_state)
    assert isinstance(model, Net) and isinstance(optimizer, nnx.Optimizer)
    assert isinstance(optimizer.opt_state[0].mu["dense"]["kernel"][...], js.Sharded)
    assert isinstance(model.dense.kernel[...], js.Sharded)
    assert isinstance(model.drop.rngs.count[...], js.Mirrored)


def on_one_device():
    """The bytes of all arrays that JAX has on device 0."""
    gc.collect()  # of what other tests in this process have left
    found = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted()
        and not jnp.issubdtype(array.dtype, jax.dtypes.extended)
        for shard in array.addressable_shards
        if shard.device == jax.devices()[0]
    }
    return sum(found.values())


def layers(key, width=128, count=4):
    keys = jax.random.split(key, count)
    params = [jax.random.normal(key, (width, width)) for key in keys]
    return {"params": params, "opt": optax.adam(0.1).init(params)}


def test_no_device_ever_has_more_than_its_parts_and_one_array(monkeypatch):
    leaf, taken, most = 128 * 128 * 4, [], []
    jit, place = jax.jit, init.mesh.place

    def analysed(fn, **options):
        jitted = jit(fn, **options)

        def call(*args):
            compiled = jitted.lower(*args).compile()
            found = compiled.memory_analysis()
            taken.append(found.temp_size_in_bytes + found.output_size_in_bytes)
            return compiled(*args)

        return call

    class Jax:
        jit = staticmethod(analysed)
        __getattr__ = staticmethod(lambda name: getattr(jax, name))

    def watched(value, sharding):
        most.append(on_one_device() - before)
        moved = place(value, sharding)
        most.append(on_one_device() - before)
        return moved

    monkeypatch.setattr(init, "jax", Jax())
    monkeypatch.setattr(init.mesh, "place", watched)
    before = on_one_device()
    state = sharded(8).init(layers, jax.random.key(0))
    monkeypatch.undo()
    at_rest = on_one_device() - before
    assert len(jax.tree.leaves(state)) == 13
    assert at_rest < 12 * leaf / 8 * 1.1
    assert len(most) == 8 and max(most) < at_rest + 2.2 * leaf
    # The moments, which are zeros, in parts; then one array after the other: its random
    # bits, of which two words are drawn at once, and itself.
    assert taken[0] < 8 * leaf / 8 * 1.1
    assert len(taken) == 5 and max(taken[1:]) < 6 * leaf


@each_of("wrapped", [lambda build: build, jax.jit])
def test_layers_of_one_kind_are_one_program(compilations, wrapped):
    key = sharded(8).mirror(jax.random.key(0))
    compilations()
    sharded(8).init(wrapped(lambda key: layers(key, 16, 8)), key)
    # All that is exact in parts; a layer; its division.
    assert compilations() <= 3


def test_layers_that_differ_in_an_array_are_not_taken_for_each_other():
    one, two = np.arange(2048.0), np.arange(2048.0)
    two[1000] = 5  # where printing leaves out

    def build():
        return [jnp.sqrt(jnp.asarray(one)), jnp.sqrt(jnp.asarray(two))]

    first, second = check_like_whole(sharded(8), build)
    assert first[1000] != second[1000]


def test_state_is_built_while_its_caller_is_traced():
    strategy = sharded(4)

    def build(x):
        return strategy.init(lambda x: {"w": jnp.sin(x) * jnp.ones(8)}, x)["w"]

    assert isinstance(jax.jit(build)(1.0), js.Sharded)
    np.testing.assert_allclose(jax.jit(build)(1.0), np.full(8, np.sin(1.0)), rtol=1e-6)
    grad = jax.grad(lambda x: build(x).sum())(1.0)
    np.testing.assert_allclose(grad, 8 * np.cos(1.0), rtol=1e-6)
    assert jax.vmap(build)(jnp.ones(3)).shape == (3, 8)
    assert jax.eval_shape(build, 1.0).shape == (8,)
