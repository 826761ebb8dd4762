"""Checkpoints are written and read in parts, and by any strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.cases import each_of
from helpers.cores import cored, drawn, over

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
    "2 cores": lambda: cored(4, 2),
    "central": lambda: js.experimental.CentralStorageStrategy(
        jax.devices()[:2], jax.devices()[5]
    ),
    "8 cores": lambda: cored(1, 8),
    "shared": lambda: js.MirroredStrategy(jax.devices()[:2], replicas_per_device=2),
    "default": js.get_strategy,
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


def restored(folder, like, strategy=None, step=None, **choices):
    with CheckpointManager(folder, strategy) as manager:
        return manager.restore(like, step, **choices)


def held(strategy, number):
    """Such a state where a strategy keeps it, with all else that it can hold."""
    state = strategy.mirror(state_of(number))
    w = state_of(number)["params"]["w"]
    if "core" in strategy.mesh.axis_names:
        state["params"]["w"] = over(strategy, w, None, "core")
    with strategy.scope():
        made = functools.partial(js.Variable, np.zeros_like(w))
        on_read = functools.partial(made, synchronization="on_read")
        variables = {
            "placed": js.Variable(0 * state["params"]["w"]),
            "mirrored": made(aggregation="mean"),
            "sum": on_read(aggregation="sum"),
            "mean": on_read(aggregation="mean"),
            "first": on_read(aggregation="only_first_replica"),
        }
    for variable in variables.values():
        variable.assign(w)
    return {
        **state,
        "n": number,
        "variables": variables,
        "model": nnx.Linear(4, 3, rngs=nnx.Rngs(number)),
        "host": np.full(2, number),
        "rate": number / 4,
        "name": f"run {number}",
        "nothing": None,
        "empty": jnp.zeros((0, 3)),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of each strategy: number i is of the i-th one."""
    made = tmp_path_factory.mktemp("checkpoints")
    with CheckpointManager(made, keep=None) as manager:
        for number, name in enumerate(STRATEGIES):
            state = held(STRATEGIES[name](), number)
            assert divided({k: state[k] for k in BASIS}) == DIVIDED.get(name, set())
            manager.save(number, state)
    return made


BASIS = ("params", "opt", "key", "n")


@each_of("number", range(len(STRATEGIES)))
def test_each_strategy_restores_what_others_saved(folder, number):
    """The one before it, and one with eight parts."""
    strategy = [*STRATEGIES.values()][number]()
    for saver in {0, number - 1 if number else len(STRATEGIES) - 1}:
        into = held(strategy, 20)
        owners = {**into["variables"], "model": into["model"]}
        arrays = {k: into[k] for k in ("params", "opt", "key")}
        lies = [leaf.sharding for leaf in jax.tree.leaves(arrays)]
        lies += [v.sharding for _, v in sorted(into["variables"].items())]
        found = restored(folder, into, strategy, saver)
        assert bits({k: found[k] for k in BASIS}) == bits(state_of(saver))
        after = jax.tree.leaves({k: found[k] for k in arrays})
        after += [v for _, v in sorted(found["variables"].items())]
        for leaf, where in zip(after, lies, strict=True):
            assert leaf.sharding.is_equivalent_to(where, len(leaf.shape))
        w = state_of(saver)["params"]["w"]
        for name, variable in found["variables"].items():
            assert variable is owners[name]
            np.testing.assert_allclose(variable.numpy(), w, rtol=1e-6)
        assert found["model"] is owners["model"]
        kernel = nnx.Linear(4, 3, rngs=nnx.Rngs(saver)).kernel
        np.testing.assert_array_equal(found["model"].kernel[...], kernel[...])
        assert isinstance(found["host"], np.ndarray)
        assert found["host"].tolist() == [saver] * 2
        assert (found["rate"], found["name"]) == (saver / 4, f"run {saver}")
        assert found["empty"].shape == (0, 3) and found["nothing"] is None


@each_of("name, kind", [("8 parts", "free"), ("optimizer in 2 parts", "types")])
def test_what_lies_nowhere_yet_lies_as_the_strategy_keeps_it(folder, name, kind):
    strategy = STRATEGIES[name]()
    like = jax.tree.map(jnp.zeros_like, {**state_of(9), "key": 0})
    like |= {"key": jax.random.key(0), "n": 0}
    if kind == "types":
        like = {**jax.eval_shape(lambda: like), "n": 0}
    for number in (0, 2, 3):
        found = restored(folder, like, strategy, number, partial=True)
        assert bits(found) == bits(state_of(number))
        assert divided(found) == DIVIDED[name]
        arrays = [x for x in jax.tree.leaves(found) if isinstance(x, jax.Array)]
        assert all(x.devices() == set(strategy.devices) for x in arrays)


@each_of("spec", [(None, "core"), (), None])
def test_several_devices_write_an_array_once(tmp_path, spec):
    """Those of a replica, and those over which state is divided."""
    strategy = sharded() if spec is None else cored(2, 4)
    large = drawn(64, 256)  # which no compression makes smaller than 3/4
    w = strategy.mirror(large) if spec is None else over(strategy, large, *spec)
    saved(tmp_path, {"w": w})
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert 0.75 * large.nbytes < sum(sizes) < 1.5 * large.nbytes


def test_a_state_says_where_it_is_to_lie(folder):
    whole = js.MirroredStrategy(jax.devices()[:4])
    like = {**whole.mirror(state_of(9)), "n": 0}
    found = restored(
        folder, like, sharded(4), 0, partial=True
    )  # it lies somewhere already
    assert not divided(found) and bits(found) == bits(state_of(0))
    like = {**sharded(4).mirror(state_of(9)), "n": 0}
    found = restored(folder, like, whole, 0, partial=True)
    assert divided(found) == MOMENTS | PARAMETERS and bits(found) == bits(state_of(0))
    with sharded(2).scope():  # the strategy of the scope
        like = {
            **state_of(9),
            "params": jax.tree.map(jnp.asarray, state_of(9)["params"]),
        }
        assert (
            divided(restored(folder, like, None, 0, partial=True))
            == MOMENTS | PARAMETERS
        )


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
