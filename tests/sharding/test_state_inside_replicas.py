"""`strategy.init` with devices inside a replica: where arrays lie, what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers.cases import each_of
from jax.sharding import PartitionSpec as P

import jaxstrategy as js

LECUN = nn.initializers.lecun_normal()


@pytest.fixture(scope="module")
def cores():
    """Four replicas of two devices."""
    return js.MirroredStrategy(logical_axes={"core": 2})


def spec(array):
    return tuple(array.sharding.spec)


def parameters(key):
    first, second = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(first, (4, 6)), "bias": jnp.zeros(6)},
        "down": {"kernel": jax.random.normal(second, (6, 4))},
    }


def make(strategy, **options):
    return strategy.init(parameters, jax.random.key(0), **options)


def test_specs_place_arrays_and_change_no_number(cores):
    specs = {
        "up": {"kernel": P(None, "core"), "bias": P("core")},
        "down": {"kernel": P("core")},
    }
    made = make(cores, specs=specs)
    assert spec(made["up"]["kernel"]) == (None, "core")
    assert spec(made["up"]["bias"]) == spec(made["down"]["kernel"]) == ("core",)
    assert made["up"]["kernel"].sharding.shard_shape((4, 6)) == (4, 3)
    jax.tree.map(np.testing.assert_array_equal, made, parameters(jax.random.key(0)))


def test_specs_may_say_it_of_the_upper_part_or_of_some(cores):
    made = make(cores, specs=P("core"))
    assert {spec(array) for array in jax.tree.leaves(made)} == {("core",)}
    made = make(cores, specs={"up": P(None), "down": None})
    assert not any(any(spec(array)) for array in jax.tree.leaves(made))
    made = make(cores, specs={"up": None, "down": P(None, "core")})
    assert spec(made["down"]["kernel"]) == (None, "core")
    assert spec(made["up"]["kernel"]) == ()


WRONG = {
    "an unknown axis": (P("model"), r"`specs` for `result\['up'\]\['kernel'\]` is .*"),
    "unknown, what there is": (P("model"), "an axis 'model', but a replica has 'core'"),
    "the axis of replicas": (P("replica"), "the axis along which replicas differ"),
    "an axis twice": (P("core", "core"), "names 'core' twice"),
    "more than the rank": (
        P(None, None, "core"),
        r"3 entries for an array of shape \(4, 6\)",
    ),
}


@each_of("case", WRONG)
def test_specs_that_cannot_be_are_refused(cores, case):
    wrong, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        make(cores, specs={"up": {"kernel": wrong, "bias": None}, "down": None})


@each_of("wrong", ["core", (None, "core"), 3])
def test_what_is_no_spec_is_refused(cores, wrong):
    with pytest.raises((TypeError, ValueError), match=r"jax\.P|PartitionSpec"):
        cores.init(lambda: jnp.zeros((2, 4)), specs=wrong)
    with pytest.raises(TypeError, match="has an entry 3"):
        cores.init(lambda: jnp.zeros((2, 4)), specs=P(3))


def test_moments_lie_as_the_parameters_that_were_given(cores):
    params = make(cores, specs={"up": None, "down": P("core")})
    state = cores.init(optax.adam(1e-2).init, params)
    for moments in (state[0].mu, state[0].nu):
        assert spec(moments["down"]["kernel"]) == ("core",)
        assert spec(moments["up"]["kernel"]) == ()
    whole = cores.init(
        lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.adam(1.0)), params
    )
    assert spec(whole.params["down"]["kernel"]) == ("core",)
    assert spec(whole.opt_state[0].nu["down"]["kernel"]) == ("core",)


class Annotated(nn.Module):
    """Two layers, the first divided by its columns and the second by its rows."""

    axis: str = "core"
    by_rules: bool = False

    @nn.compact
    def __call__(self, x):
        box = nn.with_logical_partitioning if self.by_rules else nn.with_partitioning
        columns, rows = box(LECUN, (None, self.axis)), box(LECUN, (self.axis, None))
        x = nn.relu(nn.Dense(16, kernel_init=columns)(x))
        return nn.Dense(3, kernel_init=rows)(x)


def variables(strategy, model):
    return strategy.init(model.init, jax.random.key(0), jnp.ones((1, 4)))["params"]


@pytest.mark.slow
def test_annotations_of_linen_place_boxes(cores):
    model = Annotated()
    made = variables(cores, model)
    kernel = made["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == (None, "core")
    assert spec(kernel.value) == (None, "core")
    assert spec(made["Dense_1"]["kernel"].value)[:1] == ("core",)
    assert spec(made["Dense_0"]["bias"]) == ()
    plain = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    jax.tree.map(np.testing.assert_array_equal, made, plain)


def test_logical_names_are_placed_by_rules(cores):
    model = Annotated("hidden", by_rules=True)
    with nn.logical_axis_rules([("hidden", "core")]):
        made = variables(cores, model)
    assert spec(made["Dense_0"]["kernel"].value) == (None, "core")
    # Flax leaves an array alone of which the rules say nothing.
    with nn.logical_axis_rules([("other", "core")]):
        made = variables(cores, model)
    assert spec(made["Dense_0"]["kernel"].value) == ()


def test_specs_go_before_annotations(cores):
    specs = {"Dense_0": P(), "Dense_1": None}
    made = cores.init(
        lambda key: Annotated().init(key, jnp.ones((1, 4)))["params"],
        jax.random.key(0),
        specs=specs,
    )
    assert spec(made["Dense_0"]["kernel"].value) == ()
    assert spec(made["Dense_1"]["kernel"].value)[:1] == ("core",)


def test_an_annotation_of_an_unknown_axis_names_the_path_and_the_axes(cores):
    text = (
        r"annotation of `result.*\['kernel'\].*axis 'model', but a replica has 'core'"
    )
    with pytest.raises(ValueError, match=text):
        variables(cores, Annotated("model"))


def test_a_constraint_of_an_unknown_axis_names_the_line_and_the_axes(cores):
    def build():
        return jax.lax.with_sharding_constraint(jnp.ones((2, 2)), P("model"))

    text = (
        r"(?s)`build` wants an array.*with_sharding_constraint.*'model', but .*'core'"
    )
    with pytest.raises(ValueError, match=text):
        cores.init(build)


class Objects(nnx.Module):
    """The same, of NNX."""

    def __init__(self, rngs, axis="core"):
        columns = nnx.with_partitioning(LECUN, (None, axis))
        rows = nnx.with_partitioning(LECUN, (axis, None))
        self.up = nnx.Linear(4, 16, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(16, 3, kernel_init=rows, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def build_objects(axis="core"):
    model = Objects(nnx.Rngs(0), axis)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def test_annotations_of_nnx_place_variables(cores):
    model, optimizer = cores.init(build_objects)
    assert spec(model.up.kernel[...]) == (None, "core")
    assert spec(model.down.kernel[...])[:1] == ("core",)
    assert spec(model.up.bias[...]) == ()
    moments = optimizer.opt_state[0].mu
    assert spec(moments.up.kernel[...]) == (None, "core")
    with nnx.use_eager_sharding(False):
        plain = Objects(nnx.Rngs(0))
    np.testing.assert_array_equal(model.up.kernel[...], plain.up.kernel[...])
