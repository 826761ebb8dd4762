"""Steps over the devices of each replica: numbers, placement, what is refused."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
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


def start():
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 32), "down": (32, 8), "bias": 32}
    params = {name: rng.normal(size=size).astype(F32) for name, size in shapes.items()}
    return params, rng.normal(size=(8, 16)).astype(F32)


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


# Steps of annotated models: one model for replicas of one device and of several.

LECUN = nn.initializers.lecun_normal()
X, Y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


class Layers(nn.Module):
    """Two layers, annotated; what is between them is constrained by a rule."""

    axis: str = "core"

    @nn.compact
    def __call__(self, x):
        columns = nn.with_partitioning(LECUN, (None, self.axis))
        rows = nn.with_partitioning(LECUN, (self.axis, None))
        x = nn.tanh(nn.Dense(6, kernel_init=columns)(x))
        x = nn.with_logical_constraint(x, (None, "hidden"))
        return nn.Dense(4, kernel_init=rows)(x)


def build(key, axis="core"):
    model = Layers(axis)
    params = model.init(key, X[:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=MOMENTUM)


def loss_and_gradients(state, x, y):
    def loss(params):
        return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

    return jax.value_and_grad(loss)(state.params)


def step(state, x, y):
    found = loss_and_gradients(state, x, y)
    loss, gradients = js.get_replica_context().all_reduce("mean", found)
    return state.apply_gradients(grads=gradients), loss


@pytest.fixture(scope="module")
def expected():
    state, losses = build(jax.random.key(0)), []
    for _ in range(3):
        loss, gradients = jax.jit(loss_and_gradients)(state, X, Y)
        state = state.apply_gradients(grads=gradients)
        losses.append(loss)
    return state, losses


LAYOUTS = {
    "two devices each": {"logical_axes": {"core": 2}},
    "replicas that share devices": {"devices": ["CPU:0"], "replicas_per_device": 4},
    "divided state, two devices each": {
        "sharding": js.StateSharding("state", min_bytes=0),
        "logical_axes": {"core": 2},
    },
}


@pytest.mark.slow
@each_of("layout", LAYOUTS)
def test_one_model_trains_alike_wherever_replicas_are(layout, expected):
    strategy = js.MirroredStrategy(**LAYOUTS[layout])
    count = strategy.num_replicas_in_sync
    x, y = (strategy.per_replica(a.reshape(count, -1, 4)) for a in (X, Y))
    wanted, losses = expected
    rules = [("hidden", "core")]
    with nn.logical_axis_rules(rules):
        state = strategy.init(build, jax.random.key(0))
        for loss in losses:
            state, found = strategy.run(step, args=(state, x, y))
            np.testing.assert_allclose(found, loss, rtol=0, atol=1e-6)
    assert jax.tree.structure(state.params) == jax.tree.structure(wanted.params)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    if layout == "two devices each":
        for tree in (state.params, state.opt_state[0].trace):
            kernel = tree["Dense_0"]["kernel"]
            assert isinstance(kernel, nn.Partitioned)
            assert tuple(kernel.value.sharding.spec) == (None, "core")


def test_an_axis_that_a_replica_has_not_is_refused_with_its_line():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
    params = Layers("model").init(jax.random.key(0), X[:1])
    text = r"(?s)`forward` wants an array.*'model'.*nn\.Dense\(6.*a replica has 'core'"
    with pytest.raises(ValueError, match=text):

        @strategy.run
        def forward(params):
            return Layers("model").apply(params, X[:1])

        forward(params)
    with nn.logical_axis_rules([("hidden", "data")]):
        with pytest.raises(ValueError, match=r"(?s)hidden.*'data', but a replica has"):
            params = strategy.init(Layers().init, jax.random.key(0), X[:1])
            strategy.run(lambda params: Layers().apply(params, X[:1]), (params,))


def constrained(x):
    return lax.with_sharding_constraint(x * 2, jax.P(None, "core"))


def test_a_constraint_of_jax_needs_its_axis_of_size_one_too():
    x = np.arange(8.0).reshape(2, 4)
    for size in (1, 2):
        strategy = js.MirroredStrategy(logical_axes={"core": size})
        np.testing.assert_array_equal(strategy.run(constrained, (x,)), x * 2)
        made = strategy.init(constrained, x)
        np.testing.assert_array_equal(made, x * 2)


def test_without_its_axis_the_message_says_how_to_have_it(two):
    text = (
        r"(?s)`constrained` constrains .*no devices to divide.*lax.with_sharding_constr"
    )
    with pytest.raises(ValueError, match=text + r".*`logical_axes=\{\"core\": 2\}`"):
        two.run(constrained, (jnp.ones((2, 4)),))
    text = r"(?s)`constrained` wants.*lax.with_sharding_constraint.*one device each"
    with pytest.raises(ValueError, match=text + r".*`logical_axes`, of size 1 too"):
        two.init(constrained, jnp.ones((2, 4)))


# Splitting a replica's values over its devices changes only where they lie.


@pytest.fixture(scope="module")
def pairs():
    return js.TPUStrategy(cores_per_replica=2)


@pytest.fixture
def fours():
    return js.TPUStrategy(cores_per_replica=4)


def total(x):
    return js.get_replica_context().all_reduce("sum", x)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tiles_of(array):
    """What each device has of an array, by its id."""
    return {s.device.id: np.asarray(s.data) for s in array.addressable_shards}


def test_values_gradients_and_dtypes_stay(pairs):
    # Products and sums of small whole numbers are exact in whatever order.
    x = np.random.default_rng(0).integers(-8, 8, (4, 4, 6)).astype(np.float32)

    def step(split):
        def step(x):
            def loss(x):
                y = split(3 * x) + jnp.ones_like(x)
                return (y * split(x) ** 2).sum()

            return loss(x), jax.grad(loss)(x), split(x.astype(jnp.bfloat16) * 3)

        return step

    given = (pairs.per_replica(list(x)),)
    plain = pairs.run(step(lambda x: x), given)
    splitting = [
        lambda x: pairs.experimental_split_to_logical_devices(x, [1, 2]),
        lambda x: pairs.experimental_split_to_logical_devices(x, [2, 1]),
        pairs.experimental_replicate_to_logical_devices,
    ]
    for split in splitting:
        found = pairs.run(step(split), given)
        for one, other in zip(found, plain, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(
                one.stacked.astype(np.float32), other.stacked.astype(np.float32)
            )
    np.testing.assert_array_equal(plain[0].stacked, (3 * x**3 + x**2).sum((1, 2)))
    np.testing.assert_array_equal(plain[1].stacked, 9 * x**2 + 2 * x)
    np.testing.assert_array_equal(plain[2].stacked, 3 * x)


@each_of(
    ("splits", "text"),
    [
        ([2], "Length of `partition_dimensions` must equal.*it was .2., and the shape"),
        ([2, 2], r"Dimension 0 of `tensor` must be divisible.*\(3, 4\)"),
        ([1, 4], r"product of `partition_dimensions` must be.* 2: it was \[1, 4\]"),
        ([1, 1], "the product 1"),
        ([0, 2], "a dimension has 1 part or more"),
    ],
)
def test_splits_that_cannot_be_are_refused(pairs, splits, text):
    x = numbers(3, 4)
    split = pairs.experimental_split_to_logical_devices
    for value in (x, pairs.per_replica(np.stack([x] * 4))):
        with pytest.raises(ValueError, match=text):
            split(value, splits)
        with pytest.raises(ValueError, match=text):
            pairs.run(lambda x: split(x, splits), (value,))


def test_splits_that_are_no_numbers_are_refused(pairs):
    for splits in (2, [1.0, 2], None):
        with pytest.raises(TypeError, match="`partition_dimensions` was .*; a list of"):
            pairs.experimental_split_to_logical_devices(numbers(3, 4), splits)
    with pytest.raises(TypeError, match="tensor"):
        pairs.experimental_split_to_logical_devices("text", [2])
    with pytest.raises(TypeError, match="tensor"):
        pairs.experimental_replicate_to_logical_devices({"a": 1.0})


@each_of(
    ("splits", "tile"),
    [
        ([4, 1], lambda x, core: x[core : core + 1]),
        ([1, 4], lambda x, core: x[:, core : core + 1]),
        ([2, 2], lambda x, core: x[core // 2 * 2 :][:2, core % 2 * 2 :][:, :2]),
    ],
    anew=True,
)
def test_tiles_lie_in_row_major_order(fours, splits, tile):
    x = numbers(4, 4)
    split = fours.experimental_split_to_logical_devices
    for device, data in tiles_of(split(x, splits)).items():
        np.testing.assert_array_equal(data, tile(x, device % 4))
    versions = np.stack([x, 2 * x])
    outside = split(fours.per_replica(versions), splits)
    in_step = fours.run(lambda x: split(x * 1, splits), (fours.per_replica(versions),))
    for found in (outside, in_step):
        for device, data in tiles_of(found.stacked).items():
            wanted = tile(versions[device // 4], device % 4)
            np.testing.assert_array_equal(data[0], wanted)


def test_a_batch_keeps_its_mask(pairs):
    (batch,) = pairs.experimental_distribute_dataset(js.batches(numbers(6, 4), 8))
    split = pairs.experimental_split_to_logical_devices(batch, [1, 2])
    np.testing.assert_array_equal(split.mask, batch.mask)
    np.testing.assert_array_equal(split.stacked, batch.stacked)


def test_splitting_in_loops_branches_and_transformations(pairs):
    split = pairs.experimental_split_to_logical_devices

    def step(x):
        def turn(carry, _):
            carry = split(carry + 1, [2, 1])
            return carry, total(carry)

        carried, sums = jax.lax.scan(jax.checkpoint(turn), x, None, length=2)
        branch = jax.lax.cond(
            total(x).sum() > 0, lambda x: split(2 * x, [1, 2]), lambda x: x, x
        )
        rows = jax.vmap(lambda row: split(row, [2]) - 1)(x)
        inner = jax.jit(lambda x: split(x, [1, 2]) * 3)(x)
        return {"scan": carried, "cond": branch, "vmap": rows, "jit": inner}, sums

    x = np.arange(96, dtype=np.float32).reshape(4, 4, 6)
    found, sums = pairs.run(step, (pairs.per_replica(x),))
    wanted = {"scan": x + 2, "cond": 2 * x, "vmap": x - 1, "jit": 3 * x}
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name].stacked, value, name)
    np.testing.assert_array_equal(sums, [(x + 1).sum(0), (x + 2).sum(0)])


# A block of a transformer whose heads and layers each replica's devices divide.

WIDTH, HEADS, LENGTH = 16, 8, 8
INIT = nn.initializers.lecun_normal()
ZEROS = nn.initializers.zeros


def along(*names, init=INIT):
    return nn.with_partitioning(init, names)


class Block(nn.Module):
    """Attention, then two layers. Flax's attention names the axes of a matrix."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(
            HEADS,
            use_bias=False,
            kernel_init=along(None, "core"),
            out_kernel_init=along("core"),
        )(nn.LayerNorm()(x), mask=nn.make_causal_mask(jnp.ones(x.shape[:2])))
        columns, bias = along(None, "core"), along("core", init=ZEROS)
        y = nn.Dense(4 * WIDTH, kernel_init=columns, bias_init=bias)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH, kernel_init=along("core", None))(nn.gelu(y))


@pytest.mark.slow
def test_a_block_costs_two_reductions_inside_a_replica_and_no_gather():
    strategy = js.MirroredStrategy(logical_axes={"core": 2})
    x = strategy.per_replica(np.ones((4, 2, LENGTH, WIDTH), np.float32))
    params = strategy.init(Block().init, jax.random.key(0), x.local(0))

    def forward(params, x):
        return Block().apply(params, x)

    program = jax.jit(lambda params, x: strategy.run(forward, (params, x)))
    text = program.lower(params, x).compile().as_text()
    # Shoeybi et al., 2019 (arXiv:1909.08053), figure 3: one after the attention, one
    # after the second layer.
    reductions = re.findall(r"= \S+ all-reduce(?:-start)?\((?:.*)", text)
    assert len(reductions) == 2, text
    assert all("[4,2]<=[8]" in r or "{{0,1},{2,3}" in r for r in reductions)
    assert "all-gather" not in text and "all-to-all" not in text
    assert "collective-permute" not in text
