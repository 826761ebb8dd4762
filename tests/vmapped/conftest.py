import jax
import pytest

import jaxstrategy as js


@pytest.fixture(scope="module")
def eight():
    """8 replicas on 2 devices."""
    return js.MirroredStrategy(jax.devices()[:2], replicas_per_device=4)
