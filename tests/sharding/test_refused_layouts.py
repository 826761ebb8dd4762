"""Devices of a replica and replicas of a device: what is taken, and what is refused."""

import jax
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js

KINDS = [js.MirroredStrategy, js.experimental.CentralStorageStrategy]


def multi_worker(**options):
    alone = js.cluster_resolver.SimpleClusterResolver({})
    return js.MultiWorkerMirroredStrategy(alone, **options)


@each_of(
    "given, told",
    [
        (2, "was 2; the names of axes and their sizes were wanted"),
        ([("core", 2)], r"was \[\('core', 2\)\]; the names"),
        (np.ones(2), ".*; the names of axes and their sizes were wanted, such as"),
        ({"core": 2.0}, "has 2.0 as the size of 'core'; a whole number was wanted"),
        ({"core": True}, "has True as the size of 'core'"),
        ({"core": 2, 1: 2}, "has 1 as the name of an axis; a text was wanted"),
    ],
)
@each_of("kind", KINDS)
def test_logical_axes_are_names_and_whole_numbers(kind, given, told):
    with pytest.raises(TypeError, match=f"^`logical_axes` {told}"):
        kind(logical_axes=given)


@each_of(
    "given, told",
    [
        ({"core": 0}, "has 0 as the size of 'core'; at least 1 was wanted"),
        ({"": 2}, "has an empty text as the name of an axis; a name was wanted"),
        ({"replica": 2}, "has an axis 'replica', which is the name of the axis along"),
        (
            {"core": 3},
            "was {'core': 3}: a replica has 3 devices, and 8 are no multiple",
        ),
        ({"a": 2, "b": 3}, "was .*: a replica has 6 devices, and 8 are no multiple"),
        ({"core": 2**70}, "was .*: a replica has 1180591620717411303424 devices"),
    ],
)
@each_of("kind", KINDS)
def test_logical_axes_fit_the_devices(kind, given, told):
    with pytest.raises(ValueError, match=f"^`logical_axes` {told}"):
        kind(logical_axes=given)


@each_of("given", [2.0, True, False, None, "2", [2], {"core": 2}, np.float32(2)])
@each_of("kind", KINDS)
def test_replicas_of_a_device_are_a_whole_number(kind, given):
    with pytest.raises(TypeError, match="^`replicas_per_device` was .* whole number"):
        kind(replicas_per_device=given)


@each_of(
    "given, told",
    [
        (0, "was 0; at least 1 was wanted"),
        (
            2**70,
            "there would be 9444732965739290427392 replicas, and they are numbered",
        ),
        (2**28, "was 268435456: there would be 2147483648 replicas"),
    ],
)
@each_of("kind", KINDS)
def test_replicas_of_a_device_can_be_numbered(kind, given, told):
    with pytest.raises(ValueError, match=f"^`replicas_per_device` .*{told}"):
        kind(replicas_per_device=given)


def test_a_replica_has_several_devices_or_shares_one_and_not_both():
    for sizes in ({"core": 2}, {"core": 1}):
        with pytest.raises(ValueError, match="and `replicas_per_device` 2: .*one of"):
            js.MirroredStrategy(logical_axes=sizes, replicas_per_device=2)
        with pytest.raises(ValueError, match="and `replicas_per_device` 2: .*one of"):
            multi_worker(logical_axes=sizes, replicas_per_device=2)


def test_a_strategy_of_many_replicas_is_made_without_counting_them():
    strategy = js.MirroredStrategy(jax.devices()[:1], replicas_per_device=2**31 - 1)
    assert strategy.num_replicas_in_sync == 2**31 - 1


def test_one_device_is_one_replica():
    for more in ({"replicas_per_device": 2}, {"logical_axes": {"core": 2}}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            js.OneDeviceStrategy("CPU:0", **more)


def test_a_device_twice_is_no_way_to_have_it_shared():
    with pytest.raises(ValueError, match="with `replicas_per_device` several replicas"):
        js.MirroredStrategy(["CPU:0", "CPU:0"])
