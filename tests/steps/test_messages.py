"""What is wrong with a call is said in the caller's words."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.cases import each_of
from helpers.replicas import replica
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src import lazy_names


def total(x):
    return replica().all_reduce("sum", x)


def test_what_is_no_list_of_devices(two):
    told = r"`devices` was 4; a list of devices.*`jax.devices\(\)\[:4\]`.*simulate\(4\)"
    for make in (js.MirroredStrategy, js.experimental.CentralStorageStrategy):
        with pytest.raises(TypeError, match=told):
            make(4)
    with pytest.raises(TypeError, match=r"`devices` was Mesh.*`list\(mesh.devices.fl"):
        js.MirroredStrategy(two.mesh)
    assert js.MirroredStrategy(list(two.mesh.devices.flat)).devices == two.devices
    for wrong in (1.5, True, object()):
        with pytest.raises(
            TypeError, match="`devices` was .* Give entries of `jax.dev"
        ):
            js.MirroredStrategy(wrong)


def test_an_axis_that_there_is_not_is_told_with_the_line(two):
    def step(x):
        return lax.pmean(x, "batch")  # <-

    x = two.per_replica([1.0, 2.0])
    with pytest.raises(NameError) as caught:
        two.run(step, (x,))
    lines, start = inspect.getsourcelines(step)
    text = str(caught.value)
    assert "`step` reduces over an axis 'batch' that there is not:\n" in text
    assert f"{__file__}:{start + 1}: {lines[1].strip()}" in text
    assert "`BatchNorm(axis_name='replica')`" in text
    assert "`jaxstrategy.flax.axis_name()`" in text and "all_reduce('mean', x)" in text


class Net(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        axis = self.axis or js.flax.axis_name()
        return nn.BatchNorm(use_running_average=False, momentum=0.0, axis_name=axis)(x)


@each_of("axis", ["replica", None])
def test_flaxs_batchnorm_has_global_statistics_with_the_name(two, axis):
    rows = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    net = Net(axis)
    variables = net.init(jax.random.key(0), rows)

    def step(variables, x):
        return net.apply(variables, x, mutable=["batch_stats"])

    x = two.per_replica(rows.reshape(2, 2, 2))
    y, after = two.run(step, (variables, x))
    stats = after["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(stats["var"], rows.var(0), rtol=1e-6)
    want = (rows - rows.mean(0)[None]) / np.sqrt(rows.var(0) + 1e-5)[None]
    np.testing.assert_allclose(np.reshape(y.stacked, (4, 2)), want, rtol=1e-5)


USES = {
    "all_reduce": lambda kept: kept.all_reduce("sum", 1.0),
    "replica_id_in_sync_group": lambda kept: kept.replica_id_in_sync_group,
    "num_replicas_in_sync": lambda kept: kept.num_replicas_in_sync,
    "devices": lambda kept: len(kept.devices),
}


@each_of("name", USES)
def test_the_context_of_no_strategy_is_not_for_a_step(two, name):
    kept = replica()
    told = (
        f"`{name}` .*taken outside `run`.*`get_replica_context\\(\\)` inside the step"
    )
    with pytest.raises(js.errors.ContextError, match=told):
        two.run(lambda: USES[name](kept))
    with pytest.raises(js.errors.ContextError, match=told):
        two.run(lambda: replica().merge_call(lambda s: USES[name](kept)))
    assert kept.num_replicas_in_sync == 1 and len(kept.devices) == 1


def test_a_kept_context_says_where_it_belongs(two):
    kept = []
    two.run(lambda: kept.append(replica()))

    def inside():
        mine = replica()
        return mine.merge_call(lambda s: mine.all_reduce("sum", 1.0))

    with pytest.raises(js.errors.ContextError, match="taken inside a step, and is"):
        kept[0].all_reduce("sum", 1.0)
    with pytest.raises(js.errors.ContextError, match="belongs to another step, or to"):
        two.run(lambda: kept[0].all_reduce("sum", 1.0))
    with pytest.raises(js.errors.ContextError, match="there are all replicas: use the"):
        two.run(inside)
    assert kept[0].num_replicas_in_sync == 2


def test_run_inside_pmap_or_a_shard_map_is_refused(two):
    told = "`total` was to be run on all replicas inside .*`strategy.run` instead of it"
    with pytest.raises(js.errors.ContextError, match=told):
        jax.pmap(lambda x: two.run(total, (x,)), devices=two.devices)(jnp.ones(2))
    mapped = jax.shard_map(
        lambda x: two.run(total, (x,)),
        mesh=two.mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
    )
    with pytest.raises(js.errors.ContextError, match=told):
        jax.jit(mapped)(jnp.ones(2))
    assert float(two.run(total, (jnp.ones(()),))) == 2
    with pytest.raises(js.errors.ContextError, match=told):  # compiled already
        jax.jit(mapped)(jnp.ones(2))


def test_run_inside_vmap_is_run_for_each(two):
    x = two.per_replica([1.0, 2.0])
    each = jax.vmap(lambda y: two.run(lambda y, x: total(x * y), (y, x)))(
        jnp.arange(3.0)
    )
    np.testing.assert_array_equal(each, [0, 3, 6])


def test_names_of_tensorflow_that_are_not_here_say_what_to_use():
    for full, advice in lazy_names.ADVICE.items():
        *modules, name = full.split(".")
        module = functools.reduce(getattr, modules, js)
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert str(caught.value) == (
            f"module {module.__name__!r} has no attribute {name!r}, which TensorFlow "
            f"has. {advice}"
        )
        assert not hasattr(module, name)


@each_of("module", [js, js.experimental, js.cluster_resolver])
def test_other_names_are_told_as_python_does(module):
    told = f"^module '{module.__name__}' has no attribute 'nothing'$"
    with pytest.raises(AttributeError, match=told):
        module.nothing  # noqa: B018


@each_of(
    "change",
    [
        lambda v, a: v.assign_add(a),
        lambda v, a: v[0].assign(a[0]),
        lambda v, a: v.scatter_add(js.IndexedSlices(a[:1], np.array([0]), (3,))),
    ],
    anew=True,
)
def test_a_variable_changed_for_each_mapped_row_is_told_with_the_line(two, change):
    with two.scope():
        v = js.Variable(np.zeros(3, np.float32), aggregation="sum")
    rows = two.per_replica(np.ones((2, 4, 3), np.float32))

    def step(x):
        return jax.vmap(lambda a: change(v, a))(x)

    with pytest.raises(ValueError) as caught:
        two.run(step)(rows)
    message = str(caught.value)
    assert message.startswith("`step` changes a variable inside `jax.vmap`, with anoth")
    assert "test_messages.py" in message
    assert "combine them (`values.sum(0)`), and assign the result outside" in message
    assert v.numpy().tolist() == [0, 0, 0]
