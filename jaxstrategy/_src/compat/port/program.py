"""Programs as text, as files and notebooks, and as syntax trees of LibCST."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import shutil
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import libcst as cst
from libcst import metadata


class Edit(NamedTuple):
    """Bytes of a program, and the text in their place, behind a module's local name."""

    start: int
    end: int
    text: str
    module: str = ""


class CodePlace(NamedTuple):
    """Where a name stands: line and column, both from 1; in a notebook the cell."""

    cell: int
    line: int
    column: int

    def __str__(self) -> str:
        spot = f"{self.line}:{self.column}"
        return f"cell {self.cell}:{spot}" if self.cell else spot


@final
@dataclasses.dataclass(frozen=True)
class Finding:
    """Names with the same advice, and where they are used."""

    text: str
    names: tuple[tuple[str, tuple[CodePlace, ...]], ...]
    decide: bool

    def line(self, path: str) -> str:
        """The finding in one line that editors can follow."""
        (name, (first, *others)), *rest = self.names
        told = []
        for each, places in ((name, others), *rest):
            spots = ", ".join(map(str, places))
            told.append(f"{each} ({spots})" if spots else each)
        kind = "decide" if self.decide else "note"
        return f"{path}:{first}: {kind}: {', '.join(told)}: {self.text}"

    def moved(self, move: Callable[[CodePlace], CodePlace]) -> Finding:
        names = tuple((n, tuple(map(move, places))) for n, places in self.names)
        return dataclasses.replace(self, names=names)


def grouped(
    findings: Iterable[tuple[bool, str, str, CodePlace]],
) -> tuple[Finding, ...]:
    """One finding for each text: what is to decide before what is to know."""
    by_text: dict[tuple[bool, str], dict[str, set[CodePlace]]] = {}
    for decide, text, name, place in findings:
        by_text.setdefault((decide, text), {}).setdefault(name, set()).add(place)
    rows = []
    for (decide, text), names in by_text.items():
        sorted_names = [(name, tuple(sorted(each))) for name, each in names.items()]
        sorted_names.sort(key=lambda row: (row[1][0], row[0]))
        rows.append(Finding(text, tuple(sorted_names), decide))
    return tuple(sorted(rows, key=lambda f: (not f.decide, f.names[0][1][0], f.text)))


_CELL_LINE = re.compile(r"^# port: cell (\d+)$", re.MULTILINE)
_MAGIC = re.compile(r"^([^\S\n]*)([%!?].*)$", re.MULTILINE)
_HIDDEN = re.compile(r"^(\s*)pass  # port: magic ([^\n]*)$", re.MULTILINE)


@final
class ProgramFile:
    """A Python file or a notebook, with its encoding and its ends of lines.

    The program of a notebook are its code cells one behind the other, each behind a
    comment with its number.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes()
        self._encoding, self._cells = "utf-8", None
        if path.suffix != ".ipynb":
            try:
                read = io.BytesIO(data).readline
                self._encoding = tokenize.detect_encoding(read)[0]
            except SyntaxError as error:
                raise ValueError(str(error)) from error
        self.text = self.program = data.decode(self._encoding)
        if path.suffix == ".ipynb":
            try:
                self._notebook: dict[str, Any] = json.loads(self.text)
                cells = self._notebook["cells"]
                self._cells = [c for c in cells if c["cell_type"] == "code"]
                self.program = "".join(
                    f"# port: cell {i}\n{_hidden(_source(cell))}\n"
                    for i, cell in enumerate(self._cells, start=1)
                )
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError("this is no notebook of Jupyter 4 or newer") from error

    def with_program(self, program: str) -> str:
        if self._cells is None:
            return program
        if program == self.program:
            return self.text
        _, *parts = _CELL_LINE.split(program)
        for number, part in zip(parts[::2], parts[1::2], strict=True):
            cell = self._cells[int(number) - 1]
            source = _HIDDEN.sub(r"\1\2", part[1:-1])
            if source != _source(cell):
                listed = isinstance(cell["source"], list)
                cell["source"] = source.splitlines(keepends=True) if listed else source
                cell["outputs"], cell["execution_count"] = [], None
        indent = re.search(r'^([ \t]+)"', self.text, re.MULTILINE)
        width = indent[1] if indent else 1
        text = json.dumps(self._notebook, indent=width, ensure_ascii=False)
        return text + "\n" * self.text.endswith("\n")

    def place(self, place: CodePlace) -> CodePlace:
        """Where something of the program stands for a reader of the file."""
        if self._cells is None:
            return place
        lines = self.program.split("\n")[: place.line]
        last = max(i for i, line in enumerate(lines, 1) if _CELL_LINE.match(line))
        cell = int(lines[last - 1].rpartition(" ")[2])
        return CodePlace(cell, place.line - last, place.column)

    def write(self, text: str) -> None:
        # At once, so that a full disk leaves the old program.
        path = self.path.resolve()
        draft = path.with_name(f".{path.name}.ported")
        try:
            draft.write_bytes(text.encode(self._encoding))
            shutil.copymode(path, draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _hidden(source: str) -> str:
    if source.lstrip().startswith("%%"):  # the whole cell is another program
        return re.sub("^", "pass  # port: magic ", source, flags=re.MULTILINE)
    return _MAGIC.sub(r"\1pass  # port: magic \2", source)


N = TypeVar("N", bound=cst.CSTNode)
ROOTS = ("tensorflow", "tensorflow_core")
_METADATA = (
    metadata.ParentNodeProvider,
    metadata.ByteSpanPositionProvider,
    metadata.PositionProvider,
    metadata.QualifiedNameProvider,
    metadata.ScopeProvider,
)
_PYTHON_2 = re.compile(
    r"^[ \t]*(print[ \t]+[^\s(=.,]|except[ \t]+[\w.]+[ \t]*,|exec[ \t]+['\"])",
    re.MULTILINE,
)


class NoPythonError(ValueError):
    """A text that is no program of this Python."""


def _parsed(text: str) -> cst.Module:
    is_older = _PYTHON_2.search(text)
    try:
        module = cst.parse_module(text)
        if is_older:
            ast.parse(text)  # LibCST reads `except E, e`, which is newer Python, too
    except (cst.ParserSyntaxError, SyntaxError) as error:
        of_cst = isinstance(error, cst.ParserSyntaxError)
        line = error.raw_line if of_cst else error.lineno
        said = f"is no Python: {error.message if of_cst else error.msg}"
        if is_older:
            said = (
                "is Python 2. Rewrite the file for Python 3 first, as `2to3 -w` of "
                "Python 3.12 and older does"
            )
        raise NoPythonError(f"line {line} {said}") from error
    return module


@final
@dataclasses.dataclass(eq=False)
class ImportedName:
    """One name of an import statement; without `alias` all names of a module."""

    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias | None
    full: str
    local: str
    new: str = ""  # the name that is imported instead
    is_used: bool = False
    is_needed: bool = False  # where it was used it stays

    @property
    def root(self) -> str:
        return self.full.split(".")[0]


@final
@dataclasses.dataclass(frozen=True, eq=False)
class NameUse:
    """A name of TensorFlow in a program, with all attributes that follow it."""

    node: cst.Name | cst.Attribute
    names: tuple[str, ...]
    imports: tuple[ImportedName, ...]


def root(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


@final
class Program:
    """The tree of a text, and what stands in it."""

    def __init__(self, text: str) -> None:
        wrapper = metadata.MetadataWrapper(_parsed(text), unsafe_skip_copy=True)
        self.text, self.module = text, wrapper.module
        # In one walk: each takes a second for some thousand lines.
        found: Mapping[Any, Any] = wrapper.resolve_many(_METADATA)
        self.parents: Mapping[cst.CSTNode, cst.CSTNode]
        self.parents, self._spans, self._places, self._names, self._scopes = (
            found[each] for each in _METADATA
        )
        self._nodes = sorted(self._spans, key=lambda node: self.span(node)[0])
        statements = [*self.nodes(cst.Import), *self.nodes(cst.ImportFrom)]
        self.statements = sorted(statements, key=self.span)
        self.imports = [n for each in self.statements for n in self._imported(each)]
        self.tensorflow = [each for each in self.imports if each.root in ROOTS]
        self.attributes = self.nodes(cst.Attribute)
        self.functions: dict[str, list[cst.FunctionDef]] = {}
        for function in self.nodes(cst.FunctionDef):
            self.functions.setdefault(function.name.value, []).append(function)
        self.references: list[NameUse] = []
        self.identifiers: set[str] = set()
        for node in [*self.nodes(cst.Name), *self.attributes]:
            parent = self.parents[node]
            is_part = isinstance(parent, cst.Attribute) or self.within(node, cst.Import)
            if is_part or self.within(node, cst.ImportFrom):
                continue
            if (base := root(node)) is not None:
                self.identifiers.add(base.value)
            if (reference := self.reference(node)) is not None:
                self.references.append(reference)

    def nodes(self, kind: type[N]) -> list[N]:
        """The nodes of a kind, in the order of the text."""
        return [node for node in self._nodes if isinstance(node, kind)]

    def within(self, node: cst.CSTNode, kind: type[cst.CSTNode]) -> bool:
        while not isinstance(node, kind | cst.Module):
            node = self.parents[node]
        return isinstance(node, kind)

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The bytes of a node: the first one, and the one behind the last."""
        span = self._spans[node]
        return span.start, span.start + span.length

    def edit(self, node: cst.CSTNode, text: str, module: str = "") -> Edit:
        return Edit(*self.span(node), text, module)

    def place(self, node: cst.CSTNode) -> CodePlace:
        start = self._places[node].start
        return CodePlace(0, start.line, start.column + 1)

    def meanings(self, node: cst.CSTNode) -> list[str]:
        """What a name may be of what is imported, with its modules."""
        found: Any = self._names.get(node, ())
        found = found() if callable(found) else found
        imported = metadata.QualifiedNameSource.IMPORT
        return sorted(name.name for name in found if name.source is imported)

    def reference(self, node: cst.CSTNode) -> NameUse | None:
        base = root(node)
        if base is None or not isinstance(node, cst.Name | cst.Attribute):
            return None
        names = [n for n in self.meanings(node) if n.split(".")[0] in ROOTS]
        if not names:
            return None
        scope = self._scopes.get(base)
        found = () if scope is None else scope[base.value]
        statements = [x.node for x in found if isinstance(x, metadata.ImportAssignment)]
        imports = tuple(
            each
            for each in self.imports
            if each.local == base.value and each.statement in statements
        )
        return NameUse(node, tuple(names), imports)

    def _imported(self, node: cst.Import | cst.ImportFrom) -> Iterator[ImportedName]:
        module = ""
        if isinstance(node, cst.ImportFrom):
            if node.relative or node.module is None:
                return
            module = f"{self.code(node.module)}."
        if isinstance(node.names, cst.ImportStar):
            yield ImportedName(node, None, f"{module}*", "*")
            return
        for alias in node.names:
            name = self.code(alias.name)
            given = alias.asname and alias.asname.name
            local = given.value if isinstance(given, cst.Name) else name.split(".")[0]
            yield ImportedName(node, alias, module + name, local)
