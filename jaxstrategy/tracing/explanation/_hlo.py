"""The text of a program that XLA compiled, read: `HloModule`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import final

_TABLES = ("FileNames", "FileLocations", "StackFrames")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9\-]*)\("
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CALLED = re.compile(
    r"\b(condition|body|calls|to_apply|true_computation|false_computation)=%?([^\s,}]+)"
)
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_KINDS_OF_NUMBER = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


@final
@dataclasses.dataclass(frozen=True)
class HloArray:
    """The type of an array in a program.

    Attributes:
      dtype: NumPy's name for it.
      bits: of an element.
      shape: of the array.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that it has."""
        return -(-math.prod(self.shape) * self.bits // 8)


@final
@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction of a program.

    Attributes:
      name: unlike those of others in its computation.
      computation: the name of that.
      opcode: XLA's name for the operation, such as `"all-gather-start"`.
      operands: the types of what it is given.
      attributes: the rest of its line.
      loops: how often each loop around it turns, the innermost first; None where only
        the devices will know.
      in_branch: whether it is in a branch.
    """

    name: str
    computation: str
    opcode: str
    operands: tuple[HloArray, ...]
    attributes: str
    loops: tuple[int | None, ...]
    in_branch: bool


@final
class HloModule:
    """A compiled program, by what `jax.stages.Compiled.as_text` says of it."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[re.Match[str]]] = {}
        self._entry = ""
        self._tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self._read(text)

    def _read(self, text: str) -> None:
        rows: dict[int, str] = {}
        body: list[re.Match[str]] = []
        for line in text.splitlines():
            if (found := _INSTRUCTION.match(line)) is not None:
                body.append(found)
            elif line.endswith("{") and not line.startswith((" ", "HloModule")):
                head = line.removeprefix("ENTRY ")
                name = head.split()[0].removeprefix("%")
                body = self._computations[name] = []
                if head != line:
                    self._entry = name
            elif line in _TABLES:
                rows = self._tables[line]
            elif line[:1].isdigit():
                number, _, row = line.partition(" ")
                rows[int(number)] = row
            elif line:
                rows = {}  # of a table that nobody asks for

    def instructions(self) -> Iterator[HloInstruction]:
        """All that are done, in order; those of a function once for each call."""
        yield from self._of(self._entry, (), False)

    def _of(
        self, name: str, loops: tuple[int | None, ...], in_branch: bool
    ) -> Iterator[HloInstruction]:
        types: dict[str, tuple[HloArray, ...]] = {}
        for found in self._computations.get(name, ()):
            types[found["name"]] = _arrays(found["type"])
            given, attributes = _apart(found.string[found.end() :])
            operands = [array for x in _names(given) for array in types.get(x, ())]
            yield HloInstruction(
                name=found["name"],
                computation=name,
                opcode=found["opcode"],
                operands=tuple(operands),
                attributes=attributes,
                loops=loops,
                in_branch=in_branch,
            )
            is_loop = found["opcode"] == "while"
            around = (_turns(attributes), *loops) if is_loop else loops
            is_choice = in_branch or found["opcode"] == "conditional"
            for called in _called(attributes):
                yield from self._of(called, around, is_choice)

    def origins(self, instruction: HloInstruction) -> Iterator[int]:
        """Numbers of what an instruction comes from in the user's code.

        Its own is the first; then those of its first reader, that of this one, and so
        on.
        """
        lines, first_readers = _first_readers(
            self._computations[instruction.computation]
        )
        name: str | None = instruction.name
        while name is not None:
            if (found := _FRAME.search(lines[name])) is not None:
                yield int(found[1])
            name = first_readers.get(name)

    def frames(self, origin: int) -> Iterator[tuple[str, int]]:
        """The files and lines that led to an origin, the innermost first."""
        frames = self._tables["StackFrames"]
        # The outermost frame has no parent: what is written for that is what parents'
        # numbers are more than they should be (1, JAX 0.10 and 0.12).
        more = _fields(frames.get(1, "")).get("parent_frame_id", 0)
        number = origin
        while number in frames:
            frame = _fields(frames[number])
            place = _fields(self._tables["FileLocations"][frame["file_location_id"]])
            file = self._tables["FileNames"][place["file_name_id"]]
            yield file.strip('"'), place["line"]
            number = frame["parent_frame_id"] - more


def _fields(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}


def _apart(rest: str) -> tuple[str, str]:
    """Between the parentheses of an instruction's operands, and what follows."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:place], rest[place + 1 :]
    return rest, ""


def _names(given: str) -> list[str]:
    """The names of operands, among other things."""
    return re.findall(r"%?([\w.\-]+)(?=\s*(?:,|$))", re.sub(r"/\*.*?\*/", "", given))


def _first_readers(
    body: Sequence[re.Match[str]],
) -> tuple[dict[str, str], dict[str, str]]:
    """The lines of a computation by name, and what first reads each."""
    lines = {found["name"]: found.string for found in body}
    readers: dict[str, str] = {}
    for found in body:
        for name in _names(_apart(found.string[found.end() :])[0]):
            if name in lines:
                readers.setdefault(name, found["name"])
    return lines, readers


def _arrays(written: str) -> tuple[HloArray, ...]:
    """The arrays of a type: one, or those of a tuple."""
    return tuple(
        _array(dtype, dimensions) for dtype, dimensions in _ARRAY.findall(written)
    )


def _array(dtype: str, dimensions: str) -> HloArray:
    shape = tuple(map(int, dimensions.split(","))) if dimensions else ()
    if dtype == "pred":
        return HloArray("bool", 8, shape)
    found = re.fullmatch(r"(b?[a-z])(\d+)(\w*)", dtype)
    if found is None:
        return HloArray(dtype, 0, shape)  # a token holds nothing
    kind, bits, rest = found.groups()
    prefix, letter = kind[:-1], kind[-1]
    name = f"{prefix}{_KINDS_OF_NUMBER.get(letter, letter)}{bits}"
    return HloArray(f"{name}_{rest}" if rest else name, int(bits), shape)


def _turns(attributes: str) -> int | None:
    found = _TURNS.search(attributes)
    return None if found is None else int(found[1])


def _called(attributes: str) -> Sequence[str]:
    """The computations that an instruction runs."""
    names = [name for _, name in _CALLED.findall(attributes)]
    for _, listed in _CALLED_LIST.findall(attributes):
        names += [name.strip().removeprefix("%") for name in listed.split(",")]
    return [name for name in names if name]
