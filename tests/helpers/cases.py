"""Tables of cases of which `make test` runs the most important alone."""

import copy
import functools
import inspect
import re
import warnings

import pytest

import jaxstrategy as js


def slow(*cases):
    """Cases of one argument for `parametrize` that only `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def chosen(table, *names):
    """All names of a table, of which `make test` runs these alone."""
    assert set(names) <= set(table)
    return [*names, *slow(*(name for name in table if name not in names))]


def each_of(names, rows, anew=False):
    """As `pytest.mark.parametrize`, in one test; what a row raises names the row."""
    names = names if isinstance(names, (list, tuple)) else re.findall(r"\w+", names)
    rows = list(rows)

    def decorated(test):
        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in names]

        @functools.wraps(test)
        def in_turn(*args, **fixtures):
            for number, row in enumerate(rows):
                values = row if len(names) > 1 else (row,)
                given = fixtures | dict(zip(names, values, strict=True))
                if "tmp_path" in fixtures:
                    given["tmp_path"] = fixtures["tmp_path"] / f"row {number}"
                    given["tmp_path"].mkdir()
                for name, value in fixtures.items():
                    if anew and isinstance(value, js.Strategy):
                        given[name] = copy.deepcopy(value)
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", js.errors.RecompilationWarning)
                        test(*args, **given)
                except BaseException as error:
                    shown = ", ".join(getattr(x, "__name__", str(x)) for x in values)
                    error.add_note(f"In the row {shown[:300]}.")
                    raise

        del in_turn.__wrapped__  # or pytest would ask for the names as fixtures
        in_turn.__signature__ = signature.replace(parameters=left)
        return in_turn

    return decorated


def each(table):
    """The rows of a table, one after the other; a failing test shows the last one."""
    for row in table.items() if isinstance(table, dict) else table:
        print("case:", row)
        yield row
