"""Steps of annotated models: one model for replicas of one device and of several.

The oracle is the same training on one device, without a strategy.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers.cases import each_of
from jax import lax

import jaxstrategy as js

LECUN = nn.initializers.lecun_normal()
X, Y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(np.float32)
TX = optax.sgd(0.1, momentum=0.9)


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
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


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
