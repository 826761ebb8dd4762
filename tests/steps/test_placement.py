"""Devices by name, arguments that lie on others, and those that are donated."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids, replica
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxstrategy as js
from jaxstrategy.errors import ContextError, PlacementError


@each_of(
    "name, index",
    [("CPU:0", 0), ("cpu:3", 3), ("/cpu:2", 2), ("/device:CPU:1", 1), ("CPU", 0),
     ("/job:localhost/replica:0/task:0/device:CPU:5", 5), (" cpu:7 ", 7)])  # fmt: skip
def test_names_of_devices(name, index):
    strategy = js.OneDeviceStrategy(name)
    assert strategy.devices == (jax.devices()[index],)


@each_of(
    "name, words",
    [("CPU:8", r"Unknown device 'CPU:8': this host has cpu:0..7. .*simulate\(n\)"),
     ("GPU:0", "Unknown device 'GPU:0': this host has no gpu device"),
     ("/gpu:1", "Unknown device '/gpu:1'"), ("cuda:0", "has no cuda device"),
     ("TPU:0", "has no tpu device"),
     ("CPU:x", "'CPU:x' is not the name of a device"),
     ("toaster:0", "'toaster:0' is not the name of a device"),
     ("", "'' is not the name of a device"),
     ("CPU:-1", "is not the name of a device")])  # fmt: skip
def test_unknown_devices(name, words):
    for make in (js.OneDeviceStrategy, lambda n: js.MirroredStrategy([n])):
        with pytest.raises(ValueError, match=words):
            make(name)


@each_of("device", [3, None, 1.5, ["CPU:0"]])
def test_what_is_no_device(device):
    with pytest.raises(TypeError, match="A device was expected, got"):
        js.OneDeviceStrategy(device)


def test_mirrored_strategy_takes_all_devices_or_the_given_ones():
    assert js.MirroredStrategy().devices == tuple(jax.devices())
    mixed = js.MirroredStrategy(["CPU:2", jax.devices()[0]])
    assert mixed.devices == (jax.devices()[2], jax.devices()[0])
    assert mixed.num_replicas_in_sync == 2
    assert js.MirroredStrategy("CPU:1").devices == (jax.devices()[1],)
    assert mixed.mesh.devices.tolist() == list(mixed.devices)


@each_of("platform", ["cpu", "CPU", "/device:CPU", " /cpu "])
def test_a_platform_means_all_its_devices(platform):
    eight = tuple(jax.devices())
    assert js.MirroredStrategy(platform).devices == eight
    central = js.experimental.CentralStorageStrategy(platform)
    assert central.devices == eight
    # One entry of a list is one device, as one name is where one device is wanted.
    assert js.MirroredStrategy([platform, "CPU:2"]).devices == (eight[0], eight[2])
    assert js.OneDeviceStrategy(platform).devices == eight[:1]


def test_mirrored_strategy_refuses_duplicates_and_nothing():
    with pytest.raises(ValueError, match="No duplicates are allowed.*cpu:0 is there"):
        js.MirroredStrategy(["CPU:0", "CPU:1", jax.devices()[0]])
    with pytest.raises(ValueError, match="An empty list of devices"):
        js.MirroredStrategy([])


def test_how_strategies_print():
    assert repr(js.MirroredStrategy()) == "MirroredStrategy(8 replicas on cpu:0..7)"
    two = js.MirroredStrategy(["CPU:0", "CPU:1"])
    assert repr(two) == "MirroredStrategy(2 replicas on cpu:0, cpu:1)"
    assert (
        repr(js.OneDeviceStrategy("CPU:3")) == "OneDeviceStrategy(1 replica on cpu:3)"
    )
    assert repr(js.get_strategy()) == "DefaultStrategy(1 replica)"


def test_simulating_too_late():
    with pytest.raises(js.errors.SimulationError, match=r"`simulate\(3\)` came too"):
        js.simulate(3)


@each_of("n", [0, -1, 2.5, "8", None, True])
def test_simulating_what_is_no_number(n):
    with pytest.raises(ValueError, match="a positive whole number was wanted"):
        js.simulate(n)


def in_a_new_process(code, **environment):
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=keep | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_simulate_in_a_new_process():
    done = in_a_new_process(
        "import jaxstrategy as js\n"
        "print(len(js.simulate(5)), len(js.simulate(5)), js.MirroredStrategy())"
    )
    assert done.stdout.strip() == "5 5 MirroredStrategy(5 replicas on cpu:0..4)", done


# Arguments that lie on several devices; datasets that are read while JAX traces.


def placed(shape, spec, devices, axes=("data",), mesh_shape=None):
    """0, 1, 2, ... on a mesh of the user's own."""
    grid = np.asarray(devices).reshape(mesh_shape or (len(devices),))
    sharding = NamedSharding(Mesh(grid, axes), PartitionSpec(*spec))
    return jax.device_put(np.arange(np.prod(shape), dtype="f").reshape(shape), sharding)


# Shape, the specification, and the devices and mesh that divide it.
DIVIDED = {
    "rows": ((8, 2), ("data",), 4, None, "PerReplica(array.reshape(4, 2, 2))"),
    "an entry each": ((4, 2), ("data",), 4, None, "pass `PerReplica(array)`"),
    "in part": ((4, 2), ("data",), 4, (2, 2), "`[4, ...]`, entry i for replica i"),
    "more devices": ((8, 2), ("data",), 8, None, "`[4, ...]`, entry i for replica i"),
}


@each_of("shape, spec, count, mesh_shape, advice", DIVIDED.values())
def test_a_plain_array_that_a_mesh_divides_is_refused(
    four, shape, spec, count, mesh_shape, advice
):
    axes = ("data",) if mesh_shape is None else ("data", "model")
    x = placed(shape, spec, jax.devices()[:count], axes, mesh_shape)
    text = "`x` is a plain array that is split over the replicas' devices (its shape is"
    with pytest.raises(PlacementError, match=re.escape(text)) as caught:
        four.run(lambda x: x.sum(), (x,))
    assert advice in str(caught.value)
    with pytest.raises(PlacementError, match="strategy.mirror"):
        four.reduce("sum", {"x": x})


@each_of("is_jitted", (False, True))
def test_what_a_step_captures_is_refused_too(four, is_jitted):
    array = placed((4,), ("data",), four.devices)
    double = lambda: array * 2  # noqa: E731 (the message names the line)
    step = jax.jit(double) if is_jitted else double
    text = r"What `<lambda>` captures, float32\[4\], used at .*double = lambda: array"
    with pytest.raises(PlacementError, match=text):
        four.run(lambda: step())


def test_what_it_captures_along_with_what_it_uses_is_not(four):
    def made(state):
        return lambda: state["whole"] * 2

    state = {"split": placed((4,), ("data",), four.devices), "whole": jnp.ones(3)}
    for _ in range(2):
        np.testing.assert_array_equal(four.run(made(state)), [2, 2, 2])


def test_what_the_refusal_advises_works(four):
    x = placed((8, 2), ("data",), jax.devices()[:4])
    host = np.arange(16.0).reshape(8, 2)
    own = four.run(lambda x: x, (js.PerReplica(x.reshape(4, 2, 2)),))
    for i, version in enumerate(own.values):
        np.testing.assert_array_equal(version, host[2 * i : 2 * i + 2])
    total = four.run(lambda x: x.sum(), (four.mirror(x),))
    assert float(total) == host.sum()


def test_what_lies_whole_on_other_devices_is_no_mistake(four):
    x = placed((8, 2), (), jax.devices()[:8])  # whole on each
    assert float(four.run(lambda x: x.sum(), (x,))) == 120.0
    elsewhere = placed((8, 2), ("data",), jax.devices()[4:])
    assert float(four.run(lambda x: x.sum(), (elsewhere,))) == 120.0
    one = js.MirroredStrategy(jax.devices()[:1])
    rows = placed((8, 2), ("data",), jax.devices())
    assert float(one.run(lambda x: x.sum(), (rows,))) == 120.0


def test_state_from_flax_replicate_is_told_from_a_batch(four):
    from flax import jax_utils

    state = {"w": jnp.ones((3, 2))}
    replicated = jax_utils.replicate(state, jax.devices()[:4])
    with pytest.raises(PlacementError, match="flax.jax_utils.unreplicate"):
        four.run(lambda state: state["w"].sum(), (replicated,))
    again = jax_utils.unreplicate(replicated)
    assert float(four.run(lambda state: state["w"].sum(), (again,))) == 6.0


READS = {
    "next": lambda dataset, iterator: next(iterator),
    "get_next": lambda dataset, iterator: iterator.get_next(),
    "for": lambda dataset, iterator: [batch for batch in dataset][0],
    "grouped": lambda dataset, iterator: next(
        iter(js.experimental.grouped(dataset, 2))
    ),
    "element_spec": lambda dataset, iterator: dataset.element_spec,
}
TRACERS = {
    "jit": lambda two, read: jax.jit(lambda x: (read(), x)[1])(1.0),
    "grad": lambda two, read: jax.grad(lambda x: (read(), x)[1])(1.0),
    "scan": lambda two, read: jax.lax.scan(
        lambda x, _: ((read(), x)[1], None), 1.0, length=3
    ),
    "run": lambda two, read: two.run(lambda x: (read(), x)[1], (1.0,)),
}


@each_of("read, ahead", zip(READS.values(), (0, 2, 0, 2, 0), strict=True))
def test_a_dataset_is_not_read_while_jax_traces(two, read, ahead):
    options = js.InputOptions(experimental_per_replica_buffer_size=ahead)
    dataset = two.experimental_distribute_dataset([np.arange(4)] * 3, options)
    with iter(dataset) as iterator:
        for trace in TRACERS.values():
            with pytest.raises(ContextError, match="was read inside a step, or inside"):
                trace(two, lambda: read(dataset, iterator))
        assert len(list(iterator)) == 3  # none is lost


# Donated arguments, and arguments that lie elsewhere or are of another strategy.


def test_one_array_in_two_donated_places_is_refused(four):
    for strategy in (four, js.MirroredStrategy(jax.devices()[:1])):
        check_that_one_array_in_two_donated_places_is_refused(strategy)


def check_that_one_array_in_two_donated_places_is_refused(strategy):
    """At the first call, and where calls before have donated what is in one place."""

    @strategy.run(options=js.RunOptions(donate_argnums=0))
    def step(state, other):
        return {key: value + other for key, value in state.items()}

    def fresh():
        return strategy.mirror(jnp.zeros(3) + 0)

    x, other = fresh(), fresh()
    for _ in range(2):
        for state, read, words in (
            (
                {"a": x, "b": x},
                other,
                r"`state\['a'\]` and `state\['b'\]` are one array",
            ),
            ({"a": x, "b": other}, x, r"`state\['a'\]` and `other`"),
        ):
            with pytest.raises(js.errors.DonatedValueError, match=words) as info:
                step(state, read)
            assert info.value.__cause__ is None and info.value.__suppress_context__
        state = {"a": fresh(), "b": fresh()}
        for _ in range(4):
            state = step(state, x)
        assert state["b"].shape == (3,)
    assert not x.is_deleted() and not other.is_deleted()
    taken = dict(state)
    step(state, x)
    with pytest.raises(js.errors.DonatedValueError, match=r"`state\['a'\]` was donate"):
        step(taken, x)


def test_some_arguments_are_donated_and_others_stay(four):
    options = js.RunOptions(donate_argnums=(0, 2))

    def step(state, batch, count):
        total = replica().all_reduce("sum", batch["x"])
        return {"w": state["w"] + total}, batch["rate"] * total, count + 1

    rate, count = four.mirror((jnp.ones(3), jnp.zeros(()) + 0))
    state = {"w": four.mirror(jnp.zeros(3) + 0)}
    for number in range(1, 4):
        given = state["w"], count
        state, _, count = four.run(
            step, (state, {"x": ids(four), "rate": rate}, count), options=options
        )
        assert all(array.is_deleted() for array in given)
        np.testing.assert_array_equal(state["w"], [6.0 * number] * 3)
    assert count == 3 and not rate.is_deleted()


def test_donating_a_mirrored_copy_leaves_the_original(strategy):
    original = jax.device_put(jnp.ones(3), jax.devices()[0])
    state = strategy.mirror({"a": original, "b": original})
    options = js.RunOptions(donate_argnums=0)
    strategy.run(lambda s: jax.tree.map(jnp.sin, s), (state,), options=options)
    assert state["a"].is_deleted() and original.tolist() == [1, 1, 1]


def test_zeros_keep_their_sign_and_numbers_their_type(two):
    def step(x):
        return 1.0 / x, x

    for _ in range(2):
        assert two.run(step, (0.0,))[0] == np.inf
        assert two.run(step, (-0.0,))[0] == -np.inf
        assert two.run(step, (1,))[1].dtype == jnp.int32
        assert two.run(step, (1.0,))[1].dtype == jnp.float32
        assert np.isnan(two.run(step, (float("nan"),))[1])


def test_tools_for_finding_errors_work(two):
    x = two.per_replica([1.0, 2.0])

    def step(x):
        return x, replica().all_reduce("sum", x), "text"

    with jax.disable_jit():
        assert two.run(step, (x,))[1] == 3.0
    with jax.checking_leaks():
        assert two.run(step, (x,))[1] == 3.0
    shapes = jax.eval_shape(lambda v: two.run(step, (v,))[:2], x)
    assert shapes[0].shape == () and shapes[1].shape == ()
    compiled = jax.jit(lambda v: two.run(step, (v,))[1]).lower(x).compile()
    assert compiled(x) == 3.0


def test_donated_argument_numbers_are_checked(two):
    with pytest.raises(ValueError, match="names argument 2, but `args` has 1"):
        two.run(lambda a: a, (1.0,), options=js.RunOptions(donate_argnums=2))
    with pytest.raises(ValueError, match="cannot be negative"):
        js.RunOptions(donate_argnums=-1)
    with pytest.raises(TypeError, match="an argument position or a sequence"):
        js.RunOptions(donate_argnums="state")
    assert js.RunOptions(donate_argnums=[1, 0, 1]).donate_argnums == (0, 1)


# Values of another strategy, and values in the wrong form.


def test_a_per_replica_of_another_number_of_replicas(two, four):
    for value in (ids(two), js.PerReplica(np.zeros((8, 3)))):
        with pytest.raises(js.errors.PlacementError, match="`x` is a PerReplica for"):
            four.run(lambda x: x, (value,))
    with pytest.raises(js.errors.PlacementError, match="`x` is a PerReplica of shape"):
        four.run(lambda x: x, (js.PerReplica(np.float32(1.0)),))


def check_that_a_per_replica_of_another_strategy(four, devices):
    other = js.MirroredStrategy(jax.devices()[devices])
    assert other.num_replicas_in_sync == 4

    def step(x):
        return x

    for _ in range(2):  # also when the step has been run with a right one
        with pytest.raises(js.errors.PlacementError, match="`x` is a PerReplica of an"):
            four.run(step, (ids(other),))
        four.run(step, (ids(four),))


def test_a_per_replica_of_another_strategy(four):
    for devices in (slice(4, 8), slice(3, None, -1)):
        check_that_a_per_replica_of_another_strategy(four, devices)


def test_a_per_replica_captured_by_the_step_is_refused(four):
    x = ids(four)
    for step in (
        lambda: x + 1,
        lambda: jnp.sin(x),
        lambda: replica().all_reduce("sum", x),
        lambda: replica().all_gather(x, 0),
        lambda: replica().merge_call(lambda s, v: v, (x,)),
        lambda: replica().merge_call(lambda s: s.reduce("sum", x)),
        lambda: replica().merge_call(lambda s: s.run(lambda v: v, (x,))),
        lambda: {"a": x},
    ):
        with pytest.raises(TypeError, match="ass it as an argument"):
            four.run(step)


def test_unhashable_static_arguments_are_refused(two):
    with pytest.raises(TypeError, match=r"`config` is \{1\}, a set.*must be hashable"):
        two.run(lambda x, config: x, (1.0, {1}))
    with pytest.raises(TypeError, match=r"`names` is array\(.*must be hashable"):
        two.run(lambda names: 1.0, (np.array(["a", "b"]),))
