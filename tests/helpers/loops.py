"""A table of cases as one test."""

import functools
import inspect


def each_of(names, rows):
    """Runs a test for one row after the other; its error says for which.

    Takes what `pytest.mark.parametrize` does. Each row has a `tmp_path` of its own.
    """
    names = [name.strip() for name in names.split(",")]
    rows = list(rows)

    def decorate(test):
        signature = inspect.signature(test)
        others = [p for n, p in signature.parameters.items() if n not in names]

        @functools.wraps(test)
        def in_turn(*args, **fixtures):
            for number, row in enumerate(rows):
                values = row if len(names) > 1 else (row,)
                given = fixtures | dict(zip(names, values, strict=True))
                if "tmp_path" in fixtures:
                    given["tmp_path"] = fixtures["tmp_path"] / f"case {number}"
                    given["tmp_path"].mkdir()
                try:
                    test(*args, **given)
                except BaseException as error:
                    error.add_note(f"{', '.join(names)}: {values!r:.300}")
                    raise

        del in_turn.__wrapped__
        in_turn.__signature__ = signature.replace(parameters=others)
        return in_turn

    return decorate
