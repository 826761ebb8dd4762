"""Tables of cases of which `make test` runs the most important alone."""

import pytest


def slow(*cases):
    """Cases of one argument for `parametrize` that only `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
