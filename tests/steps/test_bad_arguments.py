"""What is wrong with a call is said in the words of its caller."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cases import each, each_of
from helpers.replicas import replica
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxstrategy as js
from jaxstrategy._src import lazy_names

HUGE = 10**400


@pytest.fixture(scope="module")
def strategy_of_two(two):
    return two


TOO_LARGE = {
    "mirror": lambda strategy: strategy.mirror(2**40),
    "variable": lambda strategy: js.Variable(0).assign(2**40),
    "finite": lambda strategy: js.training.all_finite({"a": 2**40}),
    "adjust": lambda strategy: js.training.DynamicLossScale().adjust(2**40),
    "gather": lambda strategy: strategy.gather(2**40, 0),
    "argument": lambda strategy: strategy.run(lambda x: x, ({"a": [2**40]},)),
    "compile": lambda strategy: strategy.compile(lambda x: x, (2**40,)),
    "explain": lambda strategy: strategy.explain(lambda x: x, ((1, 2**40),)),
    "per_replica": lambda strategy: strategy.per_replica([2**40, 2**40]),
    "reduce": lambda strategy: strategy.reduce("sum", 2**40),
    "sparse_read": lambda strategy: vector().sparse_read(2**40),
    "scatter_add": lambda strategy: vector().scatter_add(rows([2**40])),
    "added_to": lambda strategy: rows(np.zeros(1, int)).added_to(2**40),
    "weight": lambda strategy: js.training.compute_average_loss(
        [1.0], sample_weight=[2**40]
    ),
    "weights": lambda strategy: strategy.reduce("sum", 1.0, None, weights=2**40),
    # JAX itself keeps the lower 32 bits of these, without a word.
    "numpy": lambda strategy: strategy.mirror(np.int64(2**40)),
    "numpy argument": lambda strategy: strategy.run(lambda x: x, (np.int64(2**40),)),
    "batch": lambda strategy: next(
        iter(strategy.experimental_distribute_dataset([np.full(2, 2**40)]))
    ),
}


def vector():
    return js.Variable([1.0, 2.0, 3.0])


def rows(indices):
    return js.IndexedSlices(np.ones(1, np.float32), indices, (3,))


def test_integers_that_jax_does_not_hold_are_told(strategy_of_two):
    for _, use in each(TOO_LARGE):
        told = r"1099511627776\]* was given, and int32 holds -2147483648 to 2147483647."
        with pytest.raises(ValueError, match=told):
            use(strategy_of_two)


def test_numbers_that_a_dtype_does_not_hold_are_told():
    for dtype, told in (
        ("uint8", "and uint8 holds 0 to 255. Give an array of a dtype that holds it, "),
        ("float32", r"and float32 holds -3.40282e\+38 to 3.40282e\+38. Give an array"),
    ):
        with pytest.raises(ValueError, match=f"'v': 1000.* was given, {told}"):
            js.Variable(HUGE, dtype=dtype, name="v")


def test_loss_scales_keep_to_what_their_dtypes_hold():
    for number in (-HUGE, np.inf, np.nan):
        with pytest.raises(ValueError, match="`period` is .*; at least 1 step is"):
            js.training.DynamicLossScale(period=number)
        with pytest.raises(ValueError, match="`factor` is .*; more than 1 is wanted,"):
            js.training.DynamicLossScale(factor=number)
        with pytest.raises(ValueError, match="`min_loss_scale` is .*; a number that"):
            js.training.DynamicLossScale(min_loss_scale=number)


def test_shapes_of_sparse_rows_that_cannot_be_are_refused():
    for shape in ((-1,), (HUGE,), (1.5,), 3, "ab"):
        with pytest.raises(ValueError, match="`dense_shape` was .*; a shape, such as"):
            js.IndexedSlices([1.0], [0], shape)


CONTEXTS = [
    ((1, 0, 0), "`num_replicas_in_sync` was 0; a whole number from 1 on was wanted"),
    ((0, 0, 1), "`num_input_pipelines` was 0; a whole number from 1 on was wanted"),
    ((2, 2, 1), "`input_pipeline_id` was 2; a whole number from 0 to 1 was wanted"),
    ((1, -1, 1), "`input_pipeline_id` was -1; a whole number from 0 to 0 was wa"),
]


def test_input_contexts_that_cannot_be_are_refused():
    for given, told in CONTEXTS:
        with pytest.raises(ValueError, match=told):
            js.InputContext(*given)


def test_input_contexts_have_whole_numbers():
    for given in ("2", 1.0, None, True):
        with pytest.raises(TypeError, match="`num_replicas_in_sync` was .*whole"):
            js.InputContext(1, 0, given)
        with pytest.raises(TypeError, match="`global_batch_size` was .*whole number"):
            js.InputContext(1, 0, 2).get_per_replica_batch_size(given)


def test_metrics_are_numbers_by_name(tmp_path):
    for metrics in (5, [1], {"a": "b"}, {"a": None}, {"a": HUGE}):
        with js.checkpoint.CheckpointManager(tmp_path) as manager:
            with pytest.raises(TypeError, match="`metrics` was .*; numbers by name"):
                manager.save(1, {"a": 1}, metrics)


def test_chains_that_are_none_are_refused(strategy_of_two):
    with pytest.raises(TypeError, match="`transformation` was 5; a transformation of"):
        js.optax.check_chain(5, {"w": np.ones(2)}, strategy=strategy_of_two)
    with pytest.raises(TypeError, match="`transformation` was {}; a transformation of"):
        js.optax.check_chain({}, {"w": np.ones(2)}, strategy=strategy_of_two)
    with pytest.raises(TypeError, match="`strategy` was 5; a strategy was wanted"):
        js.optax.check_chain(optax.sgd(0.1), {"w": np.ones(2)}, strategy=5)


def test_a_strategy_of_no_devices_is_refused():
    with pytest.raises(TypeError, match="`devices` has .*5.*; devices were wanted"):
        js.Strategy([5])
    device = jax.devices()[0]
    for devices in ([], [[]], [[device]], [device, device]):
        with pytest.raises(ValueError, match="`devices` was .*; a list of one or more"):
            js.Strategy(devices)


def test_masks_of_numpy_are_not_dropped(two):
    masked = np.ma.masked_equal(np.arange(2.0), 1)
    for make in (
        lambda: two.per_replica(masked),
        lambda: two.per_replica([masked, masked]),
        lambda: two.experimental_distribute_values_from_function(lambda _: masked),
    ):
        with pytest.raises(ValueError, match="is a masked array of NumPy, and its"):
            make()
    nothing_masked = two.per_replica(np.ma.masked_equal(np.arange(2.0), 5))
    np.testing.assert_array_equal(
        two.experimental_local_results(nothing_masked), [0, 1]
    )


def test_a_number_is_placed_anew_where_64_bits_are_on(two):
    def same(x):
        return x

    for bits, dtype in ((False, np.float32), (True, np.float64), (False, np.float32)):
        with jax.enable_x64(bits):
            found = two.run(same, (0.1,))
        assert found.dtype == dtype and found == dtype(0.1)


# What is wrong with a call is said in the caller's words.


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
        with pytest.raises(TypeError, match="`devices` was .* Give entries of `jax.de"):
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
    assert "test_bad_arguments.py" in message
    assert "combine them (`values.sum(0)`), and assign the result outside" in message
    assert v.numpy().tolist() == [0, 0, 0]


# Where a whole number is wanted, NumPy's will do, and True and False will not.


def saved(step, folder):
    with js.checkpoint.CheckpointManager(folder) as manager:
        manager.save(step, {"w": np.ones(2)})


WANTED = {
    "donate_argnums": lambda n, _: js.RunOptions(donate_argnums=n),
    "bytes_per_pack": lambda n, _: js.experimental.CommunicationOptions(n),
    "experimental_per_replica_buffer_size": lambda n, _: js.InputOptions(
        experimental_per_replica_buffer_size=n
    ),
    "batch_size": lambda n, _: js.batches(np.ones(3), n),
    "k": lambda n, _: js.experimental.grouped([np.ones(3)], n),
    "dense_shape": lambda n, _: js.IndexedSlices(np.ones((1, 2)), [0], (n, 2)),
    "replicas": lambda n, _: js.profiling.Topology(1e9, 1e-6, replicas=n),
    "every": lambda n, _: js.profiling.MetricLogger(print, every=n),
    "step": saved,
}


def test_a_bool_is_no_whole_number(tmp_path):
    for name, use in each(WANTED):
        with pytest.raises((TypeError, ValueError), match=f"`{name}` (was|is) .*True"):
            use(True, tmp_path)


def test_numpys_integers_are_whole_numbers(tmp_path):
    for _, use in each(WANTED):
        use(np.int64(1), tmp_path)


def test_axes_may_be_numpys(two):
    x = two.per_replica([np.ones((2, 3)), np.zeros((2, 3))])
    for axis in (0, np.int64(0), np.array(0)):
        assert two.reduce("sum", x, axis=axis).tolist() == [2.0] * 3

    def joined(x):
        return js.get_replica_context().all_gather(x, np.int64(1))

    assert two.run(joined, (x,)).shape == (2, 6)
    assert len(js.simulate(np.int64(8))) == len(jax.devices())


# What a `PerReplica` says to who uses it as if it were one array.

READ, GO_THROUGH, COMPUTE = (
    r"For one number or array of all replicas use `strategy.reduce\('mean', value\)`",
    "For each replica's version use `strategy.experimental_local_results",
    r"Compute inside the step, or in one of its own, `strategy.run\(lambda x: ",
)
AS_ONE_ARRAY = {
    "float": (float, READ),
    "int": (int, READ),
    "bool": (bool, READ),
    "if": (lambda x: 1 if x else 2, READ),
    "np.asarray": (np.asarray, READ),
    "format": (lambda x: f"{x:.3f}", READ),
    "len": (len, GO_THROUGH),
    "iter": (list, GO_THROUGH),
    "index": (lambda x: x[0], GO_THROUGH),
    "in": (lambda x: 1.0 in x, GO_THROUGH),
    "add": (lambda x: x + 1, COMPUTE),
    "from the right": (lambda x: 1 + x, COMPUTE),
    "with an array": (lambda x: x - np.ones(3), COMPUTE),
    "from an array": (lambda x: jnp.ones(3) / x, COMPUTE),
    "negative": (lambda x: -x, COMPUTE),
    "less": (lambda x: x < 1, COMPUTE),
    "equal": (lambda x: x == 1.0, COMPUTE),
    "not equal": (lambda x: x != np.ones(3), COMPUTE),
    "jnp": (jnp.sin, COMPUTE),
}


def test_uses_as_one_array_say_what_to_do(two):
    for _, (use, advice) in each(AS_ONE_ARRAY):
        with pytest.raises(TypeError, match=f"as if it were one array.*{advice}"):
            use(two.per_replica([1.0, 2.0]))


NAMES = {
    "mean": r"Use `strategy.reduce\('mean', value\)` over the replicas",
    "max": r"Use `strategy.reduce\('max', value\)` over the replicas",
    "item": READ,
    "numpy": READ,
    "reshape": COMPUTE,
    "at": COMPUTE,
    "ndim": COMPUTE,
}


def test_methods_of_arrays_say_what_to_do(two):
    for name, advice in each(NAMES):
        x = two.per_replica([1.0, 2.0])
        words = (
            f"A PerReplica has no `{name}`: it holds one version per replica. {advice}"
        )
        with pytest.raises(AttributeError, match=words):
            getattr(x, name)
        assert not hasattr(x, name)


def test_what_any_object_can_do_it_can(two):
    x, y = two.per_replica([1.0, 2.0]), two.per_replica([1.0, 2.0])
    assert x == x and x != y and x != "text" and x != None  # noqa: E711
    assert x in [y, x] and {x: 1}[x] == 1
    assert repr(x) == "PerReplica(float32[] on cpu:0, cpu:1)"
    assert f"{x}" == str(x) == "PerReplica(float32[] on cpu:0, cpu:1: 1.0, 2.0)"
    assert copy.copy(x).stacked is x.stacked
    assert jax.block_until_ready(x).values == (1, 2)


def test_donated_values_say_so(two):
    x = two.per_replica([1.0, 2.0])
    step = two.run(lambda x: x + 1, options=js.RunOptions(donate_argnums=0))
    step(x)
    for use in (
        lambda: x.values,
        lambda: x.local(0),
        lambda: two.experimental_local_results(x),
        lambda: two.experimental_local_results({"x": x}),
        lambda: two.reduce("sum", x),
        lambda: two.gather(x),
        lambda: two.per_replica(x),
        lambda: two.run(lambda x: x, (x,)),
    ):
        with pytest.raises(
            js.errors.DonatedValueError, match="donated to an earlier call"
        ):
            use()
    assert repr(x) == "PerReplica(float32[], donated to an earlier call)"
