"""A program on disk: `ProgramFile`."""

from __future__ import annotations

import io
import os
import tempfile
import tokenize
from pathlib import Path
from typing import final

from jaxstrategy.compat.port._finding import CodePlace
from jaxstrategy.compat.port._notebook_text import NotebookText


@final
class ProgramFile:
    """A Python file or a notebook, with its encoding and its ends of lines.

    Attributes:
      path: of the file.
      text: all of it.

    Raises:
      OSError: it cannot be read.
      ValueError: its encoding is unknown or not kept, or it is no notebook.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes()
        self._encoding = "utf-8"
        if path.suffix != ".ipynb":
            self._encoding = _encoding(data)
        self.text = data.decode(self._encoding)
        self._notebook = NotebookText(self.text) if path.suffix == ".ipynb" else None

    @property
    def program(self) -> str:
        """The program in it."""
        return self._notebook.program if self._notebook else self.text

    def with_program(self, program: str) -> str:
        """The file's text with another program."""
        if program == self.program or self._notebook is None:
            return program if self._notebook is None else self.text
        return self._notebook.with_program(program)

    def place(self, place: CodePlace) -> CodePlace:
        """Where something of the program stands for a reader of the file."""
        return self._notebook.place(place) if self._notebook else place

    def write(self, text: str) -> None:
        """Replaces the file at once, so that it is never half written."""
        path = self.path.resolve()
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode(self._encoding))
            os.chmod(name, path.stat().st_mode)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _encoding(data: bytes) -> str:
    try:
        return tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as error:
        raise ValueError(str(error)) from error
