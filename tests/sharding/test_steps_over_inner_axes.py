"""Steps whose replicas have several devices: numbers, placement, what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each_of
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxstrategy as js

F32 = np.float32


def strategy_of(cores, **arguments):
    return js.MirroredStrategy(logical_axes={"core": cores}, **arguments)


def over(strategy, array, *spec):
    return jax.device_put(array, NamedSharding(strategy.mesh, P(*spec)))


def compiled_text(strategy, step, args):
    program = jax.jit(lambda *args: strategy.run(step, args))
    return program.lower(*args).compile().as_text()


def counted(text, operation):
    return len(re.findall(rf"= [^=]*\b{operation}(?:-start)?\(", text))


def gradient_step(w, x):
    def loss(w):
        w = lax.with_sharding_constraint(w, P(None, "core"))
        return (lax.with_sharding_constraint(x @ w, P(None, "core")) ** 2).mean()

    return js.get_replica_context().all_reduce("mean", jax.grad(loss)(w))


def test_the_mean_gradient_of_weights_over_cores_is_that_of_numpy():
    strategy = strategy_of(2)
    x, w = np.arange(32, dtype=F32).reshape(8, 4), np.ones((4, 6), F32)
    wanted = np.mean([2 * b.T @ (b @ w) / 12 for b in x.reshape(4, 2, 4)], axis=0)
    args = over(strategy, w, None, "core"), strategy.per_replica([*x.reshape(4, 2, 4)])
    result = strategy.run(gradient_step, args)
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
    assert result.sharding.spec == P(None, "core")
    text = compiled_text(strategy, gradient_step, args)
    assert counted(text, "all-gather") == 0 and counted(text, "all-reduce") == 1


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def start():
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 32), "down": (32, 8), "bias": 32}
    params = {name: rng.normal(size=size).astype(F32) for name, size in shapes.items()}
    return params, rng.normal(size=(8, 16)).astype(F32)


def loss_of(params, x, constrain=lambda hidden: hidden):
    hidden = constrain(jnp.tanh(x @ params["up"] + params["bias"][None]))
    return ((hidden @ params["down"]) ** 2).mean()


def step_of_state(state, x):
    params, memory = state

    def loss(params):
        return loss_of(
            params, x, lambda h: lax.with_sharding_constraint(h, P(None, "core"))
        )

    found = jax.value_and_grad(loss)(params)
    value, grads = js.get_replica_context().all_reduce("mean", found)
    updates, memory = TX.update(grads, memory, params)
    return (optax.apply_updates(params, updates), memory), value


@functools.cache
def one_device_after(steps):
    params, x = start()
    memory = TX.init(params)
    for _ in range(steps):
        value, grads = jax.jit(jax.value_and_grad(loss_of))(params, x)
        updates, memory = TX.update(grads, memory, params)
        params = optax.apply_updates(params, updates)
    return params, value


WHOLE = {"up": P(None, "core"), "down": P("core"), "bias": P()}
DIVIDED = {
    "up": P("replica", "core"),
    "down": P("core", "replica"),
    "bias": P("replica"),
}


@pytest.mark.slow
@each_of("shard", [None, "state"])
def test_state_lies_over_cores_and_replicas_and_numbers_are_one_devices(shard):
    sharding = None if shard is None else js.StateSharding(shard, min_bytes=0)
    strategy = strategy_of(2, sharding=sharding)
    params, x = start()
    params = {n: over(strategy, w, *WHOLE[n]) for n, w in params.items()}
    state = strategy.mirror((params, TX.init(params)))
    x = strategy.per_replica([*x.reshape(4, 2, 16)])
    for _ in range(3):
        state, value = strategy.run(step_of_state, (state, x))
    params, wanted = one_device_after(3)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, array in state[0].items():
        np.testing.assert_allclose(array, params[name], atol=2e-5)
    moments = state[1][1][0].mu
    parameters = DIVIDED if shard == "state" else WHOLE
    assert {n: a.sharding.spec for n, a in state[0].items()} == parameters
    memory = WHOLE if shard is None else DIVIDED
    assert {n: a.sharding.spec for n, a in moments.items()} == memory


def layers_step(strategy):
    """A step whose layers are stacked, and divided over replicas and cores."""
    tx = optax.sgd(0.1)
    # Of one shape, and divided along different dimensions.
    up = over(strategy, np.ones((3, 16, 16), F32) / 16, None, None, "core")
    down = over(strategy, np.ones((3, 16, 16), F32) / 16, None, "core")

    def step(params, x):
        def loss(params):
            def layer(x, weights):
                up, down = weights
                return x + jnp.tanh(x @ up) @ down, None

            return (lax.scan(layer, x, params)[0] ** 2).mean()

        grads = js.get_replica_context().all_reduce("mean", jax.grad(loss)(params))
        return optax.apply_updates(params, tx.update(grads, tx.init(params))[0])

    x = np.random.default_rng(1).normal(size=(4, 2, 16)).astype(F32)
    return strategy.mirror((up, down)), step, strategy.per_replica([*x])


@pytest.mark.slow
@each_of("shard", ["optimizer", "state"])
def test_what_replicas_gather_and_scatter_stays_over_cores(shard):
    sharding = js.StateSharding(shard, min_bytes=0)
    found = []
    for chosen in (None, sharding):
        strategy = strategy_of(2, sharding=chosen)
        params, step, x = layers_step(strategy)
        params = strategy.run(step, (params, x))
        found.append(jax.device_get(params))
        inside = strategy.explain(step, (params, x)).inner_collectives
        assert {each.kind for each in inside} <= {"all_reduce"}
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    if shard == "state":
        specs = [array.sharding.spec for array in params]
        assert specs == [P(None, "replica", "core"), P(None, "core", "replica")]


def test_bfloat16_is_summed_in_float32_where_xla_would_end_the_process():
    strategy = strategy_of(2)
    x = strategy.per_replica([jnp.full((4, 8), i, jnp.bfloat16) for i in range(4)])

    def step(x):
        def turn(total, _):
            return total + lax.psum(x, "replica"), None

        total, _ = lax.scan(turn, jnp.zeros_like(x), None, length=2)
        parts = lax.psum_scatter(x, "replica", tiled=True)
        return total, lax.pmax(x, "replica"), lax.pmin(x, "replica"), parts

    total, largest, smallest, parts = strategy.run(step, (x,))
    for found, wanted in ((total, 12), (largest, 3), (smallest, 0)):
        assert found.dtype == jnp.bfloat16 and np.all(np.asarray(found) == wanted)
    assert np.all(np.asarray(parts.stacked) == 6) and parts.shape == (1, 8)


def test_bfloat16_is_not_reduced_where_an_inner_axis_is_left_to_xla():
    strategy = js.MirroredStrategy(logical_axes={"row": 2, "core": 2})

    def step(x, axes):
        def on_device(x):
            return x * lax.psum(x.sum(), "row")

        spec = P("row")
        return jax.shard_map(
            on_device, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )(x)

    def both(x):
        return step(x, {"row", "core"})

    def one(x):
        return step(x, {"row"})

    x = np.ones((4, 4), F32)
    narrow = jnp.ones((4, 4), jnp.bfloat16)
    assert np.all(np.asarray(strategy.run(one, (x,))) == 16)
    assert np.all(np.asarray(strategy.run(both, (narrow,)), F32) == 16)
    message = r"`one` reduces bfloat16 .* \['core'\] to XLA.*\n  the `psum`: .*:\d+: "
    with pytest.raises(NotImplementedError, match=message):
        strategy.run(one, (narrow,))


def test_a_constraint_along_the_replicas_is_refused():
    def step(x):
        return lax.with_sharding_constraint(x, P("replica"))

    message = (
        r"`step` constrains a value along 'replica', .*\n  .*test_steps_over_inner_axes"
        r"\.py:\d+: .*\n.* along the logical axes, \{'core': 2\}, or not at all"
    )
    for sharding in (None, js.StateSharding("state", min_bytes=0)):
        with pytest.raises(ValueError, match=message):
            strategy_of(2, sharding=sharding).run(step, (np.ones(8, F32),))


@each_of(
    "arguments",
    [{}, {"replicas_per_device": 2}, {"sharding": js.StateSharding(min_bytes=0)}],
)
def test_so_it_is_with_one_device_for_each_replica(arguments):
    strategy = js.MirroredStrategy(jax.devices()[:2], **arguments)

    def by_name(x):
        return lax.with_sharding_constraint(x, P("replica"))

    def by_mesh(x):
        return lax.with_sharding_constraint(
            x, NamedSharding(strategy.mesh, P("replica"))
        )

    for step in (by_name, by_mesh):
        message = rf"`{step.__name__}` constrains a value along (.*\n)+.*one replica's"
        with pytest.raises(ValueError, match=message):
            strategy.run(step, (np.ones(8, F32),))


def test_replicas_that_share_devices_are_not_told_to_have_several():
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=2)

    def step(x):
        return lax.with_sharding_constraint(x, P("model"))

    with pytest.raises(ValueError, match=r"one replica's; .* Leave the constraint out"):
        strategy.run(step, (np.ones(8, F32),))
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="'model', but replicas share"),
    ):
        js.Variable(np.ones(8, F32), sharding=P("model"))


def test_who_names_the_mesh_in_a_step_is_told_to_name_axes_only():
    strategy = strategy_of(2)

    def step(x):
        x = lax.with_sharding_constraint(x, NamedSharding(strategy.mesh, P("core")))
        return x + jnp.zeros_like(x)

    message = (
        r"constrained to a mesh by name, .*\n  .*:\d+: .*zeros_like(.*\n)+.*'core'"
    )
    with pytest.raises(ValueError, match=message):
        strategy.run(step, (np.ones(8, F32),))


@each_of("call", [jax.pure_callback, io_callback])
def test_callbacks_of_the_host_are_refused_and_printing_is_not(call, capfd):
    def step(x):
        jax.debug.print("sum {}", x.sum())

        def turn(x, _):
            return call(lambda a: np.asarray(a) + 1, x, x), None

        return lax.scan(turn, x, None, length=2)[0]

    message = (
        rf"`step` calls the host, .* \{{'core': 2\}}.*\n  the `{call.__name__}`: .*"
        r"test_steps_over_inner_axes\.py:\d+: .*\n.*`jax\.debug\.print`, which works"
    )
    with pytest.raises(NotImplementedError, match=message):
        strategy_of(2).run(step, (np.ones(8, F32),))

    strategy = strategy_of(2)
    strategy.run(lambda x: jax.debug.print("sum {}", x.sum()), (np.ones(8, F32),))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("sum 8.0") == strategy.num_replicas_in_sync


def test_a_choice_of_a_dimension_that_the_cores_divide_is_refused():
    sharding = js.StateSharding("state", min_bytes=0, dimension=lambda *_: 1)
    strategy = strategy_of(2, sharding=sharding)
    w = over(strategy, np.ones((8, 8), F32), None, "core")
    with pytest.raises(ValueError, match=r"returned 1 for .* devices of each replica"):
        strategy.run(lambda w: w + 1, (w,))
