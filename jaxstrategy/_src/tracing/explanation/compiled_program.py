"""What XLA says of a compiled program: collectives, memory, operations."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, final

import numpy as np
from jax.sharding import Mesh

from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.explanation.facts import CompiledCollective, Memory

DeviceGroups: TypeAlias = tuple[tuple[int, ...], ...]


def all_in_one(mesh: Mesh) -> DeviceGroups:
    """One group of all devices."""
    return (tuple(range(mesh.devices.size)),)


def differing_axes(mesh: Mesh, groups: DeviceGroups) -> tuple[str, ...]:
    """The axes of the mesh along which members of a group differ."""
    differ = [False] * mesh.devices.ndim
    for members in groups:
        for axis, places in enumerate(np.unravel_index(members, mesh.devices.shape)):
            differ[axis] |= bool((places != places[0]).any())
    return tuple(itertools.compress(mesh.axis_names, differ))


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
    """The type of an array in a program."""

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
    """One instruction of a program."""

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


# What they are to a `Topology`. Of one that comes apart into a start and an end, the
# start counts.
_KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    # Nothing takes longer than an all-reduce of as much.
    "collective-broadcast": "all_reduce",
}
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[^}]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_BY_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def compiled_collectives(
    text: str, replicas: Replicas, outermost: str
) -> Iterator[CompiledCollective]:
    """What the devices of replicas exchange, in order."""
    module = HloModule(text)
    for each in module.instructions():
        operation = each.opcode.removesuffix("-start")
        if operation not in _KINDS:
            continue
        groups = _groups(each.attributes) or all_in_one(replicas.mesh)
        if max(map(len, groups)) > 1:
            yield CompiledCollective(
                operation=operation,
                kind=_KINDS[operation],
                nbytes=sum(array.nbytes for array in each.operands),
                dtypes=tuple(dict.fromkeys(array.dtype for array in each.operands)),
                loops=each.loops,
                in_branch=each.in_branch,
                groups=groups,
                axes=differing_axes(replicas.mesh, groups),
                inner_axes=replicas.inner_axes,
                line=_line(module, each, outermost),
            )


def _line(module: HloModule, found: HloInstruction, outermost: str) -> Line | None:
    """The user's line that an instruction comes from, or else who reads it."""
    for origin in module.origins(found):
        frames = itertools.takewhile(
            lambda frame: frame[0] != outermost, module.frames(origin)
        )
        if (line := user_code.innermost(frames)) is not None:
            return line
    return None


def _groups(attributes: str) -> DeviceGroups | None:
    """The devices that exchange with each other; None: all of them."""
    if (found := _PAIRS.search(attributes) or _LISTED.search(attributes)) is not None:
        return tuple(map(_numbers, re.findall(r"\{([^}]*)\}", found[1]))) or None
    if (found := _COUNTED.search(attributes)) is not None:
        shape, counted, order = found.groups()
        places = _places(_numbers(counted))
        if order is not None:
            places = places.transpose(_numbers(order))
        return _rows(places.reshape(_numbers(shape)))
    if (found := _BY_AXES.search(attributes)) is not None:
        sizes = {x: int(size) for x, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        over = re.findall(r"'([^']*)'", found[2])
        last = [list(sizes).index(name) for name in over]
        places = np.moveaxis(
            _places([*sizes.values()]), last, list(range(-len(last), 0))
        )
        return _rows(places.reshape(-1, math.prod(sizes[name] for name in over)))
    return None


def _places(shape: Sequence[int]) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape)


def _rows(places: np.ndarray) -> DeviceGroups:
    return tuple(tuple(map(int, row)) for row in places)


def _numbers(written: str) -> tuple[int, ...]:
    return tuple(map(int, written.split(",")))


_LOOP = re.compile(r"\bwhile\(")


def memory(executable: Any) -> Memory | None:
    """The memory of one device; None without a program, or if XLA does not say."""
    stats = None if executable is None else executable.memory_analysis()
    if stats is None:
        return None
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        donated=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def flops(executable: Any) -> float | None:
    """The floating-point operations of one device; None likewise.

    The program is that of one device, after XLA has divided the work. XLA cannot say
    how often a loop turns, and counts its body once.
    """
    costs = None if executable is None else executable.cost_analysis()
    return costs.get("flops") if costs else None


def has_loops(executable: Any) -> bool:
    """Whether there are loops in the program, whose bodies `flops` counts once."""
    return _LOOP.search(executable.as_text() or "") is not None
