"""Imports that a ported program needs, and those it needs no more: `with_imports`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst

from jaxstrategy.compat.port._edit import Edit, edited
from jaxstrategy.compat.port._old_uses import IMPORTABLE, MODULE, without
from jaxstrategy.compat.port._python_program import ROOTS, PythonProgram
from jaxstrategy.compat.port._uses import ImportedName, Uses

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
    """The text with the modules' names filled in, and their imports.

    Args:
      text: a program with places for the names of modules.
      used_before: the imports of TensorFlow that it used before (`Uses.used`). Those
        that it does not use any more are left out.
      keras: whether it uses Keras 3, which is to run on JAX.
    """
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
