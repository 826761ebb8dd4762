"""Workers that are lost and functions that fail at random: nothing is lost or stuck."""

import random

import numpy as np
import pytest
from helpers.fake_workers import coordinator, here, push

import jaxstrategy as js

READY = js.coordinator.RemoteValueStatus.READY


@pytest.mark.parametrize("seed", range(4))
def test_each_function_counts_once_whatever_is_lost(seed):
    chance = random.Random(seed)
    fates = [chance.random() for _ in range(150)]
    lost = set()
    with coordinator(3, max_restarts=1000) as coordinated:

        @coordinated.function
        def f(number):
            fate = fates[number] if int(number) not in lost else 1.0
            lost.add(int(number))  # it is lost once at most
            if fate < 0.1:
                here.worker.kill()
            push(2 ** int(number))
            if 0.1 < fate < 0.2:
                here.worker.kill()
            return number

        values = [coordinated.schedule(f, (np.int32(i),)) for i in range(150)]
        coordinated.join(timeout=60)
        assert coordinated.fetch(values) == list(range(150))
        assert coordinated.backend.servers[0].total == 2**150 - 1
        assert len(coordinated.backend.lives) > 3


@pytest.mark.parametrize("seed", range(4))
def test_errors_and_losses_together_leave_a_coordinator_that_works(seed):
    chance = random.Random(seed)
    errors = 0
    with coordinator(3, max_restarts=1000, limit=5) as coordinated:
        values = {}

        @coordinated.function
        def f(number, fate):
            if fate < 0.05:
                raise ValueError(f"{number}")
            push(2 ** int(number))
            if fate < 0.1:
                here.worker.kill()
            return number

        for number in range(120):
            try:
                value = coordinated.schedule(
                    f, (np.int32(number), np.float64(chance.random()))
                )
            except (ValueError, RuntimeError) as error:
                assert "closed" not in str(error)
                errors += 1
            else:
                values[number] = value
        for _ in range(2):
            try:
                coordinated.join(timeout=60)
            except (ValueError, RuntimeError):
                errors += 1
        coordinated.join(timeout=60)
        assert errors
        pushed = coordinated.backend.servers[0].total
        for number, value in values.items():
            is_ready = value.status is READY
            assert value.status is not js.coordinator.RemoteValueStatus.NOT_READY
            # What is ready has counted; what was cancelled may have before.
            assert not is_ready or pushed >> number & 1
        assert pushed < 2**120
        assert coordinated.schedule(f, (np.int32(121), np.float64(1))).fetch() == 121
