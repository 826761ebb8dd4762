"""Strategies that the tests of a file share, and so what these compile."""

import jax
import pytest

import jaxstrategy as js


def pytest_collection_modifyitems(items):
    """Steps that one test after the other defines anew are compiled anew."""
    again = pytest.mark.filterwarnings(
        "ignore::jaxstrategy.errors.RecompilationWarning"
    )
    for item in items:
        if "/reductions/" in str(item.path) or "/variables/" in str(item.path):
            item.add_marker(again)


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(jax.devices()[:4])


@pytest.fixture(scope="module")
def strategy(four):
    return four
