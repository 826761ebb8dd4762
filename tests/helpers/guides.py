"""The guides in `notebooks/`: what their prose and their code say."""

import functools
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "notebooks"


def names():
    """The file names of all guides."""
    paths = [*FOLDER.glob("*.ipynb"), *FOLDER.glob("*.md")]
    return sorted(path.name for path in paths)


@functools.cache
def cells(name, kind):
    """The sources of a notebook's cells of one kind: "markdown" or "code"."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def prose(name):
    """All that a guide says outside of cells with code."""
    if name.endswith(".md"):
        return (FOLDER / name).read_text()
    return "\n\n".join(cells(name, "markdown"))


def all_prose():
    """What README.md and all guides say."""
    pages = [(ROOT / "README.md").read_text(), *(prose(name) for name in names())]
    return "\n\n".join(pages)
