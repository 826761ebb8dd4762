"""Files, folders and tests that README.md and other pages name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CHANGELOG.md", "benchmarks/README.md"]
# Where a name in a page may begin.
STARTS = [".", "jaxstrategy", "tests", "tests/multiprocess", "benchmarks"]


def code(page):
    """What stands in backquotes on a line, and behind links."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", prose), *re.findall(r"\]\(([^)#\s]+)\)", prose)]


def is_there(name):
    return any((ROOT / start / name).exists() for start in STARTS)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_are_there(page):
    paths = [
        name
        for text in code(page)
        for name in re.findall(r"(?<![\w{}$./-])(?:[\w.-]+/)*[\w.-]*", text)
        if re.fullmatch(r"[\w./-]*(?:\w\.(?:py|md|toml|ipynb|png)|_?[a-z]\w*/)", name)
    ]
    missing = sorted({name for name in paths if not is_there(name)})
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_tests_are_there(page):
    missing, file = [], ""
    for text in code(page):
        for name, test in re.findall(r"([\w/]*\.py)?::(\w+)", text):
            file = name or file
            found = [p for s in STARTS if (p := ROOT / s / file).is_file()]
            if not any(f"def {test}(" in p.read_text() for p in found):
                missing.append(f"{file}::{test}")
    assert not missing
