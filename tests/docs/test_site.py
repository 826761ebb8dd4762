"""The site of `make docs`: whole, and without warnings."""

import doctest
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_docstrings import NAMES

FOLDER = Path(__file__).parents[2] / "notebooks"
EXTENSIONS = ["api_entries", "api_links", "docstring_markup", "outer_links"]
ENTRIES = re.compile(r"^\.\. entries:: (\S+)\n\n((?:   \w+\n)+)", re.MULTILINE)


def entries():
    """The modules and names that the pages of the API have."""
    for page in sorted((FOLDER / "api").glob("*.rst")):
        for module, names in ENTRIES.findall(page.read_text()):
            yield from ((module, name) for name in names.split())


def test_each_public_name_has_one_entry():
    found = Counter(
        id(getattr(importlib.import_module(module), name)) for module, name in entries()
    )
    assert set(found.values()) == {1}
    absent = [name for name, value in NAMES.items() if id(value) not in found]
    assert not absent, f"add these to a page of notebooks/api: {absent}"


@pytest.mark.parametrize("name", EXTENSIONS)
def test_examples_of_the_extensions(name, monkeypatch):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(str(FOLDER / "_extensions"))
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_is_built_without_a_warning_and_leads_to_all_guides(tmp_path):
    """Sphinx warns of links that lead nowhere."""
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going"]
    command += ["--quiet", "--builder", "html", "--doctree-dir", tmp_path / "doctrees"]
    command += [FOLDER, tmp_path / "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "html" / "index.html").read_text()
    for guide in [*FOLDER.glob("*.ipynb"), *FOLDER.glob("*.md")]:
        assert f'href="{guide.stem}.html' in index, guide
