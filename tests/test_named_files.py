"""Files, folders and tests that README.md, CONTRIBUTING.md and others name exist."""

import re
from pathlib import Path

import pytest
import test_layers

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
]
# Where a name in a page may begin.
STARTS = [
    ".",
    "jaxstrategy",
    "jaxstrategy/tracing",
    "tests",
    "tests/multiprocess",
    "benchmarks",
    "notebooks",
]


def code(page):
    """What stands in backquotes on a line, and behind links."""
    text = (ROOT / page).read_text()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", prose), *re.findall(r"\]\(([^)#\s]+)\)", prose)]


def is_there(name):
    if any((ROOT / start / name).exists() for start in STARTS):
        return True
    # A folder in another one, as in a table of folders.
    return name.endswith("/") and any((ROOT / "jaxstrategy").glob(f"*/{name}"))


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


def test_classes_that_contributing_names_are_there():
    named = {n for text in code("CONTRIBUTING.md") for n in re.findall(r"[\w.]+", text)}
    files = (path.read_text() for path in (ROOT / "jaxstrategy").rglob("*.py"))
    known = set(re.findall(r"\w+", " ".join(files)))
    classes = {n for n in named if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*|_[A-Z_]+", n)}
    assert classes and not classes - known


def test_the_table_of_folders_has_them_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The folders")[2]
    rows = re.findall(r"^\| (`.+?`) \|", text.partition("\n## ")[0], re.MULTILINE)
    assert re.findall(r"`(\w+)/?`", " ".join(rows)) == test_layers.FLOORS


RECIPES = (ROOT / "CONTRIBUTING.md").read_text().partition("## Recipes")[2]
RECIPES = re.findall(r"^\*\*(.+?)\.\*\*(.+?)\n\n", RECIPES, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("change, text", RECIPES, ids=[title for title, _ in RECIPES])
def test_a_recipe_names_at_most_three_files_to_change(change, text):
    files = {name for name in re.findall(r"`([\w/]+\.py)`", text)}
    package = {name for name in files if (ROOT / "jaxstrategy" / name).exists()}
    # Files to look at, as examples or for help, stand in parentheses or behind "as".
    examples = re.findall(r"(?:as|\()\s*`([\w/]+\.py)`", text)
    count = len(package - set(examples)) + text.count("file of its own")
    assert count <= 3, f"{change}: {count} files"


def test_there_are_recipes_for_fifteen_changes():
    assert len(RECIPES) == 15
