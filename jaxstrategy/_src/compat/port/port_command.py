"""`python -m jaxstrategy.compat.port`: `main`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from jaxstrategy._src.compat.port.name_uses import Generation
from jaxstrategy._src.compat.port.program import CodePlace, Finding, ProgramFile
from jaxstrategy._src.compat.port.rewriting import ported, short
from jaxstrategy._src.compat.port.tables import (
    ARRAYS,
    CONTRIB,
    DISTRIBUTE,
    METHODS,
    OTHERS,
    V1,
    Name,
)

_ROWS = {
    Generation.TF2: DISTRIBUTE,
    Generation.TF1: V1,
    Generation.CONTRIB: CONTRIB,
}


def table(which: str) -> str:
    """Old names, new names and what differs: names first, then methods."""
    if which == "others":
        return "\n".join([*_HEAD, *_rows([*OTHERS, *ARRAYS])])
    methods = [
        _line(f"`.{m.name}`", f"`.{m.new}`" if m.new else "the same", m.text)
        for m in METHODS
        if which in m.generations
    ]
    return "\n".join([*_HEAD, *_rows(_ROWS[Generation(which)]), *methods])


_HEAD = ["| old | here | what differs, or what to do |", "|:--|:--|:--|"]


def _rows(names: list[Name]) -> list[str]:
    """Names of one module that move to one other, and do not differ, are one row."""
    groups: dict[tuple[str, str, str], list[Name]] = {}
    for each in names:
        groups.setdefault(_group(each), []).append(each)
    return [_row(group) for group in groups.values()]


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


def _row(group: list[Name]) -> str:
    first = group[0]
    olds = _olds(group)
    if first.new is None or len(group) == 1:
        new = f"`{short(first.new)}`" if first.new else ""
        return _line(olds, new, first.text)
    return _line(olds, f"the same of `{_module_of(first.new)}`", first.text)


def _olds(group: list[Name]) -> str:
    """The old names, with their module once if it is one."""
    modules = {each.old.rpartition(".")[0] for each in group}
    if len(group) == 1 or len(modules) > 1:
        return ", ".join(f"`{each.old}`" for each in group)
    names = ", ".join(f"`{each.old.rpartition('.')[2]}`" for each in group)
    return f"of `{modules.pop()}`: {names}"


def _module_of(new: str) -> str:
    return short(new).rpartition(".")[0]


def _line(old: str, new: str, text: str) -> str:
    cells = [cell.replace("|", "\\|") for cell in (old, new, text)]
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"


_DESCRIPTION = """\
Rewrites programs of tf.distribute, tf.compat.v1.distribute and tf.contrib.distribute:
imports, and names that have one meaning here. Prints the changes as a diff, and a list
of what a person must decide ("decide") or know ("note"), as FILE:LINE:COLUMN. Comments
and format stay. Nothing is written without --write."""

_ENDING = """\
exit status: 0; with --check 1 if something is to change or to decide; 2 if a file could
not be read or is no Python 3 (the others are done), or an argument is wrong."""


@final
@dataclasses.dataclass
class _Counts:
    """What happened to the files."""

    changed: int = 0
    decisions: int = 0
    failed: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line says; the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.table:
        print(table(chosen.table))
        return 0
    if not chosen.paths:
        parser.error("no files or folders are given")
    counts = _Counts()
    for path in _files(chosen.paths, counts):
        _port(path, chosen, counts)
    _summarize(chosen, counts)
    if counts.failed:
        return 2
    return int(chosen.check and bool(counts.changed or counts.decisions))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxstrategy.compat.port",
        description=_DESCRIPTION,
        epilog=_ENDING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        help="files (.py, .ipynb), or folders with such",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="change the files")
    action.add_argument(
        "--check", action="store_true", help="exit status 1 if something is left to do"
    )
    generations = [each.value for each in Generation]
    parser.add_argument(
        "--generation",
        choices=generations,
        help="what the programs are written for; by default what their names show",
    )
    parser.add_argument(
        "--table",
        choices=[*generations, "others"],
        help="print the names of a generation, or of what is not in tf.distribute",
    )
    return parser


def _files(paths: Sequence[Path], counts: _Counts) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = [*path.rglob("*.py"), *path.rglob("*.ipynb")]
            yield from sorted(p for p in found if not _is_hidden(p.relative_to(path)))
        elif path.is_file():
            yield path
        else:
            _fail(path, "there is no such file or folder", counts)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _fail(path: Path, text: object, counts: _Counts) -> None:
    counts.failed += 1
    print(f"{path}: error: {text}", file=sys.stderr)


def _port(path: Path, chosen: argparse.Namespace, counts: _Counts) -> None:
    generation = Generation(chosen.generation) if chosen.generation else None
    try:
        file = ProgramFile(path)
        done = ported(file.program, generation)
        text = file.with_program(done.text)
        findings = [finding.moved(file.place) for finding in done.findings]
        if chosen.write and text != file.text:
            file.write(text)
            findings = _moved(file.program, done.findings, ProgramFile(path))
    except (OSError, ValueError, RecursionError) as error:
        _fail(path, error, counts)
        return
    counts.changed += text != file.text
    counts.decisions += sum(finding.decide for finding in findings)
    if not chosen.write:
        _print_diff(path, file.text, text)
    if findings and done.generation:
        print(f"{path}: {done.generation.said}")
    for finding in findings:
        print(finding.line(str(path)))


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


def _print_diff(path: Path, before: str, after: str) -> None:
    old, new = (text.splitlines(keepends=True) for text in (before, after))
    for line in difflib.unified_diff(old, new, f"{path}", f"{path} (ported)"):
        print(line if line.endswith("\n") else f"{line}\n\\ No newline at end", end="")
        if not line.endswith("\n"):
            print()


def _summarize(chosen: argparse.Namespace, counts: _Counts) -> None:
    verb = "changed" if chosen.write else "would change"
    files = f"{counts.changed} file{'s' * (counts.changed != 1)} {verb}"
    if chosen.write:
        files = f"changed {counts.changed} file{'s' * (counts.changed != 1)}"
    hint = "; --write changes them" if counts.changed and not chosen.write else ""
    print(f"{files}{hint}; {counts.decisions} to decide", file=sys.stderr)
