"""A pipeline of stages computes what its layers in a row do, each device its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

F32 = np.float32
LAYERS, ROWS, SIZE = 8, 8, 6
SHAPES = {"w": (LAYERS, SIZE, SIZE), "b": (LAYERS, SIZE)}
RNG = np.random.default_rng(0)
PARAMS = {k: (RNG.normal(size=v) / 2).astype(F32) for k, v in SHAPES.items()}


def staged(stages, **more):
    return js.MirroredStrategy(logical_axes={"stage": stages, **more})


def over(strategy, tree, *spec):
    return jax.device_put(tree, NamedSharding(strategy.mesh, P(*spec)))


def layer(p, h):
    return h + jnp.tanh(h @ p["w"] + p["b"][None])


def in_a_row(params, x, layer=layer):
    """What a pipeline of these layers returns, by a plain loop."""
    for i in range(LAYERS):
        x = layer(jax.tree.map(lambda a, i=i: a[i], params), x)
    return x


def rows_of(replicas, rows=ROWS):
    return RNG.normal(size=(replicas, rows, SIZE)).astype(F32)


def close(result, wanted, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def loss_and_gradient(strategy, params, x, pipe, mean=False):
    """Of each replica; or the mean of all, with the compiled program's text."""

    def step(params, x):
        def loss(params):
            return (pipe(params, x) ** 2).mean()

        found = jax.value_and_grad(loss)(params)
        return js.get_replica_context().all_reduce("mean", found) if mean else found

    args = params, strategy.per_replica([*x])
    if not mean:
        return strategy.run(step, args)
    program = jax.jit(lambda *args: strategy.run(step, args)).lower(*args).compile()
    return program(*args), program.as_text()


def counts(text):
    names = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(rf"= [^=]*?\b{names}(?:-start)?\(", text)
    return {name: found.count(name) for name in found}


def piped(params, x, layer=layer, microbatches=4, **more):
    return js.training.pipeline(layer, params, x, microbatches=microbatches, **more)


WANTED = jax.value_and_grad(lambda p, x: (in_a_row(p, x) ** 2).mean())


@pytest.mark.slow
def test_the_gradients_of_each_replica_are_those_of_its_layers_in_a_row(stages=4):
    strategy = staged(stages)
    replicas = 8 // stages
    x = rows_of(replicas)
    params = over(strategy, PARAMS, "stage")
    found = loss_and_gradient(strategy, params, x, piped)
    for i, own in enumerate(strategy.experimental_local_results(found)):
        close(own, WANTED(PARAMS, x[i]))
    (_, mean), text = loss_and_gradient(strategy, params, x, piped, mean=True)
    close(mean, WANTED(PARAMS, x.reshape(-1, SIZE))[1])
    for name, array in mean.items():
        assert array.sharding.spec[0] == "stage", name
    # One exchange between neighbours at each tick, forward and backward; a sum brings
    # the results to all stages, another the mean gradient to all replicas.
    assert counts(text) == {"collective-permute": 2, "all-reduce": 1 + (replicas > 1)}


TWO = ["CPU:0", "CPU:1"]
STATE = js.StateSharding("state", min_bytes=0)
WITHOUT = {
    "one device": lambda: js.OneDeviceStrategy("CPU:0"),
    "lanes": lambda: js.MirroredStrategy("CPU:0", replicas_per_device=2),
    "divided state": lambda: js.MirroredStrategy(TWO, sharding=STATE),
    "cores": lambda: js.MirroredStrategy(logical_axes={"core": 4}),
}


@pytest.mark.slow
@each_of("make", WITHOUT.values())
def test_strategies_without_stages_compute_the_same_in_turn(make):
    strategy = make()
    x = rows_of(strategy.num_replicas_in_sync)
    params = strategy.mirror(PARAMS)
    found = loss_and_gradient(strategy, params, x, piped, mean=True)[0]
    close(found, WANTED(PARAMS, x.reshape(-1, SIZE)))


def test_under_no_strategy_and_in_a_scope_it_is_the_layers_in_a_row():
    x = rows_of(1)[0]
    close(piped(PARAMS, x), in_a_row(PARAMS, x))
    with staged(2).scope():
        close(jax.jit(piped)(PARAMS, x), in_a_row(PARAMS, x))


def test_the_number_of_parts_changes_what_a_layer_sees_and_stages_do_not():
    def mixing(p, h):
        return layer(p, h - h.mean(0, keepdims=True))

    x = rows_of(2)
    strategy = staged(4)
    run = strategy.run(
        lambda p, x: piped(p, x, mixing, microbatches=2),
        (over(strategy, PARAMS, "stage"), strategy.per_replica([*x])),
    )
    for i, own in enumerate(strategy.experimental_local_results(run)):
        halves = [in_a_row(PARAMS, half, mixing) for half in np.split(x[i], 2)]
        close(own, np.concatenate(halves))


def test_state_may_be_divided_over_replicas_too():
    strategy = js.MirroredStrategy(logical_axes={"stage": 4}, sharding=STATE)
    x = rows_of(2)

    def step(params, x):
        grads = jax.grad(lambda p: (piped(p, x) ** 2).mean())(params)
        return js.get_replica_context().all_reduce("mean", grads)

    args = over(strategy, PARAMS, "stage"), strategy.per_replica([*x])
    mean = strategy.run(step, args)
    close(mean, WANTED(PARAMS, x.reshape(-1, SIZE))[1])
    own = mean["w"].sharding.shard_shape(mean["w"].shape)
    assert own == (LAYERS // 4, SIZE // 2, SIZE)


def test_activations_may_be_trees_with_numbers_flags_and_random_keys():
    def dropping(p, x):
        keys = jax.vmap(jax.random.split)(x["keys"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (SIZE,)))(keys[:, 0])
        h = jnp.where(x["on"][:, None], layer(p, x["h"]), x["h"]) * kept
        return {"h": h, "keys": keys[:, 1], "on": ~x["on"], "seen": x["seen"] + 1}

    def tree(h, seed):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        return {"h": h, "keys": keys, "on": h[:, 0] > 0, "seen": jnp.arange(ROWS)}

    def result(call, p, h, seed):
        found = call(p, tree(h, seed), dropping)
        return {**found, "keys": jax.random.key_data(found["keys"])}

    x = rows_of(2)
    strategy = staged(4)
    args = over(strategy, PARAMS, "stage"), strategy.per_replica([*x])
    run = strategy.run(lambda p, h: result(piped, p, h, 7), args)
    for i, own in enumerate(strategy.experimental_local_results(run)):
        wanted = result(in_a_row, PARAMS, x[i], 7)
        assert all(own[name].dtype == wanted[name].dtype for name in wanted)
        close(own, wanted)


def test_a_layer_may_use_traced_arrays_and_reduce_over_the_replicas():
    def model(call, p, scale, x, mean):
        def sharing(p, h):
            return layer(p, h) * jnp.sin(scale)[None] / 2 + mean(h) / 2

        return (call(p, x, sharing) ** 2).mean()

    def step(p, scale, x):
        def mean(h):
            return js.get_replica_context().all_reduce("mean", h)

        def loss(p, scale):
            return model(piped, p, scale, x, mean)

        # The gradient is a replica's own, and through a sum that of all losses.
        grads = jax.grad(loss, argnums=(0, 1))(p, scale)
        return js.get_replica_context().all_reduce("mean", grads)

    x, scale = rows_of(2), np.linspace(1, 2, SIZE, dtype=F32)
    strategy = staged(4)
    args = over(strategy, PARAMS, "stage"), scale, strategy.per_replica([*x])
    found = strategy.run(step, args)

    def both(p, scale):
        def total(p, h):
            # Both replicas' rows, one after the other; their mean is of both.
            ours = h.reshape(2, -1, SIZE)
            mean = jnp.broadcast_to(ours.mean(0, keepdims=True), ours.shape).reshape(
                h.shape
            )
            return layer(p, h) * jnp.sin(scale)[None] / 2 + mean / 2

        return (in_a_row(p, x.reshape(-1, SIZE), total) ** 2).mean()

    close(found, jax.grad(both, argnums=(0, 1))(PARAMS, scale), 1e-4)


def test_layers_may_be_divided_over_another_inner_axis():
    strategy = staged(2, core=2)

    def divided(p, h):
        inner = jax.lax.with_sharding_constraint(jnp.tanh(h @ p["w"]), P(None, "core"))
        return h + inner @ p["w"].T

    def plain(p, h):
        return h + jnp.tanh(h @ p["w"]) @ p["w"].T

    x = rows_of(2)
    params = {"w": over(strategy, PARAMS["w"], "stage", None, "core")}

    def pipe(p, x):
        return piped(p, x, divided)

    (_, mean), text = loss_and_gradient(strategy, params, x, pipe, mean=True)

    def loss(p):
        return (in_a_row(p, x.reshape(-1, SIZE), plain) ** 2).mean()

    close(mean, jax.grad(loss)({"w": PARAMS["w"]}))
    assert mean["w"].sharding.spec == P("stage", None, "core")
    assert "all-gather" not in counts(text)


def test_what_stages_compute_while_they_wait_makes_no_gradient_nan():
    # The input of each layer is 1, and fine; but of the batch, which is 0, the second
    # stage and those after it have roots of 0.
    def root(p, h):
        return jnp.sqrt(p["a"] * h + p["c"])

    strategy = staged(4)
    x = jnp.zeros((2, ROWS, 1), F32)
    p = {"a": np.ones(8, F32), "c": np.array([1, *[0] * 7], F32)}
    step = jax.grad(lambda p, x: piped(p, x, root).sum())
    args = over(strategy, p, "stage"), strategy.per_replica([*x])
    wanted = jax.grad(lambda p: in_a_row(p, x[0], root).sum())(p)
    assert np.isfinite(wanted["a"]).all()
    for own in strategy.experimental_local_results(strategy.run(step, args)):
        close(own, wanted)


def refused(error, text, *args, stages=4, **more):
    more = {"microbatches": 4, **more}
    strategy = staged(stages)
    with pytest.raises(error, match=text):
        strategy.run(lambda: js.training.pipeline(*args, **more))


X = np.ones((8, SIZE), F32)


def test_what_cannot_be_divided_is_refused():
    text = r"`microbatches` was 3, and `x` has 8 rows .* Give one of 1, 2, 4, 8; or"
    refused(ValueError, text, layer, PARAMS, X, microbatches=3)
    refused(ValueError, "`microbatches` was 0", layer, PARAMS, X, microbatches=0)
    text = "`microbatches` was 2.0; a whole number"
    refused(TypeError, text, layer, PARAMS, X, microbatches=2.0)
    text = r"of `x`, `x\['a'\]` has 8, `x\['b'\]` has 2"
    refused(ValueError, text, layer, PARAMS, {"a": X, "b": X[:2]})
    refused(ValueError, "`x` is a scalar", layer, PARAMS, np.float32(1))
    refused(ValueError, "`x` has 0", layer, PARAMS, X[:0])
    text = r"`params` has 6 layers, and the axis 'stage' 4 stages.* Give 8 layers"
    refused(ValueError, text, layer, jax.tree.map(lambda a: a[:6], PARAMS), X)
    text = r"of `params`, `params\['b'\]` has 7, `params\['w'\]` has 8"
    refused(ValueError, text, layer, {**PARAMS, "b": PARAMS["b"][:7]}, X)
    refused(ValueError, "`params` has no arrays", layer, {}, X)
    refused(TypeError, "`layer` was 3; a function", 3, PARAMS, X)
    refused(TypeError, r"`params\['w'\]` was 'x'; an array", layer, {"w": "x"}, X)
    text = r"`axis` was 'stages'; the inner axes of the strategy are `stage`\. Give"
    refused(ValueError, text, layer, PARAMS, X, axis="stages")
    refused(ValueError, "`axis` was 'replica'", layer, PARAMS, X, axis="replica")
    refused(TypeError, "`axis` was 3; the name", layer, PARAMS, X, axis=3)
    strategy = js.MirroredStrategy(logical_axes={"pipe": 4})
    found = strategy.run(lambda p: piped(p, X, axis="pipe"), (PARAMS,))
    close(found, in_a_row(PARAMS, X))
    strategy = js.MirroredStrategy()
    values = strategy.per_replica([X] * 8)
    with pytest.raises(TypeError, match=r"`x` has a PerReplica.* inside `run`"):
        js.training.pipeline(layer, PARAMS, values, microbatches=2)


@each_of("stages", [1, 4])
def test_layers_that_the_next_cannot_follow_are_refused(stages):
    def wider(p, h):
        return jnp.concatenate([h, h], -1)

    text = r"float32\[2,12\] for float32\[2,6\]\. The next layer takes"
    refused(ValueError, text, wider, PARAMS, X, stages=stages)
    text = r"float16\[2,6\] for float32\[2,6\] at x\['h'\]"
    half = {"h": X}
    refused(
        ValueError,
        text,
        lambda p, x: {"h": x["h"].astype("float16")},
        PARAMS,
        half,
        stages=stages,
    )
    text = "of another structure than it was given"
    refused(ValueError, text, lambda p, h: (h, h), PARAMS, X, stages=stages)
    text = "What the layer returned was 'x'; an array was wanted"
    refused(TypeError, text, lambda p, h: "x", PARAMS, X, stages=stages)
