"""The site of `make docs`: whole, and without warnings."""

import doctest
import importlib
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

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


def built(folder):
    """The folder of a site that was built with every warning as an error."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going"]
    command += ["--quiet", "--builder", "html", "--doctree-dir", folder / "doctrees"]
    command += [FOLDER, folder / "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def pages(site):
    return sorted(
        path.relative_to(site).as_posix()
        for path in site.rglob("*.html")
        if not path.is_relative_to(site / "_static")
    )


class Links(HTMLParser):
    """What a page links to, and the names of its places."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.places = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.places.add(values.get("id"))
        target = values.get("src" if tag in ("img", "script") else "href")
        if target is not None and tag in ("a", "img", "link", "script"):
            self.targets.append(target)


def broken(site, page, links):
    """The links of a page that lead nowhere, or are no addresses."""
    for target in links[page].targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            if parts.scheme not in ("https", "mailto"):
                yield target
            continue
        path = (site / page).parent / unquote(parts.path) if parts.path else site / page
        if not path.resolve().is_file():
            yield target
        elif parts.fragment and path.suffix == ".html":
            goal = path.resolve().relative_to(site.resolve()).as_posix()
            if unquote(parts.fragment) not in links[goal].places:
                yield target


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_links_and_contents(tmp_path):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    site = built(tmp_path)
    links = {page: Links((site / page).read_text()) for page in pages(site)}
    found = {page: list(broken(site, page, links)) for page in links}
    assert not {page: targets for page, targets in found.items() if targets}
    guides = [*FOLDER.glob("*.ipynb"), *FOLDER.glob("*.md")]
    assert {f"{path.stem}.html" for path in guides} <= {*links["index.html"].targets}
