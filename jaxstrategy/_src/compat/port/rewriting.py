"""Rewrites a program of `tf.distribute`: `ported`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import final

import libcst as cst

from jaxstrategy._src.compat.port.name_uses import (
    REDUCTION,
    Generation,
    KeptCode,
    canonical,
    fitted,
    generation_of,
    in_generation,
    is_in_keras,
    keras_row,
    tape_advice,
)
from jaxstrategy._src.compat.port.program import (
    ROOTS,
    Edit,
    Finding,
    ImportedName,
    NameUse,
    PythonProgram,
    Uses,
    edited,
    found,
    grouped,
)
from jaxstrategy._src.compat.port.tables import (
    KERAS_METHODS,
    METHODS,
    Method,
    Name,
    row_of,
)


def method_uses(
    uses: Uses, generation: Generation, keras: bool
) -> tuple[list[Edit], list[Finding]]:
    """Methods with other names here, and what differs in others."""
    known = [m for m in METHODS if generation.value in m.generations]
    known = [*KERAS_METHODS, *known] if keras else known
    edits: list[Edit] = []
    findings: list[Finding] = []
    for node in uses.attributes:
        of_name = [m for m in known if m.name == node.attr.value]
        method = next((m for m in of_name if _is_meant(uses, node, m)), None)
        if method is None:
            continue
        if method.new:
            edits.append(uses.program.edit(node.attr, method.new))
        place = uses.program.place(node)
        name = f"{uses.program.code(node.value)}.{method.name}"
        if len(name) > 50 or "\n" in name:
            name = f".{method.name}"
        findings.append(found(name, method.text, place, False))
    return edits, findings


def _is_meant(uses: Uses, node: cst.Attribute, method: Method) -> bool:
    if method.name == "numpy":
        call = uses.program.parents.get(node)
        return isinstance(call, cst.Call) and call.func is node and not call.args
    receiver = uses.program.code(node.value)
    return not method.receiver or bool(re.search(method.receiver, receiver))


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
    """Decides name by name, for one program of one generation."""

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
        # Of several imports under one name the last one counts.
        for each in {each.local: each for each in self._uses.of_tensorflow()}.values():
            if (id(each.statement), each.local) in self._direct or not each.alias:
                continue
            for match in re.finditer(
                rf"(?<![\w.]){re.escape(each.local)}((?:\.\w+)*)", node.value
            ):
                head = each.full if _has_alias(each) else each.full.split(".")[0]
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


def _has_alias(each: ImportedName) -> bool:
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


# How programs call a module, the first that is free; and the line that imports it.
_LINES = {
    "jax": ("import jax", ("jax",)),
    "keras": ("import keras", ("keras",)),
    "jax.numpy": ("import jax.numpy as {}", ("jnp", "jax_numpy")),
    "jaxstrategy": ("import jaxstrategy as {}", ("js", "jaxstrategy")),
    "jaxstrategy.compat.v1": (
        "from jaxstrategy.compat import v1 as {}",
        ("distribute", "distribute_v1", "jaxstrategy_v1"),
    ),
    "jaxstrategy.compat.contrib": (
        "from jaxstrategy.compat import contrib as {}",
        ("distribute", "distribute_contrib", "jaxstrategy_contrib"),
    ),
}


def with_imports(
    text: str, used_before: set[tuple[int, str]], keras: bool = False
) -> str:
    """The text with the modules' names filled in, and their imports."""
    uses = Uses(PythonProgram(text))
    unused = _unused(uses, used_before)
    names, lines = _modules(text, uses, unused)
    edits = _removals(uses, unused)
    if lines or keras:
        edits.append(_insertion(uses, lines, keras))
    text = edited(text, edits)
    for module, name in names.items():
        text = text.replace(_place(module), name)
    return text


def _place(module: str) -> str:
    return MODULE.format(module.replace(".", "_"))


def _unused(uses: Uses, before: set[tuple[int, str]]) -> list[ImportedName]:
    numbers = {id(node): i for i, node in enumerate(uses.statements())}
    now = uses.used()
    return [
        each
        for each in uses.of_tensorflow()
        if (key := (numbers[id(each.statement)], each.local)) in before
        and key not in now
        and not _is_exported(uses, each.local)
    ]


def _is_exported(uses: Uses, local: str) -> bool:
    return bool(re.search(rf"__all__\s*=[^\n]*['\"]{local}['\"]", uses.program.text))


def _modules(
    text: str, uses: Uses, unused: list[ImportedName]
) -> tuple[dict[str, str], list[str]]:
    """What modules are called, and the lines that import those not yet imported."""
    needed = [m for m in reversed(IMPORTABLE) if _place(m) in text]
    known = {e.full: e.local for e in uses.imports if _at_top(uses, e.statement)}
    gone = {each.local for each in unused}
    kept = {e.local for e in uses.imports if e not in unused}
    taken = (uses.identifiers - gone) | kept | set(_parameters(text))
    names: dict[str, str] = {}
    lines: list[str] = []
    for module in needed:
        if module in known and (
            known[module] != module.split(".")[0] or module in ("jax", "keras")
        ):
            names[module] = known[module]
            continue
        line, wished = _LINES[module]
        name = next((n for n in wished if n not in taken), f"{wished[-1]}_")
        taken = taken | {name}
        names[module] = name
        lines.append(_line(line, module, name))
    return names, sorted(lines, key=lambda line: (line.startswith("from"), line))


def _line(line: str, module: str, name: str) -> str:
    if "{}" not in line:
        return line if name == module else f"{line} as {name}"
    return line.format(name).replace(f"import {name} as {name}", f"import {name}")


def _parameters(text: str) -> Iterable[str]:
    """Names of parameters, which would hide a module's name in a function."""
    for signature in re.findall(r"\bdef \w+\(([^)]*)\)", text):
        yield from re.findall(r"\b\w+\b", signature)


def _at_top(uses: Uses, statement: cst.CSTNode) -> bool:
    line = uses.program.parents.get(statement)
    return line is not None and uses.program.parents.get(line) is uses.program.module


def _insertion(uses: Uses, lines: list[str], keras: bool) -> Edit:
    """Puts lines before the first import of TensorFlow, or behind the first imports."""
    roots = (*ROOTS, "keras") if keras else ROOTS
    own = [
        e.statement
        for e in uses.imports
        if e.full.split(".")[0] in roots and _at_top(uses, e.statement)
    ]
    if own:
        at = _line_start(uses, uses.program.span(own[0])[0])
    else:
        at = _behind_imports(uses)
    if keras and "KERAS_BACKEND" not in uses.program.text:
        lines = [*_backend(uses, at), *lines]
    return Edit(
        at, at, "".join(line + uses.program.module.default_newline for line in lines)
    )


def _backend(uses: Uses, at: int) -> list[str]:
    """Lines that choose the backend, which Keras reads when it is imported."""
    has_os = any(
        each.full == each.local == "os" and uses.program.span(each.statement)[0] < at
        for each in uses.imports
        if _at_top(uses, each.statement)
    )
    chosen = ["", 'os.environ["KERAS_BACKEND"] = "jax"', ""]
    return chosen if has_os else ["import os", *chosen]


def _line_start(uses: Uses, at: int) -> int:
    before = uses.program.text.encode()[:at]
    return max(before.rfind(b"\n"), before.rfind(b"\r")) + 1


def _behind_imports(uses: Uses) -> int:
    """Where the first statement stands that is no docstring and no import."""
    module = uses.program.module
    for statement in module.body:
        if statement is module.body[0] and module.get_docstring() is not None:
            continue
        if not (
            isinstance(statement, cst.SimpleStatementLine)
            and all(isinstance(n, cst.Import | cst.ImportFrom) for n in statement.body)
        ):
            first = getattr(statement, "decorators", None) or [statement]
            return _line_start(uses, uses.program.span(first[0])[0])
    return len(uses.program.text.encode())


def _removals(uses: Uses, unused: list[ImportedName]) -> list[Edit]:
    """Takes names out of import statements, and statements that import nothing else."""
    edits: list[Edit] = []
    gone: list[cst.CSTNode] = []
    for statement in uses.statements():
        of_it = [e for e in uses.imports if e.statement is statement]
        left = [e for e in of_it if e not in unused]
        if left and len(left) < len(of_it):
            edits.append(uses.program.edit(statement, without(uses, left)))
        elif not left:
            gone.append(statement)
    return edits + [_removal(uses, each, gone) for each in gone]


def _removal(uses: Uses, statement: cst.CSTNode, gone: list[cst.CSTNode]) -> Edit:
    line = uses.program.parents[statement]
    if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
        block = uses.program.parents[line]
        if isinstance(block, cst.Module) or _has_others(block, gone):
            return _whole_line(uses, statement)
    return uses.program.edit(statement, "pass")


def _has_others(block: cst.CSTNode, gone: list[cst.CSTNode]) -> bool:
    assert isinstance(block, cst.IndentedBlock)
    return any(
        not isinstance(line, cst.SimpleStatementLine)
        or any(each not in gone for each in line.body)
        for line in block.body
    )


def _whole_line(uses: Uses, statement: cst.CSTNode) -> Edit:
    start, end = uses.program.span(statement)
    data = uses.program.text.encode()
    ends = [at for at in (data.find(b"\n", end), data.find(b"\r", end)) if at >= 0]
    end = min(ends, default=len(data))
    end += 2 if data[end : end + 2] == b"\r\n" else 1
    return Edit(_line_start(uses, start), min(end, len(data)), "")


_OURS = ("jax", "jaxstrategy")


@final
@dataclasses.dataclass(frozen=True)
class Ported:
    """What became of a program."""

    text: str
    findings: tuple[Finding, ...]
    generation: Generation | None


def ported(text: str, generation: Generation | None = None) -> Ported:
    """The program with names of this package, and what a person must decide.

    Comments and format stay. A text that is ported stays as it is.

    >>> program = "import tensorflow as tf\\ns = tf.distribute.MirroredStrategy()"
    >>> print(ported(program).text)
    import jaxstrategy as js
    s = js.MirroredStrategy()
    """
    if not any(root in text for root in ROOTS):
        return Ported(text, (), None)
    uses = Uses(PythonProgram(text))
    started = any(e.full.split(".")[0] in _OURS for e in uses.imports)
    if generation is None:
        generation = _generation(uses, started)
    notes = generation is not None and not started
    outcome = OldUses(uses, generation, notes).decide_all()
    if generation is not None:
        edits, findings = method_uses(uses, generation, outcome.keras)
        outcome.edits += edits
        outcome.findings += findings if notes else []
    if outcome.edits:
        text = with_imports(edited(text, outcome.edits), uses.used(), outcome.keras)
    return Ported(text, grouped(outcome.findings), generation)


def _generation(uses: Uses, started: bool) -> Generation | None:
    written = {n for each in uses.references for n in each.names}
    written |= {each.full for each in uses.of_tensorflow()}
    # Programs of TensorFlow 2 have some names of `tf.compat.v1` besides.
    newer = {n for n in written if ".compat.v1." in n and ".distribute" not in n}
    names = {canonical(n) for n in written - newer}
    attributes = {node.attr.value for node in uses.attributes}
    attributes |= {each.full.rpartition(".")[2] for each in uses.of_tensorflow()}
    if started:  # methods of these names are this package's, in what is ported
        attributes = set()
    return generation_of(names, attributes)
