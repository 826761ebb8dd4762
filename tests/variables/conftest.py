import pytest
from helpers.shared import four, two  # noqa: F401


@pytest.fixture(scope="module")
def strategy(four):  # noqa: F811
    return four
