"""What README.md and the guides name exists: files, sections, names of the package.

No other host is asked: of addresses only the form is looked at.
"""

import re
from types import ModuleType
from urllib.parse import urlsplit

import pytest
from helpers.guides import ROOT, names, prose

import jaxstrategy as js

README = "README.md"
PAGES = [
    README,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "benchmarks/FIGURES.md",
]
GUIDES = [f"notebooks/{name}" for name in names()]
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
CODE = re.compile(r"^```.*?^```|(?<!`)`[^`\n]+`(?!`)", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def text(page):
    if page.startswith("notebooks/"):
        return prose(page.removeprefix("notebooks/"))
    return (ROOT / page).read_text()


def links(page):
    return LINK.findall(CODE.sub("code", text(page)))


def anchors(markdown):
    """The names of sections: on GitHub and on the site, and in Jupyter."""
    outside = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for heading in HEADING.findall(outside):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).replace("`", "")
        yield re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        yield plain.replace(" ", "-")


@pytest.mark.parametrize("page", PAGES + GUIDES)
def test_links_lead_to_files_and_sections(page):
    broken = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (ROOT / page).parent / parts.path if parts.path else ROOT / page
        if not target.exists():
            broken.append(link)
        elif parts.fragment and target.suffix in {".md", ".ipynb"}:
            there = str(target.resolve().relative_to(ROOT))
            if parts.fragment not in anchors(text(there)):
                broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES + GUIDES)
def test_addresses_have_the_form_of_addresses(page):
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https" and "." in parts.netloc, link


def test_the_readme_leads_to_every_guide():
    led = {link for link in links(README) if link.startswith("notebooks/")}
    assert {f"notebooks/{name}" for name in names()} - led == set()


NAME = re.compile(r"(?<![\w.])(js|strategy)((?:\.[A-Za-z_]\w*)+)")
ROOTS = {"js": js, "strategy": js.Strategy}
# The strategies of older generations have other methods.
OLDER = "notebooks/porting.md"


def is_there(root, path):
    """Whether a name exists, as far as modules and classes lead."""
    found = ROOTS[root]
    for name in path.split(".")[1:]:
        if not isinstance(found, type | ModuleType):
            return True
        # A field without a default is no attribute of its class.
        if name in getattr(found, "__annotations__", {}):
            return True
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", [p for p in [README, *GUIDES] if p != OLDER])
def test_names_in_prose_exist(page):
    outside = re.sub(r"^```.*?^```", "", text(page), flags=re.MULTILINE | re.DOTALL)
    code = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", outside)
    named = [each for body in code for each in NAME.findall(body)]
    assert [f"{root}{path}" for root, path in named if not is_there(root, path)] == []


def test_the_checks_can_fail():
    assert not is_there("js", ".no_such_name") and not is_there("strategy", ".run_it")
    assert not is_there("js", ".checkpoint.CheckpointManagers")
    assert is_there("js", ".checkpoint.CheckpointManager.save")
    assert LINK.findall("[a](b.md#c) ![d](e.png) [`f`](g)") == ["b.md#c", "e.png", "g"]
    assert "whats-it-a_b" in anchors("# What's it `a_b`?\n")
