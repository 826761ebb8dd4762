"""Devices by name, strategies over them, and simulated devices."""

import os
import subprocess
import sys

import jax
import pytest
from helpers.cases import each_of

import jaxstrategy as js


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


@pytest.mark.slow
def test_simulate_after_a_device_was_used():
    done = in_a_new_process(
        "import jax, jaxstrategy as js\njax.devices()\njs.simulate(5)"
    )
    assert done.returncode == 1
    assert "`simulate(5)` came too late: JAX has already started, on cpu:0" in (
        done.stderr
    )


@pytest.mark.slow
def test_simulate_beats_the_environment_or_says_so():
    flags = "--xla_force_host_platform_device_count=3"
    done = in_a_new_process(
        "import jaxstrategy as js\nprint(len(js.simulate(5)))", XLA_FLAGS=flags
    )
    is_told = "SimulationError: 5 simulated" in done.stderr
    assert done.stdout.strip() == "5" or is_told, done
