"""Strategies that the tests of a file share, and so what these compile."""

import jax
import pytest

import jaxstrategy as js


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(jax.devices()[:4])
