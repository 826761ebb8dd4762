import jax
import pytest
from helpers.shared import four, pytest_collection_modifyitems, two  # noqa: F401

import jaxstrategy as js


@pytest.fixture(scope="module", params=[1, 4], ids="{}-replicas".format)
def strategy(request):
    return js.MirroredStrategy(jax.devices()[: request.param])
