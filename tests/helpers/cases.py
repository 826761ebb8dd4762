"""Tables of cases of which `make test` runs the most important alone."""

import pytest


def slow(*cases):
    """Cases of one argument for `parametrize` that only `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def chosen(table, *names):
    """All names of a table, of which `make test` runs these alone."""
    assert set(names) <= set(table)
    return [*names, *slow(*(name for name in table if name not in names))]


def each(table):
    """The rows of a table, one after the other; a failing test shows the last one.

    Of a dict, its items.
    """
    for row in table.items() if isinstance(table, dict) else table:
        print("case:", row)
        yield row
