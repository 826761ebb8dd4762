"""CITATION.cff, the templates of issues and the changes are true of this package."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import jaxstrategy

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of the format 1.2.0: what a file must have, and of the rest what this one may.
REQUIRED = {"authors", "cff-version", "message", "title"}
OPTIONAL = {"abstract", "keywords", "license", "type", "version"}
INPUTS = {"textarea", "input", "markdown", "dropdown", "checkboxes"}


def citation():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_has_what_its_format_asks_for():
    cite = citation()
    assert REQUIRED <= set(cite) <= REQUIRED | OPTIONAL
    assert cite["cff-version"] == "1.2.0" and cite["type"] == "software"
    assert cite["authors"] and all(set(each) == {"name"} for each in cite["authors"])


def test_the_citation_says_what_the_package_says():
    cite = citation()
    assert cite["version"] == jaxstrategy.__version__
    assert cite["license"] == PROJECT["license"]
    assert cite["title"] == f"{PROJECT['name']}: {PROJECT['description']}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_forms_with_questions(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert {each["type"] for each in form["body"]} <= INPUTS
    ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
    assert len(ids) == len(set(ids)) >= 2
    assert all(each["attributes"]["label"] for each in form["body"])


def test_there_are_two_templates():
    assert [path.stem for path in TEMPLATES] == ["bug", "missing"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_templates_name_exists(path):
    text = path.read_text()
    for name in re.findall(r"python -m ([\w.]+)", text):
        assert importlib.util.find_spec(f"{name}.__main__"), name
    for name in re.findall(r"`js\.(\w+)", text):
        assert hasattr(jaxstrategy, name), name


def test_changes_are_short_lines_under_subjects():
    text = (ROOT / "CHANGELOG.md").read_text()
    subjects = re.findall(r"^\*\*(.+)\*\*$", text, re.MULTILINE)
    assert subjects and len(subjects) == len(set(subjects))
    entries = re.findall(r"^- ", text, re.MULTILINE)
    assert len(entries) > len(subjects)
