"""Rows of a table in one test."""

import functools
import inspect
import warnings

import jaxstrategy as js


def each_of(names, rows):
    """As `pytest.mark.parametrize`, in one case: an error names the row it is of."""
    names = names.replace(",", " ").split()
    rows = list(rows)

    def decorate(test):
        signature = inspect.signature(test)
        left = [p for p in signature.parameters.values() if p.name not in names]

        @functools.wraps(test)
        def all_rows(**fixtures):
            for row in rows:
                values = row if len(names) > 1 else (row,)
                given = dict(zip(names, values, strict=True))
                try:
                    with warnings.catch_warnings():  # of steps that each row defines
                        warnings.simplefilter("ignore", js.errors.RecompilationWarning)
                        test(**fixtures, **given)
                except BaseException as error:
                    error.add_note(f"in the row {given}")
                    raise

        del all_rows.__wrapped__
        all_rows.__signature__ = signature.replace(parameters=left)
        return all_rows

    return decorate
