"""Remote values as arguments of scheduled functions, one for each worker."""

import time

import numpy as np
import pytest
from helpers.clusters import SECONDS, coordinated, until_each_has

import jaxstrategy as js

index = js.coordinator.experimental_get_current_worker_index


@pytest.fixture(scope="module")
def three():
    with coordinated(3) as coordinator:
        yield coordinator


def remote(coordinator, *values):
    """A remote value for each."""
    same = coordinator.function(lambda x: x)
    return [coordinator.schedule(same, (value,)) for value in values]


def test_each_worker_is_given_its_own(three):
    traces = []
    tens = js.coordinator.PerWorkerValue(remote(three, 10.0, 20.0, 30.0))
    assert len(tens) == 3 and all(
        isinstance(x, js.coordinator.RemoteValue) for x in tens.values
    )

    @three.function
    def step(own, pair):
        traces.append(1)
        return index(), own + pair["tens"] + pair["one"]

    found = until_each_has(three, step, (tens, {"tens": tens, "one": 1.0}))
    for worker, values in found.items():
        assert set(map(float, values)) == {20 * (worker + 1) + 1}
    assert len(traces) == 1


def until_it_fails(coordinator, step, value):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(3):
            coordinator.schedule(step, (value,))
        coordinator.join()


@pytest.mark.parametrize("values", [[1, 2, 3], [np.ones(2)], ["x"]], ids=repr)
def test_only_remote_values_are_taken(values):
    with pytest.raises(AssertionError, match="`RemoteValue`s were wanted"):
        js.coordinator.PerWorkerValue(values)


def test_too_few_are_an_error_of_the_function(three):
    value = js.coordinator.PerWorkerValue(remote(three, 1.0))
    three.join()
    step = three.function(lambda own: (index(), own))
    with pytest.raises(IndexError, match=r"Worker [12] runs .* PerWorkerValue of 1 va"):
        until_it_fails(three, step, value)
    three.join()


def test_values_of_different_shapes_are_an_error_of_the_function(three):
    values = remote(three, np.ones(2), np.ones(3), np.ones(3))
    value = js.coordinator.PerWorkerValue(values)
    step = three.function(lambda own: (index(), own.sum()))
    with pytest.raises(TypeError, match=r"given float32\[3\] by .*value, float32\[2\]"):
        until_it_fails(three, step, value)


def test_a_value_that_failed_is_an_error_here(three):
    iterator = iter(three.create_per_worker_dataset(lambda: range(1)))
    take = three.function(lambda iterator: (next(iterator), next(iterator)))
    failed = three.schedule(take, (iterator,))
    with pytest.raises(js.OutOfRangeError):
        three.join()
    value = js.coordinator.PerWorkerValue([failed] * 3)
    with pytest.raises(js.OutOfRangeError):
        three.schedule(three.function(lambda own: own), (value,))
    three.join()


def test_it_has_tensorflows_other_name():
    names = js.experimental.coordinator
    assert names.PerWorkerValues is js.coordinator.PerWorkerValue
