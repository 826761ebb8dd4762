"""Checkpoints of divided state: written and read in parts, by any strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.checkpoint import CheckpointManager


def sharded(count=8, shard="state", each=1, **options):
    chosen = js.StateSharding(shard, **{"min_bytes": 0, **options})
    devices = jax.devices()[:count]
    return js.MirroredStrategy(devices, sharding=chosen, replicas_per_device=each)


STRATEGIES = {
    "8 parts": sharded,
    "4 parts": lambda: sharded(4),
    "optimizer in 2 parts": lambda: sharded(2, "optimizer"),
    "1 device": lambda: js.OneDeviceStrategy(jax.devices()[3]),
    "2 copies": lambda: js.MirroredStrategy(jax.devices()[:2]),
    "4 parts, shared": lambda: sharded(2, each=2),
}


def state_of(number):
    """A state on the host, as `strategy.mirror` takes it."""
    rng = np.random.default_rng(number)
    params = {
        "w": rng.normal(size=(24, 16)).astype(np.float32),
        "half": jnp.asarray(rng.normal(size=(8, 3)), jnp.bfloat16),
        "odd": rng.normal(size=(3, 5)).astype(np.float32),
    }
    moments = optax.adam(0.1).init(params)
    moments = jax.tree.map(lambda x: x + jnp.asarray(number, x.dtype), moments)
    return {
        "params": params,
        "opt": moments,
        "key": jax.random.key(number),
        "n": number,
    }


def bits(tree):
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf) if "key" in jax.tree_util.keystr(path) else leaf
        ).tobytes()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def divided(tree):
    return {
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, js.Sharded)
    }


MOMENTS = {f"['opt'][0].{m}['{w}']" for m in ("mu", "nu") for w in ("w", "half")}
PARAMETERS = {"['params']['w']", "['params']['half']"}
DIVIDED = {
    "8 parts": MOMENTS | PARAMETERS, "4 parts": MOMENTS | PARAMETERS,
    "4 parts, shared": MOMENTS | PARAMETERS,
    "optimizer in 2 parts": MOMENTS,
}  # fmt: skip


def saved(folder, state, step=1):
    with CheckpointManager(folder, asynchronous=False) as manager:
        assert manager.save(step, state)


def restored(folder, like, strategy=None, step=None):
    with CheckpointManager(folder, strategy) as manager:
        return manager.restore(like, step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of each strategy: number i is of the i-th one."""
    made = tmp_path_factory.mktemp("checkpoints")
    with CheckpointManager(made, keep=None) as manager:
        for number, name in enumerate(STRATEGIES):
            strategy = STRATEGIES[name]()
            state = strategy.mirror(state_of(number))
            assert divided(state) == DIVIDED.get(name, set())
            manager.save(number, {**state, "n": number})
    return made


@pytest.mark.slow
@each_of(
    "name, kind",
    [*((name, "placed") for name in STRATEGIES), ("8 parts", "free"),
     ("optimizer in 2 parts", "types")],
)  # fmt: skip
def test_any_strategy_restores_what_any_other_saved(folder, name, kind):
    strategy = STRATEGIES[name]()
    like = jax.tree.map(jnp.zeros_like, {**state_of(9), "key": 0})
    like |= {"key": jax.random.key(0), "n": 0}
    if kind == "placed":
        like = {**strategy.mirror(like), "n": 0}
    elif kind == "types":
        like = {**jax.eval_shape(lambda: like), "n": 0}
    for number, saver in enumerate(STRATEGIES):
        if saver != name and "8 parts" not in (saver, name):
            continue
        found = restored(folder, like, strategy, number)
        assert bits(found) == bits(state_of(number))
        assert divided(found) == DIVIDED.get(name, set())
        where = {tuple(leaf.devices()) for leaf in jax.tree.leaves(found)
                 if isinstance(leaf, jax.Array)}  # fmt: skip
        assert {frozenset(devices) for devices in where} == {
            frozenset(strategy.devices)
        }


def test_a_state_says_where_it_is_to_lie(folder):
    whole = js.MirroredStrategy(jax.devices()[:4])
    like = {**whole.mirror(state_of(9)), "n": 0}
    found = restored(folder, like, sharded(4), 0)  # it lies somewhere already
    assert not divided(found) and bits(found) == bits(state_of(0))
    like = {**sharded(4).mirror(state_of(9)), "n": 0}
    found = restored(folder, like, whole, 0)
    assert divided(found) == MOMENTS | PARAMETERS and bits(found) == bits(state_of(0))
    with sharded(2).scope():  # the strategy of the scope
        like = {
            **state_of(9),
            "params": jax.tree.map(jnp.asarray, state_of(9)["params"]),
        }
        assert divided(restored(folder, like, None, 0)) == MOMENTS | PARAMETERS


class Net(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.dense = nnx.Linear(8, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def objects(seed):
    model = Net(seed)
    return {
        "model": model,
        "optimizer": nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param),
    }


def test_objects_of_nnx_are_restored_in_parts(tmp_path):
    replies = []

    def choose(path, leaf):
        replies.append(path)
        return len(leaf.shape) - 1

    one = sharded(8)
    state = one.init(lambda: objects(1))
    assert isinstance(state["model"].dense.kernel[...], js.Sharded)
    saved(tmp_path, state)
    for strategy in (sharded(4, dimension=choose), sharded(2, "optimizer")):
        found = objects(2)
        restored(tmp_path, found, strategy)
        for name, owner in found.items():
            wanted = bits_of_object(state[name])
            assert bits_of_object(owner) == wanted
        kernel = found["model"].dense.kernel[...]
        moment = found["optimizer"].opt_state[0].mu["dense"]["kernel"][...]
        assert isinstance(moment, js.Sharded)
        assert isinstance(kernel, js.Sharded) is (len(strategy.devices) == 4)
    # The paths are those that `mirror` tells of.
    told = set(replies)
    replies.clear()
    sharded(4, dimension=choose).mirror(objects(2))
    assert told == set(replies) and "['model'].dense.kernel.value" in told


def bits_of_object(owner):
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for leaf in jax.tree.leaves(nnx.state(owner))
    ]


@each_of("name", ["4 parts", "2 copies"])
def test_divided_variables_are_restored_as_the_new_ones_lie(
    tmp_path, name, monkeypatch
):
    whole, read = np.arange(16.0, dtype=np.float32), {}
    with sharded().scope():
        saved(tmp_path, {"v": js.Variable(whole, name="v")})
    restore = ocp.PyTreeCheckpointHandler.restore

    def watched(self, folder, args):
        read.update(args.restore_args)
        return restore(self, folder, args=args)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", watched)
    strategy = STRATEGIES[name]()
    with strategy.scope():
        v = js.Variable(np.zeros(16, np.float32), name="v")
    assert restored(tmp_path, {"v": v}, strategy)["v"] is v
    np.testing.assert_array_equal(v.numpy(), whole)
    assert isinstance(v, js.Sharded) is (name == "4 parts")
    assert read["v"].sharding == v.sharding
