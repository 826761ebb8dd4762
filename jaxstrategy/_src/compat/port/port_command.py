"""`python -m jaxstrategy.compat.port`: `main`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxstrategy._src.compat.port.name_uses import Generation
from jaxstrategy._src.compat.port.program import CodePlace, Finding, ProgramFile
from jaxstrategy._src.compat.port.rewriting import ported, short
from jaxstrategy._src.compat.port.tables import ARRAYS, METHODS, TABLES, Name
from jaxstrategy._src.text.shown import with_noun


def table(which: str) -> str:
    """Old names, new names and what differs: names first, then methods."""
    names = [*TABLES[which], *(ARRAYS if which == "others" else ())]
    # Names of one module that move to one other, and do not differ, are one row.
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for each in names:
        groups.setdefault(_group(each), []).append(each)
    rows = [("old", "here", "what differs, or what to do"), *map(_row, groups.values())]
    rows += [
        (f"`.{m.name}`", f"`.{m.new}`" if m.new else "the same", m.text)
        for m in METHODS
        if which in m.generations.split()
    ]
    lines = []
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(
            "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
        )
    return "\n".join([lines[0], "|:--|:--|:--|", *lines[1:]])


def _group(name: Name) -> tuple[str, str, str]:
    """What names of one row have in common."""
    old, _, last = name.old.rpartition(".")
    if name.new is None:
        return (old if name.text == "" else "", "", name.text)
    new, _, new_last = name.new.rpartition(".")
    is_module = name.exact and name.form is None and not name.type
    if new_last != last or is_module:
        return (f"{name.old} itself", name.new, name.text)
    return (old, new, name.text)


def _row(group: list[Name]) -> tuple[str, str, str]:
    first = group[0]
    new = first.new and short(first.new)
    if len(group) == 1:
        return (f"`{first.old}`", f"`{new}`" if new else "", first.text)
    olds = ", ".join(f"`{each.old}`" for each in group)
    modules = {each.old.rpartition(".")[0] for each in group}
    if len(modules) == 1:  # named once
        names = ", ".join(f"`{each.old.rpartition('.')[2]}`" for each in group)
        olds = f"of `{modules.pop()}`: {names}"
    return (olds, f"the same of `{new.rpartition('.')[0]}`" if new else "", first.text)


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
    if chosen.table:
        print(table(chosen.table))
        return 0
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
    printed = "print the names of a generation, or of what is not in tf.distribute"
    add("--table", choices=[*generations, "others"], help=printed)
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
        findings = _moved(file.program, done.findings, ProgramFile(path))
    if findings and done.generation:
        print(f"{path}: {done.generation.said}")
    for finding in findings:
        print(finding.line(str(path)))
    return text != file.text, findings


def _moved(
    before: str, findings: Sequence[Finding], file: ProgramFile
) -> list[Finding]:
    """The findings with the lines that they have in the written file."""
    lines = [n.splitlines() for n in (before, file.program)]
    numbers: dict[int, int] = {}
    blocks = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    for _, start, end, new_start, new_end in blocks:
        for at in range(start, end):
            # Changed lines stand last in their block, behind imports that are new.
            numbers[at + 1] = max(new_start, new_end - (end - at)) + 1

    def move(place: CodePlace) -> CodePlace:
        line = numbers.get(place.line, place.line)
        return file.place(dataclasses.replace(place, line=line))

    return [finding.moved(move) for finding in findings]
