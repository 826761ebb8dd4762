"""Runs the notebooks of this folder and writes their outputs into them.

    python notebooks/execute.py            # all
    python notebooks/execute.py debugging  # those with "debugging" in their names

A cell's code has a file name in the kernel's temporary folder; the outputs say `In[3]`
instead.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from ipykernel.compiler import get_tmp_hash_seed, murmur2_x86
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(path: Path) -> None:
    """Run a notebook from top to bottom, and keep what it prints."""
    notebook = nbformat.read(path, as_version=4)
    # Otherwise a slow moment of the machine divides what a cell prints in the middle.
    client = NotebookClient(
        notebook, timeout=180, record_timing=False, coalesce_streams=True
    )
    client.execute()
    names = {
        str(
            murmur2_x86(cell.source, get_tmp_hash_seed())
        ): f"In[{cell.execution_count}]"
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            _rename(output, names)
    notebook.metadata.language_info = {"name": "python"}
    path.write_text(nbformat.writes(notebook) + "\n")


def _rename(output: nbformat.NotebookNode, names: dict[str, str]) -> None:
    def of(match: re.Match[str]) -> str:
        return names.get(match[1], "In[?]")

    def renamed(text: str) -> str:
        text = re.sub(
            r"(?:\w:)?[/\\][^\s<>\"'`(]*ipykernel_\d+[/\\](\d+)\.py", of, text
        )
        return re.sub(r"\b(\d{6,})\.py\b", of, text)

    if "text" in output:
        output.text = renamed(output.text)
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            output.data[kind] = renamed(data)


if __name__ == "__main__":
    words = sys.argv[1:] or [""]
    names = sorted(path.name for path in HERE.glob("*.ipynb"))
    chosen = [name for name in names if any(word in name for word in words)]
    if not chosen:
        sys.exit(
            f"No notebook has {' or '.join(words)} in its name: {', '.join(names)}"
        )
    for name in chosen:
        start = time.perf_counter()
        execute(HERE / name)
        print(f"{name}: {time.perf_counter() - start:.0f} s")
