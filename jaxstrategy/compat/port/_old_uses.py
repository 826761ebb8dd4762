"""What becomes of each name of TensorFlow in a program: `OldUses`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import final

import libcst as cst

from jaxstrategy.compat.port._call_form import fitted
from jaxstrategy.compat.port._canonical import canonical, in_generation
from jaxstrategy.compat.port._edit import Edit
from jaxstrategy.compat.port._finding import Finding, found
from jaxstrategy.compat.port._generation import Generation
from jaxstrategy.compat.port._kept_code import KeptCode
from jaxstrategy.compat.port._keras_uses import (
    REDUCTION,
    is_in_keras,
    keras_row,
    tape_advice,
)
from jaxstrategy.compat.port._name import Name
from jaxstrategy.compat.port._names import row_of
from jaxstrategy.compat.port._python_program import NameUse
from jaxstrategy.compat.port._uses import ImportedName, Uses

# Stands in the text for a module's name until it is known which is free.
MODULE = "__port_{}__"
_UNCALLED = (
    "not in this form: `{}` has no such arguments, or is no object to hand on; {}"
)


@final
@dataclasses.dataclass
class PortOutcome:
    """Changes of a program, what to tell of it, and whether it uses Keras 3."""

    edits: list[Edit] = dataclasses.field(default_factory=list)
    findings: list[Finding] = dataclasses.field(default_factory=list)
    keras: bool = False

    def tell(self, name: str, text: str, uses: Uses, node: cst.CSTNode, decide: bool):
        place = uses.program.place(node)
        self.findings.append(found(name, text, place, decide))


@final
class OldUses:
    """Decides name by name, for one program of one generation.

    Args:
      uses: what the program uses.
      generation: its own.
      notes: whether to tell what may stay TensorFlow's.
    """

    def __init__(self, uses: Uses, generation: Generation | None, notes: bool) -> None:
        self._uses, self._program = uses, uses.program
        self._generation = generation
        self._keras = self._has_keras()
        self._kept = KeptCode(uses, self._row, self._keras)
        self._direct = {
            (id(each.statement), each.local)
            for each in uses.of_tensorflow()
            if each.alias is not None and self._is_direct(each)
        }
        self._notes = notes
        kept = self._kept.findings if notes else []
        self.outcome = PortOutcome(findings=list(kept), keras=self._keras)

    def decide_all(self) -> PortOutcome:
        """What becomes of all names and imports."""
        for statement in self._uses.statements():
            self._decide_import(statement)
        for reference in self._uses.references:
            self._decide(reference)
        for text in self._uses.annotations:
            self._decide_annotation(text)
        return self.outcome

    def _row(self, full: str) -> Name:
        name = self._name(full)
        if f"{name}.".startswith("tf.keras."):
            return keras_row(name, self._keras)
        return row_of(name)

    def _has_keras(self) -> bool:
        """Whether the program uses `tf.keras`, and only names that Keras 3 has."""
        used = {name for each in self._uses.references for name in each.names}
        imported = {each.full for each in self._uses.of_tensorflow()}
        names = {self._name(full) for full in used}
        names |= {self._name(full) for full in imported} - {REDUCTION}
        of_keras = [n for n in names if f"{n}.".startswith("tf.keras.")]
        return bool(of_keras) and all(map(is_in_keras, of_keras))

    def _name(self, full: str) -> str:
        return in_generation(canonical(full), self._generation)

    def _is_direct(self, each: ImportedName) -> bool:
        """Whether `from ... import` of it can name the new module instead."""
        row = self._row(each.full)
        if not isinstance(each.statement, cst.ImportFrom) or row.exact:
            return False
        known = row.new is not None and row.old == self._name(each.full)
        return known and row.form is None

    def _decide_import(self, statement: cst.Import | cst.ImportFrom) -> None:
        names = [e for e in self._uses.of_tensorflow() if e.statement is statement]
        direct = [e for e in names if (id(statement), e.local) in self._direct]
        for each in names:
            self._tell_import(each)
        if direct:
            self._replace_import(statement, names, direct)

    def _tell_import(self, each: ImportedName) -> None:
        if each.alias is None:
            text = "import the names that are used: `*` hides which of them are old"
            self.outcome.tell(
                _public(each.full), text, self._uses, each.statement, True
            )
            return
        row = self._row(each.full)
        from_module = isinstance(each.statement, cst.ImportFrom)
        if from_module and row.new is None and row.old != "tf":
            self._tell_decision(self._name(each.full), row, each.alias)

    def _replace_import(
        self,
        statement: cst.Import | cst.ImportFrom,
        names: list[ImportedName],
        direct: list[ImportedName],
    ) -> None:
        """Names that are here are imported from here, under the names they had."""
        modules: dict[str, list[str]] = {}
        for each in direct:
            new = self._row(each.full).new
            assert new is not None
            module, _, name = new.rpartition(".")
            text = name if name == each.local else f"{name} as {each.local}"
            modules.setdefault(module, []).append(text)
        lines = [f"from {m} import {', '.join(n)}" for m, n in sorted(modules.items())]
        rest = [e for e in names if e not in direct]
        if rest:
            lines.append(without(self._uses, rest))
        self.outcome.edits.append(
            self._program.edit(statement, joined(self._uses, statement, lines))
        )

    def _decide(self, reference: NameUse) -> None:
        names = sorted({self._name(full) for full in reference.names})
        rows = [self._row(full) for full in reference.names]
        if any((id(s), local) in self._direct for s, local in reference.imports):
            self._note(names[0], rows[0], reference.node)
        elif len({row.new for row in rows}) > 1:
            text = f"may be {' or '.join(names)}: import it in one way"
            self.outcome.tell(names[0], text, self._uses, reference.node, True)
        else:
            self._replace(names[0], rows[0], reference.node)

    def _replace(self, name: str, row: Name, node: cst.Name | cst.Attribute) -> None:
        if not row.certain and self._kept.holds(node):
            return
        if row.new is None:
            if not (self._kept.holds(node) and row.old == "tf"):
                self._tell_decision(name, row, node)
            return
        head = _head(node, name.removeprefix(row.old).count("."))
        if row.type and not self._is_typed(node):
            if not self._kept.holds_type(node):
                text = f"`{short(row.new)}` where it is about arrays of JAX"
                self.outcome.tell(name, text, self._uses, node, True)
            return
        edits = fitted(self._program, head, row.form) if row.form else []
        if edits is None or "#" in self._program.code(head):
            text = _UNCALLED.format(short(row.new), row.text or "the same")
            self.outcome.tell(name, text, self._uses, node, True)
            return
        literal = row.new.startswith('"')
        new = row.new if literal else placed(row.new)
        self.outcome.edits += [*edits, self._program.edit(head, new)]
        self._note(row.old, row, node)

    def _is_typed(self, node: cst.CSTNode) -> bool:
        """Whether a type is an annotation, or given to a function that is renamed."""
        parent: cst.CSTNode | None = self._program.parents.get(node)
        if isinstance(parent, cst.Arg):
            call = self._program.parents[parent]
            return isinstance(call, cst.Call) and self._is_renamed(call.func)
        while isinstance(
            parent, cst.BaseExpression | cst.BaseSlice | cst.SubscriptElement
        ):
            parent = self._program.parents.get(parent)
        return isinstance(parent, cst.Annotation)

    def _is_renamed(self, function: cst.BaseExpression) -> bool:
        if not isinstance(function, cst.Name | cst.Attribute):
            return False
        reference = self._program.reference(function)
        rows = [self._row(name) for name in reference.names] if reference else []
        return any(
            row.new is not None
            and (not row.form or fitted(self._program, function, row.form) is not None)
            for row in rows
        )

    def _tell_decision(self, name: str, row: Name, node: cst.CSTNode) -> None:
        text = row.text
        if self._keras and row.old == "tf.GradientTape":
            text = tape_advice(self._program, node) or text
        if name != "tf" and not (row.stays and not self._notes):
            self.outcome.tell(name, text, self._uses, node, not row.stays)

    def _note(self, name: str, row: Name, node: cst.CSTNode) -> None:
        if row.new is None:
            self._tell_decision(name, row, node)
        elif row.text:
            self.outcome.tell(name, row.text, self._uses, node, False)

    def _decide_annotation(self, node: cst.SimpleString) -> None:
        """Names in an annotation that is a string."""
        if node.prefix or "\\" in node.value:
            return
        start, _ = self._program.span(node)
        for each in self._uses.of_tensorflow():
            if (id(each.statement), each.local) in self._direct or not each.alias:
                continue
            for match in re.finditer(
                rf"(?<![\w.]){re.escape(each.local)}((?:\.\w+)*)", node.value
            ):
                head = each.full if _is_renamed(each) else each.full.split(".")[0]
                self._decide_text(node, start, match, head + match[1])

    def _decide_text(
        self, node: cst.SimpleString, start: int, match: re.Match[str], full: str
    ) -> None:
        name = self._name(full)
        row = self._row(full)
        if row.new is not None and not (row.form and not row.form.bare):
            rest = name.removeprefix(row.old)
            before = len(node.value[: match.start()].encode())
            size = len(match[0].encode())
            edit = Edit(start + before, start + before + size, placed(row.new) + rest)
            self.outcome.edits.append(edit)
        else:
            self._tell_decision(name, row, node)


def _is_renamed(each: ImportedName) -> bool:
    assert each.alias is not None
    return isinstance(each.statement, cst.ImportFrom) or each.alias.asname is not None


def _public(full: str) -> str:
    return f"tf{full.removeprefix('tensorflow')}"


def _head(node: cst.Name | cst.Attribute, drop: int) -> cst.Name | cst.Attribute:
    """The node without its last attributes."""
    for _ in range(drop):
        value = node.value
        if isinstance(value, cst.Name | cst.Attribute):
            node = value
    return node


# Modules that are imported, the longest first.
IMPORTABLE = (
    "jaxstrategy.compat.contrib",
    "jaxstrategy.compat.v1",
    "jaxstrategy",
    "jax.numpy",
    "jax",
    "keras",
)

_CALLED = {
    "jax": "jax",
    "keras": "keras",
    "jax.numpy": "jnp",
    "jaxstrategy": "js",
    "jaxstrategy.compat.v1": "distribute",
    "jaxstrategy.compat.contrib": "distribute",
}


def short(new: str) -> str:
    """A new name as programs call it."""
    module = next(m for m in IMPORTABLE if f"{new}.".startswith(f"{m}."))
    return _CALLED[module] + new.removeprefix(module)


def placed(new: str) -> str:
    """A new name, with its module's name left open."""
    module = next(m for m in IMPORTABLE if f"{new}.".startswith(f"{m}."))
    return MODULE.format(module.replace(".", "_")) + new.removeprefix(module)


def without(uses: Uses, names: Iterable[ImportedName]) -> str:
    """An import statement of only these names, which were in one statement."""
    names = list(names)
    statement = names[0].statement
    parts = []
    for each in names:
        assert each.alias is not None
        parts.append(
            uses.program.code(each.alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        )
    text = ", ".join(part.strip() for part in parts)
    if isinstance(statement, cst.Import):
        return f"import {text}"
    assert statement.module is not None
    return f"from {uses.program.code(statement.module)} import {text}"


def joined(uses: Uses, statement: cst.CSTNode, lines: list[str]) -> str:
    """Statements that stand where one stood, on lines of their own if it did."""
    start, _ = uses.program.span(statement)
    before = uses.program.text.encode()[:start].decode()
    indent = before[max(before.rfind("\n"), before.rfind("\r")) + 1 :]
    if indent.strip():
        return "; ".join(lines)
    return (uses.program.module.default_newline + indent).join(lines)
