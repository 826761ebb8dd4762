"""A program's syntax tree, with where its names come from: `PythonProgram`."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Mapping
from typing import Any, final

import libcst as cst
from libcst import metadata

from jaxstrategy.compat.port._edit import Edit
from jaxstrategy.compat.port._finding import CodePlace

_METADATA = (
    metadata.ParentNodeProvider,
    metadata.ByteSpanPositionProvider,
    metadata.PositionProvider,
    metadata.QualifiedNameProvider,
    metadata.ScopeProvider,
)
ROOTS = ("tensorflow", "tensorflow_core")
_PYTHON_2 = re.compile(
    r"^\s*print\s+[^\s(=.,]|^\s*except\s+[\w.]+\s*,|^\s*exec\s+['\"]"
)


class NoPythonError(ValueError):
    """A text that is no program of this Python."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class NameUse:
    """A name of TensorFlow in a program, with all attributes that follow it.

    Attributes:
      node: the name, or the attributes of it.
      names: what it may mean, with its modules; several after `try: import`.
      imports: the statements that import it, with the name each gives it.
    """

    node: cst.Name | cst.Attribute
    names: tuple[str, ...]
    imports: tuple[tuple[cst.CSTNode, str], ...]


@final
class PythonProgram:
    """The tree of a text; nodes are those of `module`.

    Raises:
      NoPythonError: the text cannot be parsed.
    """

    def __init__(self, text: str) -> None:
        wrapper = metadata.MetadataWrapper(_parsed(text), unsafe_skip_copy=True)
        self.text = text
        self.module = wrapper.module
        # In one walk: each takes a second for some thousand lines.
        found: Mapping[Any, Any] = wrapper.resolve_many(_METADATA)
        self.parents: Mapping[cst.CSTNode, cst.CSTNode]
        self.parents = found[metadata.ParentNodeProvider]
        self._spans = found[metadata.ByteSpanPositionProvider]
        self._places = found[metadata.PositionProvider]
        self._names = found[metadata.QualifiedNameProvider]
        self._scopes = found[metadata.ScopeProvider]

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The bytes of a node: the first one, and the one behind the last."""
        span = self._spans[node]
        return span.start, span.start + span.length

    def edit(self, node: cst.CSTNode, text: str) -> Edit:
        return Edit(*self.span(node), text)

    def place(self, node: cst.CSTNode) -> CodePlace:
        start = self._places[node].start
        return CodePlace(0, start.line, start.column + 1)

    def meanings(self, node: cst.CSTNode) -> list[str]:
        """What of TensorFlow a name may be, with its modules."""
        found: Any = self._names.get(node, ())
        found = found() if callable(found) else found
        return sorted(
            name.name
            for name in found
            if name.source is metadata.QualifiedNameSource.IMPORT
        )

    def reference(self, node: cst.Name | cst.Attribute) -> NameUse | None:
        """A name, if it is TensorFlow's."""
        base = root(node)
        if base is None:
            return None
        names = [n for n in self.meanings(node) if n.split(".")[0] in ROOTS]
        if not names:
            return None
        return NameUse(node, tuple(names), tuple(self._imports(base)))

    def _imports(self, base: cst.Name) -> list[tuple[cst.CSTNode, str]]:
        scope = self._scopes.get(base)
        assigned = () if scope is None else scope[base.value]
        return [
            (each.node, base.value)
            for each in assigned
            if isinstance(each, metadata.ImportAssignment)
        ]


def root(node: cst.BaseExpression) -> cst.Name | None:
    """The name before all attributes; None if it is no name."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def _parsed(text: str) -> cst.Module:
    try:
        module = cst.parse_module(text)
        if any(_PYTHON_2.search(line) for line in text.splitlines()):
            ast.parse(text)  # LibCST reads `except E, e`, which is newer Python, too
    except (cst.ParserSyntaxError, SyntaxError) as error:
        raise NoPythonError(_told(text, error)) from error
    return module


def _told(text: str, error: cst.ParserSyntaxError | SyntaxError) -> str:
    of_cst = isinstance(error, cst.ParserSyntaxError)
    line = error.raw_line if of_cst else error.lineno
    if any(_PYTHON_2.search(each) for each in text.splitlines()):
        return (
            f"line {line} is Python 2. Rewrite the file for Python 3 first, as "
            "`2to3 -w` of Python 3.12 and older does"
        )
    return f"line {line} is no Python: {error.message if of_cst else error.msg}"
