"""Coordinators of workers that are threads."""

import pytest
from helpers.clusters import coordinated


@pytest.fixture
def one():
    with coordinated(1) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def three():
    with coordinated(3) as coordinator:
        yield coordinator
