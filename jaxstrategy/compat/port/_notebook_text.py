"""The code of a Jupyter notebook as one program: `NotebookText`."""

from __future__ import annotations

import json
import re
from typing import Any, final

from jaxstrategy.compat.port._finding import CodePlace

_CELL = "# port: cell {}"
_CELL_LINE = re.compile(r"^# port: cell (\d+)$", re.MULTILINE)
_MAGIC = re.compile(r"^(\s*)([%!?].*)$")
_HIDDEN = re.compile(r"^(\s*)pass  # port: magic ([^\n]*)$", re.MULTILINE)


@final
class NotebookText:
    """The code cells one behind the other, each behind a comment with its number.

    Lines of IPython (`%matplotlib`, `!pip`) are comments meanwhile.

    Raises:
      ValueError: it is no notebook.
    """

    def __init__(self, text: str) -> None:
        try:
            self._notebook: dict[str, Any] = json.loads(text)
            cells = self._notebook["cells"]
            self._cells = [c for c in cells if c["cell_type"] == "code"]
            sources = [_source(cell) for cell in self._cells]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError("this is no notebook of Jupyter 4 or newer") from error
        indent = re.search(r'^([ \t]+)"', text, re.MULTILINE)
        self._indent = indent[1] if indent else 1
        self._end = "\n" if text.endswith("\n") else ""
        parts = [
            f"{_CELL.format(i)}\n{_hidden(source)}\n"
            for i, source in enumerate(sources, start=1)
        ]
        self.program = "".join(parts)

    def with_program(self, program: str) -> str:
        """The notebook's file with the cells of a changed program.

        Outputs of changed cells are left out: another program computed them.
        """
        _, *parts = _CELL_LINE.split(program)
        for number, source in zip(parts[::2], parts[1::2], strict=True):
            self._replace(self._cells[int(number) - 1], source[1:-1])
        text = json.dumps(self._notebook, indent=self._indent, ensure_ascii=False)
        return text + self._end

    def place(self, place: CodePlace) -> CodePlace:
        """Where something stands in its cell."""
        lines = self.program.split("\n")[: place.line]
        last = max(i for i, line in enumerate(lines, 1) if _CELL_LINE.match(line))
        cell = int(lines[last - 1].rpartition(" ")[2])
        return CodePlace(cell, place.line - last, place.column)

    def _replace(self, cell: dict[str, Any], source: str) -> None:
        source = _HIDDEN.sub(r"\1\2", source)
        if source == _source(cell):
            return
        listed = isinstance(cell["source"], list)
        cell["source"] = source.splitlines(keepends=True) if listed else source
        cell["outputs"], cell["execution_count"] = [], None


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _hidden(source: str) -> str:
    if source.lstrip().startswith("%%"):  # the whole cell is another program
        return re.sub("^", "pass  # port: magic ", source, flags=re.MULTILINE)
    lines = [_MAGIC.sub(r"\1pass  # port: magic \2", n) for n in source.split("\n")]
    return "\n".join(lines)
