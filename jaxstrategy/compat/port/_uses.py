"""What a program uses of TensorFlow, in its order: `Uses`."""

from __future__ import annotations

import dataclasses
from typing import final

import libcst as cst

from jaxstrategy.compat.port._python_program import ROOTS, NameUse, PythonProgram, root


@final
@dataclasses.dataclass(frozen=True, eq=False)
class ImportedName:
    """One name of an import statement.

    Attributes:
      statement: the `import` or `from ... import`.
      alias: the node in it; None for `*`.
      full: what is imported, with its modules.
      local: what the program calls it.
    """

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
