"""State that is built in parts: the bits of whole state, and never all of it."""

import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxstrategy as js
from jaxstrategy._src.tracing import init


def sharded(count=8, shard="state", **options):
    chosen = js.StateSharding(shard, **{"min_bytes": 0, **options})
    return js.MirroredStrategy(jax.devices()[:count], sharding=chosen)


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


def divided(strategy, tree):
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
    strategy = sharded()
    state = check_like_whole(strategy, draws, jax.random.key(3))
    assert state["text"] == "as it is"
    whole = {"['odd']", "['key']", "['text']"}
    assert divided(strategy, state) == {f"['{name}']" for name in state} - whole


def test_keys_whose_numbers_depend_on_the_device_draw_those_of_whole_state():
    key = jax.random.key(3, impl="rbg")
    check_like_whole(sharded(), lambda key: jax.random.bits(key, (16, 3)), key)


class Net(nn.Module):
    layers: int = 3

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = nn.Dense(32)(nn.LayerNorm()(x))
        return x


def train_state(key):
    variables = Net().init(key, jnp.ones((2, 32)))
    return TrainState.create(
        apply_fn=None, params=variables["params"], tx=optax.adamw(0.1)
    )


@pytest.mark.slow
def test_a_train_state_is_built_in_parts():
    strategy = sharded(shard="optimizer")
    state = check_like_whole(strategy, train_state, jax.random.key(0))
    found = divided(strategy, state)
    moments = {path for path in found if ".opt_state" in path}
    assert len(moments) == 2 * 12 and ".step" not in found
    assert found == moments


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def nnx_state():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@pytest.mark.slow
def test_objects_of_nnx_are_built_in_parts():
    strategy = sharded()
    model, optimizer = check_like_whole(strategy, nnx_state)
    assert isinstance(model, Model) and isinstance(optimizer, nnx.Optimizer)
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
    state = sharded().init(layers, jax.random.key(0))
    monkeypatch.undo()
    at_rest = on_one_device() - before
    assert len(jax.tree.leaves(state)) == 13
    assert at_rest < 12 * leaf / 8 * 1.1
    assert len(most) == 8 and max(most) < at_rest + 2.2 * leaf
    # The moments, which are zeros, in parts; then one array after the other: its random
    # bits, of which two words are drawn at once, and itself.
    assert taken[0] < 8 * leaf / 8 * 1.1
    assert len(taken) == 5 and max(taken[1:]) < 6 * leaf


def test_layers_of_one_kind_are_one_program(compilations):
    key = sharded().mirror(jax.random.key(0))
    compilations()
    sharded().init(lambda key: layers(key, 16, 8), key)
    # All that is exact in parts; a layer; its division.
    assert compilations() <= 3


def test_layers_that_differ_in_an_array_are_not_taken_for_each_other():
    one, two = np.arange(2048.0), np.arange(2048.0)
    two[1000] = 5  # where printing leaves out

    def build():
        return [jnp.sqrt(jnp.asarray(one)), jnp.sqrt(jnp.asarray(two))]

    first, second = check_like_whole(sharded(), build)
    assert first[1000] != second[1000]


@pytest.mark.slow
def test_what_the_function_does_besides_is_done_once():
    seen = []

    def build(key):
        jax.debug.callback(lambda: seen.append("built"))
        return layers(key, 16, 3)

    sharded(2).init(build, jax.random.key(0))
    jax.effects_barrier()
    traced = []
    sharded(2).init(lambda key: traced.append(1) or layers(key, 16, 3),
                    jax.random.key(0))  # fmt: skip
    assert seen in (["built"], ["built"] * 2)  # once on each device, as whole state is
    assert traced == [1]


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
