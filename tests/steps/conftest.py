import jax
import pytest
from helpers.shared import four, two  # noqa: F401

import jaxstrategy as js


@pytest.fixture(scope="module", params=[1, 4], ids="{}-replicas".format)
def strategy(request):
    return js.MirroredStrategy(jax.devices()[: request.param])


def pytest_collection_modifyitems(items):
    """Steps that one test after the other defines anew are compiled anew."""
    again = pytest.mark.filterwarnings(
        "ignore::jaxstrategy.errors.RecompilationWarning"
    )
    for item in items:
        if item.path.parent.name == "steps":
            item.add_marker(again)
