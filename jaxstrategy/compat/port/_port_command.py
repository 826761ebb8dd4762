"""`python -m jaxstrategy.compat.port`: `main`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from jaxstrategy.compat.port._finding import CodePlace, Finding
from jaxstrategy.compat.port._generation import Generation
from jaxstrategy.compat.port._name_tables import table
from jaxstrategy.compat.port._ported import ported
from jaxstrategy.compat.port._program_file import ProgramFile

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
