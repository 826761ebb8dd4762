"""Programs as text, as files and notebooks, and as syntax trees of LibCST."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import os
import re
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import libcst as cst
from libcst import metadata


@final
@dataclasses.dataclass(frozen=True, order=True)
class Edit:
    """Bytes of a text in UTF-8, and the text that replaces them."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits, of which no two overlap."""
    data, parts, at = text.encode(), [], 0
    for edit in sorted(set(edits)):
        assert edit.start >= at, "edits overlap"
        parts += [data[at : edit.start], edit.text.encode()]
        at = edit.end
    return b"".join([*parts, data[at:]]).decode()


@final
@dataclasses.dataclass(frozen=True, order=True)
class CodePlace:
    """Where a name stands: line and column, both from 1."""

    cell: int
    line: int
    column: int

    def __str__(self) -> str:
        spot = f"{self.line}:{self.column}"
        return f"cell {self.cell}:{spot}" if self.cell else spot


@final
@dataclasses.dataclass(frozen=True)
class Finding:
    """Names of which the same is to know or to do."""

    text: str
    names: tuple[tuple[str, tuple[CodePlace, ...]], ...]
    decide: bool

    @property
    def first(self) -> CodePlace:
        return self.names[0][1][0]

    def line(self, path: str) -> str:
        """The finding in one line that editors can follow."""
        kind = "decide" if self.decide else "note"
        (name, (_, *others)), *rest = self.names
        told = [
            _name_with_places(name, others),
            *(_name_with_places(*each) for each in rest),
        ]
        return f"{path}:{self.first}: {kind}: {', '.join(told)}: {self.text}"

    def moved(self, move: Callable[[CodePlace], CodePlace]) -> Finding:
        """The same with other places."""
        names = tuple((n, tuple(map(move, places))) for n, places in self.names)
        return dataclasses.replace(self, names=names)


def found(name: str, text: str, place: CodePlace, decide: bool) -> Finding:
    """A finding of one name at one place."""
    return Finding(text, ((name, (place,)),), decide)


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding for each text: what is to decide before what is to know."""
    by_text: dict[tuple[bool, str], dict[str, set[CodePlace]]] = {}
    for each in findings:
        names = by_text.setdefault((each.decide, each.text), {})
        for name, places in each.names:
            names.setdefault(name, set()).update(places)
    together = [
        Finding(text, _in_order(names), decide)
        for (decide, text), names in by_text.items()
    ]
    return tuple(sorted(together, key=lambda f: (not f.decide, f.first, f.text)))


def _in_order(
    names: dict[str, set[CodePlace]],
) -> tuple[tuple[str, tuple[CodePlace, ...]], ...]:
    rows = [(name, tuple(sorted(places))) for name, places in names.items()]
    return tuple(sorted(rows, key=lambda row: (row[1][0], row[0])))


def _name_with_places(name: str, places: Iterable[CodePlace]) -> str:
    spots = ", ".join(map(str, places))
    return f"{name} ({spots})" if spots else name


_CELL = "# port: cell {}"
_CELL_LINE = re.compile(r"^# port: cell (\d+)$", re.MULTILINE)
_MAGIC = re.compile(r"^(\s*)([%!?].*)$")
_HIDDEN = re.compile(r"^(\s*)pass  # port: magic ([^\n]*)$", re.MULTILINE)


@final
class NotebookText:
    """The code cells one behind the other, each behind a comment with its number."""

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
        """The notebook's file with the cells of a changed program."""
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


@final
class ProgramFile:
    """A Python file or a notebook, with its encoding and its ends of lines."""

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
    """A name of TensorFlow in a program, with all attributes that follow it."""

    node: cst.Name | cst.Attribute
    names: tuple[str, ...]
    imports: tuple[tuple[cst.CSTNode, str], ...]


@final
class PythonProgram:
    """The tree of a text; nodes are those of `module`."""

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
        raise NoPythonError(_parse_error(text, error)) from error
    return module


def _parse_error(text: str, error: cst.ParserSyntaxError | SyntaxError) -> str:
    of_cst = isinstance(error, cst.ParserSyntaxError)
    line = error.raw_line if of_cst else error.lineno
    if any(_PYTHON_2.search(each) for each in text.splitlines()):
        return (
            f"line {line} is Python 2. Rewrite the file for Python 3 first, as "
            "`2to3 -w` of Python 3.12 and older does"
        )
    return f"line {line} is no Python: {error.message if of_cst else error.msg}"


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ImportedName:
    """One name of an import statement."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias | None
    full: str
    local: str


@final
class Uses(cst.CSTVisitor):
    """References to TensorFlow, imports, calls, classes and functions of a program."""

    def __init__(self, program: PythonProgram) -> None:
        self.program = program
        self.references: list[NameUse] = []
        self.imports: list[ImportedName] = []
        self.calls: list[cst.Call] = []
        self.attributes: list[cst.Attribute] = []
        self.functions: dict[str, list[cst.FunctionDef]] = {}
        self.classes: list[cst.ClassDef] = []
        self.annotations: list[cst.SimpleString] = []
        self.identifiers: set[str] = set()
        self._in_annotation = 0
        program.module.visit(self)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self.attributes.append(node)
        reference = self.program.reference(node)
        if reference is not None:
            self.references.append(reference)
        base = root(node)
        if base is not None:
            self.identifiers.add(base.value)
        if reference is None:
            node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.identifiers.add(node.value)
        reference = self.program.reference(node)
        if reference is not None:
            self.references.append(reference)

    def visit_Arg_keyword(self, node: cst.Arg) -> None:
        """Keywords are names of the function that is called."""

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self._in_annotation += 1

    def leave_Annotation(self, original_node: cst.Annotation) -> None:
        self._in_annotation -= 1

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if self._in_annotation:
            self.annotations.append(node)

    def visit_Call(self, node: cst.Call) -> None:
        self.calls.append(node)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.functions.setdefault(node.name.value, []).append(node)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.classes.append(node)

    def visit_Import(self, node: cst.Import) -> bool:
        for alias in node.names:
            full = self.program.code(alias.name)
            local = _local(alias) or full.split(".")[0]
            self.imports.append(ImportedName(node, alias, full, local))
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        if node.relative or node.module is None:
            return False
        module = self.program.code(node.module)
        if isinstance(node.names, cst.ImportStar):
            self.imports.append(ImportedName(node, None, f"{module}.*", "*"))
            return False
        for alias in node.names:
            full = f"{module}.{self.program.code(alias.name)}"
            local = _local(alias) or self.program.code(alias.name)
            self.imports.append(ImportedName(node, alias, full, local))
        return False

    def of_tensorflow(self) -> list[ImportedName]:
        return [each for each in self.imports if each.full.split(".")[0] in ROOTS]

    def used(self) -> set[tuple[int, str]]:
        """Imports that the program uses: the statement's number, and the name."""
        number = {id(node): i for i, node in enumerate(self.statements())}
        return {
            (number[id(node)], local)
            for reference in self.references
            for node, local in reference.imports
            if id(node) in number
        } | {
            (i, each.local)
            for each in self.of_tensorflow()
            for i in [number[id(each.statement)]]
            for text in self.annotations
            if f"{each.local}." in text.value
        }

    def statements(self) -> list[cst.Import | cst.ImportFrom]:
        """All statements that import, in order."""
        return list(dict.fromkeys(each.statement for each in self.imports))


def _local(alias: cst.ImportAlias) -> str | None:
    name = alias.asname and alias.asname.name
    return name.value if isinstance(name, cst.Name) else None
