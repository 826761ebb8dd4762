"""Rewrites programs of `tf.distribute`: `ported`, and the command, `main`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import libcst as cst

from jaxstrategy._src.compat.port.names import (
    DATA,
    KERAS_METHODS,
    METHODS,
    REDUCTION,
    Generation,
    Method,
    Name,
    UnportedCode,
    argument_edits,
    canonical,
    generation_of,
    in_generation,
    is_in,
    is_in_keras,
    keras_row,
    row_of,
    tape_advice,
)
from jaxstrategy._src.compat.port.program import (
    ROOTS,
    CodePlace,
    Edit,
    Finding,
    ImportedName,
    NameUse,
    Program,
    ProgramFile,
    grouped,
)
from jaxstrategy._src.text import with_noun


@final
@dataclasses.dataclass(frozen=True)
class Ported:
    text: str
    findings: tuple[Finding, ...]
    generation: Generation | None
    moved: tuple[Finding, ...] = ()  # with their places in the new text


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
    program = Program(text)
    roots = {each.full.split(".")[0] for each in program.imports}
    started = bool(roots & {"jax", "jaxstrategy"})
    if generation is None:
        generation = _generation(program, started)
    port = _Port(program, generation, notes=generation is not None and not started)
    if port.edits or any(each.new for each in program.tensorflow):
        text = port.rewritten()
    rows = port.findings
    findings = grouped((d, t, name, program.place(node)) for d, t, name, node in rows)
    moved = grouped((d, t, name, port.moved(node, text)) for d, t, name, node in rows)
    return Ported(text, findings, generation, moved)


def _generation(program: Program, started: bool) -> Generation | None:
    written = {name for each in program.references for name in each.names}
    written |= {each.full for each in program.tensorflow}
    # Programs of TensorFlow 2 have some names of `tf.compat.v1` besides.
    newer = {n for n in written if ".compat.v1." in n and ".distribute" not in n}
    attributes = {node.attr.value for node in program.attributes}
    attributes |= {each.full.rpartition(".")[2] for each in program.tensorflow}
    if started:  # methods of these names are this package's, in what is ported
        attributes = set()
    return generation_of({canonical(n) for n in written - newer}, attributes)


@final
class _Port:
    """Decides name by name, for one program of one generation."""

    def __init__(
        self, program: Program, generation: Generation | None, notes: bool
    ) -> None:
        self._program, self._generation, self._notes = program, generation, notes
        self.edits: list[Edit] = []
        self.findings: list[tuple[bool, str, str, cst.CSTNode]] = []
        used = {self._name(n) for each in program.references for n in each.names}
        used |= {self._name(each.full) for each in program.tensorflow} - {REDUCTION}
        of_keras = [name for name in used if is_in(name, "tf.keras")]
        # Whether it uses `tf.keras`, and only names that Keras 3 has.
        self.keras = bool(of_keras) and all(map(is_in_keras, of_keras))
        self._unported = UnportedCode(program, self._row, self.keras)
        for each in program.tensorflow:
            self._decide_import(each)
        for reference in self._program.references:
            is_replaced = self._decide(reference)
            for each in reference.imports:
                each.is_used = True
                each.is_needed |= not is_replaced
        for text in program.nodes(cst.SimpleString):
            if program.within(text, cst.Annotation):
                self._decide_annotation(text)
        for node in self._program.attributes if self._generation else ():
            self._decide_method(node)
        if self._notes:
            text = "stays TensorFlow, as a dataset of tf.data runs it"
            for name, function in self._unported.functions:
                self._report(f"def {name}", text, function, False)

    def _report(self, name: str, text: str, node: cst.CSTNode, decide: bool) -> None:
        self.findings.append((decide, text, name, node))

    def _name(self, full: str) -> str:
        return in_generation(canonical(full), self._generation)

    def _row(self, full: str) -> Name:
        name = self._name(full)
        is_keras = is_in(name, "tf.keras")
        return keras_row(name, self.keras) if is_keras else row_of(name)

    # Imports.

    def _decide_import(self, each: ImportedName) -> None:
        if each.alias is None:
            text = "import the names that are used: `*` hides which of them are old"
            name = f"tf{each.full.removeprefix('tensorflow')}"
            self._report(name, text, each.statement, True)
            return
        row = self._row(each.full)
        if not isinstance(each.statement, cst.ImportFrom) or row.old == "tf":
            return
        if row.new is None:
            self._report_decision(self._name(each.full), row, each.alias)
        elif not row.exact and not row.pattern and row.old == self._name(each.full):
            each.new = row.new

    # Names.

    def _decide(self, reference: NameUse) -> bool:
        """Whether the name is replaced."""
        names = sorted({self._name(full) for full in reference.names})
        rows = [self._row(full) for full in reference.names]
        if any(each.new for each in reference.imports):
            self._note(names[0], rows[0], reference.node)
        elif len({row.new for row in rows}) > 1:
            text = f"may be {' or '.join(names)}: import it in one way"
            self._report(names[0], text, reference.node, True)
        else:
            return self._replace(names[0], rows[0], reference.node)
        return False

    def _replace(self, name: str, row: Name, node: cst.Name | cst.Attribute) -> bool:
        kept = self._unported.holds(node)
        if kept and (not row.certain or (row.new is None and row.old == "tf")):
            return False
        if row.new is None:
            self._report_decision(name, row, node)
            return False
        if row.type and not self._is_typed(node):
            if not self._unported.holds(node, is_type=True):
                text = f"`{short(row.new)}` where it is about arrays of JAX"
                self._report(name, text, node, True)
            return False
        head: cst.CSTNode = node  # without the attributes of what has the row
        for _ in range(name.removeprefix(row.old).count(".")):
            head = head.value if isinstance(head, cst.Attribute) else head
        edits = argument_edits(self._program, head, row.pattern) if row.pattern else []
        if edits is None or "#" in self._program.code(head):
            text = (
                f"not in this form: `{short(row.new)}` has no such arguments, or is no "
                f"object to hand on; {row.text or 'the same'}"
            )
            self._report(name, text, node, True)
            return False
        self.edits += [*edits, self._program.edit(head, *_parts(row.new))]
        self._note(row.old, row, node)
        return True

    def _is_typed(self, node: cst.CSTNode) -> bool:
        """Whether a type is an annotation, or given to a function that is renamed."""
        parent: Any = self._program.parents.get(node)
        if isinstance(parent, cst.Arg):
            call = self._program.parents[parent]
            function = call.func if isinstance(call, cst.Call) else parent
            reference = self._program.reference(function)
            return any(
                row.new is not None
                and (
                    not row.pattern
                    or argument_edits(self._program, function, row.pattern) is not None
                )
                for row in map(self._row, reference.names if reference else ())
            )
        inner = cst.BaseExpression | cst.BaseSlice | cst.SubscriptElement
        while isinstance(parent, inner):
            parent = self._program.parents.get(parent)
        return isinstance(parent, cst.Annotation)

    def _report_decision(self, name: str, row: Name, node: cst.CSTNode) -> None:
        text = row.text
        if self.keras and row.old == "tf.GradientTape":
            text = tape_advice(self._program, node) or text
        if name != "tf" and not (row.stays and not self._notes):
            self._report(name, text, node, not row.stays)

    def _note(self, name: str, row: Name, node: cst.CSTNode) -> None:
        if row.new is None:
            self._report_decision(name, row, node)
        elif row.text:
            self._report(name, row.text, node, False)

    def _decide_annotation(self, node: cst.SimpleString) -> None:
        if node.prefix or "\\" in node.value:
            return
        # Of several imports under one name the last one counts.
        for each in {each.local: each for each in self._program.tensorflow}.values():
            if each.new or not each.alias:
                continue
            is_alias = isinstance(each.statement, cst.ImportFrom) or each.alias.asname
            head = each.full if is_alias else each.full.split(".")[0]
            pattern = rf"(?<![\w.]){re.escape(each.local)}((?:\.\w+)*)"
            for match in re.finditer(pattern, node.value):
                each.is_used = True
                name, row = self._name(head + match[1]), self._row(head + match[1])
                if row.new is None or (row.pattern and not row.pattern.bare):
                    each.is_needed = True
                    self._report_decision(name, row, node)
                    continue
                start = self._program.span(node)[0]
                start += len(node.value[: match.start()].encode())
                end = start + len(match[0].encode())
                new, module = _parts(row.new)
                new += name.removeprefix(row.old)
                self.edits.append(Edit(start, end, new, module))

    # Methods.

    def _decide_method(self, node: cst.Attribute) -> None:
        """A method with another name here, or one that differs in something."""
        assert self._generation is not None
        for method in (*(KERAS_METHODS if self.keras else ()), *METHODS):
            if (
                method.name == node.attr.value
                and self._generation.value in method.generations.split()
                and self._matches(node, method)
            ):
                break
        else:
            return
        if method.new:
            self.edits.append(self._program.edit(node.attr, method.new))
        if self._notes:
            name = f"{self._program.code(node.value)}.{method.name}"
            is_long = len(name) > 50 or "\n" in name
            self._report(
                f".{method.name}" if is_long else name, method.text, node, False
            )

    def _matches(self, node: cst.Attribute, method: Method) -> bool:
        if method.name == "numpy":
            call = self._program.parents.get(node)
            return isinstance(call, cst.Call) and call.func is node and not call.args
        receiver = self._program.code(node.value)
        return not method.receiver or bool(re.search(method.receiver, receiver))

    # The text that comes of it.

    def rewritten(self) -> str:
        program = self._program
        unused = [
            each
            for each in program.tensorflow
            if each.is_used
            and not (each.is_needed or each.new)
            and not re.search(rf"__all__\s*=[^\n]*['\"]{each.local}['\"]", program.text)
        ]
        left = [each for each in program.imports if each not in unused]
        gone = {each.statement for each in unused} - {each.statement for each in left}
        for statement in program.statements:
            self._rewrite_import(statement, unused, gone)
        names, lines = self._module_names(unused, left)
        imported = [*names, *(each.new or each.full for each in left)]
        # Not only by what nothing uses.
        keras = self.keras and any(is_in(each, "keras") for each in imported)
        if lines or keras:
            self._insert(lines, keras)
        data, parts, at = program.text.encode(), [], 0
        self.edits = [
            Edit(start, end, f"{names.get(module, '')}{text}")
            for start, end, text, module in sorted(set(self.edits))
        ]
        for start, end, text, _ in self.edits:
            assert start >= at, "edits overlap"
            parts += [data[at:start], text.encode()]
            at = end
        return b"".join([*parts, data[at:]]).decode()

    def moved(self, node: cst.CSTNode, text: str) -> CodePlace:
        """Where a node stands in the text that was made."""
        at = self._program.span(node)[0]
        shift = sum(  # in what was replaced, from the end: names that stay stand last
            max(len(new.encode()) - (end - start), start - at)
            for start, end, new, _ in self.edits
            if start < at or start == end == at
        )
        # A name in what was replaced may have been where a character is now.
        before = text.encode()[: at + shift].decode(errors="ignore")
        lines = re.split("\\r\\n|\\r|\\n", before)
        return CodePlace(0, len(lines), len(lines[-1]) + 1)

    def _rewrite_import(
        self,
        statement: cst.Import | cst.ImportFrom,
        unused: Sequence[ImportedName],
        gone: Collection[cst.CSTNode],
    ) -> None:
        program = self._program
        of_it = [each for each in program.imports if each.statement is statement]
        modules: dict[str, list[str]] = {}
        for each in of_it:
            if each.new:
                module, _, name = each.new.rpartition(".")
                name = name if name == each.local else f"{name} as {each.local}"
                modules.setdefault(module, []).append(name)
        left = [each for each in of_it if each not in unused and not each.new]
        start, end = program.span(statement)
        line_start = _line_start(program, start)
        if statement in gone:
            line = program.parents[statement]
            is_line = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
            block = program.parents[line]
            stays = isinstance(block, cst.Module) or any(
                not isinstance(other, cst.SimpleStatementLine)
                or any(each not in gone for each in other.body)
                for other in block.children
                if isinstance(other, cst.BaseStatement)
            )
            if is_line and stays:
                rest = re.match(rb"[^\r\n]*(\r\n|\r|\n)?", program.text.encode()[end:])
                assert rest is not None
                self.edits.append(Edit(line_start, end + rest.end(), ""))
            else:
                self.edits.append(program.edit(statement, "pass"))
        elif len(left) < len(of_it):
            lines = [
                f"from {m} import {', '.join(n)}" for m, n in sorted(modules.items())
            ]
            if left:
                aliases = (each.alias for each in left if each.alias is not None)
                given = (
                    program.code(a.with_changes(comma=cst.MaybeSentinel.DEFAULT))
                    for a in aliases
                )
                text = f"import {', '.join(each.strip() for each in given)}"
                if isinstance(statement, cst.ImportFrom) and statement.module:
                    text = f"from {program.code(statement.module)} {text}"
                lines.append(text)
            # On lines of their own, if it stood on one.
            indent = program.text.encode()[line_start:start].decode()
            apart = "; " if indent.strip() else program.module.default_newline + indent
            self.edits.append(program.edit(statement, apart.join(lines)))

    def _module_names(
        self, unused: Sequence[ImportedName], left: Sequence[ImportedName]
    ) -> tuple[dict[str, str], list[str]]:
        """What modules are called, and the lines that import those not yet imported."""
        program = self._program
        known = {e.full: e.local for e in left if _at_top(program, e.statement)}
        taken = program.identifiers - {each.local for each in unused}
        taken |= {each.local for each in left}
        # Names of parameters would hide a module's name in a function.
        taken |= {each.name.value for each in program.nodes(cst.Param)}
        wanted = {edit.module for edit in self.edits}
        names: dict[str, str] = {}
        lines: list[str] = []
        for module in reversed(_MODULES):
            if module not in wanted:
                continue
            local = known.get(module)
            if local and (local != module.split(".")[0] or module in ("jax", "keras")):
                names[module] = local
                continue
            line, *wished = _MODULES[module]
            name = next((n for n in wished if n not in taken), f"{wished[-1]}_")
            taken.add(name)
            names[module] = name
            line = line.format(name)
            lines.append(line.replace(f"import {name} as {name}", f"import {name}"))
        return names, sorted(lines, key=lambda line: (line.startswith("from"), line))

    def _insert(self, lines: list[str], keras: bool) -> None:
        """Puts lines before the statement with the first import of TensorFlow."""
        program = self._program
        roots = (*ROOTS, "keras") if keras else ROOTS
        first: Any = next(e.statement for e in program.imports if e.root in roots)
        while program.parents[first] is not program.module:
            first = program.parents[first]
        first = next(iter(getattr(first, "decorators", ())), first)
        at = _line_start(program, program.span(first)[0])
        if keras and "KERAS_BACKEND" not in program.text:  # read when Keras is imported
            has_os = any(
                each.full == each.local == "os"
                and _at_top(program, each.statement)
                and program.span(each.statement)[0] < at
                for each in program.imports
            )
            chosen = ["", 'os.environ["KERAS_BACKEND"] = "jax"', ""]
            lines = [*([] if has_os else ["import os"]), *chosen, *lines]
        end = program.module.default_newline
        self.edits.append(Edit(at, at, "".join(line + end for line in lines)))


_MODULES = DATA["modules"]


def _parts(new: str) -> tuple[str, str]:
    """What stands behind the local name of a module, and the module."""
    module = next((each for each in _MODULES if is_in(new, each)), "")  # "": a text
    return new.removeprefix(module), module


def short(new: str) -> str:
    rest, module = _parts(new)
    return _MODULES[module][1] + rest


def _line_start(program: Program, at: int) -> int:
    before = program.text.encode()[:at]
    return max(before.rfind(b"\n"), before.rfind(b"\r")) + 1


def _at_top(program: Program, statement: cst.CSTNode) -> bool:
    return program.parents[program.parents[statement]] is program.module


_DESCRIPTION = """\
Rewrites programs of tf.distribute, tf.compat.v1.distribute and tf.contrib.distribute:
imports, and names that have one meaning here. Prints the changes as a diff, and a list
of what a person must decide ("decide") or know ("note"), as FILE:LINE:COLUMN. Comments
and format stay. Nothing is written without --write."""

_ENDING = """\
exit status: 0; with --check 1 if something is to change or to decide; 2 if a file could
not be read or is no Python 3 (the others are done), or an argument is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if not chosen.paths:
        parser.error("no files or folders are given")
    changed = decisions = failed = 0
    for path in itertools.chain.from_iterable(map(_files, chosen.paths)):
        try:
            is_changed, found = _port(path, chosen)
        except (OSError, ValueError, RecursionError) as error:
            failed += 1
            missing = not path.exists()
            told = "there is no such file or folder" if missing else error
            print(f"{path}: error: {told}", file=sys.stderr)
            continue
        changed += is_changed
        decisions += sum(finding.decide for finding in found)
    files = f"{with_noun(changed, 'file')} would change"
    if chosen.write:
        files = f"changed {with_noun(changed, 'file')}"
    hint = "; --write changes them" if changed and not chosen.write else ""
    print(f"{files}{hint}; {decisions} to decide", file=sys.stderr)
    if failed:
        return 2
    return int(chosen.check and bool(changed or decisions))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.compat.port",
        description=_DESCRIPTION,
        epilog=_ENDING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    several = "files (.py, .ipynb), or folders with such"
    add("paths", nargs="*", type=Path, help=several)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="change the files")
    left = "exit status 1 if something is left to do"
    action.add_argument("--check", action="store_true", help=left)
    generations = [each.value for each in Generation]
    written = "what the programs are written for; by default what their names show"
    add("--generation", choices=generations, help=written)
    return parser


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for found in sorted([*path.rglob("*.py"), *path.rglob("*.ipynb")]):
        if not any(part.startswith(".") for part in found.relative_to(path).parts):
            yield found


def _port(path: Path, chosen: argparse.Namespace) -> tuple[bool, Sequence[Finding]]:
    """Prints what becomes of a file; whether it changes, and what is to decide."""
    file = ProgramFile(path)
    done = ported(file.program, chosen.generation and Generation(chosen.generation))
    text = file.with_program(done.text)
    findings = [finding.moved(file.place) for finding in done.findings]
    if not chosen.write:
        old, new = (t.splitlines(keepends=True) for t in (file.text, text))
        for line in difflib.unified_diff(old, new, f"{path}", f"{path} (ported)"):
            print(line, end="" if line.endswith("\n") else "\n\\ No newline at end\n")
    elif text != file.text:
        file.write(text)
        findings = [finding.moved(ProgramFile(path).place) for finding in done.moved]
    if findings and done.generation:
        print(f"{path}: {done.generation.said}")
    for finding in findings:
        print(finding.line(str(path)))
    return text != file.text, findings
