"""Tables of cases of which `make test` runs the most important alone."""

import copy
import inspect

import pytest

import jaxstrategy as js


def slow(*cases):
    """Cases of one argument for `parametrize` that only `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def chosen(table, *names):
    """All names of a table, of which `make test` runs these alone."""
    assert set(names) <= set(table)
    return [*names, *slow(*(name for name in table if name not in names))]


def looped(names, rows, anew=False):
    """As `pytest.mark.parametrize`, in one test; what a row raises names the row.

    `anew`: each row has strategies of its own, which have warned of nothing yet.
    """
    names = names.split(",") if isinstance(names, str) else names
    names, rows = [name.strip() for name in names], list(rows)

    def decorated(test):
        signature = inspect.signature(test)

        def loop(**fixtures):
            for row in rows:
                values = row if len(names) > 1 else (row,)
                given = {
                    name: copy.deepcopy(each)
                    if anew and isinstance(each, js.Strategy)
                    else each
                    for name, each in fixtures.items()
                }
                try:
                    test(**given, **dict(zip(names, values, strict=True)))
                except BaseException as error:
                    shown = ", ".join(getattr(x, "__name__", str(x)) for x in values)
                    error.add_note(f"In the row {shown[:200]}.")
                    raise

        loop.__name__, loop.__doc__ = test.__name__, test.__doc__
        loop.__module__, loop.pytestmark = (
            test.__module__,
            getattr(test, "pytestmark", []),
        )
        kept = [p for name, p in signature.parameters.items() if name not in names]
        loop.__signature__ = signature.replace(parameters=kept)
        return loop

    return decorated


def each(table):
    """The rows of a table, one after the other; a failing test shows the last one.

    Of a dict, its items.
    """
    for row in table.items() if isinstance(table, dict) else table:
        print("case:", row)
        yield row
