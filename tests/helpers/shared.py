"""Strategies that the tests of a file share, and so what these compile.

For `conftest.py`: `from helpers.shared import four, two` and the hook.
"""

import jax
import pytest

import jaxstrategy as js

FOLDERS = ("steps", "sharding")


def pytest_collection_modifyitems(items):
    """Steps that one test after the other defines anew are compiled anew."""
    again = pytest.mark.filterwarnings(
        "ignore::jaxstrategy.errors.RecompilationWarning"
    )
    for item in items:
        if item.path.parent.name in FOLDERS:
            item.add_marker(again)


@pytest.fixture(scope="module")
def two():
    return js.MirroredStrategy(jax.devices()[:2])


@pytest.fixture(scope="module")
def four():
    return js.MirroredStrategy(jax.devices()[:4])
