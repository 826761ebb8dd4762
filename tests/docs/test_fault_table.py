"""The tests that the guides' tables of faults name are there."""

import pathlib
import re

import pytest
from helpers.guides import all_prose

TESTS = pathlib.Path(__file__).parents[1]


def named():
    """File and function of each test in a table's row, which may leave out the file."""
    for row in re.findall(r"^\|.*::test_.*\|$", all_prose(), re.M):
        file = "test_checkpoint_faults.py"  # of rows that name none
        for path, function in re.findall(r"`([\w/]*\.?p?y?)::(test_\w+)`", row):
            file = path or file
            yield file, function


NAMED = sorted(set(named()))


def test_the_tables_name_tests():
    assert len(NAMED) > 25


@pytest.mark.parametrize("file, function", NAMED)
def test_a_named_test_is_there(file, function):
    paths = [*TESTS.glob(f"*/{file}"), TESTS / file]
    found = [path for path in paths if path.exists()]
    assert found, f"there is no {file}"
    assert f"\ndef {function}(" in found[0].read_text()
