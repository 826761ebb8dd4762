"""The debugging guide shows what its mistakes are answered with, word by word."""

import re
import runpy
import shutil
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"


def to_four_digits(text):
    """XLA may round the last digit otherwise, by its options."""
    return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.4g}", text)


def printed(path):
    """What each cell with code prints, whatever the ends of its lines."""
    notebook = nbformat.read(path, as_version=4)
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    texts = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in cells
        if "jax.debug.print" not in cell.source  # the replicas print in any order
    ]
    return [to_four_digits(" ".join(text.split())) for text in texts]


SHOWN = printed(FOLDER / "debugging.ipynb")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    copy = shutil.copy(FOLDER / "debugging.ipynb", tmp_path)
    runpy.run_path(str(FOLDER / "execute.py"))["execute"](Path(copy))
    assert printed(copy) == SHOWN


@pytest.mark.parametrize(
    "error, line",
    [
        ("NotMirroredError", "it varies since: In["),
        ("DoubleReductionWarning", "reduced first: In["),
        ("DivergentCollectiveError", "its predicate varies since: In["),
        ("TracedValueError", "if js.get_replica_context()"),
        ("LeakedTracerError", "losses.append(x * x)"),
        ("NonFiniteError", "loss = jnp.log(w * x - 1)"),
    ],
)
def test_mistakes_are_answered_with_a_line_of_code(error, line):
    (answer, *_) = [text for text in SHOWN if text.startswith(f"{error}: ")]
    assert line in answer
